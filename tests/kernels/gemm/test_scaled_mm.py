"""The arguments of torch's scaled products: decoded value by value, and checked as torch's C++ checks them.

On CPU a stand-in decodes the very arguments and multiplies them; under FakeTensorMode torch's own meta functions see
them; where torch has the kernel on CPU it runs; the tests marked gpu run the rest.
"""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mxtensor as mx
from mxtensor.core import select
from mxtensor.kernels.gemm import emulated, scaled_mm, scaled_mm_contract
from mxtensor.kernels.gemm.scaled_mm_contract import SCALINGS, plan
from mxtensor.kernels.gemm.select import gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode, encode
from tests.helpers.compare import assert_same_product, relative_error
from tests.helpers.stand_in import (
    BF16,
    BLACKWELL,
    CASES,
    FP16,
    FP32,
    HOPPER,
    PAIRS,
    SHAPES,
    asked,
    quantized_pair,
    spec_of,
    stand_in,
)

__all__ = ["asked", "stand_in"]


def values(operand):
    return decode(encode(operand.x, operand.cast) if isinstance(operand, Unquantized) else operand, FP32)


def takes_bias(left):
    return not left.startswith("mxfp4")


@pytest.mark.parametrize("m, n, k", SHAPES)
@pytest.mark.parametrize("capability, left, right", CASES)
def test_what_is_handed_over_means_what_the_operands_mean(pretend, stand_in, capability, left, right, m, n, k):
    pretend(capability)
    a, b = quantized_pair(left, right, m, n, k)
    bias = torch.randn(n, dtype=BF16) if takes_bias(left) else None
    y = scaled_mm.KERNEL.run(a, b, GemmArgs(BF16, bias))
    assert len(stand_in.calls) == 1 and y.shape == (m, n) and y.dtype is BF16 and y.is_contiguous()
    operands = (values(a), values(b)) if bias is None else (values(a), values(b), bias)
    assert_same_product(y, lambda p, q, r=0: p @ q.t() + r, *operands)
    assert relative_error(y, emulated.KERNEL.run(a, b, GemmArgs(BF16, bias))) < 1e-3


@pytest.mark.parametrize("capability, left, right", CASES)
def test_a_cast_operand_gives_the_same_call_as_plain_values(pretend, stand_in, capability, left, right):
    pretend(capability)
    a, b = quantized_pair(left, right, 5, 33, 100)
    y = scaled_mm.KERNEL.run(a, b, GemmArgs(BF16))
    assert torch.equal(scaled_mm.KERNEL.run(encode(a.x, a.cast), b, GemmArgs(BF16)), y)
    swapped = scaled_mm.KERNEL.run(
        Unquantized(a.x, a.cast), Unquantized(decode(b, FP32), mx.Cast.of(right)), GemmArgs(BF16)
    )
    assert relative_error(swapped, y) < 0.1  # cast twice, from another amax


@pytest.mark.parametrize("capability, left, right", [c for c in CASES if takes_bias(c[1])])
@pytest.mark.parametrize(
    "dtype, bias_dtype, bias_shape, alpha, beta",
    [
        (BF16, FP32, (33,), 1, 1), (BF16, BF16, (33,), 0.75, 1), (BF16, BF16, (33,), 1, 0.5), (BF16, BF16, (1,), 1, 1),
        (BF16, BF16, (5, 33), 1, 1), (BF16, BF16, (5, 1), 2.0, 3.0), (FP32, FP32, (33,), 1, 1),
        (FP32, None, None, 1, 1), (FP16, FP16, (33,), 1, 1), (FP16, None, None, 3.0, 1),
    ],
)  # fmt: skip
def test_what_the_kernel_cannot_add_is_added_in_float32(
    pretend, stand_in, capability, left, right, dtype, bias_dtype, bias_shape, alpha, beta
):
    pretend(capability)
    a, b = quantized_pair(left, right, 5, 33, 100)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=bias_dtype)
    args = GemmArgs(dtype, bias, alpha, beta)
    if scaled_mm.refuses(spec_of(a, b, dtype), a, b, args) is not None:
        row_by_cutlass = left == "float8_row" and capability == BLACKWELL  # has no float32 result
        assert row_by_cutlass or (dtype is FP32 and capability == HOPPER)  # whose sums have fewer bits
        return
    y = scaled_mm.KERNEL.run(a, b, args)
    operands = (values(a), values(b)) if bias is None else (values(a), values(b), bias)
    assert y.dtype is dtype
    assert_same_product(y, lambda p, q, r=0: alpha * (p @ q.t()) + beta * r, *operands)


def test_a_beta_of_zero_takes_nothing_of_the_bias(pretend, stand_in):
    pretend(HOPPER)
    a, b = quantized_pair("float8_row", "float8_row", 5, 33, 100)
    nan = torch.full((33,), float("nan"), dtype=BF16)
    y = scaled_mm.KERNEL.run(a, b, GemmArgs(BF16, nan, 1, 0))
    assert torch.equal(y, scaled_mm.KERNEL.run(a, b, GemmArgs(BF16)))


@pytest.mark.parametrize("m, n, k", [(0, 16, 32), (4, 0, 32), (4, 16, 0)])
@pytest.mark.parametrize("format", ["float8_row", "float8_tensor"])
def test_a_product_of_nothing_calls_nothing(pretend, stand_in, format, m, n, k):
    pretend(HOPPER)
    a, b = quantized_pair(format, format, m, n, k)
    bias = torch.randn(n, dtype=BF16)
    y = scaled_mm.KERNEL.run(a, b, GemmArgs(BF16, bias))
    assert torch.equal(y, bias.expand(m, n)) and not stand_in.calls


@pytest.mark.parametrize("capability, format", [(HOPPER, "float8_row"), (HOPPER, "float8_1x128"), (BLACKWELL, "mxfp8")])
def test_a_nan_stays_in_its_own_rows_and_columns(pretend, stand_in, capability, format):
    pretend(capability)
    x, w = torch.randn(5, 100, dtype=BF16), torch.randn(33, 100, dtype=BF16)
    x[2, 7], w[4, 99] = float("nan"), float("inf")
    y = scaled_mm.KERNEL.run(Unquantized(x, mx.Cast.of(format)), encode(w, mx.Cast.of(format)), GemmArgs(BF16))
    bad = torch.zeros(5, 33, dtype=torch.bool)
    bad[2], bad[:, 4] = True, True
    assert torch.equal(y.isnan(), bad)


@pytest.mark.parametrize(
    "capability, format",
    [(HOPPER, "float8_row"), (HOPPER, "float8_tensor"), (HOPPER, "float8_1x128"), (BLACKWELL, "mxfp8")],
)
def test_leading_dimensions_are_rows(pretend, stand_in, capability, format):
    pretend(capability)
    x, (_, b) = torch.randn(2, 3, 5, 100, dtype=BF16), quantized_pair(format, format, 1, 33, 100)
    for a in (Unquantized(x, mx.Cast.of(format)), encode(x, mx.Cast.of(format))):
        y = scaled_mm.KERNEL.run(a, b, GemmArgs(BF16))
        assert y.shape == (2, 3, 5, 33)
        assert_same_product(y, lambda p, q: p @ q.t(), values(a), values(b))
    one = Operand(b.data[None], b.scale[None], None, b.format, (1, 33, 100))
    assert torch.equal(scaled_mm.KERNEL.run(encode(x[:1, 0], mx.Cast.of(format)), one, GemmArgs(BF16))[0],
                       scaled_mm.KERNEL.run(encode(x[0, 0], mx.Cast.of(format)), b, GemmArgs(BF16)))  # fmt: skip


def test_strided_and_misaligned_operands_are_copied_into_line(pretend, stand_in):
    pretend(HOPPER)
    cast = mx.Cast.of("float8_row")
    whole = encode(torch.randn(40, 48), cast)
    part = Operand(whole.data[1:34, :33], whole.scale[1:34], None, whole.format, (33, 33))
    a = encode(torch.randn(1, 33), cast)
    a = Operand(a.data.as_strided((1, 33), (1, 1)), a.scale.as_strided((1, 1), (7, 1)), None, a.format, (1, 33))
    bias = torch.randn(34, dtype=BF16)[1:]
    y = scaled_mm.KERNEL.run(a, part, GemmArgs(BF16, bias))
    assert_same_product(y, lambda p, q, r: p @ q.t() + r, values(a), values(part), bias)
    part = Operand(whole.data[1:33], whole.scale[1:33], None, whole.format, (32, 48))
    left = encode(torch.randn(3, 48), cast)
    y = scaled_mm.KERNEL.run(left, part, GemmArgs(BF16, torch.randn(40, dtype=BF16)[1:33]))
    assert stand_in.calls[-1][3].storage_offset() * 4 % 16 == 0


def test_the_scales_of_a_weight_are_swizzled_once(pretend, stand_in, monkeypatch):
    pretend(BLACKWELL)
    seen, real = [], scaled_mm.swizzle
    monkeypatch.setattr(scaled_mm, "swizzle", lambda scale: (seen.append(scale.shape), real(scale))[1])
    _, b = quantized_pair("mxfp8", "mxfp8", 5, 33, 100)
    for _ in range(3):
        scaled_mm.KERNEL.run(Unquantized(torch.randn(5, 100), mx.Cast.of("mxfp8")), b, GemmArgs(BF16))
    assert seen.count((33, 4)) == 1 and seen.count((5, 4)) == 3
    b.scale.add_(1)
    a = Unquantized(torch.randn(5, 100), mx.Cast.of("mxfp8"))
    y = scaled_mm.KERNEL.run(a, b, GemmArgs(BF16))
    assert seen.count((33, 4)) == 2
    assert_same_product(y, lambda p, q: p @ q.t(), values(a), values(b))


# ---------------------------------------------------------------------------------------------- torch itself


def fake(format, rows, cols):
    """An operand on a CUDA device that this machine lacks; call inside FakeTensorMode."""
    return Operand.empty(mx.get_format(format), (rows, cols), "cuda")


@pytest.mark.parametrize("m, n, k", [*SHAPES, (256, 384, 1024), (0, 16, 32)])
@pytest.mark.parametrize("capability, left, right", [*CASES, ((8, 9), "float8_row", "float8_row")])
def test_torchs_own_checks_accept_every_call(pretend, asked, capability, left, right, m, n, k):
    pretend(capability)
    with FakeTensorMode(), mx.explain() as log:
        a, b = fake(left, m, k), fake(right, n, k)
        bias = torch.empty(n, dtype=BF16, device="cuda") if takes_bias(left) else None
        y = gemm("linear", a, b, GemmArgs(BF16, bias))
    assert y.shape == (m, n) and y.dtype is BF16 and y.is_contiguous() and y.device.type == "cuda"
    assert log.entries[0].kernel == "scaled_mm" and not log.entries[0].refusals
    wrong_in_torch = left.startswith("mxfp4") or (128, 128) in (b.format.block, a.format.block)
    if m and not (wrong_in_torch and (m % 128 or n % 128 or left.startswith("mxfp4"))):
        ((a, b),) = asked
        assert a.shape[0] >= m and b.shape[1] >= n


def runs_on_cpu(format):
    """Whether torch's kernel on CPU takes the scales of a format; torch 2.11 takes one scale per tensor only."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU"):
        return False
    scales = torch.ones(() if format == "float8_tensor" else (16, 1))
    data = torch.zeros(16, 16, dtype=torch.float8_e4m3fn)
    try:
        torch._scaled_mm(data, data.t(), scales, scales.t() if scales.dim() else scales, out_dtype=BF16)
    except RuntimeError as error:
        assert "only supports per-tensor scaling" in str(error)
        return False
    return True


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("m, n, k", [(1, 16, 128), (5, 33, 100), (64, 48, 256)])
@pytest.mark.parametrize("format", ["float8_tensor", "float8_row"])
def test_torchs_kernel_on_cpu_agrees(pretend, format, m, n, k, bias):
    if not runs_on_cpu(format):
        pytest.skip(f"torch's kernel on this CPU does not take {format}")
    pretend(HOPPER)
    a, b = quantized_pair(format, format, m, n, k)
    args = GemmArgs(BF16, torch.randn(n, dtype=BF16) if bias else None)
    assert relative_error(scaled_mm.KERNEL.run(a, b, args), emulated.KERNEL.run(a, b, args)) < 3e-3


def test_the_op_passes_torchs_opcheck():
    data = torch.randn(16, 32).to(torch.float8_e4m3fn)
    scales = [torch.rand(1, 1), torch.rand(1, 1)]
    row = next(i for i, s in enumerate(SCALINGS) if s.name == "float8 per tensor")
    torch.library.opcheck(
        scaled_mm_contract.scaled_mm, (data, data.clone(), scales, None, None, row, BF16),
        test_utils="test_faketensor",
    )  # fmt: skip


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("capability, left, right", CASES)
def test_a_tracer_sees_one_op_for_any_number_of_rows(pretend, request, capability, left, right):
    pretend(capability)
    cast, (_, b) = mx.Cast.of(left), quantized_pair(left, right, 1, 33, 100)

    def product(x):
        return scaled_mm.KERNEL.run(Unquantized(x, cast), b, GemmArgs(BF16))

    graph = make_fx(product, tracing_mode="symbolic", _allow_non_fake_inputs=True)(torch.randn(8, 100, dtype=BF16))
    ops = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert ops.count(torch.ops.mxtensor.scaled_mm.default) == 1
    request.getfixturevalue("stand_in")  # after the trace, which asks torch itself
    y = torch.randn(12, 100, dtype=BF16)
    assert torch.equal(graph(y), product(y))


def test_fast_accumulation_is_off():
    assert scaled_mm_contract.USE_FAST_ACCUM is False  # True would keep 14 bits of each partial sum


# ---------------------------------------------------------------------------------------------- refusals


def refusal(pretend, left, right, capability, args=None, toolkit=(13, 0), shapes=None, device="cuda"):
    pretend(capability, toolkit)
    m, n, k = shapes or (5, 32, 64)
    a, b = quantized_pair(left, right, m, n, k)
    return scaled_mm.refuses(spec_of(a, b, BF16, device), a, b, args or GemmArgs(BF16))


@pytest.mark.parametrize(
    "left, right, capability, sentence",
    [
        ("mxfp8", "mxfp8", (9, 0), "mxfp8 scaling needs sm100, this device is sm90"),
        ("nvfp4", "nvfp4", (8, 9), "nvfp4 scaling needs sm100, this device is sm89"),
        ("mxfp4", "mxfp4", (12, 0), "mxfp4 scaling needs sm100 and before sm110, this device is sm120"),
        ("float8_row", "float8_row", (8, 0), "float8 per row scaling needs sm89, this device is sm80"),
        ("float8_1x128", "float8_128x128", (10, 0),
         "float8 1x128 by 1x128 scaling needs sm90 and before sm100, this device is sm100"),
        ("float8_e5m2_row", "float8_e5m2_row", (9, 0),
         "no tensor core multiplies e5m2 by e5m2, the elements of float8_e5m2_row and float8_e5m2_row"),
        ("float8_row", "float8_e5m2_row", (10, 0),
         "float8 per row scaling needs sm90 and before sm100, this device is sm100"),
        ("mxfp8", "mxfp4", (10, 0), "has no scaling for mxfp8_e4m3 by mxfp4_e2m1"),
        ("mxfp8", "float8_row", (10, 0), "has no scaling for mxfp8_e4m3 by float8_e4m3_row"),
        ("mxfp6", "mxfp6", (10, 0), "has no scaling for mxfp6_e2m3 by mxfp6_e2m3"),
        ("mxfp8[1x16]", "mxfp8", (10, 0), "has no scaling for mxfp8_e4m3[1x16] by mxfp8_e4m3"),
    ],
)  # fmt: skip
def test_formats_and_devices_without_a_kernel_are_named(pretend, left, right, capability, sentence):
    assert refusal(pretend, left, right, capability) == sentence


def test_the_cuda_release_decides_too(pretend):
    sentence = "float8 1x128 by 1x128 scaling needs CUDA 12.9, this torch was built with 12.8"
    assert refusal(pretend, "float8_1x128", "float8_1x128", HOPPER, toolkit=(12, 8)) == sentence
    assert refusal(pretend, "float8_row", "float8_row", HOPPER, toolkit=(12, 8)) is None  # CUTLASS's
    assert plan(SCALINGS, mx.FORMATS["float8_row"], mx.FORMATS["float8_row"], HOPPER, (12, 8)).outputs == (BF16, FP16)


def test_other_devices_and_plain_operands_are_refused(pretend, monkeypatch):
    assert refusal(pretend, "mxfp8", "mxfp8", BLACKWELL, device="cpu") == "runs on cuda, this tensor is on cpu"
    a, b = quantized_pair("mxfp8", "mxfp8", 5, 32, 64)
    plain = a.x
    want = "needs both operands quantized, one is bfloat16"
    assert scaled_mm.refuses(spec_of(plain, b, BF16), plain, b, GemmArgs(BF16)) == want
    assert scaled_mm.refuses(spec_of(b, plain, BF16), b, plain, GemmArgs(BF16)) == want
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "ROCm" in scaled_mm.refuses(spec_of(a, b, BF16), a, b, GemmArgs(BF16))


def test_what_would_be_rounded_twice_is_refused(pretend):
    bias = torch.randn(32, dtype=BF16)
    sentence = refusal(pretend, "mxfp4", "mxfp4", BLACKWELL, GemmArgs(BF16, bias))
    assert sentence == (
        "mxfp4 scaling returns bfloat16 only: this bias, alpha or bfloat16 result needs a float32 product"
    )
    for args in (GemmArgs(FP32), GemmArgs(FP16), GemmArgs(BF16, None, 2.0), GemmArgs(torch.float64)):
        assert "needs a float32 product" in refusal(pretend, "mxfp4", "mxfp4", BLACKWELL, args)
    assert refusal(pretend, "mxfp4", "mxfp4", BLACKWELL, GemmArgs(BF16, bias, 1, 0)) is None
    assert "needs a float32 product" in refusal(pretend, "float8_row", "float8_row", BLACKWELL, GemmArgs(FP32))


def test_a_float32_result_is_refused_where_sums_have_fewer_bits(pretend):
    for capability in ((8, 9), HOPPER):
        assert "in about 14 bits" in refusal(pretend, "float8_row", "float8_row", capability, GemmArgs(FP32))
    assert refusal(pretend, "float8_tensor", "float8_tensor", BLACKWELL, GemmArgs(FP32)) is None


def test_a_float64_result_is_refused(pretend):
    assert "needs a float32 product" in refusal(pretend, "float8_row", "float8_row", HOPPER, GemmArgs(torch.float64))


def test_batches_are_refused_unless_they_are_one_matrix(pretend):
    pretend(HOPPER)
    cast = mx.Cast.of("float8_row")
    a, b = Unquantized(torch.randn(2, 5, 64), cast), encode(torch.randn(2, 32, 64), cast)
    want = "multiplies by one matrix, the right operand is a batch: (2, 32, 64)"
    assert scaled_mm.refuses(spec_of(a, b, BF16), a, b, GemmArgs(BF16)) == want
    tiles = Unquantized(torch.randn(2, 130, 64), mx.Cast.of("float8_128x128"))
    one = encode(torch.randn(32, 64), mx.Cast.of("float8_1x128"))
    want = "a float8_e4m3_128x128 operand of shape (2, 130, 64) is not a matrix of whole blocks"
    assert scaled_mm.refuses(spec_of(tiles, one, BF16), tiles, one, GemmArgs(BF16)) == want
    whole = Unquantized(torch.randn(2, 128, 64), mx.Cast.of("float8_128x128"))
    assert scaled_mm.refuses(spec_of(whole, one, BF16), whole, one, GemmArgs(BF16)) is None


# ---------------------------------------------------------------------------------------------- on a GPU

GPU_SHAPES = [(1, 128, 128), (17, 96, 416), (128, 256, 512), (300, 520, 1000), (64, 33, 640), (2048, 1024, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", GPU_SHAPES)
@pytest.mark.parametrize("dtype, bias", [(BF16, False), (BF16, True), (FP32, True), (FP16, True)])
@pytest.mark.parametrize("left, right", PAIRS[HOPPER] + PAIRS[BLACKWELL][2:])
def test_the_gpus_product_is_the_emulated_one(left, right, dtype, bias, m, n, k):
    a, b = (
        Unquantized(torch.randn(rows, k, dtype=dtype, device="cuda"), mx.Cast.of(f))
        for rows, f in ((m, left), (n, right))
    )
    b = encode(b.x, b.cast)
    args = GemmArgs(dtype, torch.randn(n, dtype=dtype, device="cuda") * math.sqrt(k) if bias else None)
    reason = scaled_mm.refuses(spec_of(a, b, dtype), a, b, args)
    if reason is not None:
        pytest.skip(reason)
    # Tensor cores of sm89 and sm90 accumulate float8 products in 14 bits between the sums in float32.
    limit = {BF16: 2.5e-3, FP16: 1.2e-3, FP32: 1e-3}[dtype]
    assert relative_error(scaled_mm.KERNEL.run(a, b, args), emulated.KERNEL.run(a, b, args)) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["float8_tensor", "float8_row", "float8_1x128", "float8_128x128", "mxfp8", "nvfp4"])
def test_a_linear_on_the_gpu_chooses_it(format):
    layer = mx.quantize_(torch.nn.Linear(416, 96, dtype=BF16, device="cuda"), format)
    x = torch.randn(2, 33, 416, dtype=BF16, device="cuda")
    with torch.no_grad(), mx.explain() as log:
        y = layer(x)
    entry = next(e for e in log.entries if e.kernel in select.KERNEL_NAMES)
    if "scaled_mm" in entry.refusals:
        pytest.skip(entry.refusals["scaled_mm"])
    assert entry.kernel == "scaled_mm"
    with torch.no_grad(), mx.kernels("emulated"):
        assert relative_error(y, layer(x)) < 2.5e-3


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("format", ["float8_tensor", "float8_row", "float8_1x128", "float8_128x128", "mxfp8", "nvfp4"])
def test_a_compiled_linear_on_the_gpu_equals_the_eager_one(format):
    torch._dynamo.reset()
    layer = mx.quantize_(torch.nn.Linear(416, 96, dtype=BF16, device="cuda"), format)
    x = torch.randn(33, 416, dtype=BF16, device="cuda")
    with torch.no_grad():
        assert relative_error(torch.compile(layer, fullgraph=True)(x), layer(x)) < 2.5e-3
