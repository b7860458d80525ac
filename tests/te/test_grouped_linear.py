"""GroupedLinear: one linear layer for each group of rows, bitwise identical to separate layers."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor import recipe
from mxtensor.te.contexts import quantized_model_init
from mxtensor.te.linear import GroupedLinear, Linear
from mxtensor.te.moe import Fp8Padding, Fp8Unpadding
from mxtensor.training.linear import Options
from tests.helpers import oracle
from tests.helpers.compare import assert_same_product, relative_error
from tests.helpers.separate_layers import separate_layers

K, N = 72, 56
RECIPES = [
    recipe.MXFP8BlockScaling(), recipe.MXFP4BlockScaling(stochastic_rounding=False),
    recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), recipe.Float8CurrentScaling(),
    recipe.DelayedScaling(amax_history_len=3), recipe.Float8BlockScaling(use_f32_scales=True),
]  # fmt: skip
SPLITS = {
    "odd": [5, 33, 1, 70], "aligned": [32, 64, 32], "zeros": [0, 37, 0, 0, 3, 0], "one has all": [0, 0, 65],
    "nobody": [0, 0], "alone": [41],
}  # fmt: skip
by_name = pytest.mark.parametrize("active", RECIPES, ids=lambda r: type(r).__name__)


class Sequence(nn.Module):
    """The reference of GroupedLinear: its weights in separate modules."""

    def __init__(self, grouped, **options):
        super().__init__()
        bias = grouped.bias0 is not None
        self.each = nn.ModuleList(
            Linear(grouped.in_features, grouped.out_features, bias=bias, params_dtype=grouped.weight0.dtype, **options)
            for _ in range(grouped.num_gemms)
        )
        with torch.no_grad():
            for i, layer in enumerate(self.each):
                layer.weight.copy_(getattr(grouped, f"weight{i}"))
                if bias:
                    layer.bias.copy_(getattr(grouped, f"bias{i}"))

    def forward(self, x, m_splits, is_first_microbatch=None):
        rows = x.reshape(-1, x.shape[-1]).split(list(m_splits))
        out = torch.cat([layer(part, is_first_microbatch) for layer, part in zip(self.each, rows, strict=True)])
        return out.view(*x.shape[:-1], out.shape[1])

    def parameter_lists(self):
        return [layer.weight for layer in self.each], [layer.bias for layer in self.each]


def weights_of(grouped):
    return [getattr(grouped, f"weight{i}") for i in range(grouped.num_gemms)]


def biases_of(grouped):
    return [getattr(grouped, f"bias{i}") for i in range(grouped.num_gemms)]


def step(module, x, splits, g, **arguments):
    """The result and the gradient of x; the gradients of parameters are in .grad."""
    x = x.detach().clone().requires_grad_()
    y = module(x, splits, **arguments)
    y.backward(g.to(y.dtype))
    return y.detach(), x.grad


def assert_same_gradients(grouped, sequence):
    for mine, theirs in zip((weights_of(grouped), biases_of(grouped)), sequence.parameter_lists(), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a.grad, b.grad)


def batch(rows, dtype=torch.bfloat16):
    """An input and an upstream gradient whose rows differ widely, which detects a scale shared between groups."""
    return tuple(torch.randn(rows, width, dtype=dtype) * torch.randn(rows, 1).exp2().to(dtype) for width in (K, N))


# ---------------------------------------------------------------------------------------------- the sequence


@by_name
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS.keys())
def test_grouped_linear_is_bitwise_identical_to_separate_linears(active, splits):
    """Three steps, so that the histories of delayed scaling have an effect."""
    grouped = GroupedLinear(len(splits), K, N, params_dtype=torch.bfloat16)
    sequence = Sequence(grouped)
    for _ in range(3):
        x, g = batch(sum(splits))
        with mx.autocast(recipe=active):
            y, dx = step(grouped, x, splits, g)
            wanted, wanted_dx = step(sequence, x, splits, g)
        assert y.dtype is torch.bfloat16 and y.shape == (sum(splits), N)
        assert torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
        assert_same_gradients(grouped, sequence)


@by_name
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_in_other_dtypes_and_without_bias_too(active, dtype):
    splits = SPLITS["odd"]
    grouped = GroupedLinear(len(splits), K, N, bias=False)  # float32 weights: the input decides
    sequence = Sequence(grouped)
    x, g = batch(sum(splits), dtype)
    with mx.autocast(recipe=active):
        y, dx = step(grouped, x, splits, g)
        wanted, wanted_dx = step(sequence, x, splits, g)
    assert y.dtype is dtype and torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
    pairs = zip(weights_of(grouped), sequence.parameter_lists()[0], strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


@pytest.mark.parametrize("num_gemms", [3, 6])
@pytest.mark.parametrize("active", [*RECIPES, None], ids=lambda r: type(r).__name__)
def test_accuracy_with_aligned_splits(active, num_gemms):
    """Splits in whole blocks at sorted random positions, sequence-first input."""
    bs, length, hidden, ffn = 2, 256, 64, 96
    size = 1 if active is None else 32 if active.mxfp8() or active.nvfp4() else 16
    places = torch.sort(torch.randint(0, length // size, (num_gemms - 2,))).values.tolist()
    m_splits = (torch.tensor([*places, length // size]) - torch.tensor([0, *places])) * size
    m_splits = torch.cat([m_splits, torch.tensor([0])])  # one group has no rows
    assert m_splits.sum() == length

    def init(weight):
        return nn.init.normal_(weight, 0, 0.023)

    grouped = GroupedLinear(num_gemms, hidden, ffn, bias=True, init_method=init, parallel_mode="column")
    sequence = Sequence(grouped)
    x, g = torch.randn(length, bs, hidden), torch.randn(length, bs, ffn)
    m_splits = m_splits * bs
    with mx.autocast(enabled=active is not None, recipe=active):
        y, dx = step(grouped, x, m_splits.tolist(), g)
        wanted, wanted_dx = step(sequence, x, m_splits.tolist(), g)
    assert y.shape == (length, bs, ffn) and torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
    assert_same_gradients(grouped, sequence)
    if active is None:
        return
    exact = [F.linear(t.view(-1, hidden).double(), w.double()) for t in (x,) for w in weights_of(grouped)]
    rows = torch.repeat_interleave(torch.arange(num_gemms), m_splits)
    reference = torch.stack(exact)[rows, torch.arange(length * bs)].view_as(y)
    error = relative_error(y, reference)
    assert error < (0.20 if "4" in type(active).__name__ else 0.045), error


def test_each_group_is_cast_from_its_own_rows_only():
    """Against the oracle's casts and float64 products: blocks of the columnwise copies start at each group."""
    splits, format = SPLITS["odd"], mx.get_format("mxfp8")
    grouped = GroupedLinear(len(splits), K, N)
    x, g = batch(sum(splits), torch.float32)
    with mx.autocast(recipe=recipe.MXFP8BlockScaling()):
        y, dx = step(grouped, x, splits, g)

    def cast(t):
        values = oracle.as_float32(t)
        return torch.from_numpy(oracle.decode(oracle.encode(values, format), format, values.shape))

    components = zip(*(t.split(splits) for t in (x, g, y, dx)), weights_of(grouped), biases_of(grouped), strict=True)
    for rows, grad, y, dx, w, b in components:
        w, dw, db = w.detach(), w.grad, b.grad
        assert_same_product(y, lambda x, w, b: x @ w.t() + b, cast(rows), cast(w), b.detach())
        assert_same_product(dx, lambda g, w: g @ w.t(), cast(grad), cast(w.t()))
        assert_same_product(dw, lambda g, x: g @ x.t(), cast(grad.t()), cast(rows.t()))
        assert_same_product(db, lambda g: g.sum(0), grad)


def test_a_group_without_rows_gets_a_gradient_of_zeros():
    grouped = GroupedLinear(3, K, N)
    x, g = batch(9)
    with mx.autocast():
        step(grouped, x, [4, 0, 5], g)
    assert not grouped.weight1.grad.any() and not grouped.bias1.grad.any()
    assert grouped.weight0.grad.any() and grouped.bias2.grad.any()


@pytest.mark.parametrize("kind", [tuple, torch.tensor, lambda s: torch.tensor(s, dtype=torch.int32)])
def test_m_splits_may_be_a_tuple_or_a_tensor_of_integers(kind):
    splits = SPLITS["zeros"]
    grouped = GroupedLinear(len(splits), K, N)
    x, _ = batch(sum(splits))
    with mx.autocast():
        assert torch.equal(grouped(x, kind(splits)), grouped(x, splits))


@pytest.mark.gpu
@by_name
def test_on_cuda_with_row_counts_on_the_device(active):
    splits = [5, 0, 160, 128, 1]
    grouped = GroupedLinear(len(splits), 256, 128, params_dtype=torch.bfloat16, device="cuda")
    sequence = Sequence(grouped).cuda()
    x, g = (torch.randn(sum(splits), width, dtype=torch.bfloat16, device="cuda") for width in (256, 128))
    with mx.autocast(recipe=active):
        y, dx = step(grouped, x, torch.tensor(splits, device="cuda"), g)
        wanted, wanted_dx = step(sequence, x, splits, g)
    assert torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
    assert_same_gradients(grouped, sequence)


def test_outside_autocast_each_group_is_torchs_linear_layer():
    splits = SPLITS["odd"]
    grouped = GroupedLinear(len(splits), K, N)
    x, g = batch(sum(splits), torch.float32)
    y, dx = step(grouped, x, splits, g)
    groups = zip(*(t.split(splits) for t in (x, y, dx, g)), weights_of(grouped), biases_of(grouped), strict=True)
    for rows, part, part_dx, part_g, w, b in groups:
        rows, leaf, bias = (t.detach().clone().requires_grad_() for t in (rows, w, b))
        out = F.linear(rows, leaf, bias)
        out.backward(part_g)
        assert torch.equal(part, out) and torch.equal(part_dx, rows.grad)
        assert torch.equal(w.grad, leaf.grad) and torch.equal(b.grad, bias.grad)
    with mx.autocast(enabled=False):
        assert torch.equal(grouped(x, splits), y)


def test_strided_inputs_and_gradients():
    splits = SPLITS["odd"]
    grouped = GroupedLinear(len(splits), K, N)
    x, g = batch(sum(splits))
    transposed, spread = x.t().contiguous().t(), g[:1].expand(sum(splits), N)
    with mx.autocast():
        y, dx = step(grouped, x, splits, spread.contiguous())
        first = [w.grad.clone() for w in weights_of(grouped)]
        grouped.zero_grad()
        leaf = transposed.requires_grad_()
        out = grouped(leaf, splits)
    out.backward(spread)
    assert torch.equal(out, y) and torch.equal(leaf.grad, dx)
    assert all(torch.equal(a, w.grad) for a, w in zip(first, weights_of(grouped), strict=True))


def test_tensors_without_gradients_need_no_product():
    splits = [33, 8]
    grouped = GroupedLinear(2, K, N)
    grouped.weight0.requires_grad_(False)
    x, g = batch(41)
    with mx.autocast(), mx.explain() as log:
        grouped(x, splits).backward(g)  # x needs no gradient
    assert grouped.weight0.grad is None and grouped.weight1.grad is not None and grouped.bias0.grad is not None
    assert [e.spec.op for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")] == ["fprop", "fprop", "wgrad"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("active", RECIPES[:2], ids=lambda r: type(r).__name__)
def test_compiles_whole_forward_and_backward(active):
    splits = SPLITS["odd"]
    grouped = GroupedLinear(len(splits), K, N, params_dtype=torch.bfloat16)
    compiled = torch.compile(grouped, fullgraph=True, backend="aot_eager")
    x, g = batch(sum(splits))
    with mx.autocast(recipe=active):
        y, dx = step(grouped, x, splits, g)
        grads = [p.grad.clone() for p in grouped.parameters()]
        grouped.zero_grad()
        wanted, wanted_dx = step(compiled, x, splits, g)
    assert torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, grouped.parameters(), strict=True))


def test_inside_torch_autocast_the_result_has_its_dtype():
    splits = SPLITS["odd"]
    grouped = GroupedLinear(len(splits), K, N)
    sequence = Sequence(grouped)
    x, g = batch(sum(splits), torch.float32)
    for active in (recipe.MXFP8BlockScaling(), None):
        with torch.autocast("cpu", dtype=torch.bfloat16), mx.autocast(enabled=active is not None, recipe=active):
            y, dx = step(grouped, x, splits, g)
            wanted, wanted_dx = step(sequence, x, splits, g)
        assert y.dtype is torch.bfloat16 and dx.dtype is torch.float32
        assert torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
        assert_same_gradients(grouped, sequence)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_step(reentrant):
    splits = SPLITS["zeros"]
    grouped = GroupedLinear(len(splits), K, N)
    x, g = batch(sum(splits))

    def checkpointed(x, splits):
        return checkpoint(grouped, x, splits, use_reentrant=reentrant)

    with mx.autocast(recipe=recipe.MXFP4BlockScaling(stochastic_rounding=False)):
        results = [step(module, x, splits, g) for module in (grouped, checkpointed)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------------------------------- the definition


@by_name
def test_every_group_is_a_layer_of_its_own(active):
    """The module and ``linear`` of each group share everything but the state of delayed scaling."""
    if active.delayed():
        active = recipe.Float8CurrentScaling()
    splits = SPLITS["zeros"]
    grouped = GroupedLinear(len(splits), K, N, params_dtype=torch.bfloat16)
    x, g = batch(sum(splits))
    with mx.autocast(recipe=active):
        y, dx = step(grouped, x, splits, g)
    leaf = x.clone().requires_grad_()
    leaves = [leaf, *weights_of(grouped), *biases_of(grouped)]
    out = separate_layers(leaf, leaves[1:7], leaves[7:], splits, Options(active.linear_recipe()))
    mine = torch.autograd.grad(out, leaves, g)
    theirs = [dx, *(w.grad for w in weights_of(grouped)), *(b.grad for b in biases_of(grouped))]
    assert torch.equal(out, y) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    plain = separate_layers(x, leaves[1:7], None, splits, Options(active.linear_recipe()))
    assert plain.shape == y.shape and not torch.equal(plain, y)


# ---------------------------------------------------------------------------------------------- padding


def pad_tensor_for_fp8(hidden_states, tokens_per_expert, align_size):
    """Padding written by hand, without the module."""
    padded = [(n + align_size - 1) // align_size * align_size for n in tokens_per_expert]
    out = []
    for rows, n, size in zip(torch.split(hidden_states, tokens_per_expert), tokens_per_expert, padded, strict=True):
        out += [rows, torch.zeros(size - n, hidden_states.shape[1], dtype=hidden_states.dtype)]
    return torch.cat(out), padded


@by_name
@pytest.mark.parametrize("num_gemms", [3, 6])
def test_accuracy_with_padding(active, num_gemms):
    """Padded groups have the same casts as the groups alone; the backend may sum in another order."""
    splits = torch.randint(1, 60, (num_gemms,)).tolist()
    grouped = GroupedLinear(num_gemms, K, N, params_dtype=torch.bfloat16)
    twin, pad, unpad = copy.deepcopy(grouped), Fp8Padding(num_gemms), Fp8Unpadding(num_gemms)
    x, g = batch(sum(splits))
    with mx.autocast(recipe=active):
        y, dx = step(grouped, x, splits, g)
        padded, sizes = pad(x, splits)
        by_hand, sizes_by_hand = pad_tensor_for_fp8(x, splits, 16 if active.fp8() else 32)
        assert torch.equal(padded, by_hand) and sizes == sizes_by_hand
        out, grad = step(twin, padded, sizes, pad(g, splits)[0])
        assert relative_error(unpad(out, splits), y) < 1e-3 and relative_error(unpad(grad, splits), dx) < 1e-3
    for a, b in zip(grouped.parameters(), twin.parameters(), strict=True):
        assert relative_error(b.grad, a.grad) < 1e-3


# ---------------------------------------------------------------------------------------------- options


def test_delayed_wgrads_of_all_microbatches_add_up():
    splits = [[5, 33, 0], [0, 2, 40], [17, 0, 1]]
    grouped = GroupedLinear(3, K, N, delay_wgrad_compute=True)
    at_once, sequence = GroupedLinear(3, K, N), Sequence(grouped, delay_wgrad_compute=True)
    at_once.load_state_dict(grouped.state_dict())
    with mx.autocast():
        for sizes in splits:
            x, g = batch(sum(sizes))
            results = [step(module, x, sizes, g) for module in (grouped, at_once, sequence)]
            assert all(torch.equal(a, b) for r in results[1:] for a, b in zip(results[0], r, strict=True))
    assert all(w.grad is None for w in weights_of(grouped)) and all(b.grad.any() for b in biases_of(grouped))
    grouped.backward_dw()
    for layer in sequence.each:
        layer.backward_dw()
    assert_same_gradients(grouped, sequence)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(grouped.parameters(), at_once.parameters(), strict=True))
    grouped.backward_dw()  # no gradient is pending
    assert torch.equal(grouped.weight0.grad, at_once.weight0.grad)


@pytest.mark.parametrize("later", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("active", [recipe.MXFP8BlockScaling(), None], ids=["mxfp8", "high precision"])
def test_wgrads_are_added_to_main_grad_in_float32(later, active):
    splits = [5, 0, 33]
    options = {"fuse_wgrad_accumulation": True, "delay_wgrad_compute": later}
    grouped = GroupedLinear(3, K, N, params_dtype=torch.bfloat16, **options)
    sequence = Sequence(grouped, **options)
    start = torch.randn(3, N, K)
    for mine, theirs, values in zip(weights_of(grouped), sequence.parameter_lists()[0], start, strict=True):
        mine.main_grad, theirs.main_grad = values.clone(), values.clone()
    for _ in range(2):
        x, g = batch(38)
        with mx.autocast(enabled=active is not None, recipe=active):
            step(grouped, x, splits, g)
            step(sequence, x, splits, g)
    if later:
        assert torch.equal(grouped.weight0.main_grad, start[0])
        grouped.backward_dw()
        for layer in sequence.each:
            layer.backward_dw()
    assert torch.equal(grouped.weight1.main_grad, start[1]) and not torch.equal(grouped.weight0.main_grad, start[0])
    for mine, theirs in zip(weights_of(grouped), sequence.parameter_lists()[0], strict=True):
        assert mine.grad is None and torch.equal(mine.main_grad, theirs.main_grad)


@by_name
def test_later_microbatches_use_the_weights_of_the_first(active):
    splits = [[5, 33, 1], [12, 0, 6]]
    grouped = GroupedLinear(3, K, N, params_dtype=torch.bfloat16)
    sequence = Sequence(grouped)
    for first, sizes in zip((True, False), splits, strict=True):
        x, g = batch(sum(sizes))
        with mx.autocast(recipe=active), mx.explain() as log:
            y, dx = step(grouped, x, sizes, g, is_first_microbatch=first)
        casts = [e for e in log.entries if e.spec.op == "cast pair" and e.spec.shapes[0][:2] == (N, K)]
        assert bool(casts) is first
        with mx.autocast(recipe=active):
            wanted, wanted_dx = step(sequence, x, sizes, g, is_first_microbatch=first)
        assert torch.equal(y, wanted) and torch.equal(dx, wanted_dx)
    assert_same_gradients(grouped, sequence)
    with torch.no_grad():
        grouped.weight1.mul_(2)  # an optimizer's step
    x, _ = batch(39)
    with mx.autocast(recipe=recipe.MXFP8BlockScaling()), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the type of the recipe changes
        assert torch.equal(grouped(x, [5, 33, 1], is_first_microbatch=False), grouped(x, [5, 33, 1]))


def test_the_biases_may_be_returned_instead():
    splits = [5, 0, 33]
    grouped = GroupedLinear(3, K, N, return_bias=True)
    x, _ = batch(38)
    with mx.autocast():
        y, biases = grouped(x, splits)
        bare = separate_layers(
            x, weights_of(grouped), None, splits, Options(recipe.MXFP8BlockScaling().linear_recipe())
        )
    assert torch.equal(y, bare) and len(biases) == 3 and all(b.dtype is torch.bfloat16 for b in biases)
    assert all(torch.equal(b, p.bfloat16()) for b, p in zip(biases, biases_of(grouped), strict=True))
    assert GroupedLinear(2, K, N, bias=False, return_bias=True)(x, [38, 0])[1] == [None, None]


def test_the_input_itself_may_be_saved_for_wgrad():
    splits = SPLITS["odd"]
    grouped, keeping = GroupedLinear(4, K, N), GroupedLinear(4, K, N, save_original_input=True)
    keeping.load_state_dict(grouped.state_dict())
    x, g = batch(sum(splits))
    with mx.autocast():
        results = [step(module, x, splits, g) for module in (grouped, keeping)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(grouped.parameters(), keeping.parameters(), strict=True))


def test_each_group_has_its_own_histories_and_the_state_dict_contains_them():
    active, splits = recipe.DelayedScaling(amax_history_len=4), [5, 0, 33]
    grouped = GroupedLinear(3, K, N)
    data = [batch(38) for _ in range(4)]
    with mx.autocast(recipe=active):
        for x, g in data[:2]:
            step(grouped, x * torch.tensor([1.0] * 5 + [8.0] * 33).view(-1, 1).bfloat16(), splits, g)
    amax = torch.stack([state.delayed.record for state in grouped._products])[:, 0]
    assert amax[2] > 2 * amax[0] > 0 and amax[1] == 0  # the input's amax of each group
    saved = io.BytesIO()
    torch.save(grouped.state_dict(), saved)
    saved.seek(0)
    other = GroupedLinear(3, K, N)
    other.load_state_dict(torch.load(saved, weights_only=True))
    with mx.autocast(recipe=active):
        for x, g in data[2:]:
            results = [step(module, x, splits, g) for module in (grouped, other)]
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_state_dict_without_histories_loads():
    grouped = GroupedLinear(2, K, N)
    assert list(grouped.state_dict()) == ["weight0", "bias0", "weight1", "bias1"]  # TransformerEngine's order
    assert [name for name, _ in grouped.named_parameters()] == list(grouped.state_dict())
    with mx.autocast(recipe=recipe.DelayedScaling()):
        grouped(batch(3)[0], [1, 2])
    grouped.load_state_dict(GroupedLinear(2, K, N).state_dict(), strict=True)


# ---------------------------------------------------------------------------------------------- quantized weights


@pytest.mark.parametrize("active", [r for r in RECIPES if not r.delayed()], ids=lambda r: type(r).__name__)
def test_modules_with_quantized_weights(active):
    """MXTensor weights give the same step as the high-precision weights that they were quantized from."""
    splits = SPLITS["odd"]
    torch.manual_seed(3)
    with quantized_model_init(enabled=True, recipe=active):
        grouped = GroupedLinear(
            4, K, N, bias=True, init_method=lambda w: nn.init.normal_(w, 0, 0.023), params_dtype=torch.bfloat16,
            parallel_mode="row",
        )  # fmt: skip
    torch.manual_seed(3)
    plain = GroupedLinear(4, K, N, init_method=lambda w: nn.init.normal_(w, 0, 0.023), params_dtype=torch.bfloat16)
    assert all(isinstance(w, mx.MXTensor) for w in weights_of(grouped))
    x, g = batch(sum(splits))
    with mx.autocast(recipe=active):
        results = [step(module, x, splits, g) for module in (grouped, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for a, b in zip(grouped.parameters(), plain.parameters(), strict=True):
        assert not isinstance(a.grad, mx.MXTensor) and torch.equal(a.grad, b.grad)


def test_a_recipe_mismatch_names_both_and_changes_nothing():
    with quantized_model_init(recipe=recipe.MXFP8BlockScaling()):
        grouped = GroupedLinear(3, K, N, name="experts")
    x, _ = batch(12)
    with mx.autocast(recipe=recipe.MXFP8BlockScaling()):
        y = grouped(x, [4, 4, 4])
    before = dict(grouped.quantizers)
    wrong = mx.autocast(recipe=recipe.NVFP4BlockScaling())
    with wrong, pytest.raises(RuntimeError, match=r"Recipe mismatch for experts: .*MXFP8.*NVFP4BlockScaling"):
        grouped(x, [4, 4, 4])
    assert grouped.quantizers == before
    with mx.autocast(recipe=recipe.MXFP8BlockScaling()):
        assert torch.equal(grouped(x, [4, 4, 4]), y)


def test_a_recipe_of_another_type_warns_once_and_each_group_has_quantizers():
    grouped = GroupedLinear(3, K, N, name="experts")
    x, _ = batch(12)
    with mx.autocast(recipe=recipe.MXFP8BlockScaling()):
        grouped(x, [4, 4, 4])
    assert len(grouped.quantizers["scaling_fwd"]) == 6 and len(grouped.quantizers["scaling_bwd"]) == 3
    with mx.autocast(recipe=recipe.DelayedScaling()):
        with pytest.warns(
            UserWarning, match="Recipe type changed .*MXFP8BlockScaling.*DelayedScaling.*experts"
        ) as seen:
            grouped(x, [4, 4, 4])
        assert len(seen) == 1
        for _ in range(3):  # warnings are errors
            grouped(x, [4, 4, 4])


# ---------------------------------------------------------------------------------------------- mistakes


def test_m_splits_that_do_not_fit_are_named_and_leave_the_state_as_it_was():
    grouped = GroupedLinear(3, K, N)
    x, _ = batch(12)
    with mx.autocast(recipe=recipe.DelayedScaling()):
        grouped(x, [4, 4, 4])
        before = [copy.deepcopy(state.delayed.state_dict()) for state in grouped._products]
        for splits, message in [
            ([4, 8], r"GroupedLinear: m_splits has 2 row counts, there are 3 groups: \[4, 8\]"),
            ([4, 4, 5], r"GroupedLinear: m_splits \[4, 4, 5\] sum to 13, the input has 12 rows"),
            ([8, -4, 8], r"GroupedLinear: m_splits has negative row counts: \[8, -4, 8\]"),
        ]:
            for given in (splits, torch.tensor(splits)):
                with pytest.raises(ValueError, match=message):
                    grouped(x, given)
        for given in ([4.0, 4.0, 4.0], torch.tensor([4.0, 4.0, 4.0]), ["4", "4", "4"]):
            with pytest.raises(TypeError, match=r"GroupedLinear: m_splits is .* row counts are integers"):
                grouped(x, given)
        with pytest.raises(TypeError, match="the input is int64"):
            grouped(torch.ones(12, K, dtype=torch.int64), [4, 4, 4])
        with pytest.raises(ValueError, match=rf"input \(12, {K + 1}\) does not fit"):
            grouped(torch.ones(12, K + 1), [4, 4, 4])
        with pytest.raises(ValueError, match="the input is on meta, the weight on cpu"):
            grouped(x.to("meta"), [4, 4, 4])
        with pytest.raises(ValueError, match="the input is 0-dimensional"):
            grouped(torch.ones(()), [4, 4, 4])
        after = [state.delayed.state_dict() for state in grouped._products]
        assert all(torch.equal(a[k], b[k]) for a, b in zip(before, after, strict=True) for k in a)
        grouped(x, [4, 4, 4])


def test_unsupported_arguments_are_refused():
    with pytest.raises(ValueError, match="GroupedLinear: num_gemms is 0; it must be an integer from 1"):
        GroupedLinear(0, K, N)
    with pytest.raises(ValueError, match="GroupedLinear: parallel_mode='row' of 2 ranks and bias=True"):
        GroupedLinear(2, K, N, tp_size=2, parallel_mode="row")
    assert GroupedLinear(2, K, N, tp_size=2, parallel_mode="row", bias=False).weight1.shape == (N, K // 2)


def test_initialization_is_torchs_and_repr_shows_the_sizes():
    grouped = GroupedLinear(2, K, N)
    bound = 1 / K**0.5
    assert all(p.abs().max() <= bound and p.abs().max() > 0.8 * bound for p in grouped.parameters())
    assert not torch.equal(grouped.weight0, grouped.weight1)
    assert repr(grouped) == f"GroupedLinear(num_gemms=2, in_features={K}, out_features={N})"
