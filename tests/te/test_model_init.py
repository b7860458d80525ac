"""quantized_model_init: which weights become MXTensors, their copies, and that they train."""

import asyncio
import copy
import threading

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.recipe.linear_recipe import TensorCasts
from mxtensor.te import LayerNormMLP, Linear
from mxtensor.te.contexts import quantized_model_init
from tests.helpers.compare import same_bytes
from tests.helpers.training_reference import check_step

RECIPES = {
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 32x32": MXFP8BlockScaling(two_dimensional_weights=True),
    "mxfp4": MXFP4BlockScaling(stochastic_rounding=False),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "float8 current": Float8CurrentScaling(),
    "float8 block": Float8BlockScaling(),
    "delayed": DelayedScaling(),
}


def quantized():
    """Whether a module that is created here is quantized."""
    return isinstance(Linear(32, 32).weight, mx.MXTensor)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_weights_are_quantized_by_the_recipe(recipe):
    """From the initial values of the module; biases and norms stay plain."""
    torch.manual_seed(3)
    plain = LayerNormMLP(96, 64)
    torch.manual_seed(3)
    with quantized_model_init(recipe=recipe):
        module = LayerNormMLP(96, 64)
    cast = recipe.linear_recipe().weight.rowwise
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, nn.Parameter) and ours.requires_grad
        if ours.dim() == 2:
            expected = mx.quantize(theirs, cast.format, cast.scaling, orientation="both")
            assert isinstance(ours, mx.MXTensor) and same_bytes(ours, expected), name
            assert ours.orientation is mx.Orientation.BOTH and len(ours.operands) == (1 if cast.format.square else 2)
        else:
            assert type(ours) is nn.Parameter and torch.equal(ours, theirs)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_without_gradients_weights_are_rowwise_only(off):
    with off(), quantized_model_init():
        layer = Linear(64, 48)
    assert layer.weight.orientation is mx.Orientation.ROWWISE and len(layer.weight.operands) == 1
    with off(), mx.autocast():
        assert layer(torch.randn(4, 64)).shape == (4, 48)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 32x32", "nvfp4", "float8 current", "float8 block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantized_weights_give_the_step_of_the_high_precision_values(name, dtype):
    """Both copies come from the high-precision values, so the reference is that of a plain weight."""
    recipe = RECIPES[name]
    with quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = Linear(100, 70, params_dtype=dtype)
    x, g = torch.randn(3, 19, 100).to(dtype).requires_grad_(), torch.randn(3, 19, 70).to(dtype)
    with mx.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    assert type(layer.weight.grad) is torch.Tensor and layer.weight.grad.dtype is dtype
    values = layer.weight.get_high_precision_init_val()
    check_step((y, x.grad, layer.weight.grad, layer.bias.grad), x, values, layer.bias, g, recipe.linear_recipe())


def test_a_rowwise_weight_trains_with_its_values_in_dgrad():
    with torch.no_grad(), quantized_model_init():
        layer = Linear(64, 48)
    x, g = torch.randn(20, 64).requires_grad_(), torch.randn(20, 48)
    with mx.autocast():
        layer(x).backward(g)
    exact = mx.quantize(g, "mxfp8").dequantize().double() @ layer.weight.dequantize().double()
    assert (x.grad - exact).norm() / exact.norm() < 2e-6 and layer.weight.grad is not None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_quantized_weights_learn(kind):
    with quantized_model_init():
        model = nn.Sequential(Linear(32, 64), nn.ReLU(), Linear(64, 8))
    optimizer = kind(model.parameters(), lr=2 if kind is torch.optim.SGD else 0.02)
    x, target, losses = torch.randn(64, 32), torch.randn(64, 8), []
    for _ in range(30):
        with mx.autocast():
            loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert isinstance(model[0].weight, mx.MXTensor) and losses[-1] < 0.7 * losses[0]


def test_state_dicts_go_between_quantized_and_plain_modules():
    with quantized_model_init():
        operands, other = Linear(64, 48), Linear(64, 48)
    plain = Linear(64, 48)
    values = plain.weight.detach().clone()
    operands.load_state_dict(plain.state_dict())
    assert same_bytes(operands.weight, mx.quantize(values, "mxfp8", orientation="both"))
    other.load_state_dict(operands.state_dict())
    assert same_bytes(other.weight, operands.weight)
    plain.load_state_dict(operands.state_dict())
    assert type(plain.weight) is nn.Parameter and torch.equal(plain.weight, operands.weight.dequantize())
    assert same_bytes(copy.deepcopy(operands).weight, operands.weight)


# ---------------------------------------------------------------------------------------------- first values


def test_initial_values_are_preserved_until_they_are_cleared():
    torch.manual_seed(3)
    plain = Linear(64, 48, params_dtype=torch.bfloat16)
    torch.manual_seed(3)
    with quantized_model_init(preserve_high_precision_init_val=True):
        layer = Linear(64, 48, params_dtype=torch.bfloat16)
    saved = layer.weight.get_high_precision_init_val()
    assert torch.equal(saved, plain.weight) and saved.dtype is torch.bfloat16 and saved.device.type == "cpu"
    assert not saved.requires_grad and not hasattr(layer.bias, "get_high_precision_init_val")
    layer.float()  # torch replaces the parameter by another tensor
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None
    layer.weight.clear_high_precision_init_val()
    with quantized_model_init():
        assert not hasattr(Linear(64, 48).weight, "get_high_precision_init_val")


def test_deferred_initialization():
    """Created on meta, moved, filled: quantized by the recipe, with initial values."""
    with quantized_model_init(preserve_high_precision_init_val=True):
        layer = Linear(64, 48, device="meta")
    assert layer.weight.is_meta and layer.weight.get_high_precision_init_val() is None
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    plain = Linear(64, 48)
    assert same_bytes(layer.weight, mx.quantize(plain.weight, "mxfp8", orientation="both"))
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    assert torch.equal(layer.bias, plain.bias)


# ---------------------------------------------------------------------------------------------- the context


def test_blocks_nest():
    assert not quantized()
    with quantized_model_init(recipe=NVFP4BlockScaling()):
        with quantized_model_init(enabled=False):
            assert not quantized()
        with quantized_model_init(enabled=True):
            assert str(Linear(32, 32).weight.format) == "mxfp8_e4m3"
        assert Linear(32, 32).weight.format.name.startswith("nvfp4")
    assert not quantized()


def test_an_exception_inside_leaves_the_block():
    with pytest.raises(ZeroDivisionError), quantized_model_init():
        1 / 0  # noqa: B018
    assert not quantized()
    recipe = MXFP8BlockScaling()
    recipe.margin = 2
    with pytest.raises(ValueError, match="margin is 2"), quantized_model_init(recipe=recipe):
        pass
    assert not quantized()


def test_it_is_a_decorator():
    @quantized_model_init()
    def make():
        return quantized()

    assert make() and not quantized() and make()


def test_other_threads_and_tasks_are_not_affected():
    found = {}
    with quantized_model_init():
        thread = threading.Thread(target=lambda: found.update(thread=quantized()))
        thread.start()
        thread.join()

    async def inside(entered, left):
        with quantized_model_init():
            entered.set()
            await left.wait()
            found["inside"] = quantized()

    async def beside(entered, left):
        await entered.wait()
        found["beside"] = quantized()
        found["copied"] = await asyncio.to_thread(quantized)
        left.set()

    async def both():
        entered, left = asyncio.Event(), asyncio.Event()
        await asyncio.gather(inside(entered, left), beside(entered, left))

    asyncio.run(both())
    assert found == {"thread": False, "inside": True, "beside": False, "copied": False}


def test_a_recipe_with_high_precision_weights_creates_plain_weights():
    with quantized_model_init(recipe=CustomRecipe("mxfp8", None)):
        assert not quantized()


def test_mistakes():
    with pytest.raises(TypeError, match="'mxfp8' is not a recipe; pass an instance"):
        quantized_model_init(recipe="mxfp8")
    two = CustomRecipe("mxfp8", TensorCasts(TensorCasts.of("mxfp8").rowwise, TensorCasts.of("mxfp6").columnwise))
    with pytest.raises(ValueError, match="one MXTensor has one format"), quantized_model_init(recipe=two):
        pass
    assert not quantized()


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_an_assigned_high_precision_state_dict_is_quantized(device):
    with torch.device(device), quantized_model_init():
        layer = Linear(64, 32)
    source = nn.Linear(64, 32)
    layer.load_state_dict(source.state_dict(), assign=True)
    expected = mx.quantize(source.weight.detach(), layer.weight.format, orientation="both")
    assert isinstance(layer.weight, mx.MXTensor) and same_bytes(layer.weight, expected)
    assert torch.equal(layer.bias, source.bias)
