"""Codes, products and modules on a CUDA device equal those on CPU."""

import dataclasses
import sys

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm.select import gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import FakeQuantized, Form
from mxtensor.kernels.quantize import triton_rows
from mxtensor.kernels.quantize.choose_cast import fake_quantize
from mxtensor.kernels.quantize.choose_pair import cast_pair
from mxtensor.kernels.quantize.definition import encode_with_amax
from mxtensor.kernels.quantize.triton_common import slow_in_one_pass
from mxtensor.numerics import reference
from mxtensor.numerics.derived import swizzle

casts = sys.modules["mxtensor.kernels.quantize.choose_cast"]
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


def same_operand(got, expected):
    """Codes, scales and global scale are bitwise equal."""
    assert (got.format, got.shape) == (expected.format, expected.shape)
    for ours, theirs in zip(got.tensors, expected.tensors, strict=True):
        assert (ours.dtype, ours.shape, ours.is_contiguous()) == (theirs.dtype, theirs.shape, True)
        assert same(ours.reshape(-1), theirs.reshape(-1))


def same_values(got, expected):
    got = got.cpu()
    assert got.dtype == expected.dtype and torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))


def every_bfloat16():
    """(1024, 2048): whole tiles; each block of 32 has another bfloat16 value and a few values of its magnitude."""
    word = torch.arange(65536, dtype=torch.int32)[torch.randperm(65536)]
    x = torch.zeros(65536, 32, dtype=torch.bfloat16)
    x[:, 0] = word.to(torch.int16).view(torch.bfloat16)
    for column in (3, 17, 22):
        below = word - (torch.randint(0, 9, word.shape) << 7) - torch.randint(0, 128, word.shape)
        below = torch.where((below & 0x7FFF) > (word & 0x7FFF), word & 0x8000, below)
        x[:, column] = below.to(torch.int16).view(torch.bfloat16)
    return x.view(1024, 2048)


# ---------------------------------------------------------------------------------------------- casts
# A new pair of kernel and compile-time constants takes a second to compile, so not all options are combined.


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_equal_the_cpu_reference_bit_for_bit(format, dtype):
    cast, x = mx.Cast.of(format), special_values().to(dtype)
    for y in (x, x[7:]):  # a scale of the whole tensor is NaN in the first, and finite in the second
        with mx.explain() as log:
            got = mx.quantize(y.cuda(), format).rowwise
        assert [(e.spec.op, e.kernel) for e in log.entries] == [("quantize", "triton")]
        same_operand(got, reference.encode(y, cast))


@pytest.mark.parametrize("scaling", ["floor", "ceil", "even"])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4", "mxint8"])
def test_scale_rules_equal_the_cpu_reference(format, scaling):
    x = special_values().bfloat16()
    same_operand(mx.quantize(x.cuda(), format, scaling).rowwise, reference.encode(x, mx.Cast.of(format, scaling)))


@pytest.mark.parametrize("format", FORMATS)
def test_every_bfloat16_value_and_whole_tiles(format):
    x = every_bfloat16()
    finite = torch.where(x.isfinite(), x, 1.0)
    for y in (x, finite, torch.randn(1024, 2048).bfloat16()):
        same_operand(mx.quantize(y.cuda(), format).rowwise, reference.encode(y, mx.Cast.of(format)))


@pytest.mark.parametrize("format", FORMATS)
def test_values_equal_the_cpu_reference(format):
    for x, dtype in ((special_values(), torch.float32), (torch.randn(128, 2048), torch.bfloat16)):
        expected = mx.quantize(x, format)
        same_values(expected.cuda().dequantize(dtype), expected.dequantize(dtype))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row"])
def test_rounded_values_equal_the_cpu_reference(format):
    x, cast = special_values()[7:].bfloat16(), mx.Cast.of(format)
    operand = reference.encode(x, cast)
    got, global_scale = fake_quantize(x.cuda(), cast, torch.bfloat16)
    same_values(got, reference.decode_local(operand).bfloat16())
    assert (global_scale is None) == (operand.global_scale is None)


TWO_COPIES = [f for f in FORMATS if mx.get_format(f).block[0] == 1 and mx.get_format(f).block[1] > 0]


def same_copies(x, format):
    got = mx.quantize(x.cuda(), format, orientation="both")
    same_operand(got.rowwise, reference.encode(x, mx.Cast.of(format)))
    same_operand(got.columnwise, reference.encode(x.t(), mx.Cast.of(format)))


@pytest.mark.parametrize("format", TWO_COPIES)
def test_both_copies_equal_the_cpu_reference(format):
    """Whole tiles, tails of aligned pairs, and tails of odd rows and columns."""
    for x in (torch.randn(512, 1024), special_values()[8:, :420], special_values()[7:, :419]):
        same_copies(x.bfloat16(), format)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "nvfp4"])
def test_both_copies_of_float32_and_a_copy_along_columns(format):
    x = special_values()[7:]
    same_copies(x, format)
    got = mx.quantize(x.bfloat16().cuda(), format, orientation="columnwise")
    same_operand(got.columnwise, reference.encode(x.bfloat16().t(), mx.Cast.of(format)))


def same_copy(got, operand, dtype=torch.bfloat16):
    """A copy from ``cast_pair`` is the operand, or the values of the operand."""
    if not isinstance(got, FakeQuantized):
        same_operand(got, operand)
        return
    same_values(got.values.contiguous(), reference.decode_local(operand).to(dtype))
    global_scale = operand.global_scale
    assert (got.global_scale is None) == (global_scale is None)
    assert global_scale is None or got.global_scale.cpu() == global_scale


PAIRS = [(Form.VALUES, Form.CODES), (Form.VALUES, Form.VALUES), (Form.CODES, Form.VALUES)]


@pytest.mark.parametrize("forms", PAIRS, ids=lambda forms: "-".join(form.value for form in forms))
@pytest.mark.parametrize("format", TWO_COPIES)
def test_pairs_of_operands_equal_the_cpu_reference(format, forms):
    """Whole tiles, tails of aligned pairs, and tails of odd rows and columns."""
    cast = mx.Cast.of(format)
    for x in (torch.randn(512, 1024), special_values()[8:, :420], special_values()[7:, :419]):
        x = x.bfloat16()
        with mx.explain() as log:
            row, column = cast_pair(x.cuda(), cast, *forms, torch.bfloat16)
        in_two = forms[1] is Form.CODES and slow_in_one_pass(cast)
        assert [e.kernel for e in log.entries] == (["two casts", "triton", "triton"] if in_two else ["triton"])
        same_copy(row, reference.encode(x, cast))
        same_copy(column, reference.encode(x.t(), cast))


@pytest.mark.parametrize("scaling", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e3m2", "mxfp4", "mxint8"])
def test_every_bfloat16_rounds_to_the_value_of_its_code(format, scaling):
    """In words of two values, with instructions that the interpreter lacks; rows, columns and both."""
    x, cast = every_bfloat16(), mx.Cast.of(format, scaling)
    row, column = reference.encode(x, cast), reference.encode(x.t(), cast)
    got = cast_pair(x.cuda(), cast, Form.VALUES, Form.VALUES, torch.bfloat16)
    same_copy(got[0], row)
    same_copy(got[1], column)
    same_values(fake_quantize(x.cuda(), cast, torch.bfloat16)[0], reference.decode_local(row).bfloat16())
    values, _ = fake_quantize(x.cuda().t(), cast, torch.bfloat16)
    assert values.t().is_contiguous()
    same_values(values.contiguous(), reference.decode_local(column).bfloat16())


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "float8_1x128"])
def test_pairs_of_float32_and_by_seeds_equal_the_cpu_reference(format):
    x = special_values()[7:]
    for dtype in (torch.float32, torch.float16):
        row, column = cast_pair(x.cuda(), mx.Cast.of(format), *PAIRS[0], dtype)
        same_copy(row, reference.encode(x, mx.Cast.of(format)), dtype)
        same_copy(column, reference.encode(x.t(), mx.Cast.of(format)))
    casts = [mx.Cast.of(format, rounding="stochastic", seed=seed) for seed in (3, 4)]
    row, column = cast_pair(x.cuda(), casts[0], *PAIRS[1], torch.float32)
    same_copy(row, reference.encode(x, casts[0]), torch.float32)
    same_copy(column, reference.encode(x.t(), casts[1]), torch.float32)


@pytest.mark.parametrize("format", ["float8_tensor", "float8_e5m2_tensor", "float8_tensor_pow2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_by_one_scale_and_their_transpose_equal_the_cpu_reference(format, dtype):
    cast, codes = mx.Cast.of(format), (Form.CODES, Form.CODES)
    for x in (torch.randn(512, 1024), special_values()[:, :420], torch.randn(93, 419)):
        x = x.to(dtype)
        row, column = cast_pair(x.cuda(), cast, *codes, dtype)
        same_operand(row, reference.encode(x, cast))
        same_operand(column, reference.encode(x.t(), cast))
        amax, record = torch.tensor(1.5), torch.tensor(0.25, device="cuda")
        row, column = cast_pair(x.cuda(), cast, *codes, dtype, amax.cuda(), record)
        same_operand(row, encode_with_amax(x, cast, amax))
        same_operand(column, encode_with_amax(x.t(), cast, amax))
        own = reference.tensor_amax(x).clamp(min=0.25)
        assert record.cpu() == own or (record.isnan() and own.isnan())


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "nvfp4"])
@pytest.mark.parametrize("shape", [(33, 416), (3, 33, 416)])
def test_a_float32_result_of_bfloat16_values_is_not_rounded(format, shape):
    x, w, bias = torch.randn(shape).bfloat16(), torch.randn(96, 416).bfloat16(), torch.randn(96)
    cast = mx.Cast.of(format)
    if len(shape) > 2 and format == "nvfp4":
        pytest.skip("a global scale multiplies the accumulator of matrices only")
    a = FakeQuantized(*fake_quantize(x.cuda(), cast, torch.bfloat16), cast.format)
    b = cast_pair(w.t().contiguous().cuda(), cast, None, Form.VALUES, torch.bfloat16)[1]  # column-major
    assert not b.values.is_contiguous()
    with mx.explain() as log:
        y = gemm("mm", a, b, GemmArgs(torch.float32, bias.cuda(), 2.0, 0.5))
    assert [e.kernel for e in log.entries] == ["dequant"] and y.dtype is torch.float32
    left, right = (reference.decode(reference.encode(t, cast), torch.float64) for t in (x, w))
    assert relative_error(y, 2 * (left @ right.t()) + 0.5 * bias.double()) < 2e-6


@pytest.mark.parametrize("format", ["mxfp8", "float8_tensor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_pair_equals_the_eager_one(format):
    torch._dynamo.reset()
    cast, x = mx.Cast.of(format), torch.randn(128, 416, dtype=torch.bfloat16, device="cuda")
    forms = PAIRS[0] if format == "mxfp8" else (Form.CODES, Form.CODES)
    eager = cast_pair(x, cast, *forms, x.dtype)
    compiled = torch.compile(lambda x: cast_pair(x, cast, *forms, x.dtype), fullgraph=True)(x)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert type(ours) is type(theirs)
        for part in ("values",) if isinstance(ours, FakeQuantized) else ("data", "scale"):
            assert torch.equal(getattr(ours, part).float(), getattr(theirs, part).float())


@pytest.mark.parametrize("shape", [(200, 300), (256, 2048)])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_scales_are_the_swizzle_of_the_scales(format, shape):
    x, cast = torch.randn(shape).bfloat16(), mx.Cast.of(format)
    expected = reference.encode(x, cast)
    data, scale, global_scale = triton_rows.quantize_swizzled(x.cuda(), cast)
    assert same(data, expected.data) and same(scale, swizzle(expected.scale))
    assert global_scale is None or global_scale.cpu() == expected.global_scale


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp8[32x32]"])
def test_a_compiled_kernel_meets_other_alignments_strides_and_sizes(format):
    """Each call follows one with which a cache could confuse it; the first calls are repeated at the end."""
    flat = torch.randn(80 * 512 + 64).bfloat16()
    views = [
        flat[: 64 * 512].view(64, 512),
        flat[1 : 64 * 512 + 1].view(64, 512),
        flat[2 : 64 * 512 + 2].view(64, 512),
        flat[: 64 * 576].view(64, 576)[:, :512],
        flat[: 64 * 513].view(64, 513)[:, :512],
        flat[: 64 * 514].view(64, 514)[:, :512],
        flat[: 1 * 512].view(1, 512),
        flat[: 64 * 512].view(64, 512)[::2],
        flat[: 64 * 512].view(512, 64).t(),
        flat[:512].view(1, 512).expand(64, 512),
    ]
    on_device = flat.cuda()
    for x in (*views, *views[:2]):
        y = torch.as_strided(on_device, x.shape, x.stride(), x.storage_offset())
        same_operand(mx.quantize(y, format).rowwise, reference.encode(x, mx.Cast.of(format)))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxint8", "nvfp4", "float8_row", "mxfp8[32x32]"])
def test_a_seed_gives_the_bits_of_the_cpu(format):
    x = special_values()[7:].bfloat16()
    for seed in (5, 2**40 + 1):
        got = mx.quantize(x.cuda(), format, rounding="stochastic", seed=seed).rowwise
        same_operand(got, reference.encode(x, mx.Cast.of(format, "rceil", "stochastic", seed)))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4"])
def test_both_copies_by_a_seed_and_by_the_generator(format):
    x = torch.randn(96, 200)
    both = mx.quantize(x.cuda(), format, orientation="both", rounding="stochastic", seed=9)
    same_operand(both.rowwise, reference.encode(x, mx.Cast.of(format, "rceil", "stochastic", 9)))
    same_operand(both.columnwise, reference.encode(x.t(), mx.Cast.of(format, "rceil", "stochastic", 10)))
    draws = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        draws.append(mx.quantize(x.cuda(), format, orientation="both", rounding="stochastic"))
    assert same(draws[0].columnwise.data, draws[2].columnwise.data)
    assert not same(draws[0].columnwise.data, draws[1].columnwise.data)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_tensor", "float8_row"])
def test_a_cast_replays_in_a_cuda_graph(format):
    both = "both" if format in ("mxfp8", "nvfp4") else "rowwise"
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        mx.quantize(x, format, orientation=both).dequantize()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        w = mx.quantize(x, format, orientation=both)
        values = w.dequantize()
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        for operands in (values, *(t for operand in w.operands for t in operand.tensors)):
            operands.view(torch.uint8).fill_(0xAA) if operands.dim() else operands.fill_(-1.0)
        graph.replay()
        same_operand(w.rowwise, reference.encode(x.cpu(), mx.Cast.of(format)))
        assert torch.equal(values, mx.quantize(x, format).dequantize())
        if w.columnwise is not None and both == "both":
            same_operand(w.columnwise, reference.encode(x.cpu().t(), mx.Cast.of(format)))


def test_casts_run_on_the_current_stream():
    x, late = torch.zeros(512, 1024, device="cuda"), torch.randn(512, 1024, device="cuda")
    mx.quantize(late, "mxfp8").dequantize()  # compiled by now
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # tens of milliseconds in which another stream would read the zeros
        x.copy_(late)
        w = mx.quantize(x, "mxfp8")
        values = w.dequantize()
    stream.synchronize()
    same_operand(w.rowwise, reference.encode(late.cpu(), mx.Cast.of("mxfp8")))
    assert torch.equal(values.cpu(), reference.decode(reference.encode(late.cpu(), mx.Cast.of("mxfp8")), torch.float32))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_casts_run_on_the_device_of_their_tensor():
    x = torch.randn(64, 256)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        w = mx.quantize(x.to(device), "mxfp8", orientation="both")
        assert {t.device for t in w.rowwise.tensors} == {torch.device(device)}
        same_operand(w.rowwise, reference.encode(x, mx.Cast.of("mxfp8")))
        same_operand(w.columnwise, reference.encode(x.t(), mx.Cast.of("mxfp8")))
        assert w.dequantize().device == torch.device(device)
    assert torch.cuda.current_device() == 0


def test_an_error_of_the_device_names_the_kernel_and_its_operands(monkeypatch):
    def fail(*operands):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(casts, "QUANTIZE", (dataclasses.replace(casts.QUANTIZE[0], run=fail), *casts.QUANTIZE[1:]))
    text = r"'triton' failed in quantize of bfloat16->mxfp8_e4m3 8x64 on cuda:0: CUDA error: an illegal memory access"
    with pytest.raises(RuntimeError, match=text):
        mx.quantize(torch.randn(8, 64, dtype=torch.bfloat16, device="cuda"), "mxfp8")


@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "nvfp4"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_compiled_cast_of_both_copies_equals_the_cpu_reference(format):
    torch._dynamo.reset()
    x = special_values()[7:]
    got = torch.compile(lambda x: mx.quantize(x, format, orientation="both"), fullgraph=True)(x.cuda())
    expected = mx.quantize(x, format, orientation="both")
    same_operand(got.rowwise, expected.rowwise)
    same_operand(got.columnwise, expected.columnwise)


# ---------------------------------------------------------------------------------------------- products, modules


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
def test_a_compiled_cast_equals_the_cpu_reference_bit_for_bit(format):
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
    major, minor = torch.cuda.get_device_capability()
    if major >= 10:
        pytest.skip("a device that runs it itself")
    assert f"this device is sm{major}{minor}" in log.table(refused=True)


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


@pytest.mark.parametrize("config", ["float8_e4m3_row", "float8_e4m3_tensor", "float8_e4m3_1x128", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 48, 600])
def test_repeated_products_have_the_bits_of_the_general_way(config, rows):
    """The second call of a kind is recorded, later ones repeat it; also on another stream, and for another layer."""
    layers = [mx.quantize_(torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16), config) for _ in range(2)]
    side = torch.cuda.Stream()
    with torch.no_grad():
        for stream in (torch.cuda.current_stream(), side):
            for layer in layers * 3:
                x = torch.randn(rows, 512, device="cuda").bfloat16()
                with torch.cuda.stream(stream):
                    stream.wait_stream(torch.cuda.default_stream())
                    y = layer(x)
                torch.cuda.synchronize()
                with mx.explain():
                    assert torch.equal(y, layer(x))
