"""torchao's QATConfig: the steps of ``mx.quantize_`` under its names."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor import ao


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))


@pytest.mark.parametrize("quantize_", [mx.quantize_, ao.quantize_], ids=["mx", "ao"])
def test_the_steps_are_those_of_mx(quantize_):
    m, same, x = model(), model(), torch.randn(5, 64)
    quantize_(m, ao.QATConfig("mxfp4", step=ao.QATStep.PREPARE))
    mx.quantize_(same, "mxfp4", step="prepare")
    assert type(m[0]) is ao.FakeQuantizedLinear and torch.equal(m(x), same(x))
    quantize_(m, ao.QATConfig("mxfp4", step="convert"))
    mx.quantize_(same, "mxfp4", step="convert")
    assert torch.equal(m[0].weight.rowwise.data, same[0].weight.rowwise.data) and torch.equal(m(x), same(x))
    table = ao.FqnToConfig({"0": "mxfp8-weight-only", "2": "mxfp4"})
    m = quantize_(quantize_(model(), ao.QATConfig(table)), ao.QATConfig(table, step="convert"))
    assert [str(m[i].weight.format) for i in (0, 2)] == ["mxfp8_e4m3", "mxfp4_e2m1"]


def test_configs_of_both_tensors_and_plain_layers_back():
    config = ao.QATConfig(
        activation_config=ao.NVFP4FakeQuantizeConfig(), weight_config=ao.MXFakeQuantizeConfig("mxfp6_e2m3")
    )
    m = ao.quantize_(model(), config, lambda module, fqn: fqn == "0")
    assert type(m[2]) is nn.Linear and m[0].weight_fake_quantizer.cast.format.name == "mxfp6_e2m3"
    assert m[0].activation_fake_quantizer.cast.format.name == "nvfp4"
    weight = m[0].weight
    ao.quantize_(m, ao.QATConfig(step="convert"))
    assert type(m[0]) is nn.Linear and m[0].weight is weight


def test_torchaos_own_configs_are_read():
    qat = pytest.importorskip("torchao.quantization.qat")
    prototype = pytest.importorskip("torchao.prototype.qat")
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    base = formats.MXDynamicActivationMXWeightConfig(
        activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2
    )
    m = ao.quantize_(model(), qat.QATConfig(base, step="prepare"))
    assert str(m[0].weight_fake_quantizer.cast.format) == "mxfp4_e2m1"
    ao.quantize_(m, qat.QATConfig(base, step="convert"))
    assert isinstance(m[0].weight, mx.MXTensor) and m[0].weight.recipe.activation.format.name == "mxfp4_e2m1"
    pair = {"activation_config": prototype.NVFP4FakeQuantizeConfig(False),
            "weight_config": prototype.MXFakeQuantizeConfig(torch.float8_e4m3fn)}  # fmt: skip
    m = ao.quantize_(model(), qat.QATConfig(**pair, step="prepare"))
    assert m[0].activation_fake_quantizer.cast.format.name == "nvfp4_single_level"
    assert m[0].weight_fake_quantizer.cast.format.name == "mxfp8_e4m3"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ao.QATConfig("mxfp4", step="train"), ValueError, "is 'train'; choose one of 'prepare', 'convert'"),
        (lambda: ao.QATConfig(), ValueError, "'prepare' needs base_config or weight_config"),
        (lambda: ao.QATConfig("mxfp4", ao.MXFakeQuantizeConfig()), ValueError, "leave the other configs out"),
        (
            lambda: ao.QATConfig(weight_config=ao.MXFakeQuantizeConfig(), step="convert"),
            ValueError,
            "'convert' takes base_config only",
        ),
        (
            lambda: mx.quantize_(model(), ao.QATConfig(weight_config="mxfp4")),
            TypeError,
            "cannot round with 'mxfp4'; pass an MXFakeQuantizeConfig",
        ),
        (lambda: mx.quantize_(model(), ao.QATConfig("mxfp4"), include_head=True), ValueError, "leaves heads out"),
        (lambda: mx.calibrate(model(), [torch.ones(2, 64)], ao.QATConfig("mxfp4")), ValueError, "for quantize_ alone"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()
