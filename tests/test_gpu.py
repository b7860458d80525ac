"""On a CUDA device the same codes, the same products, the same modules: nothing here depends on the backend."""

import pytest
import torch

import mxtensor as mx
from mxtensor import codec

pytestmark = pytest.mark.gpu
FORMATS = [*mx.FORMATS, "mxfp8[32x32]", "mxfp4[1x64]"]


def special_values(rows=96, cols=416):
    """Gaussian values over many magnitudes, with a NaN, an infinity, a zero block, subnormals and a ragged tail."""
    x = torch.randn(rows, cols + 5) * 2.0 ** torch.randint(-140, 120, (rows, 1)).float()
    x[1, 3], x[2, 40], x[3, 64:96] = float("nan"), float("-inf"), 0.0
    x[4] = torch.randn(cols + 5) * 1e-42
    return x


def same(a, b):
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def relative_error(y, reference):
    return ((y.double().cpu() - reference.double().cpu()).norm() / reference.double().cpu().norm()).item()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_equal_the_cpu_codec_bit_for_bit(format, dtype):
    x = special_values().to(dtype)
    for scaling in mx.ScaleCalculationMode:
        cast = mx.Cast.of(format, scaling)
        expected = codec.encode(x, cast)
        got = mx.quantize(x.cuda(), cast.format, scaling).rowwise
        assert same(got.data, expected.data)
        assert same(got.scale, expected.scale)
        values, reference = codec.decode(got, torch.float32).cpu(), codec.decode(expected, torch.float32)
        assert torch.equal(values.nan_to_num(7.0), reference.nan_to_num(7.0))
        assert torch.equal(values.isnan(), reference.isnan())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_equals_the_product_of_its_dequantized_operands(format, dtype):
    layer = torch.nn.Linear(416, 96, dtype=dtype, device="cuda")
    mx.quantize_(layer, format)
    x = torch.randn(2, 33, 416, dtype=dtype, device="cuda")
    qx = mx.quantize(x.flatten(0, 1), format).dequantize(torch.float64)
    reference = (qx @ layer.weight.dequantize(torch.float64).t() + layer.bias.double()).view(2, 33, 96)
    limit = 1e-6 if dtype is torch.float32 else 2.5e-3
    with torch.no_grad():
        assert relative_error(layer(x), reference) < limit
    with torch.inference_mode():
        assert relative_error(layer(x), reference) < limit


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_linear_equals_the_eager_one(format):
    torch._dynamo.reset()
    layer = mx.quantize_(torch.nn.Linear(416, 96, dtype=torch.bfloat16, device="cuda"), format)
    x = torch.randn(33, 416, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(layer, fullgraph=True)
    with torch.no_grad():
        assert relative_error(compiled(x), layer(x)) < 2.5e-3


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "float8_row", "mxfp8[32x32]"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_cast_equals_the_cpu_codec_bit_for_bit(format):
    torch._dynamo.reset()
    x = special_values()
    expected = mx.quantize(x, format)
    got = torch.compile(lambda x: mx.quantize(x, format), fullgraph=True)(x.cuda())
    assert same(got.rowwise.data, expected.rowwise.data)
    assert same(got.rowwise.scale, expected.rowwise.scale)
    values, reference = torch.compile(lambda w: w.dequantize(), fullgraph=True)(got).cpu(), expected.dequantize()
    assert torch.equal(values.nan_to_num(7.0), reference.nan_to_num(7.0))


def test_a_model_moves_to_the_device_and_back_without_changing_a_code():
    layer = mx.quantize_(torch.nn.Linear(416, 96), "mxfp4")
    codes = layer.weight.rowwise.data.clone()
    layer.cuda()
    assert layer.weight.device.type == "cuda"
    assert same(layer.weight.rowwise.data, codes)
    layer.cpu()
    assert same(layer.weight.rowwise.data, codes)


def test_attention_runs_in_eval_and_under_autocast():
    layer = torch.nn.TransformerEncoderLayer(96, 4, 128, batch_first=True, dropout=0.0, device="cuda")
    mx.quantize_(layer, "mxfp8")
    x = torch.randn(2, 7, 96, device="cuda")
    slow = layer(x)
    with torch.no_grad():
        assert relative_error(layer.eval()(x), slow) < 1e-4
        with torch.autocast("cuda", torch.bfloat16):
            assert relative_error(layer(x), slow) < 3e-2


def test_the_log_names_the_device_that_a_kernel_refused():
    layer = mx.quantize_(torch.nn.Linear(416, 96, device="cuda"), "mxfp8")
    with torch.no_grad(), mx.explain() as log:
        layer(torch.randn(5, 416, device="cuda"))
    assert "blocked: runs on cpu, this tensor is on cuda" in log.table()


@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", "nvfp4", "float8_row"])
def test_a_linear_replays_in_a_cuda_graph(config):
    layer = mx.quantize_(torch.nn.Linear(416, 96, dtype=torch.bfloat16, device="cuda"), config)
    x = torch.randn(33, 416, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, layer(x))


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_trains_a_quantized_parameter(fused):
    layer = torch.nn.Linear(64, 32, device="cuda")
    layer.weight = torch.nn.Parameter(mx.quantize(layer.weight, "mxfp8"))
    x, target = torch.randn(64, 64, device="cuda"), torch.randn(64, 32, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=fused)
    losses = []
    for _ in range(60):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert isinstance(layer.weight, mx.MXTensor)
    assert losses[-1] < 0.6 * losses[0]


def test_pinned_memory_holds_the_same_codes():
    w = mx.quantize(torch.randn(64, 128), "mxfp6")
    pinned = w.pin_memory()
    assert pinned.is_pinned() and not w.is_pinned()
    assert same(pinned.rowwise.data, w.rowwise.data)
    assert torch.equal(pinned.to("cuda", non_blocking=True).dequantize().cpu(), w.dequantize())
