"""Products by a stack of weights: every matrix and every group of rows trains as a layer of its own."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor.convert.training import training_parameter
from mxtensor.kernels.gemm import emulated
from mxtensor.kernels.operands import FakeQuantized, Form
from mxtensor.kernels.quantize import definition
from mxtensor.numerics.operand import Operand
from mxtensor.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.training.casts import copies, copies_of, layout_of
from mxtensor.training.delayed_scaling import Scales
from mxtensor.training.interception import STATE
from mxtensor.training.linear import linear
from mxtensor.training.passes import Options
from mxtensor.training.training_weight import TrainingWeight
from tests.helpers.nvfp4_options import NVFP4_OPTIONS
from tests.helpers.training_reference import check_step

RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    **NVFP4_OPTIONS,
    "float8 current": Float8CurrentScaling(),
    "float8 block": Float8BlockScaling(),
    "square": CustomRecipe("mxfp8[32x32]", "mxfp8[32x32]", "mxfp8[32x32]"),
}
SIZES = [5, 0, 40, 32, 1]
MXFP8 = RECIPES["mxfp8"]


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def step(x, w, g, recipe, ends=None, scales=None):
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    y = linear(x, w, None, Options(recipe), scales, None, ends)
    y.backward(g)
    return y.detach(), x.grad, w.grad


def values(*shape, dtype=torch.float32):
    """Rows and matrices of different sizes of values, so that a scale of two of them would show."""
    x = torch.randn(shape)
    return (x * 2.0 ** torch.arange(shape[0]).remainder(7).view(-1, *[1] * (len(shape) - 1))).to(dtype)


# ---------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_each_group_trains_as_the_reference_of_a_layer(name, dtype):
    recipe, ends, rows = RECIPES[name].linear_recipe(), ends_of(SIZES), sum(SIZES) + 3
    x, w, g = values(rows, 48, dtype=dtype), values(5, 64, 48, dtype=dtype), values(rows, 64, dtype=dtype)
    y, dx, dw = step(x, w, g, recipe, ends)
    start = 0
    for i, n in enumerate(SIZES):
        part = slice(start, start + n)
        check_step((y[part], dx[part], dw[i], None), x[part], w[i], None, g[part], recipe)
        start += n
    assert not y[start:].any() and not dx[start:].any() and not dw[1].any()  # after the last group; no rows
    assert y.dtype is dx.dtype is dw.dtype is dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_each_matrix_of_a_batch_trains_as_the_reference_of_a_layer(name, dtype):
    recipe = RECIPES[name].linear_recipe()
    x, w, g = values(3, 7, 48, dtype=dtype), values(3, 64, 48, dtype=dtype), values(3, 7, 64, dtype=dtype)
    y, dx, dw = step(x, w, g, recipe)
    for i in range(3):
        check_step((y[i], dx[i], dw[i], None), x[i], w[i], None, g[i], recipe)


def same_values(a, b):
    if isinstance(a, Operand) and isinstance(b, Operand):
        return torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) and torch.equal(a.scale, b.scale)
    return torch.equal(*(t.values if isinstance(t, FakeQuantized) else t for t in (a, b)))


# Rotations sum in float32.
@pytest.mark.parametrize("name", [name for name, one in RECIPES.items() if one.linear_recipe().input.signs is None])
def test_operands_of_a_group_are_those_of_a_layer_bit_for_bit(name):
    recipe = RECIPES[name].linear_recipe()
    groups = layout_of(ends_of(SIZES), sum(SIZES), recipe)
    own, x = recipe.has_tensor_scales, values(sum(SIZES), 48)
    for casts in (recipe.input, recipe.grad):
        want = torch.float32
        row, column = copies_of(x, casts, (want, want), (), groups, own)
        assert column.shape == (48, groups.length)
        start = 0
        for n, place in zip(SIZES, [0, *groups.padded_ends.tolist()], strict=False):
            part = x[start : start + n]
            alone = copies(part, casts, (want, want), ())
            if n:
                wanted = [emulated.values(side, want) for side in alone]
                assert torch.equal(emulated.values(row, want)[start : start + n], wanted[0])
                assert torch.equal(emulated.values(column, want)[:, place : place + n], wanted[1])
            start += n


def test_operands_that_are_saved_are_codes():
    recipe, x = MXFP8.linear_recipe(), values(40, 64)
    groups = layout_of(ends_of([20, 20]), 40, recipe)
    _, column = copies_of(x, recipe.input, (None, Form.CODES), (), groups)
    alone = copies(x[20:], recipe.input, (None, Form.CODES), ())[1]
    assert column.shape == (64, 96)
    place = groups.padded_ends[0]
    assert torch.equal(column.data[:, place : place + 20].view(torch.uint8), alone.data.view(torch.uint8))
    assert torch.equal(column.scale[:, place // 32 : place // 32 + 1], alone.scale)
    made = linear(
        x.requires_grad_(), values(2, 32, 64).requires_grad_(), None, Options(recipe), None, None, groups.ends
    )
    saved = [t for t in made.grad_fn.saved_tensors if t.dtype is torch.float8_e4m3fn]
    assert [tuple(t.shape) for t in saved] == [(64, 96)]  # not the input


@pytest.mark.parametrize("sizes", [[0, 0], [64, 0], [0, 33], [1, 1]])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_groups_may_be_empty_or_all_there_is(name, sizes):
    recipe, rows = RECIPES[name].linear_recipe(), sum(sizes)
    x, w, g = values(rows, 32), values(2, 16, 32), values(rows, 16)
    y, dx, dw = step(x, w, g, recipe, ends_of(sizes))
    start = 0
    for i, n in enumerate(sizes):
        part = slice(start, start + n)
        check_step((y[part], dx[part], dw[i], None), x[part], w[i], None, g[part], recipe)
        start += n


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_step_computes_the_gradients_that_are_needed(name):
    recipe, ends = RECIPES[name].linear_recipe(), ends_of(SIZES)
    x, w, g = values(78, 48), values(5, 64, 48), values(78, 64)
    y, dx, dw = step(x, w, g, recipe, ends)
    for needs_dx, needs_dw in ((True, False), (False, True)):
        one, other = x.clone().requires_grad_(needs_dx), w.clone().requires_grad_(needs_dw)
        out = linear(one, other, None, Options(recipe), None, None, ends)
        out.backward(g)
        assert torch.equal(out, y)
        assert torch.equal(one.grad, dx) if needs_dx else one.grad is None
        assert torch.equal(other.grad, dw) if needs_dw else other.grad is None


def test_a_checkpoint_recomputes_products_of_a_stack():
    w = training_parameter(nn.Parameter(values(4, 32, 16)), MXFP8.linear_recipe())

    def products(x):
        return torch.bmm(x, w).sum() + F.grouped_mm(x.reshape(12, 32), w, offs=GROUPS).square().sum()

    grads = []
    for run in (products, lambda x: checkpoint(products, x, use_reentrant=False)):
        w.grad = None
        run(X.clone().requires_grad_()).backward()
        grads.append(w.grad)
    assert torch.equal(*grads) and grads[0].any()


@pytest.mark.parametrize("recipe", [MXFP4BlockScaling(), NVFP4BlockScaling()], ids=["mxfp4", "nvfp4"])
def test_gradients_that_round_stochastically_have_the_right_mean(recipe):
    recipe, ends = recipe.linear_recipe(), ends_of([20, 44])
    x, w, g = torch.randn(64, 32), torch.randn(2, 32, 32), torch.randn(64, 32)
    steps = [step(x, w, g, recipe, ends)[1:] for _ in range(60)]
    assert not torch.equal(steps[0][0], steps[1][0]) and not torch.equal(steps[0][1], steps[1][1])
    made = copies_of(w, recipe.weight, (None, torch.float32), (), None, recipe.has_tensor_scales)[1]
    rounded = emulated.values(made, torch.float32)
    exact = torch.cat([g[:20] @ rounded[0].t(), g[20:] @ rounded[1].t()])
    once, mean = steps[0][0], torch.stack([dx for dx, _ in steps]).mean(0)
    assert (mean - exact).norm() < 0.3 * (once - exact).norm()


# ---------------------------------------------------------------------------------------------- delayed scaling


def test_a_stack_has_one_history_and_one_scale_with_delayed_scaling():
    recipe = DelayedScaling(amax_history_len=4)
    w = training_parameter(nn.Parameter(values(3, 16, 32)), recipe.linear_recipe())
    x, ends = values(40, 32), ends_of([10, 0, 25])
    for _ in range(2):
        y = torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
        y.backward(torch.full_like(y, 0.25))
    state = vars(w)[STATE]
    assert torch.equal(
        state.history[0], torch.stack([x[:35].abs().amax(), w.high_precision.abs().amax(), torch.tensor(0.25)])
    )
    states = [name for name in vars(w) if name.startswith(STATE)]
    assert states == [STATE]
    torch.bmm(values(3, 5, 32), w.transpose(1, 2))  # the same layer
    torch.bmm(values(4, 5, 32), w[torch.tensor([0, 2, 2, 1])].transpose(1, 2))
    assert [name for name in vars(w) if name.startswith(STATE)] == [STATE]
    F.linear(x, w[1])  # a slice is a layer of its own
    assert len([name for name in vars(w) if name.startswith(STATE)]) == 2


def delayed_step(x, w, g, recipe, ends, amax):
    """A step with these scales; what it records; and the tensors that are saved."""
    scales, saved = Scales(torch.tensor(amax), torch.zeros(3)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = linear(x, w, None, Options(recipe), scales, None, ends)
    forward = scales.record.clone()
    y.backward(g)
    return (y.detach(), x.grad, w.grad), (forward, scales.record), saved


DELAYED = {
    "hybrid": DelayedScaling(),
    "e4m3": DelayedScaling(fp8_format=Format.E4M3),
    "margin": DelayedScaling(margin=1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DELAYED)
def test_groups_with_the_scale_of_a_history(name, dtype):
    """Bit for bit a layer of each group with the same scales, whose products are in float32, too."""
    recipe, ends, rows = DELAYED[name].linear_recipe(), ends_of(SIZES), sum(SIZES) + 3
    x, w, g = values(rows, 48, dtype=dtype), values(5, 64, 48, dtype=dtype), values(rows, 64, dtype=dtype)
    amax = [20.0, 3.0, 0.7]  # some values are beyond
    (y, dx, dw), (forward, record), saved = delayed_step(x, w, g, recipe, ends, amax)
    start = 0
    for i, n in enumerate(SIZES):
        part = slice(start, start + n)
        expected, _, _ = delayed_step(x[part], w[i], g[part], recipe, None, amax)
        for mine, one in zip((y[part], dx[part], dw[i]), expected, strict=True):
            torch.testing.assert_close(mine, one, rtol=2e-6 if dtype is torch.float32 else 2**-7, atol=1e-5)
        start += n
    assert not y[start:].any() and not dx[start:].any() and not dw[1].any()  # after the last group; no rows
    assert y.dtype is dx.dtype is dw.dtype is dtype
    largest = [t[:start].abs().amax().float() if t is not w else t.abs().amax().float() for t in (x, w, g)]
    assert torch.equal(record, torch.stack(largest)) and torch.equal(forward[:2], record[:2]) and forward[2] == 0
    float8 = [t for t in saved if t.dtype is torch.float8_e4m3fn]  # the input, and no other copy of it
    assert [t.shape for t in float8] == [(48, layout_of(ends, rows, recipe).length)]
    assert not any(t.shape == x.shape for t in saved)


@pytest.mark.parametrize("name", DELAYED)
def test_operands_with_the_scale_of_a_history_are_those_of_the_definition(name):
    recipe, ends = DELAYED[name].linear_recipe(), ends_of(SIZES)
    groups, x = layout_of(ends, sum(SIZES) + 3, recipe), values(sum(SIZES) + 3, 48)
    for casts in (recipe.input, recipe.grad):
        for wants in ((torch.float32, torch.float32), (None, torch.float32), (torch.float32, None)):
            amax, record = torch.tensor(5.0), torch.zeros(())
            row, column = copies_of(x, casts, wants, (amax, record), groups, True)
            inside = torch.where((groups.of_row < groups.number)[:, None], x, 0)
            expected = definition.encode_with_amax(inside, casts.rowwise, amax)
            assert record == x[: sum(SIZES)].abs().amax()
            assert (row is None, column is None) == (wants[0] is None, wants[1] is None)
            padded = groups.padded(expected.data.view(torch.uint8)).t()
            for made, codes in ((row, expected.data.view(torch.uint8)), (column, padded)):
                if made is not None:
                    assert torch.equal(made.values.view(torch.uint8), codes)
                    assert made.global_scale.item() == expected.scale.item() and made.global_scale.dim() == 2


def test_a_batch_with_the_scale_of_a_history():
    recipe, amax = DelayedScaling().linear_recipe(), [20.0, 3.0, 0.7]
    x, w, g = values(3, 7, 48), values(3, 64, 48), values(3, 7, 64)
    got, (_, record), saved = delayed_step(x, w, g, recipe, None, amax)
    for i in range(3):
        expected, _, _ = delayed_step(x[i], w[i], g[i], recipe, None, amax)
        for mine, one in zip(got, expected, strict=True):
            torch.testing.assert_close(mine[i], one, rtol=2e-6, atol=1e-5)
    assert torch.equal(record, torch.stack([t.abs().amax() for t in (x, w, g)]))
    assert not any(t.shape == x.shape and t.dtype is x.dtype for t in saved)


@pytest.mark.parametrize("reentrant", [True, False])
def test_experts_with_delayed_scaling_are_recomputed_with_their_own_scales(reentrant):
    results, active = [], DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    for wrap in (lambda fn, x: fn(x), lambda fn, x: checkpoint(fn, x, use_reentrant=reentrant)):
        torch.manual_seed(0)
        w, out = training_parameter(nn.Parameter(values(4, 16, 32)), active.linear_recipe()), []
        for i in range(3):
            xs = [(4.0 ** (k + i) * values(12, 32)).requires_grad_() for k in range(3)]
            ys = [wrap(lambda x, w=w: torch._grouped_mm(x, w.mT, offs=GROUPS), x) for x in xs]
            for x, y in zip(xs, ys, strict=True):
                w.grad = None
                y.backward(torch.full_like(y, 0.5**i))
                out += [y.detach(), x.grad, w.grad.clone(), *(t.clone() for t in vars(w)[STATE].state_dict().values())]
        results.append(out)
    assert all(map(torch.equal, *results))


def test_gathered_matrices_share_the_history_of_their_stack_under_autocast():
    w = nn.Parameter(values(3, 16, 32))
    for _ in range(2):
        with mx.autocast(recipe=DelayedScaling()):
            y = torch.bmm(w[torch.tensor([0, 2])], values(2, 32, 5))
        y.sum().backward()
    assert [name for name in vars(w) if name.startswith(STATE)] == [STATE]
    assert vars(w)[STATE].history[0, 1] == w[torch.tensor([0, 2])].abs().amax()


# ---------------------------------------------------------------------------------------------- the ways in

X, GROUPS = values(4, 3, 32), ends_of([3, 3, 3, 2])
INDEX = torch.tensor([0, 2, 2, 1])
WAYS = {
    # name: a product of x and a stack (4, 32, 16), and the input of each layer with its matrix
    "bmm": (lambda x, w: torch.bmm(x, w), lambda x: list(zip(x, range(4), strict=True))),
    "Tensor.bmm": (lambda x, w: x.bmm(w), lambda x: list(zip(x, range(4), strict=True))),
    "gathered": (lambda x, w: torch.bmm(x, w[INDEX]), lambda x: list(zip(x, INDEX, strict=True))),
    "index_select": (
        lambda x, w: torch.bmm(x, torch.index_select(w, 0, INDEX)), lambda x: list(zip(x, INDEX, strict=True))
    ),
    "left operand": (lambda x, w: torch.bmm(w.mT[INDEX], x.mT).mT, lambda x: list(zip(x, INDEX, strict=True))),
    "matmul": (lambda x, w: x @ w, lambda x: list(zip(x, range(4), strict=True))),
    "broadcast": (lambda x, w: torch.matmul(x[0], w), lambda x: [(x[0], i) for i in range(4)]),
    "slice": (lambda x, w: (x[0] @ w[1])[None], lambda x: [(x[0], 1)]),
    "unbound": (lambda x, w: torch.mm(x[0], w.unbind()[2])[None], lambda x: [(x[0], 2)]),
    "grouped": (
        lambda x, w: torch._grouped_mm(x.reshape(12, 32), w, offs=GROUPS)[:11].split([3, 3, 3, 2]),
        lambda x: list(zip(x.reshape(12, 32)[:11].split([3, 3, 3, 2]), range(4), strict=True)),
    ),
    "F.grouped_mm": (
        lambda x, w: F.grouped_mm(x.reshape(12, 32), w, offs=GROUPS)[:11].split([3, 3, 3, 2]),
        lambda x: list(zip(x.reshape(12, 32)[:11].split([3, 3, 3, 2]), range(4), strict=True)),
    ),
}  # fmt: skip


def in_a_block(way, w, product):
    """The result of a product of ``w`` by way of a training weight or of autocast, and the log, in strict mode."""
    with mx.strict(), mx.explain() as log:
        if way == "quantize_":
            return product(training_parameter(w, MXFP8.linear_recipe())), log
        with mx.autocast(recipe=MXFP8):
            return product(w), log


@pytest.mark.parametrize("way", ["quantize_", "autocast"])
@pytest.mark.parametrize("name", WAYS)
def test_each_product_runs_as_layers_of_matrices(name, way):
    product, layers = WAYS[name]
    w = nn.Parameter(values(4, 32, 16))
    y, log = in_a_block(way, w, lambda w: product(X, w))
    (entry,) = [e for e in log.entries if e.spec.op == "fprop"]
    assert entry.kernel != "high precision"
    for got, (x, i) in zip(y, layers(X), strict=True):
        check_step(
            (got.detach(), None, None, None), x, w.detach()[i].mT, None, torch.zeros(len(x), 16), MXFP8.linear_recipe()
        )


def test_matrices_that_are_gathered_carry_the_recipe_and_rows_of_matrices_do_not():
    w = training_parameter(nn.Parameter(values(4, 32, 16)), MXFP8.linear_recipe())
    assert isinstance(w[INDEX], TrainingWeight) and isinstance(w.index_select(0, INDEX), TrainingWeight)
    assert type(w[INDEX, INDEX]) is torch.Tensor and type(w.index_select(1, INDEX)) is torch.Tensor
    one = training_parameter(nn.Parameter(values(32, 16)), MXFP8.linear_recipe())
    assert type(one[INDEX]) is torch.Tensor
    w[INDEX].sum().backward()
    assert torch.equal(w.grad[:, 0, 0], torch.tensor([1.0, 1, 2, 0]))


HIGH = {
    "einsum": lambda w: torch.einsum("eti,eio->eto", X, w),
    "baddbmm": lambda w: torch.baddbmm(torch.zeros(4, 3, 16), X, w),
    "with a bias": lambda w: torch.tensordot(X, w, dims=([2], [1])),
}


@pytest.mark.parametrize("way", ["quantize_", "autocast", "both"])
@pytest.mark.parametrize("name", HIGH)
def test_other_products_are_logged_and_refused(name, way):
    w = nn.Parameter(values(4, 32, 16))
    if way != "autocast":
        w = training_parameter(w, MXFP8.linear_recipe())

    def block():
        return nullcontext() if way == "quantize_" else mx.autocast(recipe=MXFP8)

    with mx.explain() as log, block():
        HIGH[name](w)
    assert [e.kernel for e in log.entries] == ["high precision"]
    with mx.strict(), block(), pytest.raises(NotImplementedError, match=r"by a stack of weights \(4, 32, 16\) in high"):
        HIGH[name](w)


def test_nothing_is_quantized_where_autocast_is_disabled():
    w = training_parameter(nn.Parameter(values(4, 32, 16)), MXFP8.linear_recipe())
    for name, (product, _) in WAYS.items():
        with mx.autocast(enabled=False), mx.strict(), mx.explain() as log:
            y = product(X, w)
        assert log.entries == [], name
        for one, other in zip(y, product(X, w.high_precision), strict=True):
            assert torch.equal(one, other)


ERRORS = {
    "input": ((torch.ones(12, 31), None), "input (12, 31), stack of weights (4, 16, 32) and ends (4,) do not fit"),
    "ends": ((torch.ones(12, 32), ends_of([3, 9])), "and ends (2,) do not fit"),
    "dtype": ((torch.ones(12, 32), torch.tensor([3, 6, 9, 12])), "must be int32 on cpu, got int64 on cpu"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_calls_say_what_does_not_fit(case):
    (x, ends), words = ERRORS[case]
    w = values(4, 16, 32)
    with pytest.raises(ValueError) as raised:
        linear(x, w, None, Options(MXFP8.linear_recipe()), None, None, GROUPS if ends is None else ends)
    assert words in str(raised.value)
    with pytest.raises(ValueError, match=r"input \(3, 5, 32\) and stack of weights \(4, 16, 32\) do not fit"):
        linear(torch.ones(3, 5, 32), w, None, Options(MXFP8.linear_recipe()))


# ---------------------------------------------------------------------------------------------- compiled


class Stack(nn.Module):
    def __init__(self, product, dtype):
        super().__init__()
        self.weight, self.product = nn.Parameter(values(4, 32, 16, dtype=dtype)), product

    def forward(self, x):
        return self.product(x, self.weight)


COMPILED = {
    "bmm": lambda x, w: torch.bmm(x, w),
    "gathered": lambda x, w: torch.bmm(w[INDEX].transpose(1, 2), x.mT),
    "slice": lambda x, w: x[0] @ w[1],
    "grouped": lambda x, w: F.grouped_mm(x.reshape(12, 32), w, offs=GROUPS),
}


def trained(model, x, block):
    x = x.clone().requires_grad_()
    with block:
        y = model(x)
    y.sum().backward()
    return y.detach(), x.grad, model.weight.grad


def check_compiled(name, way, recipe, backend):
    torch._dynamo.reset()
    model, x = Stack(COMPILED[name], torch.bfloat16), X.bfloat16()
    if way == "quantize_":
        model.weight = training_parameter(model.weight, recipe.linear_recipe())
    eager = copy.deepcopy(model)

    def block():
        return nullcontext() if way == "quantize_" else mx.autocast(recipe=recipe)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    expected = trained(eager, x, block())
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)  # a graph from a cache is not traced
    with no_cache, mx.strict(), mx.explain() as log:
        got = trained(compiled, x, block())
    assert {"fprop", "dgrad", "wgrad"} <= {e.spec.op for e in log.entries}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    torch._dynamo.reset()


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("way", ["quantize_", "autocast"])
def test_a_compiled_grouped_product_is_that_of_eager_code(way):
    check_compiled("grouped", way, MXFP8, "aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "recipe", [MXFP8, RECIPES["nvfp4"], RECIPES["float8 current"]], ids=["mxfp8", "nvfp4", "float8"]
)
@pytest.mark.parametrize("way", ["quantize_", "autocast"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_products_are_those_of_eager_code(name, way, recipe):
    check_compiled(name, way, recipe, "aot_eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["quantize_", "autocast"])
@pytest.mark.parametrize("name", COMPILED)
def test_inductor_compiles_each_product(name, way):
    check_compiled(name, way, MXFP8, "inductor")
