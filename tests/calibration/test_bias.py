"""Bias correction: after it the mean of each output of a quantized layer is that of the layer before."""

import copy

import pytest
import torch
from torch import nn

import mxtensor as mx
from tests.helpers.calibration_model import Stopped, batches, error, model, stopping, weights


def outputs(m, layer):
    """The outputs of a layer for all data, (rows, columns)."""
    found = []
    with layer.register_forward_hook(lambda module, args, out: found.append(out.flatten(0, -2))):
        for ids in batches():
            m(ids)
    return torch.cat(found)


@pytest.mark.parametrize("form", ["plain", "tuple"])
@pytest.mark.parametrize("format", ["mxfp4-weight-only", "mxfp4"])
@pytest.mark.parametrize("rounding", [[], ["gptq"]])
def test_the_means_of_outputs_are_those_of_the_model_before(form, format, rounding):
    m = model(form)
    got = mx.calibrate(copy.deepcopy(m), batches(), format, [*rounding, "bias"])
    plain = (
        mx.calibrate(copy.deepcopy(m), batches(), format, rounding)
        if rounding
        else mx.quantize_(copy.deepcopy(m), format)
    )
    assert weights(got).keys() == weights(plain).keys()
    for after, other, before in zip(got.layers, plain.layers, m.layers, strict=True):
        for name in ("up", "down"):
            mean = outputs(m, getattr(before, name)).mean(0)
            near, far = (outputs(q, getattr(b, name)).mean(0) for q, b in ((got, after), (plain, other)))
            assert (near - mean).norm() < 1e-4 * mean.norm() < 0.01 * (far - mean).norm()


def test_a_layer_without_a_bias_gets_one_if_asked():
    m = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16)).requires_grad_(False)
    data = [torch.randn(200, 64) + 1]
    made = mx.calibrate(copy.deepcopy(m), data, "mxfp4-weight-only", "bias")
    left = mx.calibrate(copy.deepcopy(m), data, "mxfp4-weight-only", mx.BiasCorrection(make=False))
    assert left[0].bias is None and not left[1].bias.equal(m[1].bias) and not made[1].bias.requires_grad
    error = (made[0](data[0]) - m[0](data[0])).mean(0).norm()
    assert error < 1e-4 < 0.1 * (left[0](data[0]) - m[0](data[0])).mean(0).norm()
    w = made[0].weight.dequantize()
    assert torch.allclose(made[0].bias, (m[0].weight - w) @ data[0].mean(0), atol=1e-5)  # the paper's formula


def test_it_continues_and_an_interrupted_one_leaves_the_model(tmp_path):
    m = model()
    before = {name: (p, p.clone()) for name, p in m.named_parameters()}
    whole = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4", ["gptq", "bias"])
    with pytest.raises(Stopped):
        mx.calibrate(m, batches(), "mxfp4", [stopping(mx.GPTQ(), "operand", 4), "bias"], state=tmp_path)
    assert all(p is before[name][0] and p.equal(before[name][1]) for name, p in m.named_parameters())
    for _ in range(2):  # the second reads all blocks
        got = mx.calibrate(copy.deepcopy(m), batches(), "mxfp4", ["gptq", "bias"], state=tmp_path)
        assert error(got, whole) == 0


def test_a_weight_in_two_places_has_no_bias_to_correct():
    shared = nn.Linear(32, 32)
    m = nn.Sequential(shared, nn.ReLU(), nn.Linear(32, 32)).requires_grad_(False)
    m[2].weight = shared.weight
    got = mx.calibrate(copy.deepcopy(m), [torch.randn(50, 32) + 1], "mxfp4-weight-only", "bias")
    assert got[0].bias.equal(m[0].bias) and got[2].bias.equal(m[2].bias)


def test_wrong_calls():
    with pytest.raises(TypeError, match="make"):
        mx.BiasCorrection(make="yes")
    with pytest.raises(ValueError, match="then 'bias'"):
        mx.calibrate(model(), batches(), "mxfp4", ["bias", "gptq"])
