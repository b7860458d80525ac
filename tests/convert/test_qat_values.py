"""A layer prepared for quantization-aware training computes what the quantized layer will, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = tuple(mx.FORMATS)


def layer(dtype, bias=True, columns=96):
    torch.manual_seed(0)
    return nn.Linear(columns, 48, bias=bias).to(dtype)


def twins(m, config):
    """The layer prepared, and the layer quantized."""
    prepared = mx.quantize_(copy.deepcopy(nn.Sequential(m)), config, step="prepare")
    return prepared, mx.quantize_(copy.deepcopy(nn.Sequential(m)), config)


def check(m, x, config):
    """Outputs are bitwise equal, with and without gradients; gradients are straight-through."""
    prepared, quantized = twins(m, config)
    with torch.no_grad():
        expected = quantized(x)
        assert expected.isfinite().all() and prepared(x).equal(expected)
    leaf = x.clone().requires_grad_()
    out = prepared(leaf)
    assert out.dtype is x.dtype and out.equal(expected) and quantized(leaf.detach()).equal(expected)
    grad = torch.randn_like(out)
    dx, dw, *db = torch.autograd.grad(out, [leaf, *prepared.parameters()], grad)
    inputs = prepared[0].activation_fake_quantizer
    rounded = [
        t.detach().requires_grad_() for t in (x if inputs is None else inputs(x), quantized[0].weight.dequantize())
    ]
    wanted = torch.autograd.grad(F.linear(*rounded), rounded, grad)
    assert all(found.dtype is x.dtype and found.isfinite().all() for found in (dx, dw, *db))
    for found, value in zip((dx, dw), wanted, strict=True):
        assert (found - value).double().norm() <= 4 * torch.finfo(x.dtype).eps * value.double().norm()
    if db:
        assert db[0].equal(grad.flatten(0, -2).sum(0))


INPUTS = {  # name: (shape of the input, whether the layer has a bias)
    "a vector": ((96,), False),
    "one row": ((1, 96), True),
    "a batch, the last block short": ((5, 3, 100), True),
    "many rows": ((140, 96), False),
}


@pytest.mark.exhaustive(quick=40)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("activation", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.pairs
def test_prepare_equals_the_quantized_layer(format, dtype, activation, inputs):
    shape, bias = INPUTS[inputs]
    m = layer(dtype, bias, shape[-1])
    check(m, torch.randn(shape).to(dtype), format if activation else f"{format}-weight-only")


def cast_of(format, **options):
    return mx.Cast.of(format, **options)


RECIPES = {
    "square blocks": mx.LinearRecipe.inference("mxfp8[32x32]", "mxfp8"),
    "a global scale of each row": mx.LinearRecipe.inference("nvfp4", "nvfp4[row_scaled]"),
    "two formats": mx.LinearRecipe.inference("mxfp4", "mxfp8"),
    "another rule of scales": mx.LinearRecipe.inference(*[cast_of("mxfp4", scaling="floor")] * 2),
    "seeded": mx.LinearRecipe.inference(*[cast_of("nvfp4", rounding="stochastic", seed=7)] * 2),
    "the definition": mx.LinearRecipe.inference("nvfp4", "nvfp4", "emulated"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_prepare_equals_the_quantized_layer_of_other_casts(recipe, dtype):
    check(layer(dtype), torch.randn(5, 3, 96).to(dtype), RECIPES[recipe])


def test_prepare_runs_the_kernel_that_the_recipe_requires():
    m = mx.quantize_(nn.Sequential(layer(torch.bfloat16)), RECIPES["the definition"], step="prepare")
    assert m[0].kernel == "emulated"
    mx.quantize_(m, None, step="convert")
    assert not hasattr(m[0], "kernel")


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "float8_e4m3_row"])
def test_equal_inside_torch_autocast(format, dtype):
    prepared, quantized = twins(layer(torch.float32), format)
    x = torch.randn(5, 3, 96)
    with torch.autocast("cpu", dtype):
        out = prepared(x)
        with torch.no_grad():
            assert prepared(x).equal(quantized(x)) and out.equal(quantized(x))
    assert out.dtype is dtype
    out.sum().backward()
    assert all(p.grad.dtype is torch.float32 and p.grad.isfinite().all() for p in prepared.parameters())


@pytest.mark.exhaustive(quick=1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
@pytest.mark.parametrize("format", ["nvfp4", "float8_e4m3_row"])
def test_equal_in_a_graph(format):
    """Without Inductor, which rounds sums in another order."""
    prepared, quantized = twins(layer(torch.bfloat16), format)
    x = torch.randn(5, 3, 96, dtype=torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    assert out.requires_grad
    with torch.no_grad():
        assert compiled(x).equal(torch.compile(quantized, fullgraph=True, backend="aot_eager")(x))
        assert (out - prepared(x)).double().norm() < 1e-2 * out.double().norm()


def test_random_numbers_are_the_same_in_the_gradient():
    """Stochastic rounding without a seed: torch multiplies the rounded values, which the gradient has."""
    recipe = mx.LinearRecipe.inference(cast_of("mxfp4", rounding="stochastic"))
    m = mx.quantize_(nn.Sequential(layer(torch.float32, False)), recipe, step="prepare")
    x = torch.eye(96).requires_grad_()
    (dx,) = torch.autograd.grad(out := m(x), x, torch.eye(96, 48))
    assert dx[:48].equal(out.t()[:48].detach())


def test_second_derivatives_pass():
    m = mx.quantize_(nn.Sequential(layer(torch.float32)), "nvfp4", step="prepare")
    x = torch.randn(4, 96, requires_grad=True)
    (dx,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert m[0].weight.grad.isfinite().all() and m[0].weight.grad.any()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(3, 96, dtype=torch.bfloat16), "must have one dtype, got torch.bfloat16 and torch.float32"),
        (torch.randn(3, 64), "the contracted dimensions differ"),
    ],
)
def test_what_does_not_fit_is_refused_as_torch_refuses_it(x, message):
    m = mx.quantize_(nn.Sequential(layer(torch.float32)), "nvfp4", step="prepare")
    with pytest.raises(RuntimeError, match=message):
        m(x)
