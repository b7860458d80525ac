"""The autograd function of a linear layer: three products compared with an exact reference, for any input."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.core.kernel import describe
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
from mxtensor.training.delayed_scaling import Scales
from mxtensor.training.linear import Options, linear
from tests.helpers.compare import relative_error
from tests.helpers.nvfp4_options import NVFP4_OPTIONS
from tests.helpers.training_reference import check_step

NEAREST = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 hybrid": MXFP8BlockScaling(fp8_format=Format.HYBRID),
    "mxfp8 floor": MXFP8BlockScaling(input_scaling="floor", weight_scaling="ceil", grad_scaling="even"),
    "mxfp8 32x32 weights": MXFP8BlockScaling(two_dimensional_weights=True),
    "mxfp8 one copy": MXFP8BlockScaling(single_weight_copy=True),
    "mxfp6 one copy, floor": MXFP6BlockScaling(single_weight_copy=True, weight_scaling="floor"),
    "mxfp8 plain wgrad": MXFP8BlockScaling(high_precision_wgrad=True),
    "mxfp8 plain backward": MXFP8BlockScaling(high_precision_backward=True),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    **NVFP4_OPTIONS,
    "float8 current": Float8CurrentScaling(),
    "float8 current, powers of two": Float8CurrentScaling(use_power_2_scales=True),
    "float8 block": Float8BlockScaling(),
    "float8 block, any scale": Float8BlockScaling(use_f32_scales=True),
    "mixed": CustomRecipe("mxfp8", "mxfp6_e3m2", "mxint8"),
    "weight in high precision": CustomRecipe("mxfp8", None, "mxfp8_e5m2"),
}
"""Recipes that round to nearest."""


@pytest.fixture(autouse=True)
def compile_anew():
    torch._dynamo.reset()


def step(x, w, b, g, recipe, **options):
    """(y, dx, dw, db) of fresh leaves."""
    leaves = [None if t is None else t.detach().clone().requires_grad_(t.requires_grad) for t in (x, w, b)]
    linear_recipe = recipe.linear_recipe() if hasattr(recipe, "linear_recipe") else recipe
    y = linear(*leaves, Options(linear_recipe, **options))
    if y.requires_grad:
        y.backward(g)
    return y.detach(), *(None if t is None else t.grad for t in leaves)


def problem(*shape, n, dtype=torch.float32, bias=True):
    """x (*shape), w (n, shape[-1]), b (n,) that require gradients, and a random g."""
    x = torch.randn(shape).to(dtype)
    w, b = torch.randn(n, shape[-1]).to(dtype) * 0.1, torch.randn(n).to(dtype)
    g = torch.randn(*shape[:-1], n).to(dtype)
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_() if bias else None, g


@pytest.mark.parametrize("recipe", NEAREST.values(), ids=NEAREST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_recipe_gives_the_reference(recipe, dtype):
    x, w, b, g = problem(3, 50, 100, n=70, dtype=dtype)
    check_step(step(x, w, b, g, recipe), x, w, b, g, recipe.linear_recipe())


SHAPES = [((1, 32), 32), ((1, 7), 5), ((33, 31), 65), ((2, 3, 5, 33), 17), ((4, 1), 1), ((0, 64), 32), ((2, 0, 64), 8)]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8 current", "float8 block"])
@pytest.mark.parametrize("shape, n", SHAPES, ids=str)
def test_any_shape(shape, n, recipe):
    x, w, b, g = problem(*shape, n=n)
    check_step(step(x, w, b, g, NEAREST[recipe]), x, w, b, g, NEAREST[recipe].linear_recipe())


def test_a_vector_is_one_row():
    x, w, b, g = problem(40, n=30)
    check_step(step(x, w, b, g, NEAREST["mxfp8"]), x, w, b, g, NEAREST["mxfp8"].linear_recipe())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strided_inputs_and_gradients(dtype):
    """Transposed, sliced and expanded tensors go in as their values."""
    recipe = NEAREST["mxfp8"]
    x = torch.randn(64, 48).to(dtype).t().requires_grad_()
    w = torch.randn(40, 80).to(dtype)[:, 8:72].requires_grad_()
    for g in (torch.randn(80, 48).to(dtype).t()[:, ::2], torch.randn(1, 40).to(dtype).expand(48, 40)):
        check_step(step(x, w, None, g, recipe), x, w, None, g, recipe.linear_recipe())
    scalar = torch.randn(()).to(dtype).expand(48, 40)
    check_step(step(x, w, None, scalar, recipe), x, w, None, scalar, recipe.linear_recipe())


@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_only_the_products_whose_gradients_are_wanted_run(needs):
    x, w, b, g = problem(32, 64, n=48)
    for t, wanted in zip((x, w, b), needs, strict=True):
        t.requires_grad_(bool(wanted))
    with mx.explain() as log:
        out = step(x, w, b, g, NEAREST["mxfp8"])
    check_step(out, x, w, b, g, NEAREST["mxfp8"].linear_recipe())
    assert [t is not None for t in out[1:]] == [bool(n) for n in needs]
    ran = [e.spec.op for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")]
    assert sorted(ran) == sorted(["fprop"] + ["dgrad"] * needs[0] + ["wgrad"] * needs[1])


def test_each_tensor_is_cast_once_for_both_products():
    x, w, b, g = problem(32, 64, n=48)
    with mx.explain() as log:
        step(x, w, b, g, NEAREST["mxfp8"])
    pairs = [describe(e.spec) for e in log.entries if e.spec.op == "cast pair"]
    assert len([p for p in pairs if p.endswith("32x64")]) == 1
    assert len([p for p in pairs if p.endswith("32x48")]) == 1


def test_the_gradient_of_the_bias_is_that_of_the_gradient_itself():
    x, w, b, g = problem(64, 32, n=16, dtype=torch.bfloat16)
    db = step(x, w, b, g, NEAREST["mxfp4"])[3]
    assert torch.equal(db, g.sum(0, dtype=torch.float32).bfloat16())


@pytest.mark.parametrize("name, limit", [("mxfp8", 0.04), ("mxfp6", 0.042), ("float8 block", 0.04), ("nvfp4", 0.18)])
def test_error_against_an_unquantized_model(name, limit):
    """By norm, on Gaussian data, of y, dx and dw."""
    x, w, _, g = problem(256, 512, n=384, bias=False)
    y, dx, dw, _ = step(x, w, None, g, NEAREST[name])
    exact = x.double() @ w.double().T, g.double() @ w.double(), g.double().T @ x.double()
    assert all(relative_error(a, e) < limit for a, e in zip((y, dx, dw), exact, strict=True))


# ---------------------------------------------------------------------------------------------- what waits for backward


def saved_bytes(fn):
    """Bytes that autograd saves while ``fn`` runs, each memory counted once."""
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = fn()
    return sum(saved.values()), out


def test_activations_are_saved_in_half_the_bytes():
    x = torch.randn(256, 512).bfloat16()
    w = torch.randn(64, 512).bfloat16().requires_grad_()
    plain, _ = saved_bytes(lambda: F.linear(x, w))
    ours, _ = saved_bytes(lambda: linear(x, w, None, Options(MXFP8BlockScaling().linear_recipe())))
    assert plain == x.nbytes
    assert ours - w.nbytes <= 0.52 * x.nbytes  # the weight is there anyway
    original, _ = saved_bytes(lambda: linear(x, w, None, Options(MXFP8BlockScaling().linear_recipe(), save_input=True)))
    assert original - w.nbytes == x.nbytes


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8 current"])
def test_keeping_the_input_changes_no_bit(recipe):
    x, w, b, g = problem(40, 64, n=32)
    plain, saved = (step(x, w, b, g, NEAREST[recipe], save_input=save) for save in (False, True))
    assert all(torch.equal(a, c) for a, c in zip(plain, saved, strict=True))


def test_two_forwards_before_a_backward():
    x, w, _, g = problem(16, 64, n=32, bias=False)
    linear_recipe = NEAREST["mxfp8"].linear_recipe()
    first, second = linear(x, w, None, Options(linear_recipe)), linear(2 * x, w, None, Options(linear_recipe))
    second.backward(g)
    first.backward(g)
    _, dx, dw, _ = step(x, w, None, g, NEAREST["mxfp8"])
    assert torch.equal(x.grad, 3 * dx) and torch.allclose(w.grad, 3 * dw, rtol=1e-6)


def test_a_weight_changed_before_backward_is_an_error():
    x, w, _, g = problem(16, 64, n=32, bias=False)
    y = linear(x, w, None, Options(NEAREST["mxfp8"].linear_recipe()))
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(g)


def test_no_second_derivative():
    x, w, _, g = problem(16, 64, n=32, bias=False)
    y = linear(x, w, None, Options(NEAREST["mxfp8"].linear_recipe()))
    (dx,) = torch.autograd.grad(y, x, g.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.backward(torch.randn_like(dx))


# ---------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_autocast_sets_the_dtype_of_the_result_only(dtype):
    """Casts see the float32 values, the result is rounded to the autocast dtype, gradients have their leaves' dtype."""
    model = torch.nn.Linear(64, 48)
    x, g = torch.randn(20, 64, requires_grad=True), torch.randn(20, 48).to(dtype)
    with torch.autocast("cpu", dtype=dtype), mx.autocast():
        y = model(x)
    y.backward(g)
    assert y.dtype is dtype and x.grad.dtype is model.weight.grad.dtype is torch.float32
    rounded = (y.detach(), x.grad.to(dtype), model.weight.grad.to(dtype), model.bias.grad)
    check_step(rounded, x, model.weight, model.bias, g, MXFP8BlockScaling().linear_recipe())


def test_backward_inside_torch_autocast_changes_nothing():
    x, w, b, g = problem(16, 64, n=32)
    plain = step(x, w, b, g, NEAREST["mxfp8"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, c) for a, c in zip(plain, step(x, w, b, g, NEAREST["mxfp8"]), strict=True))


def test_a_quantized_weight_enters_as_it_is():
    x, w, b, g = problem(24, 64, n=48)
    linear_recipe = MXFP8BlockScaling().linear_recipe()
    operands = torch.nn.Parameter(mx.quantize(w, "mxfp8", orientation="both"))
    y = linear(x, operands, b, Options(linear_recipe))
    y.backward(g)
    check_step((y.detach(), x.grad, operands.grad, b.grad), x, w, b, g, linear_recipe)
    assert type(operands.grad) is torch.Tensor


def test_a_quantized_weight_of_one_copy_gives_its_values_to_dgrad():
    """They are exact; casting them anew along the other dimension would round twice."""
    x, w, _, g = problem(24, 64, n=48, bias=False)
    operands = mx.quantize(w, "mxfp8")
    y = linear(x, operands, None, Options(MXFP8BlockScaling().linear_recipe()))
    y.backward(g)
    g_row = mx.quantize(g, "mxfp8").dequantize().double()
    assert relative_error(x.grad, g_row @ operands.dequantize().double()) < 1e-6


def test_stochastic_gradients_are_right_on_average():
    x, w, _, g = problem(16, 64, n=32, bias=False)
    linear_recipe = MXFP4BlockScaling().linear_recipe()
    runs = [step(x, w, None, g, linear_recipe) for _ in range(200)]
    assert not torch.equal(runs[0][1], runs[1][1]) and torch.equal(runs[0][0], runs[1][0])
    w_col = mx.quantize(w.t().contiguous(), "mxfp4").dequantize().double().t()
    mean = torch.stack([run[1] for run in runs]).double().mean(0)
    one = relative_error(runs[0][1], g.double() @ w_col)
    assert relative_error(mean, g.double() @ w_col) < 0.2 * one


def test_delayed_scales_come_from_outside():
    x, w, _, g = problem(24, 64, n=48, bias=False)
    amax, record = torch.tensor([2.0, 0.1, 1.0]), torch.zeros(3)
    y = linear(x, w, None, Options(DelayedScaling().linear_recipe()), Scales(amax, record))
    y.backward(g)
    assert torch.equal(record, torch.stack([x.abs().max(), w.abs().max(), g.abs().max()]))
    x_seen = x.double().clamp(-2, 2)
    assert relative_error(y, x_seen @ w.double().clamp(-0.1, 0.1).T) < 0.05


# ---------------------------------------------------------------------------------------------- compiled


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 32x32 weights", "nvfp4", "float8 current", "float8 block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_as_one_graph_is_eager(name, dtype):
    x, w, b, g = problem(48, 64, n=32, dtype=dtype)
    linear_recipe = NEAREST[name].linear_recipe()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, w, b):
        return linear(torch.relu(x), w, b, Options(linear_recipe))

    leaves = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    y = layer(*leaves)
    y.backward(g)
    eager = [t.detach().clone().requires_grad_() for t in (x, w, b)]
    linear(torch.relu(eager[0]), *eager[1:], Options(linear_recipe)).backward(g)
    assert all(torch.equal(a.grad, c.grad) for a, c in zip(leaves, eager, strict=True))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's own
def test_compiled_by_inductor():
    x, w, b, g = problem(48, 64, n=32, dtype=torch.bfloat16)
    linear_recipe = MXFP8BlockScaling().linear_recipe()
    layer = torch.compile(lambda x, w, b: linear(x, w, b, Options(linear_recipe)), fullgraph=True)
    y = layer(x, w, b)
    y.backward(g)
    check_step((y.detach(), x.grad, w.grad, b.grad), x, w, b, g, linear_recipe)


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "x, w, b, error, message",
    [
        (torch.arange(64).view(2, 32), torch.randn(4, 32), None, TypeError, "the input is int64"),
        (torch.randn(2, 32), torch.ones(4, 32, dtype=torch.int8), None, TypeError, "the weight is int8"),
        (torch.eye(32).to_sparse(), torch.randn(4, 32), None, TypeError, r"is sparse_coo; convert it with \.to_dense"),
        (torch.randn(2, 31), torch.randn(4, 32), None, ValueError, r"input \(2, 31\) and weight \(4, 32\) do not fit"),
        (torch.randn(()), torch.randn(4, 32), None, ValueError, "do not fit"),
        (torch.randn(2, 32), torch.randn(4, 32), torch.randn(5), ValueError, r"bias \(5,\) does not fit"),
        (
            torch.randn(2, 32),
            torch.randn(4, 32, device="meta"),
            None,
            ValueError,
            "input is on cpu, the weight on meta",
        ),
    ],
)
def test_mistakes_say_what_is_wrong(x, w, b, error, message):
    with pytest.raises(error, match=message):
        linear(x, w, b, Options(MXFP8BlockScaling().linear_recipe()))
    x, w, b, g = problem(8, 32, n=4)
    check_step(step(x, w, b, g, MXFP8BlockScaling()), x, w, b, g, MXFP8BlockScaling().linear_recipe())
