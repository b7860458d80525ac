"""torch.compile(fullgraph=True) on CPU: whole modules, no graph break, the eager result, no needless recompilation."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import mxtensor as mx
from tests.helpers.compare import relative_error, same_bytes

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    # inductor imports torch.utils.mkldnn, which still uses torch.jit
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


def assert_close(got, expected):
    """float32: the order of summation may differ; bfloat16: at most the neighbouring value, and rarely."""
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert relative_error(got, expected) < (1e-6 if got.dtype is torch.float32 else 1e-3)


FORMATS = ["mxfp8", "mxfp4", "mxint8", "nvfp4"]


def linear(format, dtype, rows=80):
    return mx.quantize_(nn.Linear(96, rows).to(dtype), format)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linears_of_four_formats_in_one_graph(dtype):
    """Activations are cast inside the graph; inputs of two and three dimensions; weights small, and enough to slice."""
    modules = nn.ModuleList(linear(format, dtype) for format in FORMATS)
    modules.extend(linear(format, dtype, rows=700) for format in ("mxfp8-weight-only", "nvfp4"))

    def model(x, y):
        return [m(x) for m in modules], [m(y) for m in modules]

    inputs = torch.randn(7, 96).to(dtype), torch.randn(2, 5, 96).to(dtype)
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        for got, expected in zip(compiled(*inputs), model(*inputs), strict=True):
            for g, e in zip(got, expected, strict=True):
                assert_close(g, e)


def test_the_gradient_of_a_compiled_linear():
    module = linear("mxfp8-weight-only", torch.float32)
    g, grads = torch.randn(7, 80), []
    x = torch.randn(7, 96)
    for call in (module, torch.compile(module, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        call(leaf).backward(g)
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_attention_and_encoder_layer(mode):
    """In eval mode torch.compile uses the fused ops, which eager MXTensors avoid."""
    attention = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0).eval()
    for module in (attention, layer):
        mx.quantize_(module, "mxfp8-weight-only")

    def model(x, memory):
        return attention(x, memory, memory)[0], layer(x)

    x, memory = torch.randn(2, 7, 64), torch.randn(2, 9, 64)
    with mode():
        for got, expected in zip(torch.compile(model, fullgraph=True)(x, memory), model(x, memory), strict=True):
            assert_close(got, expected)


@pytest.mark.exhaustive
def test_quantizing_and_dequantizing_inside_a_graph():
    def model(x, w):
        return [mx.quantize(x, format) for format in FORMATS], [w.dequantize(), w.t()[:32].dequantize(torch.bfloat16)]

    x, w = torch.randn(33, 96), mx.quantize(torch.randn(48, 64), "mxfp6", orientation="both")
    tensors, plain = torch.compile(model, fullgraph=True)(x, w)
    for got, format in zip(tensors, FORMATS, strict=True):
        expected = mx.quantize(x, format)
        assert isinstance(got, mx.MXTensor) and repr(got) == repr(expected)
        assert same_bytes(got, expected)
    assert torch.equal(plain[0], w.dequantize())
    assert torch.equal(plain[1], w.t()[:32].dequantize(torch.bfloat16))


def counted(fn):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, backend=counter, fullgraph=True, dynamic=False), counter


def test_a_second_weight_of_equal_metadata_does_not_recompile():
    compiled, counter = counted(lambda x, w: F.linear(x, w))
    x = torch.randn(7, 96)
    for _ in range(3):
        w = mx.quantize(torch.randn(80, 96), "mxfp8")
        assert_close(compiled(x, w), F.linear(x, w))
    assert counter.frame_count == 1
    for other in ("mxfp4", "nvfp4"):  # another format is another graph
        w = mx.quantize(torch.randn(80, 96), other)
        assert_close(compiled(x, w), F.linear(x, w))
    assert counter.frame_count == 3


def test_two_equal_layers_share_one_graph():
    layers = nn.ModuleList(linear("mxfp8", torch.float32) for _ in range(3))
    compiled, counter = counted(lambda m, x: m(x))
    with torch.no_grad():
        for layer in (*layers, copy.deepcopy(layers[0])):
            x = torch.randn(7, 96)
            assert_close(compiled(layer, x), layer(x))
    assert counter.frame_count == 1


def test_a_graph_uses_its_weight_by_reference():
    module, x = linear("mxfp8-weight-only", torch.float32), torch.randn(7, 96)
    compiled, counter = counted(module)
    with torch.no_grad():
        before = compiled(x)
        module.load_state_dict(nn.Linear(96, 80).state_dict())
        after = compiled(x)
        assert_close(after, module(x))
    assert relative_error(before, after) > 0.5 and counter.frame_count == 1
