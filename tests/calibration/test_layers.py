"""Layers that store their weight as (in, out) are calibrated as linear layers are."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.calibration.layers import calibrated, orientation_of, stored_as
from mxtensor.convert.changes import checked_changes
from mxtensor.convert.configs import choose
from mxtensor.kernels.quantize.choose_cast import quantize_operand
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import Orientation, get_format
from mxtensor.recipe.linear_recipe import LinearRecipe
from mxtensor.tensor.quantize_as import quantize_as


class Conv1D(nn.Module):
    """As transformers' Conv1D: a linear layer whose weight is (in, out)."""

    def __init__(self, out, cols):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(cols, out) / 8), nn.Parameter(torch.randn(out))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), layer(64, 96), layer(96, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def models():
    """A model of Conv1D, and one of linear layers with the same values."""
    torch.manual_seed(0)
    conv, linear = Model(lambda cols, out: Conv1D(out, cols)), Model(nn.Linear)
    conv.norm.weight.data = torch.randn(64).exp()
    linear.norm.load_state_dict(conv.norm.state_dict())
    for name in ("up", "down"):
        of, to = getattr(conv, name), getattr(linear, name)
        to.weight.data, to.bias.data = of.weight.data.T.contiguous(), of.bias.data.clone()
    return conv.requires_grad_(False), linear.requires_grad_(False)


def data():
    torch.manual_seed(1)
    mix = torch.randn(64, 64) / 8
    return [torch.randn(64, 64) @ mix for _ in range(3)]


@pytest.mark.parametrize("format", ["mxfp4-weight-only", "nvfp4", "float8_e4m3_tensor", "float8_e4m3_row-weight-only"])
@pytest.mark.parametrize("method", ["mse", "gptq", "awq", ["smooth", "gptq", "bias"]])
def test_a_layer_with_the_transposed_weight_is_calibrated_as_a_linear_layer(format, method):
    conv, linear = models()
    rounded = mx.quantize_(copy.deepcopy(conv), format)
    a, b = (mx.calibrate(copy.deepcopy(m), data(), format, method) for m in (conv, linear))
    for name in ("up", "down"):
        got, expected, plain = (getattr(m, name).weight for m in (a, b, rounded))
        assert torch.equal(got.dequantize(), expected.dequantize().T)
        assert got.shape == plain.shape and got.copies == plain.copies and got.recipe == plain.recipe
        assert all(x.is_contiguous() for x in got.components)
    assert torch.allclose(a.norm.weight, b.norm.weight) and torch.allclose(a.up.bias, b.up.bias)
    x = torch.cat(data())
    assert torch.allclose(a(x), b(x), rtol=1e-3, atol=1e-3)
    if method == "gptq":
        assert (a(x) - conv(x)).norm() < 0.85 * (rounded(x) - conv(x)).norm()


@pytest.mark.parametrize("measure", ["kl", "layer"])
def test_its_errors_are_those_of_the_linear_layer(measure):
    a, b = (mx.plan(m, data(), 5, measure=measure) for m in models())
    for name, weight in a.weights.items():
        assert not weight.estimated and weight.errors == pytest.approx(b.weights[name].errors, rel=1e-3)


def test_gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    m = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False)
    for block in m.transformer.h:
        block.attn.c_attn.weight.mul_(20)
        block.mlp.c_fc.weight.mul_(20)
    ids = torch.randint(0, 50, (8, 64))
    rounded, got = (
        f(copy.deepcopy(m), *args, "mxfp4-weight-only") for f, args in ((mx.quantize_, ()), (mx.calibrate, ([ids],)))
    )
    expected = m(ids).logits
    assert (got(ids).logits - expected).norm() < 0.8 * (rounded(ids).logits - expected).norm()


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxfp6_e2m3", "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("orientation", [Orientation.ROWWISE, Orientation.COLUMNWISE])
def test_the_stored_copy_is_that_of_quantize_(name, square, orientation):
    format = get_format(name).with_block((32, 32)) if square else get_format(name)
    recipe, w = LinearRecipe.inference(Cast(format), None), torch.randn(96, 70)
    expected = quantize_as(w, recipe, orientation)
    matrix = w if orientation is Orientation.ROWWISE else w.T.contiguous()
    got = stored_as(quantize_operand(matrix, recipe.stored), orientation, recipe, w.dtype)
    assert got.shape == expected.shape and got.stride() == expected.stride() and got.copies == expected.copies
    assert all(torch.equal(a, b) for a, b in zip(got.components, expected.components, strict=True))


def test_which_modules_are_layers():
    assert orientation_of(nn.Linear(2, 2)) is Orientation.ROWWISE
    assert orientation_of(Conv1D(2, 2)) is Orientation.COLUMNWISE
    for module in (nn.Embedding(2, 2), nn.MultiheadAttention(4, 2), nn.LayerNorm(2), nn.Conv1d(2, 2, 1), nn.ReLU()):
        assert orientation_of(module) is None
    m = nn.ModuleDict({"embed": nn.Embedding(50, 32), "head": nn.Linear(32, 50), "other": nn.Embedding(9, 32)})
    m["head"].weight = m["embed"].weight
    changes = checked_changes(m, choose(m, "mxfp4", lambda module, fqn: True)[0])
    assert list(calibrated(changes)) == [m["head"]]
