"""Static scales of NVFP4 inputs: observe, run data, convert; the result is the definition with the scale seen."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.training.prepared_linear import LARGEST, ObservedLinear, StaticInputLinear


def model(dtype=torch.float32):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    return m.to(dtype).requires_grad_(False)


def static(m, *inputs):
    mx.quantize_(m, "nvfp4", step="observe")
    for x in inputs:
        m(x)
    return mx.quantize_(m, "nvfp4", step="convert")


def rounded(x, scale):
    """Elements of E2M1 times scales of blocks in E4M3 times ``scale``, by plain ops in float64 but for the product with
    the reciprocal of a scale, which decides ties and is defined in float32."""
    blocks = (x.double() / scale).unflatten(-1, (-1, 16))
    wanted = blocks.abs().amax(-1, keepdim=True) / 6
    sizes = wanted.clamp(2.0**-9, 448).to(torch.float32).to(torch.float8_e4m3fn).double()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    y = (blocks.float() * (1 / sizes.float())).double().clamp(-6, 6)
    odd = torch.arange(8) % 2 * 1e-9  # of two as near, the even code
    nearest = ((y.abs()[..., None] - values).abs() + odd).argmin(-1)
    return (values[nearest] * y.sign() * sizes).flatten(-2) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_definition(dtype):
    m = model(dtype)
    data = [torch.randn(40, 64, dtype=dtype) * size for size in (1, 3, 2)]
    got = static(copy.deepcopy(m), *data)
    amax = max(float(x.abs().max()) for x in data)
    scale = float(got[0].input_scale)
    assert scale == 2.0 ** torch.tensor(amax / LARGEST).log2().ceil().item() and type(got[0]) is StaticInputLinear
    x = torch.randn(8, 64, dtype=dtype)
    values = rounded(x, scale)
    w = got[0].weight.dequantize().double()
    assert torch.equal(w, mx.quantize(m[0].weight, "nvfp4").dequantize().double())
    expected = values @ w.T + m[0].bias.double()
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    assert (got[0](x).double() - expected).norm() < tolerance * expected.norm()


def test_the_error_is_as_with_a_scale_for_each_input():
    m, x = model(), torch.randn(200, 64)
    expected = m(x)
    dynamic, got = mx.quantize_(copy.deepcopy(m), "nvfp4"), static(copy.deepcopy(m), x)
    errors = [(q(x) - expected).norm() for q in (got, dynamic)]
    assert errors[0] < 1.1 * errors[1]
    saturated = got[0](1000 * x)
    assert saturated.isfinite().all() and (saturated - m[0](1000 * x)).norm() > 0.5 * saturated.norm()
    with mx.explain() as log:
        got(x)
    casts = [spec for entry in log.entries for spec in entry.spec.formats if "nvfp4_single_level" in str(spec)]
    assert casts  # no scale of the whole tensor


def test_no_input_is_read_for_its_amax(monkeypatch):
    got, x = static(model(), torch.randn(20, 64)), torch.randn(5, 64)
    before = got(x)
    one = got(torch.cat([x, 100 * x]))[:5]  # a row does not depend on the others
    assert torch.equal(before, one)


def test_calibrated_weights_keep_their_codes():
    m = model()
    data = [torch.randn(300, 64) @ torch.randn(64, 64) for _ in range(2)]
    calibrated = mx.calibrate(copy.deepcopy(m), data, "nvfp4")
    got = static(copy.deepcopy(calibrated), *data)
    for one, other in ((got[0], calibrated[0]), (got[2], calibrated[2])):
        assert all(torch.equal(a, b) for a, b in zip(one.weight.components, other.weight.components, strict=True))
    errors = [(q(data[0]) - m(data[0])).norm() for q in (got, calibrated)]
    assert errors[0] < 1.1 * errors[1]


def test_the_model_keeps_its_modules_and_a_state_dict_its_scales():
    m = model()
    layers = list(m)
    mx.quantize_(m, "nvfp4", step="observe")
    assert (
        list(m) == layers and type(m[0]) is ObservedLinear and set(m.state_dict()) == {"0.weight", "0.bias", "2.weight"}
    )
    x = torch.randn(6, 64)
    m(x)
    copied = copy.deepcopy(m)
    got = mx.quantize_(m, "nvfp4", step="convert")
    assert list(got) == layers and set(got.state_dict()) == {
        "0.weight", "0.bias", "0.input_scale", "2.weight", "2.input_scale"
    }  # fmt: skip
    copied(4 * x)
    other = mx.quantize_(copied, "nvfp4", step="convert")
    assert not torch.equal(other[0].input_scale, got[0].input_scale)
    other.load_state_dict(got.state_dict())
    assert torch.equal(other(x), got(x)) and torch.equal(copy.deepcopy(got)(x), got(x))


def test_an_interrupted_convert_continues(monkeypatch):
    m, x = model(), torch.randn(6, 64)
    expected = static(copy.deepcopy(m), x)(x)
    mx.quantize_(m, "nvfp4", step="observe")
    m(x)
    with monkeypatch.context() as patch:
        patch.setattr(ObservedLinear, "to_linear", lambda layer: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            mx.quantize_(m, "nvfp4", step="convert")
    assert m(x).isfinite().all()
    mx.quantize_(m, "nvfp4", step="convert")
    assert torch.equal(m(x), expected)


@pytest.mark.exhaustive
def test_it_compiles_into_one_graph():
    got, x = static(model(), torch.randn(20, 64)), torch.randn(5, 64)
    torch.compiler.reset()
    compiled = torch.compile(got, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), got(x))


def test_inside_torch_autocast_results_have_its_dtype():
    m, x = model(), torch.randn(200, 64)
    expected, got = m(x), static(copy.deepcopy(m), x)
    with torch.autocast("cpu", torch.bfloat16):
        out = got(x)
    assert out.dtype is torch.bfloat16
    assert (out - expected).norm() < 1.1 * (got(x) - expected).norm()
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="too large for float16; use bfloat16"):
        got(x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_shows_its_layers_their_inputs_in_evaluation():
    """Without gradients, torch gives the weights of both layers to one op and makes padded batches nested tensors."""
    torch.manual_seed(0)
    m = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1).eval().requires_grad_(False)
    x, mask = torch.randn(3, 5, 32), torch.arange(5) >= torch.tensor([[5], [2], [4]])
    expected = m(x, src_key_padding_mask=mask)[~mask]
    found = []
    for padding in (mask, None):
        observed = mx.quantize_(copy.deepcopy(m), "nvfp4", step="observe")
        observed(x, src_key_padding_mask=padding)
        found.append(float(observed.layers[0].linear2.input_amax))
    got = mx.quantize_(observed, "nvfp4", step="convert")
    assert 0 < found[0] <= found[1]
    out = got(x, src_key_padding_mask=mask)[~mask]
    assert (out - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: mx.quantize_(model(), "nvfp4", step="watch"),
            "'watch'; choose one of 'prepare', 'observe', 'convert'",
        ),
        (lambda: mx.quantize_(model(), None, step="observe"), "the step 'observe' needs a config, such as 'nvfp4'"),
        (
            lambda: mx.quantize_(model(), "mxfp8", step="observe"),
            "the recipe of 0.weight, and inputs have static scales in",
        ),
        (
            lambda: mx.quantize_(model(), "nvfp4-weight-only", step="observe"),
            "static scales in NVFP4 only; pass 'nvfp4'",
        ),
        (
            lambda: mx.quantize_(mx.quantize_(model(), "nvfp4", step="observe"), "nvfp4", step="convert"),
            "0 has seen inputs",
        ),
        (lambda: static(model(torch.float16), torch.ones(2, 64, dtype=torch.float16)), "float16, in which outputs"),
    ],
)
def test_wrong_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_failed_convert_changes_nothing():
    m = mx.quantize_(model(), "nvfp4", step="observe")
    with pytest.raises(ValueError, match="has seen inputs with the amax 0"):
        mx.quantize_(m, "nvfp4", step="convert")
    assert type(m[0]) is ObservedLinear and type(m[0].weight) is nn.Parameter
    with pytest.warns(UserWarning, match="no layer is prepared"):
        mx.quantize_(model(), "nvfp4", step="convert")
    y = F.linear(torch.ones(2, 64), m[0].weight, m[0].bias)
    assert torch.equal(m[0](torch.ones(2, 64)), y)


def test_a_dict_of_configs_observes_its_layers_and_no_config_gives_plain_ones_back():
    m, x = model(), torch.randn(6, 64)
    expected = m(x)
    table = {"0": "nvfp4"}
    mx.quantize_(m, table, step="observe")
    assert type(m[0]) is ObservedLinear and type(m[2]) is nn.Linear
    m(x)
    plain = mx.quantize_(copy.deepcopy(m), None, step="convert")
    assert type(plain[0]) is nn.Linear and torch.equal(plain(x), expected)
    mx.quantize_(m, table, step="convert")
    assert type(m[0]) is StaticInputLinear and not isinstance(m[2].weight, mx.MXTensor)


def test_one_convert_ends_both_first_steps():
    m, x = model(), torch.randn(6, 64)
    mx.quantize_(m, {"0": "nvfp4"}, step="observe")
    mx.quantize_(m, {"2": "mxfp4"}, step="prepare")
    m(x)
    mx.quantize_(m, {"0": "nvfp4", "2": "mxfp4"}, step="convert")
    assert type(m[0]) is StaticInputLinear and type(m[2]) is nn.Linear
    assert [str(m[i].weight.format) for i in (0, 2)] == ["nvfp4", "mxfp4_e2m1"]
