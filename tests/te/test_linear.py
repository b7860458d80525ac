"""mxtensor.te.Linear: torch's layer outside autocast, the recipe's three products inside, and every option."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

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
from mxtensor.te import Linear
from mxtensor.te.contexts import quantized_model_init
from mxtensor.te.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from mxtensor.training.delayed_scaling import DelayedState
from mxtensor.training.linear import Options, linear
from tests.helpers.compare import relative_error
from tests.helpers.training_reference import check_step

NEAREST = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 hybrid, 32x32 weights": MXFP8BlockScaling(fp8_format=Format.HYBRID, two_dimensional_weights=True),
    "mxfp8 plain backward": MXFP8BlockScaling(high_precision_backward=True),
    "mxfp6": MXFP6BlockScaling(),
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "float8 current": Float8CurrentScaling(),
    "float8 block": Float8BlockScaling(),
    "weight in high precision": CustomRecipe("mxfp8", None, "mxfp8_e5m2"),
}
"""Recipes that round to nearest and keep no state."""


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def step(layer, x, g, recipe, **arguments):
    """(y, dx) of a pass inside autocast; outside it if recipe is None."""
    x = x.detach().requires_grad_(x.requires_grad)
    with mx.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **arguments)
    if y.requires_grad:
        y.backward(g)
    return y.detach(), x.grad


def check(layer, x, g, recipe):
    """Compare a pass and the gradients of the parameters with the reference."""
    layer.zero_grad(set_to_none=True)
    y, dx = step(layer, x, g, recipe)
    db = None if layer.bias is None else layer.bias.grad
    check_step((y, dx, layer.weight.grad, db), x, layer.weight, layer.bias, g, recipe.linear_recipe())


def holds(layer, x, g, recipe, y, dx=None, dw=None, db=None):
    """Compare the given results of a pass with the reference."""
    check_step((y, dx, dw, db), x, layer.weight, layer.bias, g, recipe.linear_recipe())


def twin(layer):
    return copy.deepcopy(layer)


# ---------------------------------------------------------------------------------------------- as torch.nn.Linear


def test_initialization_is_torchs_and_torchs_state_dict_loads():
    torch.manual_seed(5)
    theirs = nn.Linear(40, 24)
    torch.manual_seed(5)
    ours = Linear(40, 24)
    assert torch.equal(ours.weight, theirs.weight) and torch.equal(ours.bias, theirs.bias)
    assert list(ours.state_dict()) == ["weight", "bias"]
    other = nn.Linear(40, 24)
    assert str(ours.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    assert torch.equal(ours.weight, other.weight)
    assert str(other.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outside_autocast_it_is_torch_linear(dtype):
    ours, theirs = Linear(40, 24, params_dtype=dtype), nn.Linear(40, 24, dtype=dtype)
    ours.load_state_dict(theirs.state_dict())
    x, g = leaf(3, 7, 40, dtype=dtype), torch.randn(3, 7, 24).to(dtype)
    y, dx = step(ours, x, g, None)
    expected = theirs(x)
    expected.backward(g)
    assert torch.equal(y, expected) and torch.equal(dx, x.grad)
    assert torch.equal(ours.weight.grad, theirs.weight.grad) and torch.equal(ours.bias.grad, theirs.bias.grad)
    with mx.autocast(), mx.autocast(enabled=False):
        assert torch.equal(ours(x), expected)
    assert ours.quantizers == {"scaling_fwd": [], "scaling_bwd": []}


# ---------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("recipe", NEAREST.values(), ids=NEAREST)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_recipe_gives_the_reference(recipe, dtype):
    layer = Linear(100, 70, params_dtype=dtype)
    check(layer, leaf(3, 19, 100, dtype=dtype), torch.randn(3, 19, 70).to(dtype), recipe)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8 current", "float8 block"])
@pytest.mark.parametrize("shape, n", [((1, 7), 5), ((33, 31), 65), ((2, 3, 5, 33), 17), ((40,), 30), ((0, 64), 32)])
def test_any_shape(shape, n, recipe):
    check(Linear(shape[-1], n), leaf(*shape), torch.randn(*shape[:-1], n), NEAREST[recipe])


def test_strided_inputs_and_expanded_gradients():
    layer, recipe = Linear(48, 24), NEAREST["mxfp8"]
    x = torch.randn(48, 36).t().requires_grad_()
    for g in (torch.randn(24, 36).t(), torch.randn(1, 24).expand(36, 24), torch.randn(()).expand(36, 24)):
        check(layer, x, g, recipe)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_result_has_the_dtype_of_the_input_and_gradients_those_of_their_tensors(x_dtype, w_dtype):
    layer, x = Linear(64, 48, params_dtype=w_dtype), leaf(20, 64, dtype=x_dtype)
    g = torch.randn(20, 48).to(x_dtype)
    for recipe in (NEAREST["mxfp8"], None):
        y, dx = step(layer, x, g, recipe)
        assert (y.dtype, dx.dtype) == (x_dtype, x_dtype)
        assert layer.weight.grad.dtype is layer.bias.grad.dtype is w_dtype
    holds(layer, x, g, NEAREST["mxfp8"], *step(layer, x, g, NEAREST["mxfp8"]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torch_autocast_gives_the_dtype_of_the_result(dtype):
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48).to(dtype)
    with torch.autocast("cpu", dtype):
        for recipe in (NEAREST["mxfp8"], None):
            layer.zero_grad()
            y, dx = step(layer, x, g, recipe)
            assert (y.dtype, dx.dtype, layer.weight.grad.dtype) == (dtype, torch.float32, torch.float32)
    y, _ = step_in(dtype, layer, x, g)
    holds(layer, x, g, NEAREST["mxfp8"], y)


def step_in(dtype, layer, x, g):
    with torch.autocast("cpu", dtype):
        return step(layer, x, g, NEAREST["mxfp8"])


def test_error_against_an_unquantized_layer():
    """By norm, on Gaussian data: two MXFP8 operands give 3.7 %."""
    layer, x, g = Linear(512, 384, bias=False), leaf(256, 512), torch.randn(256, 384)
    y, dx = step(layer, x, g, NEAREST["mxfp8"])
    x64, w64, g64 = x.detach().double(), layer.weight.detach().double(), g.double()
    for mine, exact in ((y, x64 @ w64.T), (dx, g64 @ w64), (layer.weight.grad, g64.T @ x64)):
        assert relative_error(mine, exact) < 0.04


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_frozen_tensors_get_no_gradient_and_the_others_the_right_one(frozen):
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    (x if frozen == "input" else getattr(layer, frozen)).requires_grad_(False)
    with mx.explain() as log:
        check(layer, x, g, NEAREST["mxfp8"])
    ops = {entry.spec.op for entry in log.entries}
    assert ("dgrad" in ops, "wgrad" in ops) == (frozen != "input", frozen != "weight")
    assert (layer.weight.grad is None, layer.bias.grad is None) == (frozen == "weight", frozen == "bias")


def test_tied_weights_add_their_gradients():
    one, two = Linear(64, 64, bias=False), Linear(64, 64, bias=False)
    two.weight = one.weight
    x, g, h = leaf(20, 64), torch.randn(20, 64), torch.randn(20, 64)
    gradients = []
    for layer, upstream in ((one, g), (two, h)):
        one.weight.grad = None
        step(layer, x, upstream, NEAREST["mxfp8"])
        gradients.append(one.weight.grad)
    one.weight.grad = None
    with mx.autocast():
        torch.autograd.backward([one(x), two(x)], [g, h])
    assert torch.equal(one.weight.grad, gradients[1] + gradients[0])


def test_two_forwards_before_two_backwards_outside_the_context():
    layer, x, z = Linear(64, 48), leaf(20, 64), leaf(9, 64)
    with mx.autocast(recipe=NEAREST["mxfp8"]):
        first, second = layer(x), layer(z)
    g, h = torch.randn(20, 48), torch.randn(9, 48)
    second.backward(h)
    of_second = layer.weight.grad.clone()
    first.backward(g)
    holds(layer, x, g, NEAREST["mxfp8"], first, x.grad)
    holds(layer, z, h, NEAREST["mxfp8"], second, z.grad, of_second)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same_step(use_reentrant):
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    plain = (*step(layer, x, g, NEAREST["mxfp8"]), layer.weight.grad)
    layer.zero_grad()
    recomputed = step(lambda t: checkpoint(layer, t, use_reentrant=use_reentrant), x, g, NEAREST["mxfp8"])
    assert all(torch.equal(a, b) for a, b in zip(plain, (*recomputed, layer.weight.grad), strict=True))


# ---------------------------------------------------------------------------------------------- bias, init, split


def test_return_bias_does_not_add_the_bias():
    layer, x = Linear(40, 24, return_bias=True), leaf(7, 40, dtype=torch.bfloat16)
    added = Linear(40, 24)
    added.load_state_dict(layer.state_dict())
    for recipe in (None, NEAREST["mxfp8"]):
        with mx.autocast(enabled=recipe is not None, recipe=recipe):
            (y, bias), z = layer(x), added(x)
        assert bias.dtype is torch.bfloat16 and relative_error(y + bias, z) < 4e-3
    with mx.autocast():
        y, bias = Linear(40, 24, bias=False, return_bias=True)(x)
    assert bias is None


def test_init_method_fills_the_weight_and_biases_start_at_zero():
    layer = Linear(40, 24, init_method=lambda t: nn.init.constant_(t, 0.5))
    assert (layer.weight == 0.5).all() and (layer.bias == 0).all()
    with torch.no_grad():
        layer.weight.zero_()
    layer.reset_parameters()
    assert (layer.weight == 0.5).all()
    deferred = Linear(40, 24, device="meta").to_empty(device="cpu")
    deferred.reset_parameters()
    assert 0 < deferred.weight.abs().max() <= 1 / 40**0.5 and 0 < deferred.bias.abs().max() <= 1 / 40**0.5


@pytest.mark.parametrize("recipe", [None, NEAREST["mxfp8"], NEAREST["nvfp4"]], ids=["plain", "mxfp8", "nvfp4"])
def test_split_parameters_are_one_weight(recipe):
    split, whole = Linear(40, 70, parameters_split={"query": 40, "key_": 30}), Linear(40, 70)
    names = [name for name, _ in split.named_parameters()]
    assert names == ["query_weight", "query_bias", "key_weight", "key_bias"]
    with torch.no_grad():
        whole.weight.copy_(torch.cat([split.query_weight, split.key_weight]))
        whole.bias.copy_(torch.cat([split.query_bias, split.key_bias]))
    x, g = leaf(20, 40), torch.randn(20, 70)
    assert all(map(torch.equal, step(split, x, g, recipe), step(whole, x, g, recipe)))
    for name in ("weight", "bias"):
        components = torch.cat([getattr(split, f"{part}_{name}").grad for part in ("query", "key")])
        assert torch.equal(components, getattr(whole, name).grad)


def test_a_split_by_names_divides_the_rows_equally():
    layer = Linear(40, 48, parameters_split=("q", "k", "v"), bias=False)
    assert [tuple(p.shape) for p in layer.parameters()] == [(16, 40)] * 3
    with pytest.raises(ValueError, match="does not divide out_features=50"):
        Linear(40, 50, parameters_split=("q", "k", "v"))
    with pytest.raises(ValueError, match=r"\{'q': 20, 'k': 20\} does not divide out_features=50"):
        Linear(40, 50, parameters_split={"q": 20, "k": 20})


@pytest.mark.parametrize("recipe", [NEAREST["mxfp8"], NEAREST["float8 current"], DelayedScaling()], ids=str)
def test_quantized_split_parameters_have_one_product_each(recipe):
    with quantized_model_init(recipe=recipe):
        split = Linear(40, 70, parameters_split={"q": 40, "k": 30})
        each = Linear(40, 40), Linear(40, 30)
    for layer, name in zip(each, ("q", "k"), strict=True):
        layer.weight, layer.bias = getattr(split, f"{name}_weight"), getattr(split, f"{name}_bias")
    x, g = leaf(20, 40), torch.randn(20, 70)
    y, dx = step(split, x, g, recipe)
    separate = [step(layer, x, part, recipe) for layer, part in zip(each, g.split([40, 30], 1), strict=True)]
    assert torch.equal(y, torch.cat([part[0] for part in separate], 1))
    assert torch.equal(dx, separate[0][1] + separate[1][1])
    assert len(split.quantizers["scaling_fwd"]) == 4 and len(split.quantizers["scaling_bwd"]) == 2


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 hybrid, 32x32 weights"])
def test_a_quantized_weight_changed_before_backward_is_an_error(name):
    with quantized_model_init(recipe=NEAREST[name]):
        layer = Linear(64, 48)
    with mx.autocast(recipe=NEAREST[name]):
        y = layer(leaf(20, 64))
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.randn(20, 48))


# ---------------------------------------------------------------------------------------------- main_grad


def with_main_grad(layer):
    for parameter in layer.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape)
    return layer


@pytest.mark.parametrize("recipe", [None, NEAREST["mxfp8"], NEAREST["mxfp8 plain backward"]], ids=str)
def test_fused_accumulation_adds_float32_wgrads_to_main_grad(recipe):
    plain = Linear(64, 48)
    fused = with_main_grad(Linear(64, 48, fuse_wgrad_accumulation=True, params_dtype=torch.bfloat16))
    with torch.no_grad():
        plain.weight.copy_(fused.weight)
        plain.bias.copy_(fused.bias)
    total = torch.zeros(48, 64)
    for _ in range(3):
        x, g = leaf(20, 64, dtype=torch.bfloat16), torch.randn(20, 48).bfloat16()
        step(fused, x, g, recipe)
        plain.zero_grad()
        step(plain, x.float().detach(), g.float(), recipe)
        total += plain.weight.grad
        assert fused.weight.grad is None and fused.bias.grad is not None
    assert fused.weight.main_grad.dtype is torch.float32
    assert relative_error(fused.weight.main_grad, total) < 1e-6


def test_main_grad_of_split_and_of_quantized_parameters():
    recipe, x, g = NEAREST["mxfp8"], leaf(20, 64), torch.randn(20, 48)
    split = with_main_grad(Linear(64, 48, parameters_split=("a", "b"), fuse_wgrad_accumulation=True))
    split.b_weight.requires_grad_(False)
    whole = Linear(64, 48)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([split.a_weight, split.b_weight]))
    step(split, x, g, recipe), step(whole, x, g, recipe)
    assert torch.equal(split.a_weight.main_grad, whole.weight.grad[:24]) and not split.b_weight.main_grad.any()
    with quantized_model_init(recipe=recipe):
        operands = with_main_grad(Linear(64, 48, fuse_wgrad_accumulation=True))
    step(operands, x, g, recipe)
    assert torch.equal(operands.weight.main_grad, whole.weight.grad) and operands.weight.grad is None


def test_a_missing_main_grad_is_an_error_that_changes_nothing():
    layer, x, g = Linear(64, 48, fuse_wgrad_accumulation=True, name="decoder.fc"), leaf(20, 64), torch.randn(20, 48)
    with pytest.raises(
        RuntimeError, match=r"decoder.fc: .* \(48, 64\) has no main_grad; give it one: weight.main_grad"
    ):
        step(layer, x, g, NEAREST["mxfp8"])
    layer.weight.main_grad = torch.zeros(64, 48)
    with pytest.raises(RuntimeError, match=r"has a main_grad of shape \(64, 48\)"):
        step(layer, x, g, None)
    assert layer.quantizers["scaling_fwd"] == []
    with torch.no_grad(), mx.autocast():
        assert layer(x).shape == (20, 48)  # no gradient, so no main_grad is needed
    with_main_grad(layer)
    holds(layer, x, g, NEAREST["mxfp8"], *step(layer, x, g, NEAREST["mxfp8"]))
    layer.weight.requires_grad_(False)
    del layer.weight.main_grad
    step(layer, x, g, NEAREST["mxfp8"])


# ---------------------------------------------------------------------------------------------- backward_dw


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("recipe", [None, NEAREST["mxfp8"], DelayedScaling()], ids=["plain", "mxfp8", "delayed"])
def test_delayed_wgrads_add_up_over_microbatches(recipe, fused):
    """Several passes before one backward_dw are bitwise identical to passes without the delay."""
    at_once = with_main_grad(Linear(64, 48, fuse_wgrad_accumulation=fused))
    later = with_main_grad(Linear(64, 48, fuse_wgrad_accumulation=fused, delay_wgrad_compute=True))
    later.load_state_dict(at_once.state_dict())

    def gradient(layer):
        return layer.weight.main_grad if fused else layer.weight.grad

    for _ in range(2):
        before = None if gradient(later) is None else gradient(later).clone()
        for _ in range(3):
            x, g = leaf(20, 64), torch.randn(20, 48)
            assert all(map(torch.equal, step(later, x, g, recipe), step(at_once, x, g, recipe)))
            assert torch.equal(later.bias.grad, at_once.bias.grad)  # at once
        assert gradient(later) is before is None or torch.equal(gradient(later), before)
        later.backward_dw()
        assert torch.equal(gradient(later), gradient(at_once))
        later.backward_dw()  # no backward pass since the last call
        assert torch.equal(gradient(later), gradient(at_once))


def test_backward_dw_computes_in_the_context_of_the_forward_pass():
    """A torch.autocast around backward_dw has no effect; split and quantized weights work too."""
    recipe, x, g = NEAREST["mxfp8 plain backward"], leaf(20, 64), torch.randn(20, 48)
    at_once, later = Linear(64, 48), Linear(64, 48, parameters_split=("a", "b"), delay_wgrad_compute=True)
    with torch.no_grad():
        at_once.weight.copy_(torch.cat([later.a_weight, later.b_weight]))
    step(at_once, x, g, recipe), step(later, x, g, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        later.backward_dw()
    assert torch.equal(torch.cat([later.a_weight.grad, later.b_weight.grad]), at_once.weight.grad)
    assert not later.a_weight.grad.requires_grad
    with quantized_model_init(recipe=NEAREST["mxfp8"]):
        operands = Linear(64, 48, delay_wgrad_compute=True)
    step(operands, x, g, NEAREST["mxfp8"])
    operands.backward_dw()
    assert type(operands.weight.grad) is torch.Tensor
    at_once.zero_grad()
    step(at_once, x, g, NEAREST["mxfp8"])
    assert torch.equal(operands.weight.grad, at_once.weight.grad)


def test_backward_dw_without_delay_does_nothing():
    layer, x = Linear(64, 48), leaf(20, 64)
    step(layer, x, torch.randn(20, 48), NEAREST["mxfp8"])
    before = layer.weight.grad.clone()
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, before)


# ---------------------------------------------------------------------------------------------- microbatches


def weight_casts(layer, log):
    shape = "x".join(map(str, layer.weight.shape))
    return [e for e in log.entries if e.spec.op.startswith("cast") and describe(e.spec).endswith(shape)]


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8 plain backward", "float8 current", "weight in high precision"])
def test_the_first_microbatch_quantizes_the_weight_for_the_others(recipe):
    recipe = NEAREST[recipe]
    saved, anew = Linear(64, 48), Linear(64, 48)
    anew.load_state_dict(saved.state_dict())
    for first in (True, False, False):
        x, g = leaf(20, 64), torch.randn(20, 48)
        with mx.explain() as log:
            mine = step(saved, x, g, recipe, is_first_microbatch=first)
        assert (len(weight_casts(saved, log)) > 0) == (first and recipe.linear_recipe().weight.rowwise is not None)
        theirs = step(anew, x, g, recipe)
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(mine, theirs, strict=True))
    assert relative_error(saved.weight.grad, anew.weight.grad) < 1e-6


def test_a_cached_weight_is_quantized_again_when_it_or_the_recipe_changes():
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    step(layer, x, g, NEAREST["mxfp8"], is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.mul_(-3)  # like an optimizer step
    y, dx = step(layer, x, g, NEAREST["mxfp8"], is_first_microbatch=False)
    holds(layer, x, g, NEAREST["mxfp8"], y, dx)
    hybrid = MXFP8BlockScaling(fp8_format=Format.E5M2)
    y, dx = step(layer, x, g, hybrid, is_first_microbatch=False)
    holds(layer, x, g, hybrid, y, dx)
    layer.weight = nn.Parameter(torch.randn(48, 64))
    y, dx = step(layer, x, g, hybrid, is_first_microbatch=False)
    holds(layer, x, g, hybrid, y, dx)
    layer.weight.data = torch.randn(48, 64)
    y, dx = step(layer, x, g, hybrid, is_first_microbatch=False)
    holds(layer, x, g, hybrid, y, dx)


def test_a_weight_cached_by_an_evaluation_serves_training():
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off, mx.autocast(recipe=NEAREST["mxfp8"]):
            layer(x, is_first_microbatch=True)
        y, dx = step(layer, x, g, NEAREST["mxfp8"], is_first_microbatch=False)
        holds(layer, x, g, NEAREST["mxfp8"], y, dx)


def test_save_original_input_saves_the_input_itself():
    layer, saved = Linear(64, 48, save_original_input=True), []
    x, g = leaf(20, 64), torch.randn(20, 48)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t)
    with keep, mx.autocast(recipe=NEAREST["mxfp8"]):
        y = layer(x)
    assert x.data_ptr() in saved
    y.backward(g)
    holds(layer, x, g, NEAREST["mxfp8"], y, x.grad, layer.weight.grad, layer.bias.grad)


# ---------------------------------------------------------------------------------------------- recipes change

QUANTIZERS = {
    MXFP8BlockScaling: MXFP8Quantizer,
    NVFP4BlockScaling: NVFP4Quantizer,
    Float8BlockScaling: Float8BlockQuantizer,
    Float8CurrentScaling: Float8CurrentScalingQuantizer,
    DelayedScaling: Float8Quantizer,
}


@pytest.mark.parametrize("made_by", [MXFP8BlockScaling, Float8BlockScaling, NVFP4BlockScaling])
def test_a_quantized_weight_must_fit_the_recipe(made_by):
    with quantized_model_init(enabled=True, recipe=made_by()):
        layer = Linear(32, 32)
    x, g = leaf(32, 32), torch.randn(32, 32)
    step(layer, x, g, made_by())
    quantizers, y = layer.quantizers, step(layer, x, g, made_by())[0]
    with pytest.raises(RuntimeError) as caught:
        step(layer, x, g, DelayedScaling())
    for words in ("Recipe mismatch for Linear", made_by.__name__, "DelayedScaling", "use the recipe"):
        assert words in str(caught.value)
    assert layer.quantizers is quantizers and list(layer.state_dict()) == ["weight", "bias"]
    assert torch.equal(step(layer, x, g, made_by())[0], y)


def test_a_recipe_mismatch_names_the_module():
    with quantized_model_init():
        layer = Linear(32, 32, name="encoder.3.fc1")
    with pytest.raises(RuntimeError, match=r"Recipe mismatch for encoder\.3\.fc1: "):
        step(layer, leaf(4, 32), None, Float8CurrentScaling())


@pytest.mark.parametrize("target", [MXFP8BlockScaling, Float8BlockScaling, Float8CurrentScaling, NVFP4BlockScaling])
def test_a_recipe_of_another_type_warns_once(target):
    """Three iterations, then three under a recipe of another type, whose first iteration warns."""
    layer = Linear(32, 32)
    for _ in range(3):
        step(layer, leaf(32, 32), torch.randn(32, 32), DelayedScaling())
    assert all(isinstance(q, Float8Quantizer) for q in layer.quantizers["scaling_fwd"])
    recipe = target()
    for i in range(3):
        x, g = leaf(32, 32), torch.randn(32, 32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(layer, x, g, recipe)
        assert [w.category for w in caught] == ([UserWarning] if i == 0 else [])
        for text in (str(w.message) for w in caught):
            assert "Recipe type changed from DelayedScaling to " + target.__name__ + " for Linear" in text
        assert all(isinstance(q, QUANTIZERS[target]) for q in layer.quantizers["scaling_fwd"])
    if target is not NVFP4BlockScaling:  # its gradients round stochastically
        check(layer, x, g, recipe)


@pytest.mark.parametrize("recipe, kind", QUANTIZERS.items())
def test_the_quantizers_of_a_module(recipe, kind):
    layer = Linear(32, 32)
    step(layer, leaf(32, 32), torch.randn(32, 32), recipe())
    assert [len(layer.quantizers[key]) for key in ("scaling_fwd", "scaling_bwd")] == [2, 1]
    assert all(isinstance(q, kind) for slots in layer.quantizers.values() for q in slots)


def test_a_changed_field_takes_effect_at_the_next_forward_without_a_warning():
    layer, recipe, x, g = Linear(64, 48), MXFP8BlockScaling(), leaf(20, 64), torch.randn(20, 48)
    check(layer, x, g, recipe)
    before = layer.quantizers
    check(layer, x, g, recipe)
    assert layer.quantizers is before
    for field, value in (("fp8_format", Format.HYBRID), ("weight_scaling", "floor"), ("high_precision_wgrad", True)):
        setattr(recipe, field, value)
        check(layer, x, g, recipe)
        assert layer.quantizers is not before
        before = layer.quantizers


# ---------------------------------------------------------------------------------------------- delayed scaling


def test_each_module_has_its_own_amax_histories():
    """Products and histories equal those of ``linear`` over one DelayedState; the first scales are 1."""
    layer, recipe = Linear(64, 48), DelayedScaling(amax_history_len=4)
    state = DelayedState(recipe.linear_recipe(), torch.device("cpu"))
    for i in range(6):
        x, g = leaf(20, 64), torch.randn(20, 48)
        layer.zero_grad()
        y, dx = step(layer, x, g, recipe)
        z, w = x.detach().requires_grad_(), layer.weight.detach().requires_grad_()
        scales = state.step()
        expected = linear(z, w, layer.bias.detach(), Options(recipe.linear_recipe()), scales)
        expected.backward(g)
        assert torch.equal(y, expected) and torch.equal(dx, z.grad) and torch.equal(layer.weight.grad, w.grad)
        quantizer = layer.quantizers["scaling_fwd"][0]
        assert torch.equal(quantizer.scale, state.scale[0]) and torch.equal(quantizer.amax, state.record[0])
        if i == 0:
            assert (state.scale == 1).all()
            amax = x.abs().amax()
    assert not torch.equal(state.amax[0], amax)  # after four steps the first amax has left the history


def test_a_delayed_state_goes_on_when_the_recipe_changes():
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    for _ in range(2):
        step(layer, x, g, DelayedScaling())
    first = layer.quantizers["scaling_fwd"][0]
    assert first.scale == 448 / x.abs().max()
    step(layer, x, g, DelayedScaling(margin=2))
    assert layer.quantizers["scaling_fwd"][0].scale == 448 / (4 * x.abs().max())
    assert layer.quantizers["scaling_fwd"][0] is not first
    assert layer.state_dict()["_extra_state"]["0.amax"].shape == (3,)
    with pytest.warns(UserWarning, match="Recipe type changed"):
        step(layer, x, g, MXFP8BlockScaling())
    assert "_extra_state" not in layer.state_dict()


def test_a_checkpoint_resumes_delayed_scaling_bitwise(tmp_path):
    recipe = DelayedScaling(amax_history_len=8)
    model = nn.Sequential(Linear(64, 48), Linear(48, 16, delay_wgrad_compute=True))
    data = [(leaf(20, 64), torch.randn(20, 16)) for _ in range(6)]
    for x, g in data[:3]:
        step(model, x, g, recipe)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    restored = nn.Sequential(Linear(64, 48), Linear(48, 16))
    restored.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    early = restored.state_dict()
    assert torch.equal(early["0._extra_state"]["0.history"], model[0].state_dict()["_extra_state"]["0.history"])
    for x, g in data[3:]:
        assert all(map(torch.equal, step(restored, x, g, recipe), step(model, x, g, recipe)))
    with pytest.raises(ValueError, match="use amax_history_len=8"):
        restored.load_state_dict(early)
        step(restored, *data[0], DelayedScaling(amax_history_len=5))
    step(restored, *data[0], recipe)


def test_a_state_dict_without_histories_is_complete():
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    for _ in range(2):
        step(layer, x, g, DelayedScaling())
    assert str(layer.load_state_dict(nn.Linear(64, 48).state_dict())) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        layer.load_state_dict(Linear(64, 48, bias=False).state_dict())


@pytest.mark.parametrize("recipe", [DelayedScaling(), MXFP8BlockScaling()], ids=str)
def test_copies_are_independent(recipe):
    layer, x, g = Linear(64, 48), leaf(20, 64), torch.randn(20, 48)
    for _ in range(2):
        step(layer, x, g, recipe, is_first_microbatch=True)
    copies = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
    expected = step(layer, x, g, recipe)
    state = copy.deepcopy(layer.get_extra_state() or {})
    for other in copies:
        assert all(map(torch.equal, step(other, x, g, recipe), expected))
        step(other, 100 * x.detach(), g, recipe)
    assert all(torch.equal(value, state[key]) for key, value in (layer.get_extra_state() or {}).items())


def test_delayed_states_follow_the_module_to_another_device():
    layer = Linear(64, 48)
    step(layer, leaf(20, 64), torch.randn(20, 48), DelayedScaling())
    layer.to("meta")
    assert layer.get_extra_state()["0.history"].is_meta


# ---------------------------------------------------------------------------------------------- torch.compile


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "float8 current"])
@pytest.mark.parametrize("operands", [False, True], ids=["plain weight", "quantized weight"])
def test_forward_and_backward_compile_to_one_graph(fresh_dynamo, recipe, operands):
    recipe = NEAREST[recipe]
    with quantized_model_init(enabled=operands, recipe=recipe):
        layer = Linear(64, 48)
    x, g = leaf(20, 64), torch.randn(20, 48)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (compiled, layer):
        layer.zero_grad()
        results.append((*step(call, x, g, recipe), layer.weight.grad, layer.bias.grad))
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(*results, strict=True))


def test_split_parameters_compile_under_torch_autocast(fresh_dynamo):
    layer, x = Linear(64, 48, parameters_split=("a", "b"), return_bias=True), leaf(20, 64)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16), mx.autocast():
        (y, bias), (expected, _) = compiled(x, is_first_microbatch=True), layer(x)
    assert y.dtype is bias.dtype is torch.bfloat16 and relative_error(y, expected) < 1e-3


@pytest.mark.exhaustive(quick=1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # from each graph break
@pytest.mark.parametrize("options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}, {}], ids=str)
def test_options_that_need_eager_code_break_the_graph_and_work(fresh_dynamo, options):
    recipe = NEAREST["mxfp8"] if options else DelayedScaling()
    layer = with_main_grad(Linear(64, 48, **options))
    other, x, g = with_main_grad(twin(layer)), leaf(20, 64), torch.randn(20, 48)
    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        assert all(map(torch.equal, step(compiled, x, g, recipe), step(other, x, g, recipe)))
    layer.backward_dw(), other.backward_dw()
    gradients = [t.weight.main_grad if "fuse_wgrad_accumulation" in options else t.weight.grad for t in (layer, other)]
    assert torch.equal(*gradients)


# ---------------------------------------------------------------------------------------------- mistakes

MISTAKES = {
    "integers": (lambda: torch.ones(4, 64, dtype=torch.int64), TypeError, "the input is int64; convert it"),
    "features": (lambda: torch.randn(4, 32), ValueError, r"input \(4, 32\) does not fit: .* in_features, 64"),
    "scalar": (lambda: torch.randn(()), ValueError, r"input \(\) does not fit"),
    "device": (lambda: torch.randn(4, 64, device="meta"), ValueError, "on meta, the weight on cpu; move one"),
}


@pytest.mark.parametrize("make, kind, text", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["plain", "delayed"])
def test_a_wrong_input_is_an_error_that_changes_nothing(make, kind, text, recipe):
    layer, x, g = Linear(64, 48, name="fc"), leaf(20, 64), torch.randn(20, 48)
    other = twin(layer)
    step(layer, x, g, recipe), step(other, x, g, recipe)
    with pytest.raises(kind, match="fc: .*" + text):
        step(layer, make(), None, recipe)
    assert all(map(torch.equal, step(layer, x, g, recipe), step(other, x, g, recipe)))


def test_an_impossible_recipe_changes_nothing():
    layer, x, g, recipe = Linear(64, 48), leaf(20, 64), torch.randn(20, 48), MXFP8BlockScaling()
    step(layer, x, g, recipe)
    before = layer.quantizers
    with mx.autocast(recipe=recipe):
        recipe.margin = 3
        with pytest.raises(ValueError, match="margin is 3"):
            layer(x)
    assert layer.quantizers is before
    recipe.margin = 0
    check(layer, x, g, recipe)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"tp_group": "a group"}, TypeError, "tp_group is 'a group'; pass a process group of torch.distributed"),
        ({"tp_size": 0}, ValueError, "tp_size is 0"),
        ({"tp_size": 5, "parallel_mode": "column"}, ValueError, "out_features=48 does not divide into 5 equal parts"),
        ({"tp_size": 5, "parallel_mode": "row"}, ValueError, "in_features=64 does not divide into 5 equal parts"),
        ({"parallel_mode": "diagonal"}, ValueError, "parallel_mode is 'diagonal'; choose one of column, row"),
        ({"get_rng_state_tracker": 3}, TypeError, "get_rng_state_tracker is 3; pass a function"),
    ],
)
def test_wrong_arguments_for_tensor_parallelism_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        Linear(64, 48, **arguments)


def test_arguments_without_parallelism_are_accepted():
    for mode in (None, "row", "column"):
        layer = Linear(64, 48, False, False, None, 1, None, None, False, False, torch.bfloat16, mode)
        assert layer.weight.dtype is torch.bfloat16 and layer.bias is None


def test_functional_and_repr():
    layer = Linear(64, 48)
    assert repr(layer) == "Linear(in_features=64, out_features=48)"
    x = torch.randn(4, 64)
    out = torch.func.functional_call(layer, {"weight": torch.zeros(48, 64)}, x)
    assert torch.equal(out, F.linear(x, torch.zeros(48, 64), layer.bias))
