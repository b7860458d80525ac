"""DotProductAttention, rotary embedding and MultiheadAttention: against torch, formulas and the log of products."""

import copy
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.te.dot_product_attention import MASKS, DotProductAttention
from mxtensor.te.multihead_attention import MultiheadAttention
from mxtensor.te.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.helpers.compare import relative_error

MXFP8 = mx.recipe.MXFP8BlockScaling


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def backward(y, inputs, grad):
    return torch.autograd.grad(y, inputs, grad)


def by_definition(q, k, v, seen, scale):
    """softmax(q k^T * scale) v over the keys in ``seen`` (b, h, q, k); all others (s, b, h, d). Zeros without a key."""
    groups = q.shape[2] // k.shape[2]
    k, v = (torch.stack([t[:, :, h // groups] for h in range(q.shape[2])], 2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * scale
    weights = torch.where(seen, scores.exp(), 0.0)
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    return torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)


def allowed(mask_type, window, queries, keys, lengths, arbitrary):
    """The keys that each query sees under a mask type, one pair at a time: (b, 1, queries, keys)."""
    seen = torch.zeros(len(lengths), 1, queries, keys, dtype=torch.bool)
    for b, (n, m) in enumerate(lengths):
        padded = "padding" in mask_type
        end = m - n if padded else keys - queries
        shift = 0 if mask_type in ("causal", "padding_causal") else end
        for i in range(queries):
            for j in range(keys):
                distance = j - (i + shift)
                ok = (window[0] < 0 or distance >= -window[0]) and (window[1] < 0 or distance <= window[1])
                ok = ok and ("causal" not in mask_type or distance <= 0)
                ok = ok and (not padded or (i < n and j < m))
                seen[b, 0, i, j] = ok and (mask_type != "arbitrary" or not arbitrary[b, 0, i, j])
    return seen


# ---------------------------------------------------------------------------------------------- DotProductAttention


@pytest.mark.parametrize("sizes", [(7, 7), (5, 8), (8, 5)], ids=str)
@pytest.mark.parametrize("window", [None, (-1, -1), (2, 1), (2, -1), (-1, 1)], ids=str)
@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.pairs
def test_every_mask_type_and_window_hides_its_keys(mask_type, window, sizes):
    queries, keys = sizes
    batch, heads, groups, d = 3, 4, 2, 8
    lengths = [(queries, keys), (queries - 3, keys - 2), (queries - 1, keys)]
    if queries == keys:
        lengths = [(n, n) for n, _ in lengths]
    q, k, v = draw(queries, batch, heads, d), draw(keys, batch, groups, d), draw(keys, batch, groups, d)
    paddings = [
        (torch.arange(n) >= torch.tensor([pair[side] for pair in lengths])[:, None])[:, None, None, :]
        for side, n in enumerate((queries, keys))
    ]
    arbitrary = torch.rand(batch, 1, queries, keys) < 0.4
    mask = None
    if "padding" in mask_type:
        mask = paddings[0] if queries == keys else tuple(paddings)
    elif mask_type == "arbitrary":
        mask = arbitrary
    attention = DotProductAttention(heads, d, groups, attn_mask_type=mask_type, window_size=window)
    y = attention(q, k, v, mask)
    limits = window or (-1, -1)
    seen = allowed(mask_type, limits, queries, keys, lengths, arbitrary).expand(-1, heads, -1, -1)
    reference = by_definition(q, k, v, seen, 1 / math.sqrt(d))
    torch.testing.assert_close(y, reference, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(y)
    for ours, theirs in zip(backward(y, (q, k, v), grad), backward(reference, (q, k, v), grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "padding_causal"])
def test_formats_differ_only_in_the_order_of_dimensions(mask_type):
    q, k, v = draw(6, 2, 4, 8), draw(6, 2, 1, 8), draw(6, 2, 1, 8)
    mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = True
    attention = DotProductAttention(4, 8, 1, attn_mask_type=mask_type)
    sbhd = attention(q, k, v, mask)
    bshd = attention(*(t.transpose(0, 1) for t in (q, k, v)), mask, "bshd")
    assert sbhd.shape == (6, 2, 32) and bshd.shape == (2, 6, 32)
    assert torch.equal(sbhd, bshd.transpose(0, 1))


def test_softmax_scale_and_channels_of_values():
    q, k, v = draw(5, 2, 3, 8), draw(5, 2, 3, 8), draw(5, 2, 3, 4)
    y = DotProductAttention(3, (8, 4), attn_mask_type="no_mask", softmax_scale=0.7)(q, k, v)
    everything = torch.ones(2, 3, 5, 5, dtype=torch.bool)
    torch.testing.assert_close(y, by_definition(q, k, v, everything, 0.7), rtol=1e-12, atol=1e-12)


def test_a_call_may_override_mask_and_window():
    q, k, v = draw(6, 2, 2, 8), draw(6, 2, 2, 8), draw(6, 2, 2, 8)
    causal, free = DotProductAttention(2, 8), DotProductAttention(2, 8, attn_mask_type="no_mask")
    assert torch.equal(causal(q, k, v, attn_mask_type="no_mask"), free(q, k, v))
    torch.testing.assert_close(free(q, k, v, window_size=(5, 0)), causal(q, k, v), rtol=1e-12, atol=1e-12)
    windowed = DotProductAttention(2, 8, attn_mask_type="no_mask", window_size=(1, 1))
    assert torch.equal(windowed(q, k, v, window_size=(-1, -1)), free(q, k, v))


@pytest.mark.parametrize("mask_type", [name for name, row in MASKS.items() if not row.causal])
@pytest.mark.parametrize("window", [(-1, 0), [-1, 0]], ids=["tuple", "list"])
def test_the_window_of_causal_masks_is_not_a_limit_with_others(mask_type, window):
    """A layer for causal masks, with TransformerEngine's window for them, that a call gives another mask."""
    q, k, v = draw(6, 2, 2, 8), draw(6, 2, 2, 8), draw(6, 2, 2, 8)
    mask = torch.zeros(2, 1, 6 if mask_type == "arbitrary" else 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = True
    causal = DotProductAttention(2, 8, window_size=window)
    assert torch.equal(causal(q, k, v), DotProductAttention(2, 8)(q, k, v))
    with pytest.warns(UserWarning, match=r"window_size=\(-1, 0\) limits nothing with attn_mask_type='"):
        y = causal(q, k, v, mask, attn_mask_type=mask_type)
    assert torch.equal(y, DotProductAttention(2, 8, attn_mask_type=mask_type)(q, k, v, mask))


def test_queries_that_see_nothing_give_zeros_and_finite_gradients():
    q, k, v = draw(4, 1, 2, 8, dtype=torch.float32), draw(4, 1, 2, 8, dtype=torch.float32), draw(4, 1, 2, 8)
    v = v.float().detach().requires_grad_()
    blind = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    blind[..., 2, :] = True
    y = DotProductAttention(2, 8, attn_mask_type="arbitrary")(q, k, v, blind)
    assert (y[2] == 0).all() and (y[[0, 1, 3]] != 0).all()
    grads = backward(y, (q, k, v), torch.randn_like(y))
    assert all(g.isfinite().all() for g in grads) and (grads[0][2] == 0).all()


def test_dropout_is_for_training_only():
    q, k, v = draw(16, 2, 2, 8), draw(16, 2, 2, 8), draw(16, 2, 2, 8)
    dropping, keeping = DotProductAttention(2, 8, attention_dropout=0.5), DotProductAttention(2, 8)
    first, second = dropping(q, k, v), dropping(q, k, v)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    seeded = dropping(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(seeded, dropping(q, k, v))
    assert torch.equal(dropping.eval()(q, k, v), keeping(q, k, v))


def test_recomputing_the_core_is_bitwise_identical_and_repeats_dropout():
    q, k, v = draw(16, 2, 2, 8), draw(16, 2, 2, 8), draw(16, 2, 2, 8)
    attention, results = DotProductAttention(2, 8, attention_dropout=0.5), []
    grad = torch.randn(16, 2, 16, dtype=torch.float64)
    for recompute in (False, True):
        torch.manual_seed(7)
        y = attention(q, k, v, checkpoint_core_attention=recompute)
        results.append((y, *backward(y, (q, k, v), grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_attention_products_stay_in_high_precision_under_a_recipe(dtype):
    q, k, v = (draw(32, 2, 4, 32, dtype=dtype) for _ in range(3))
    attention, grad = DotProductAttention(4, 32), torch.randn(32, 2, 128).to(dtype)
    outside = attention(q, k, v)
    with mx.autocast(recipe=MXFP8()), mx.explain() as log:
        inside = attention(q, k, v)
        grads = backward(inside, (q, k, v), grad)
    assert log.entries == []
    assert inside.dtype == dtype and torch.equal(inside, outside)
    assert all(torch.equal(a, b) for a, b in zip(grads, backward(outside, (q, k, v), grad), strict=True))


def padded(n):
    return torch.zeros(2, 1, 1, n, dtype=torch.bool)


@pytest.mark.parametrize(
    ("arguments", "call", "error", "message"),
    [
        ({"num_gqa_groups": 3}, None, ValueError, "num_attention_heads=4 must be a multiple of num_gqa_groups=3"),
        ({"qkv_format": "thd"}, None, ValueError, "qkv_format is 'thd'; choose one of sbhd, bshd"),
        ({"attn_mask_type": "diagonal"}, None, ValueError, "attn_mask_type is 'diagonal'; choose one of no_mask, "),
        ({"attention_type": "both"}, None, ValueError, "attention_type is 'both'; choose one of self, cross"),
        ({"tp_size": 3}, None, ValueError, "num_attention_heads=4 does not divide into 3 equal parts"),
        ({}, {"k": (6, 2, 3, 8)}, ValueError, r"\(6, 2, 4, 8\), \(6, 2, 3, 8\), \(6, 2, 4, 8\) do not fit"),
        ({}, {"k": (6, 3, 4, 8), "v": (6, 3, 4, 8)}, ValueError, "do not fit: sbhd needs one batch size"),
        ({"attn_mask_type": "padding"}, {}, ValueError, r"needs an attention_mask \(2, 1, 1, 6\), True for padding"),
        ({"attn_mask_type": "padding"}, {"mask": padded(5)}, ValueError, r"\(2, 1, 1, 5\) of queries and .* do not"),
        ({"attn_mask_type": "padding"}, {"mask": padded(6).float()}, TypeError, "is torch.float32; pass bool"),
        ({"attn_mask_type": "arbitrary"}, {}, ValueError, r"= \(2, 4, 6, 6\), .* got NoneType"),
        ({"attn_mask_type": "arbitrary"}, {"mask": padded(5)}, ValueError, r"got \(2, 1, 1, 5\)"),
    ],
)
def test_errors_name_the_argument(arguments, call, error, message):
    if call is None:
        with pytest.raises(error, match=message):
            DotProductAttention(4, 8, **arguments)
        return
    attention = DotProductAttention(4, 8, **arguments)
    q, k, v = (draw(*call.get(name, (6, 2, 4, 8))) for name in "qkv")
    with pytest.raises(error, match=message):
        attention(q, k, v, call.get("mask"))


# ---------------------------------------------------------------------------------------------- rotary embedding


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_each_pair_of_channels_rotates_by_its_angle(form, percent, interleaved):
    length, d, offset, base = 11, 16, 3, 500.0
    rope = RotaryPositionEmbedding(d, percent, rotary_base=base, interleaved=interleaved)
    freqs = rope(length + 2, offset)
    rotated = int(d * percent)
    assert freqs.shape == (length + 2, 1, 1, rotated) and freqs.dtype == torch.float32
    t = torch.randn((length, 2, 3, d) if form == "sbhd" else (2, length, 3, d), dtype=torch.float64)
    y = apply_rotary_pos_emb(t, freqs, form, interleaved=interleaved)
    assert torch.equal(y[..., rotated:], t[..., rotated:])
    position = torch.arange(length, dtype=torch.float64).add(offset)
    position = position.view(-1, 1, 1) if form == "sbhd" else position.view(1, -1, 1)
    for i in range(rotated // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
        rotation = torch.polar(torch.ones_like(position), position * base ** (-2 * i / rotated))
        expected = torch.complex(t[..., a], t[..., b]) * rotation
        torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), expected, rtol=0, atol=1e-5)


def test_the_product_of_rotated_vectors_depends_on_their_distance_only():
    freqs = RotaryPositionEmbedding(8)(40)
    a, b = (torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(40, -1, -1, -1) for _ in range(2))
    scores = torch.einsum("isth,jsth->ij", *(apply_rotary_pos_emb(t, freqs) for t in (a, b)))
    for distance in (0, 1, 9):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)


def test_half_precision_is_rotated_in_float32_and_rounded_once():
    freqs = RotaryPositionEmbedding(16)(9)
    t = torch.randn(9, 2, 3, 16, dtype=torch.bfloat16, requires_grad=True)
    y = apply_rotary_pos_emb(t, freqs)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, apply_rotary_pos_emb(t.float(), freqs, fused=True).bfloat16())
    (grad,) = backward(y, t, torch.ones_like(y))
    assert grad.dtype == torch.bfloat16


def test_positions_are_interpolated():
    plain = RotaryPositionEmbedding(8)
    torch.testing.assert_close(RotaryPositionEmbedding(8, seq_len_interpolation_factor=4)(32)[::4], plain(8))
    dynamic = RotaryPositionEmbedding(8, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=8)
    torch.testing.assert_close(dynamic(16)[::2], plain(8))
    torch.testing.assert_close(dynamic(32)[::4], plain(8))


def test_frequencies_stay_float32_and_survive_meta_and_foreign_state_dicts():
    rope = RotaryPositionEmbedding(8)
    frequencies = rope.inv_freq.clone()
    assert torch.equal(rope.bfloat16().inv_freq, frequencies) and rope(4).dtype == torch.float32
    with torch.device("meta"):
        fresh = RotaryPositionEmbedding(8)
    assert torch.equal(fresh.to_empty(device="cpu").inv_freq, frequencies)
    rope.load_state_dict({"inv_freq": torch.zeros(4)})
    assert torch.equal(rope.inv_freq, frequencies) and rope.state_dict() == {}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RotaryPositionEmbedding(6, 0.5), "give 3 rotary channels, which rotate in pairs"),
        (lambda: RotaryPositionEmbedding(8, 2.0), "give 16 rotary channels"),
        (lambda: apply_rotary_pos_emb(torch.ones(4, 1, 1, 8), torch.ones(3, 1, 1, 8)), "do not cover sbhd"),
        (lambda: apply_rotary_pos_emb(torch.ones(4, 1, 1, 8), torch.ones(4, 1, 1, 16)), "do not cover sbhd"),
        (lambda: apply_rotary_pos_emb(torch.ones(4, 1, 8), torch.ones(4, 1, 1, 8), "thd"), "is 'thd'; choose one of"),
    ],
)
def test_errors_name_the_angles(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------------------------------------- MultiheadAttention


def products(log):
    """The number of quantized products of each kind in a log."""
    return Counter(entry.spec.op for entry in log.entries if entry.spec.op in ("fprop", "dgrad", "wgrad"))


def assert_same_gradients(ours, theirs):
    """Compare the gradients of a layer with those of the torch module that it was created from."""
    twin = copy.deepcopy(ours)
    twin.load_state_dict({name: parameter.grad for name, parameter in theirs.named_parameters()})
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() == dict(twin.named_parameters()).keys()
    for name, expected in twin.named_parameters():
        torch.testing.assert_close(gradients[name], expected.detach(), msg=name)


FUSED = [{}, {"fuse_qkv_params": True}, {"fuse_qkv_params": True, "qkv_weight_interleaved": False}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", FUSED, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_multihead_attention_equals_torchs(kind, batch_first, options, dtype):
    theirs = nn.MultiheadAttention(48, 3, bias=not batch_first, batch_first=batch_first, dtype=dtype)
    ours = MultiheadAttention.from_torch(theirs, attention_type=kind, **options)
    x, memory = draw(2, 7, 48, dtype=dtype), draw(2, 5, 48, dtype=dtype)
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    source = x if kind == "self" else memory
    hidden = torch.rand(2, 1, 7, source.shape[1 if batch_first else 0]) < 0.3
    hidden[..., 0] = False
    expected, _ = theirs(x, source, source, attn_mask=hidden.expand(-1, 3, -1, -1).flatten(0, 1), need_weights=False)
    y = ours(x, hidden, *([] if kind == "self" else [memory]), attn_mask_type="arbitrary")
    torch.testing.assert_close(y, expected)
    grad, inputs = torch.randn_like(y), (x, memory)[: 1 if kind == "self" else 2]
    for mine, other in zip(
        torch.autograd.grad(y, inputs, grad, retain_graph=True),
        torch.autograd.grad(expected, inputs, grad, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)
    y.backward(grad)
    expected.backward(grad)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("options", FUSED, ids=str)
def test_grouped_queries_share_keys_and_values(options):
    """Written out head by head: query head h uses key and value head h // (heads / groups)."""
    hidden, heads, groups, d = 32, 6, 2, 8
    layer = MultiheadAttention(
        hidden, heads, d, 0.0, num_gqa_groups=groups, attn_mask_type="no_mask", params_dtype=torch.float64, **options
    )
    x = draw(5, 2, hidden)
    if not options:
        weights = {name: getattr(layer.qkv, f"{name}_weight") for name in ("query", "key", "value")}
        biases = {name: getattr(layer.qkv, f"{name}_bias") for name in ("query", "key", "value")}

        def rows(name, head):
            span = slice(head * d, (head + 1) * d)
            return weights[name][span], biases[name][span]
    else:
        starts = {"query": 0, "key": heads, "value": heads + groups}

        def rows(name, head):
            place = starts[name] + head
            if options.get("qkv_weight_interleaved", True):
                per, within = heads // groups, {"query": 0, "key": heads // groups, "value": heads // groups + 1}
                group, index = divmod(head, per) if name == "query" else (head, 0)
                place = group * (per + 2) + within[name] + index
            span = slice(place * d, (place + 1) * d)
            return layer.qkv.weight[span], layer.qkv.bias[span]

    contexts = []
    for head in range(heads):
        q = F.linear(x, *rows("query", head))
        k, v = (F.linear(x, *rows(name, head // (heads // groups))) for name in ("key", "value"))
        weights_ = torch.softmax(torch.einsum("qbd,kbd->bqk", q, k) / math.sqrt(d), -1)
        contexts.append(torch.einsum("bqk,kbd->qbd", weights_, v))
    expected = F.linear(torch.cat(contexts, -1), layer.proj.weight, layer.proj.bias)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_angles_rotate_queries_and_keys(form):
    layer = MultiheadAttention(32, 4, None, 0.0, num_gqa_groups=2, qkv_format=form, bias=False)
    rope, x = RotaryPositionEmbedding(8)(6), draw(6, 2, 32, dtype=torch.float32)
    x = x if form == "sbhd" else x.transpose(0, 1)
    q, k, v = (
        F.linear(x, getattr(layer.qkv, f"{name}_weight")).unflatten(-1, (-1, 8)) for name in ("query", "key", "value")
    )
    transposed = (apply_rotary_pos_emb(t, rope, form) for t in (q, k))
    expected = layer.proj(DotProductAttention(4, 8, 2)(*transposed, v, None, form))
    torch.testing.assert_close(layer(x, rotary_pos_emb=rope), expected)
    assert torch.equal(layer(x, rotary_pos_emb=rope), layer(x, rotary_pos_emb=(rope, rope)))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_the_results_beside_the_output(normalization):
    layer = MultiheadAttention(
        32, 4, None, 0.0, input_layernorm=True, return_bias=True, return_layernorm_output=True,
        normalization=normalization, zero_centered_gamma=True,
    )  # fmt: skip
    with torch.no_grad():
        layer.proj.bias.normal_()
    x = draw(6, 2, 32, dtype=torch.float32)
    y, bias, normed = layer(x)
    norm = F.layer_norm if normalization == "LayerNorm" else F.rms_norm
    torch.testing.assert_close(normed, norm(x, (32,), eps=1e-5))
    plain = MultiheadAttention(32, 4, None, 0.0)
    plain.load_state_dict(
        {name.replace("layernorm_qkv", "qkv"): t for name, t in layer.state_dict().items() if "layer_norm" not in name}
    )
    assert torch.equal(bias, layer.proj.bias)
    torch.testing.assert_close(y + bias, plain(normed))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "qkv.query_* qkv.key_* qkv.value_* proj.*"),
        ({"fuse_qkv_params": True}, "qkv.* proj.*"),
        (
            {"input_layernorm": True},
            "layernorm_qkv.layer_norm_* layernorm_qkv.query_* layernorm_qkv.key_* layernorm_qkv.value_* proj.*",
        ),
        ({"attention_type": "cross"}, "query_layer.* key_value.key_* key_value.value_* proj.*"),
        (
            {"attention_type": "cross", "input_layernorm": True, "fuse_qkv_params": True},
            "layernorm_query.layer_norm_* layernorm_query.* key_value.* proj.*",
        ),
        (
            {"attention_type": "cross", "input_layernorm": True},
            "layernorm_query.layer_norm_* layernorm_query.query_* key_value.key_* key_value.value_* proj.*",
        ),
    ],
    ids=str,
)
def test_parameters_are_named_as_transformer_engines(options, names):
    wanted = {name.replace("*", kind) for name in names.split() for kind in ("weight", "bias")}
    layer = MultiheadAttention(32, 4, **options)
    assert set(layer.state_dict()) == wanted == set(dict(layer.named_parameters()))
    loaded = MultiheadAttention(32, 4, **options)
    loaded.load_state_dict(layer.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_projections_are_quantized_and_attention_is_not(kind):
    layer = MultiheadAttention(64, 4, None, 0.0, attention_type=kind, params_dtype=torch.bfloat16)
    x, memory = draw(32, 2, 64, dtype=torch.bfloat16), draw(32, 2, 64, dtype=torch.bfloat16)
    arguments = {} if kind == "self" else {"encoder_output": memory}
    with mx.autocast(recipe=MXFP8()), mx.explain() as log:
        y = layer(x, **arguments)
        y.backward(torch.randn_like(y))
    linears = 2 if kind == "self" else 3
    assert products(log) == {"fprop": linears, "dgrad": linears, "wgrad": linears}
    assert relative_error(y, layer(x, **arguments)) < 0.08


def test_quantized_parameters_load_torchs_and_train():
    theirs = nn.MultiheadAttention(64, 4)
    recipe = MXFP8()
    with te.quantized_model_init(recipe=recipe):
        ours = MultiheadAttention.from_torch(theirs)
    weight = ours.qkv.key_weight
    assert isinstance(weight, mx.MXTensor)
    expected = mx.quantize(theirs.in_proj_weight[64:128].detach(), weight.format)
    assert torch.equal(weight.dequantize(), expected.dequantize())
    x = draw(32, 2, 64, dtype=torch.float32)
    with mx.autocast(recipe=recipe):
        y = ours(x)
    y.backward(torch.randn_like(y))
    assert type(weight.grad) is torch.Tensor and weight.grad.shape == (64, 64)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MultiheadAttention(30, 4), ValueError, "hidden_size=30 does not divide into num_attention_heads=4"),
        (lambda: MultiheadAttention(32, 4, num_gqa_groups=3), ValueError, "must be a multiple of num_gqa_groups=3"),
        (lambda: MultiheadAttention(32, 4, attention_type="none"), ValueError, "attention_type is 'none'"),
        (lambda: MultiheadAttention(32, 4, qkv_format="thd"), ValueError, "qkv_format is 'thd'"),
        (
            lambda: MultiheadAttention(32, 4, num_gqa_groups=2, tp_size=4, set_parallel_mode=True),
            ValueError, "num_gqa_groups=2 does not divide into 4 equal parts",
        ),
        (
            lambda: MultiheadAttention(32, 4)(torch.ones(3, 1, 32), encoder_output=torch.ones(3, 1, 32)),
            ValueError, "attention_type='self' takes no encoder_output",
        ),
        (
            lambda: MultiheadAttention(32, 4, attention_type="cross")(torch.ones(3, 1, 32)),
            ValueError, "attention_type='cross' needs encoder_output",
        ),
        (
            lambda: MultiheadAttention.from_torch(nn.MultiheadAttention(32, 4, kdim=16)),
            NotImplementedError, "kdim=16, vdim=32, .* use torch's module",
        ),
        (
            lambda: MultiheadAttention.from_torch(nn.MultiheadAttention(32, 4, add_bias_kv=True)),
            NotImplementedError, "add_bias_kv=True",
        ),
    ],
)  # fmt: skip
def test_errors_of_multihead_attention_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
