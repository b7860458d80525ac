"""Tokens sorted by expert and put back, against loops over tokens and experts; gradients against those loops."""

import pytest
import torch

import mxtensor.te as te
from mxtensor.te.moe import Fp8Padding

TOKENS, EXPERTS, HIDDEN, TOP = 13, 5, 6, 2


def routed(seed=0):
    """Tokens, a mask of experts, the same as indices, and weights; expert 3 has no token."""
    torch.manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS)
    scores[:, 3] = -1
    index = scores.topk(TOP).indices
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32).scatter_(1, index, 1)
    return torch.randn(TOKENS, HIDDEN).requires_grad_(), mask, index.to(torch.int32), torch.rand(TOKENS, EXPERTS)


def by_expert(mask):
    """(token, expert) of each permuted row."""
    return [(t, e) for e in range(mask.shape[1]) for t in range(mask.shape[0]) if mask[t, e]]


@pytest.mark.parametrize("map_type", ["mask", "index"])
@pytest.mark.parametrize("known", [True, False])
def test_tokens_are_sorted_by_expert_and_their_gradients_come_back(map_type, known):
    x, mask, index, _ = routed()
    rows = by_expert(mask)
    y, row_id_map = te.moe_permute(
        x, mask if map_type == "mask" else index, len(rows) if known else -1, map_type=map_type
    )
    assert torch.equal(y, torch.stack([x[t] for t, _ in rows])) and row_id_map.dtype is torch.int32
    grad = torch.randn_like(y)
    y.backward(grad)
    wanted = torch.zeros_like(x)
    for (t, _), g in zip(rows, grad, strict=True):
        wanted[t] += g
    torch.testing.assert_close(x.grad, wanted)


@pytest.mark.parametrize("map_type", ["mask", "index"])
@pytest.mark.parametrize("weighted", [True, False])
def test_rows_of_a_token_are_summed_with_their_weights(map_type, weighted):
    x, mask, index, probs = routed()
    given = mask if map_type == "mask" else index
    y, row_id_map = te.moe_permute(x.detach(), given, map_type=map_type)
    weights = (probs if map_type == "mask" else probs.gather(1, index.long())) if weighted else None
    y, weights = y.requires_grad_(), None if weights is None else weights.requires_grad_()
    out = te.moe_unpermute(y, row_id_map, weights, x.shape, map_type)
    a, p = y.detach().clone().requires_grad_(), probs.detach().clone().requires_grad_()
    wanted = torch.zeros(TOKENS, HIDDEN)
    for (t, e), row in zip(by_expert(mask), a, strict=True):
        wanted = wanted.index_add(0, torch.tensor([t]), (row * p[t, e] if weighted else row).unsqueeze(0))
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)
    grad = torch.randn_like(out)
    out.backward(grad), wanted.backward(grad)
    torch.testing.assert_close(y.grad, a.grad)
    if weighted:
        found = weights.grad if map_type == "index" else weights.grad.gather(1, index.long())
        torch.testing.assert_close(found, p.grad.gather(1, index.long()))


def test_bfloat16_sums_are_rounded_once():
    x, mask, _, probs = routed()
    y, row_id_map = te.moe_permute(x.detach().bfloat16(), mask)
    out = te.moe_unpermute(y, row_id_map, probs.bfloat16())
    wanted = te.moe_unpermute(y.float(), row_id_map, probs.bfloat16().float())
    assert out.dtype is torch.bfloat16 and torch.equal(out, wanted.bfloat16())


def test_bfloat16_gradients_are_sums_in_float32_rounded_once():
    x, mask, _, _ = routed()
    y, row_id_map = te.moe_permute(x.detach().bfloat16().requires_grad_(), mask | (torch.arange(EXPERTS) < 3).int())
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable, grad)
    assert torch.equal(found, te.moe_unpermute(grad.float(), row_id_map).bfloat16())


def test_gradients_of_gradients_and_transforms():
    x, mask, _, probs = routed()
    x, probs = x.detach().double().requires_grad_(), probs.double().requires_grad_()
    sizes, order = torch.tensor([4, 0, TOKENS * TOP - 4]), torch.tensor([2, 1, 0])

    def through(x, probs):
        y, weights, row_id_map = te.moe_permute_with_probs(x, probs, mask, TOKENS * TOP)
        y, weights = te.moe_sort_chunks_by_index_with_probs(y * weights.unsqueeze(1), weights, sizes, order)
        y, _ = te.moe_sort_chunks_by_index_with_probs(y, weights, sizes[order], order)
        return te.moe_unpermute(y**2, row_id_map, probs)

    assert torch.autograd.gradcheck(through, (x, probs), fast_mode=True)
    assert torch.autograd.gradgradcheck(through, (x, probs), fast_mode=True)
    (wanted,) = torch.autograd.grad(through(x, probs).sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: through(x, probs).sum())(x), wanted)


def test_rows_beyond_num_out_tokens_are_dropped_and_dropped_choices_have_none():
    x, mask, index, _ = routed()
    y, row_id_map = te.moe_permute(x, mask, 10)
    whole, _ = te.moe_permute(x, mask)
    assert torch.equal(y, whole[:10]) and int((row_id_map >= 0).sum()) == 10
    taken = torch.zeros(TOKENS, 1)
    for t, _ in by_expert(mask)[:10]:
        taken[t] += 1
    torch.testing.assert_close(te.moe_unpermute(y, row_id_map), x * taken)
    index[4, 0] = -1
    y, row_id_map = te.moe_permute(x, index, map_type="index")
    assert y.shape[0] == TOKENS * TOP - 1 and row_id_map[4, 0] == -1


def test_weights_and_padding_travel_with_the_rows():
    x, mask, _, probs = routed()
    rows, counts = by_expert(mask), mask.sum(0)
    y, weights, _ = te.moe_permute_with_probs(x, probs, mask)
    assert torch.equal(weights, torch.stack([probs[t, e] for t, e in rows]))
    p = probs.clone().requires_grad_()
    padded, padded_weights, row_id_map, offsets, sizes = te.moe_permute_and_pad_with_probs(x, p, mask, counts, 4)
    wanted, wanted_sizes = Fp8Padding(EXPERTS, 4)(y, counts)
    assert torch.equal(padded, wanted) and sizes.tolist() == wanted_sizes and offsets[0] == 0
    assert torch.equal(padded_weights, Fp8Padding(EXPERTS, 4)(weights.unsqueeze(1), counts)[0].squeeze(1))
    (padded_weights * torch.arange(len(padded))).sum().backward()
    assert torch.equal(p.grad != 0, (mask != 0) & (p.grad != 0)) and p.grad.count_nonzero() >= len(rows) - 1
    back = te.moe_unpermute(padded, row_id_map, pad_offsets=offsets)
    torch.testing.assert_close(back, x * TOP)
    *_, none, same = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 1)
    assert none is None and torch.equal(same, counts)


def test_chunks_are_moved_whole():
    x, sizes, order = torch.randn(11, 3).requires_grad_(), torch.tensor([2, 0, 5, 4]), torch.tensor([2, 0, 3, 1])
    weights = torch.rand(11)
    y, moved = te.moe_sort_chunks_by_index_with_probs(x, weights, sizes, order)
    wanted = torch.cat([x.split(sizes.tolist())[i] for i in order])
    assert torch.equal(y, wanted) and torch.equal(y, te.moe_sort_chunks_by_index(x, sizes, order))
    assert torch.equal(moved, torch.cat([weights.split(sizes.tolist())[i] for i in order]))
    grad = torch.randn_like(y)
    y.backward(grad)
    inverse = te.moe_sort_chunks_by_index(grad, sizes[order], order.argsort())
    assert torch.equal(x.grad, inverse)
    longer = torch.cat([x, torch.ones(2, 3)])  # rows after all chunks stay where they are
    assert torch.equal(te.moe_sort_chunks_by_index(longer, sizes, order), torch.cat([wanted, torch.ones(2, 3)]))
    assert torch.equal(te.moe_sort_chunks_by_index(longer, sizes[:0], order[:0]), longer)


def test_no_tokens_at_all():
    x, mask = torch.randn(0, HIDDEN), torch.zeros(0, EXPERTS, dtype=torch.int32)
    y, row_id_map = te.moe_permute(x, mask)
    assert y.shape == (0, HIDDEN) and te.moe_unpermute(y, row_id_map).shape == (0, HIDDEN)
    y, row_id_map = te.moe_permute(torch.randn(3, HIDDEN), torch.zeros(3, EXPERTS, dtype=torch.int32))
    assert y.shape == (0, HIDDEN) and not te.moe_unpermute(y, row_id_map).any()


def test_compiled_in_one_graph():
    x, mask, _, probs = routed()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def through(x, mask, probs):
        y, row_id_map = te.moe_permute(x, mask, TOKENS * TOP)
        return te.moe_unpermute(y * 2, row_id_map, probs)

    y, row_id_map = te.moe_permute(x, mask, TOKENS * TOP)
    assert torch.equal(through(x, mask, probs), te.moe_unpermute(y * 2, row_id_map, probs))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_compiled_with_a_number_of_rows_that_is_counted(map_type, tokens, backward):
    """Also without a token: eager results, and the same gradients, in one graph."""
    torch.compiler.reset()
    routing = torch.arange(tokens * 2, dtype=torch.int32).view(tokens, 2) % 3 if map_type == "index" else (
        torch.arange(tokens * 3).view(tokens, 3) % 2).int()  # fmt: skip

    def through(x, routing):
        y, row_id_map = te.moe_permute(x, routing, map_type=map_type)
        return y, row_id_map, te.moe_unpermute(y * 2, row_id_map, map_type=map_type)

    found = []
    for call in (through, torch.compile(through, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        x = torch.randn(tokens, HIDDEN, requires_grad=backward)
        out = call(x, routing)
        if backward:
            out[2].square().sum().backward()
        found.append([*out, x.grad])
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one, other)


def test_the_old_name_of_the_weights_warns():
    x, mask, _, probs = routed()
    y, row_id_map = te.moe_permute(x, mask)
    with pytest.warns(UserWarning, match="merging_probs"):
        old = te.moe_unpermute(y, row_id_map, probs=probs)
    assert torch.equal(old, te.moe_unpermute(y, row_id_map, probs))
