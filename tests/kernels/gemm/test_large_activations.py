"""Products of NVFP4 weights with activations so large that their sums overflow before the global scale is applied."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.kernels.gemm.select import grouped_gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.recipe.linear_recipe import LinearRecipe
from tests.helpers.compare import relative_error

CONFIGS = {
    "plain": LinearRecipe.inference("nvfp4", None),
    "in nvfp4": LinearRecipe.inference("nvfp4", "nvfp4"),
    "in mxfp8": LinearRecipe.inference("nvfp4", "mxfp8"),
    "in float8_row": LinearRecipe.inference("nvfp4", "float8_row"),
}
SCALES = [1e24, 1e30, 1e33, 1e36, 1e38]


def layer(config, k, dtype=torch.float32, bias=True):
    made = nn.Linear(k, 48, bias, dtype=dtype)
    with torch.no_grad():
        made.weight.mul_(1e-4)
    return mx.quantize_(made, CONFIGS[config])


def rounded(x, config):
    """The activations as the recipe rounds them, in float64."""
    cast = CONFIGS[config].activation
    return x.double() if cast is None else mx.quantize(x, cast).dequantize(torch.float64)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("config", CONFIGS)
def test_linear_layers_equal_the_definition(config, rows, scale):
    for dtype in (torch.float32, torch.bfloat16):
        for k in (64, 500):
            module, x = layer(config, k, dtype), (torch.rand(rows, k, dtype=dtype) - 0.5) * scale
            want = rounded(x, config) @ module.weight.dequantize(torch.float64).t() + module.bias.double()
            with torch.no_grad():
                for _ in range(2):  # the second call is that of the Plan's launch
                    y = module(x)
                    assert y.isfinite().all() and relative_error(y, want) < (1e-5 if dtype is torch.float32 else 6e-3)


def test_rows_that_are_not_contiguous_memory_and_those_with_inf():
    module, x = layer("plain", 64), (torch.rand(6, 128) - 0.5) * 1e37
    x[2, 3] = torch.inf
    with torch.no_grad():
        y = module(x[:, :64])
        x[2, 3] = 0
        want = x[:, :64].double() @ module.weight.dequantize(torch.float64).t() + module.bias.double()
    others = [0, 1, 3, 4, 5]
    assert not y[2].isfinite().all() and relative_error(y[others], want[others]) < 1e-5


@pytest.mark.parametrize("rows", [4, 200])
def test_stacks_of_weights(rows):
    stack = mx.quantize(torch.randn(3, 48, 64) * 1e-4, "nvfp4")
    x = (torch.rand(3, rows, 64) - 0.5) * 1e36
    with torch.no_grad():
        y = torch.bmm(x, stack.transpose(1, 2))
    assert relative_error(y, x.double() @ stack.dequantize(torch.float64).mT) < 1e-5


@pytest.mark.parametrize("config", CONFIGS)
def test_groups_of_rows(config):
    recipe = CONFIGS[config]
    stack = mx.quantize(torch.randn(3, 48, 64) * 1e-4, "nvfp4")
    x, ends = (torch.rand(12, 64) - 0.5) * 1e36, torch.tensor([5, 5, 12], dtype=torch.int32)
    rows = x if recipe.activation is None else Unquantized(x, recipe.activation)
    with mx.explain() as log:
        y = grouped_gemm("experts", rows, stack.rowwise, ends, GemmArgs(torch.float32))
    assert log.entries[0].kernel == "cpu_codes"
    values, w = rounded(x, config), stack.dequantize(torch.float64)
    assert relative_error(y, torch.cat([values[:5] @ w[0].t(), values[5:] @ w[2].t()])) < 1e-5


def test_what_is_not_large_keeps_its_bits():
    """The exact power of two is out of the way: values at both sides of the bound give the same codes of a result."""
    module = layer("plain", 64, bias=False)
    x = torch.rand(3, 64) - 0.5
    with torch.no_grad():
        below, above = module(x * 2.0**94), module(x * 2.0**100)
    assert torch.equal(below * 2.0**6, above)
