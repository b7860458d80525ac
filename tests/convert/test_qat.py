"""Quantization-aware training: gradients are straight-through, prepare and convert are whole or undone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx
from mxtensor.training.prepared_linear import FakeQuantizedLinear

CONFIGS = ["mxfp4", "mxfp4-weight-only", "nvfp4", "mxint8-weight-only"]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))


def rounded(x, format):
    """As the rows of one matrix, which share the global scale of NVFP4."""
    return mx.quantize(x.flatten(0, -2), format).dequantize().view(x.shape)


def reference(m, x, config):
    """The output by rounding with plain ops; the gradient of x + (Q(x) - x).detach() is that of x."""
    format, weight_only = config.removesuffix("-weight-only"), config.endswith("-weight-only")

    def through(t):
        return t + (rounded(t.detach(), format) - t).detach()

    for layer in m:
        if isinstance(layer, nn.Linear):
            x = F.linear(x if weight_only else through(x), through(layer.weight), layer.bias)
        else:
            x = layer(x)
    return x


@pytest.mark.parametrize("config", CONFIGS)
def test_values_and_gradients_equal_a_reference(config):
    m, x = model(), torch.randn(5, 3, 64)
    prepared = mx.quantize_(copy.deepcopy(m), config, step="prepare")
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outs = [prepared(inputs[0]), reference(m, inputs[1], config)]
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(prepared.parameters(), m.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_convert_gives_the_model_that_was_simulated(config):
    m, x = model(), torch.randn(5, 64)
    before = dict(m.named_parameters())
    mx.quantize_(m, config, step="prepare")
    assert all(p is before[name] and p.requires_grad for name, p in m.named_parameters())
    assert list(m.state_dict()) == list(before) and type(m[0]) is FakeQuantizedLinear
    expected = m(x)
    direct = mx.quantize_(copy.deepcopy(model()), config)
    mx.quantize_(m, config, step="convert")
    assert type(m[0]) is nn.Linear and not list(m[0].children()) and isinstance(m[2].weight, mx.MXTensor)
    assert (
        m[0].weight.rowwise.data.equal(direct[0].weight.rowwise.data) and m[0].weight.recipe == direct[0].weight.recipe
    )
    torch.testing.assert_close(m(x), expected, rtol=1e-2, atol=1e-3)
    assert str(m[0]).endswith(str(direct[0])[-20:])


def test_training_lowers_the_loss_of_rounded_weights():
    teacher, x = model(), torch.randn(256, 8) @ torch.randn(8, 64)  # correlated, as inputs of layers are
    m = mx.quantize_(copy.deepcopy(teacher), "mxfp4-weight-only", step="prepare")
    optimizer = torch.optim.Adam(m.parameters(), 1e-3)
    target = teacher(x).detach()
    losses = []
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / 60)
        loss = F.mse_loss(m(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    mx.quantize_(m, "mxfp4-weight-only", step="convert")
    assert F.mse_loss(m(x), target).item() < 0.5 * losses[0]


def test_layers_can_have_different_formats():
    table = {"0": "mxfp8-weight-only", "2": "mxfp4"}
    m = mx.quantize_(model(), table, step="prepare")
    assert m[0].activation_fake_quantizer is None and str(m[2].activation_fake_quantizer) == "FakeQuantizer(mxfp4_e2m1)"
    m[2].weight_fake_quantizer.enabled = m[2].activation_fake_quantizer.enabled = False
    x = torch.randn(3, 32)
    assert m[2](x).equal(F.linear(x, m[2].weight))
    mx.quantize_(m, table, step="convert")
    assert [str(m[i].weight.format) for i in (0, 2)] == ["mxfp8_e4m3", "mxfp4_e2m1"]


def test_plain_layers_back():
    m = mx.quantize_(model(), "mxfp4-weight-mxint8-activation", lambda module, fqn: fqn == "0", step="prepare")
    assert type(m[2]) is nn.Linear and str(m[0].weight_fake_quantizer) == "FakeQuantizer(mxfp4_e2m1)"
    assert str(m[0].activation_fake_quantizer) == "FakeQuantizer(mxint8)"
    weight = m[0].weight
    mx.quantize_(m, None, step="convert")
    assert type(m[0]) is nn.Linear and m[0].weight is weight


class Stopped(BaseException):
    pass


def test_an_interrupted_prepare_changes_nothing(monkeypatch):
    m, calls = model(), []
    original = FakeQuantizedLinear.from_linear

    def stops(layer, recipe):
        calls.append(layer)
        if len(calls) == 2:
            layer.__class__ = FakeQuantizedLinear  # in the middle of it
            raise Stopped
        return original(layer, recipe)

    monkeypatch.setattr(FakeQuantizedLinear, "from_linear", stops)
    with pytest.raises(Stopped):
        mx.quantize_(m, "mxfp4", step="prepare")
    assert all(type(layer) is nn.Linear and not list(layer.children()) for layer in (m[0], m[2]))


def test_an_interrupted_convert_leaves_a_usable_model_and_continues(monkeypatch):
    from mxtensor.convert import changes

    m, x = model(), torch.randn(4, 64)
    mx.quantize_(m, "mxfp4-weight-only", step="prepare")
    expected, calls, original = m(x), [], changes._parameter

    def stops(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Stopped
        return original(*args)

    monkeypatch.setattr(changes, "_parameter", stops)
    with pytest.raises(Stopped):
        mx.quantize_(m, "mxfp4-weight-only", step="convert")
    monkeypatch.undo()
    assert isinstance(m[0].weight, mx.MXTensor) and type(m[2]) is FakeQuantizedLinear
    torch.testing.assert_close(m(x), expected, rtol=1e-3, atol=1e-4)
    mx.quantize_(m, "mxfp4-weight-only", step="convert")
    assert all(type(m[i]) is nn.Linear and isinstance(m[i].weight, mx.MXTensor) for i in (0, 2))
    torch.testing.assert_close(m(x), expected, rtol=1e-3, atol=1e-4)


def test_values_have_the_dtype_of_autocast():
    m = mx.quantize_(model(), "mxfp4", step="prepare")
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x)
    out.sum().backward()
    assert out.dtype is torch.bfloat16 and m[0].weight.grad.dtype is torch.float32
    torch.testing.assert_close(out.float(), m(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxint8"])
def test_inside_torch_autocast_inputs_are_rounded_as_those_of_the_converted_model(format):
    """torch.autocast casts an input first: a value may then be rounded the other way."""
    m, x = mx.quantize_(model(), format, step="prepare"), torch.randn(40, 64)
    converted = mx.quantize_(copy.deepcopy(m), format, step="convert")
    with torch.autocast("cpu", torch.bfloat16):
        assert m(x).equal(converted(x))
        assert m.double()(x.double()).dtype is torch.float64  # which torch.autocast leaves alone


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_compiled_gradients_are_those_of_eager_code():
    m, x = mx.quantize_(model(), "mxfp8", step="prepare"), torch.randn(5, 64, requires_grad=True)
    torch.compiler.reset()
    grads = []
    for call in (m, torch.compile(m, fullgraph=True, backend="aot_eager")):
        y = call(x)
        grads.append(torch.autograd.grad(y.square().sum(), [x, *m.parameters()]))
    assert all(map(torch.equal, *grads)) and all(g.any() for g in grads[0])


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()


@pytest.mark.filterwarnings("ignore:.* stay in high precision:UserWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padding", [False, True])
def test_torchs_encoder_rounds_in_evaluation_too(padding):
    """Without gradients, torch gives the weights of both layers to one op and makes padded batches nested tensors."""
    m, x = encoder(), torch.randn(3, 5, 32)
    mask = torch.arange(5) >= torch.tensor([[5], [2], [4]]) if padding else None
    mx.quantize_(m, "mxfp4", step="prepare")
    given = ~mask if padding else torch.ones(3, 5, dtype=torch.bool)
    expected = m(x, src_key_padding_mask=mask)[given]
    for found in (m, copy.deepcopy(m)):
        with torch.no_grad():
            out = found(x, src_key_padding_mask=mask)[given]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert (out - encoder()(x, src_key_padding_mask=mask)[given]).norm() > 0.01 * out.norm()
    mx.quantize_(m, None, step="convert")
    assert not any(module._forward_pre_hooks for module in m.modules())


def tied():
    m = nn.ModuleDict({"embed": nn.Embedding(64, 32), "out": nn.Linear(32, 64, bias=False)})
    m["out"].weight = m["embed"].weight
    return m


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mx.quantize_(model(), "mxfp4", step="train"), ValueError, "step is 'train'; choose one of 'prepare'"),
        (lambda: mx.quantize_(model(), None, step="prepare"), ValueError, "'prepare' needs a config, such as"),
        (
            lambda: mx.quantize_(model(), mx.recipe.MXFP8BlockScaling(), step="prepare"),
            ValueError,
            "simulates a format for inference, and MXFP8BlockScaling",
        ),
        (lambda: mx.quantize_(model(), "mxfp4", include_head=True, step="prepare"), ValueError, "leaves heads out"),
        (
            lambda: mx.quantize_(tied(), "mxfp4", lambda module, fqn: fqn == "out", step="prepare"),
            ValueError,
            "out.weight is also the weight of Embedding",
        ),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_what_is_left_out_is_said():
    m = nn.ModuleList([nn.MultiheadAttention(32, 2), nn.Linear(32, 32)])
    with pytest.warns(
        UserWarning, match=r"0.in_proj_weight.* stay in high precision: the step .prepare. is for nn.Linear only"
    ):
        mx.quantize_(m, "mxfp4", step="prepare")
    with pytest.warns(UserWarning, match="changed nothing: no nn.Linear passed the filter of the step 'prepare'"):
        mx.quantize_(nn.ReLU(), "mxfp4", step="prepare")
    with pytest.warns(UserWarning, match="no layer is prepared; call it with step='prepare'"):
        mx.quantize_(model(), "mxfp4", step="convert")
