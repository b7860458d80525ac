"""Both passes of a layer are traced for any number of rows: no fake and no decision needs the number."""

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import mxtensor as mx
from mxtensor.training.passes import Inputs, Options, backward, forward
from tests.helpers.stand_in import BLACKWELL, HOPPER

RECIPES = {
    "mxfp8": mx.recipe.MXFP8BlockScaling(),
    "mxfp8 hybrid": mx.recipe.MXFP8BlockScaling(fp8_format=mx.recipe.Format.HYBRID),
    "mxfp6": mx.recipe.MXFP6BlockScaling(),
    "mxfp4": mx.recipe.MXFP4BlockScaling(),
    "nvfp4": mx.recipe.NVFP4BlockScaling(),
    "float8 current": mx.recipe.Float8CurrentScaling(),
    "float8 block": mx.recipe.Float8BlockScaling(),
}


def rows_of(shapes, hint=96):
    """A size as torch.compile(dynamic=True) has it."""
    symbol = shapes.create_symbol(hint, ConstantSource("rows"), dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=hint)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("capability", [(8, 0), HOPPER, BLACKWELL], ids=["sm80", "sm90", "sm100"])
@pytest.mark.pairs
def test_both_passes_are_traced_for_any_number_of_rows(device, capability, recipe, dtype):
    if capability == BLACKWELL and recipe is RECIPES["nvfp4"]:
        pytest.skip("its fake tensors need a torch that is built with CUDA")
    device(capability)
    shapes, options, needs = ShapeEnv(), Options(recipe.linear_recipe()), (True, True, True)
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True), enable_python_dispatcher(), torch.no_grad():
        rows = rows_of(shapes)
        x, weight, bias = (torch.empty(s, dtype=dtype, device="cuda") for s in ((rows, 256), (512, 256), (512,)))
        y, tensors, saved = forward(x, weight, bias, options, None, None, needs, None)
        assert y.shape == (rows, 512) and isinstance(y.shape[0], torch.SymInt)
        inputs = Inputs(needs, x.shape, (dtype,) * 4, False)
        grads = backward(torch.empty_like(y), tensors, saved, inputs, options, None, None)
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]
    assert not shapes.replacements, "the graph is for one number of rows"
