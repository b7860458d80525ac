"""Groups of rows times a stack of weights: the arguments and the result of torch's grouped product."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.kernels.gemm import emulated, scaled_mm
from mxtensor.kernels.gemm.select import grouped_gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode, encode
from tests.helpers.compare import assert_same_product, relative_error
from tests.helpers.slow_swizzle import slowly_back
from tests.helpers.stand_in import BF16, BLACKWELL, FP32, HOPPER, asked, spec_of

__all__ = ["asked"]

CASES = [
    (HOPPER, "float8_row", "float8_row"), (HOPPER, "float8_tensor", "float8_row"),
    (HOPPER, "float8_row", "float8_tensor"), (BLACKWELL, "mxfp8", "mxfp8"), (BLACKWELL, "mxfp8", "mxfp8[32x32]"),
]  # fmt: skip
GROUPS = [([5], 0), ([0, 3, 0, 200, 129, 0], 0), ([1, 2, 3], 7), ([128, 128], 0), ([0, 0], 4)]


def product_of_groups(a, b, scale_a, scale_b, offs=None, bias=None, out_dtype=None, use_fast_accum=False):
    """torch._scaled_grouped_mm in float64; it reads scales at the addresses that GroupedBlas.cpp and MSLK read."""
    rows, inner = a.shape
    groups, _, cols = b.shape
    assert a.stride() == (inner, 1) and b.stride() == (inner * cols, 1, inner) and not inner % 16 and not cols % 16
    assert a.dtype is b.dtype is torch.float8_e4m3fn and out_dtype is BF16 and not use_fast_accum
    assert offs.dtype is torch.int32 and offs.shape == (groups,) and scale_a.is_contiguous()
    out = torch.full((rows, cols), float("nan"), dtype=BF16)
    start, tiles, blocks = 0, 0, -(-inner // 128) * 4
    for i, end in enumerate(offs.tolist()):
        left, right = a[start:end].double(), b[i].t().double()
        if scale_a.dtype is FP32:
            assert scale_a.shape == (rows,) and scale_b.shape == (groups, cols) and scale_b.stride(1) == 1
            left, right = left * scale_a[start:end, None].double(), right * scale_b[i][:, None].double()
        else:
            assert scale_a.dtype is scale_b.dtype is torch.float8_e8m0fnu and scale_a.dim() == scale_b.dim() == 2
            assert not inner % 32 and scale_a.shape[0] >= rows and scale_a.shape[1] == blocks
            assert scale_b.shape == (groups, -(-cols // 128) * 128 * blocks)
            flat, whole = scale_a.view(torch.uint8).flatten(), -(-(end - start) // 128) * 128
            part = slowly_back(flat[tiles * blocks : (tiles + whole) * blocks], end - start, inner // 32)
            tiles += whole
            if end > start:
                left = left * part.view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)
            part = slowly_back(scale_b[i].view(torch.uint8), cols, inner // 32)
            right = right * part.view(torch.float8_e8m0fnu).double().repeat_interleave(32, 1)
        out[start:end] = (left @ right.t()).to(BF16)
        start = end
    return out


def stack(left, right, sizes, after, n, k, device="cpu"):
    a = Unquantized(torch.randn(sum(sizes) + after, k, dtype=BF16, device=device), mx.Cast.of(left))
    b = encode(torch.randn(len(sizes), n, k, dtype=BF16, device=device), mx.Cast.of(right))
    return a, b, torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("n, k", [(16, 128), (33, 100), (144, 288)])
@pytest.mark.parametrize("sizes, after", GROUPS)
@pytest.mark.parametrize("capability, left, right", CASES)
def test_every_group_meets_its_own_weight(pretend, monkeypatch, capability, left, right, sizes, after, n, k):
    pretend(capability)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", product_of_groups)
    a, b, ends = stack(left, right, sizes, after, n, k)
    assert scaled_mm.refuses_grouped(spec_of(a, b, BF16), a, b, ends, GemmArgs(BF16)) is None
    y = scaled_mm.GROUPED.run(a, b, ends, GemmArgs(BF16))
    x, w, start = decode(encode(a.x, a.cast), FP32), decode(b, FP32), 0
    assert y.shape == (len(x), n) and y.dtype is BF16
    for i, end in enumerate(ends.tolist()):
        if end > start:
            assert_same_product(y[start:end], lambda p, q: p @ q.t(), x[start:end], w[i])
        start = end
    assert (y[start:] == 0).all()
    assert torch.equal(scaled_mm.GROUPED.run(encode(a.x, a.cast), b, ends, GemmArgs(BF16)), y)


@pytest.mark.parametrize("rows, groups, n, k", [(0, 2, 16, 64), (3, 2, 0, 64), (3, 2, 16, 0)])
def test_a_product_of_nothing_is_zero(pretend, rows, groups, n, k):
    pretend(HOPPER)
    a, b, ends = stack("float8_row", "float8_row", [rows, 0], 0, n, k)
    y = scaled_mm.GROUPED.run(a, b, ends, GemmArgs(BF16))
    assert y.shape == (rows, n) and y.dtype is BF16 and not y.any()


@pytest.mark.parametrize("n, k", [(16, 128), (33, 100), (144, 288)])
@pytest.mark.parametrize("capability, left, right", CASES)
def test_torchs_own_checks_accept_every_call(pretend, asked, capability, left, right, n, k):
    pretend(capability)

    def fake(format, *shape):
        format = mx.get_format(format)
        data = torch.empty(format.data_shape(shape), dtype=format.element.dtype, device="cuda")
        scale = torch.empty(format.scale_shape(shape), dtype=format.scale.dtype, device="cuda")
        return Operand(data, scale, None, format, shape)

    with FakeTensorMode(), mx.explain() as log:
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        y = grouped_gemm("_grouped_mm", fake(left, 50, k), fake(right, 3, n, k), ends, GemmArgs(BF16))
    assert log.entries[0].kernel == "scaled_mm" and len(asked) == 1
    assert y.shape == (50, n) and y.dtype is BF16 and y.device.type == "cuda"


@pytest.mark.parametrize(
    "left, right, capability, sentence",
    [
        ("float8_row", "float8_row", (8, 9), "float8 per row scaling needs sm90 and before sm100, this device is sm89"),
        ("mxfp8", "mxfp8", (12, 0), "mxfp8 scaling needs sm100 and before sm110, this device is sm120"),
        ("float8_e5m2_row", "float8_row", (9, 0), "has no scaling for float8_e5m2_row by float8_e4m3_row"),
        ("nvfp4", "nvfp4", (10, 0), "has no scaling for nvfp4 by nvfp4"),
        ("mxfp4", "mxfp4", (10, 0), "has no scaling for mxfp4_e2m1 by mxfp4_e2m1"),
        ("float8_1x128", "float8_1x128", (9, 0), "has no scaling for float8_e4m3_1x128 by float8_e4m3_1x128"),
    ],
)
def test_formats_and_devices_without_a_kernel_are_named(pretend, left, right, capability, sentence):
    pretend(capability)
    a, b, ends = stack(left, right, [2, 3], 0, 16, 64)
    assert scaled_mm.refuses_grouped(spec_of(a, b, BF16), a, b, ends, GemmArgs(BF16)) == sentence


def test_what_the_grouped_kernel_does_not_do_is_refused(pretend):
    pretend(HOPPER)
    a, b, ends = stack("float8_row", "float8_row", [2, 3], 0, 16, 64)
    bias = torch.randn(16, dtype=BF16)
    for args, words in (
        (GemmArgs(FP32), "returns bfloat16, the result is float32"),
        (GemmArgs(BF16, bias), "before an alpha or a bias could be applied"),
        (GemmArgs(BF16, None, 2.0), "before an alpha or a bias could be applied"),
    ):
        assert words in scaled_mm.refuses_grouped(spec_of(a, b, args.out_dtype), a, b, ends, args)
    assert scaled_mm.refuses_grouped(spec_of(a, b, BF16), a, b, ends, GemmArgs(BF16, bias, 1, 0)) is None
    many = spec_of(a, b, BF16)._replace(shapes=((5, 64), (1024, 16, 64)))
    assert "at most 1023 groups, got 1024" in scaled_mm.refuses_grouped(many, a, b, ends, GemmArgs(BF16))


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(16, 128), (33, 100), (144, 288), (1024, 2048)])
@pytest.mark.parametrize("sizes, after", [*GROUPS, ([0, 700, 13, 256, 55], 9)])
@pytest.mark.parametrize("left, right", [(left, right) for _, left, right in CASES])
def test_the_gpus_product_is_the_emulated_one(left, right, sizes, after, n, k):
    a, b, ends = stack(left, right, sizes, after, n, k, "cuda")
    reason = scaled_mm.refuses_grouped(spec_of(a, b, BF16), a, b, ends, GemmArgs(BF16))
    if reason is not None:
        pytest.skip(reason)
    y = scaled_mm.GROUPED.run(a, b, ends, GemmArgs(BF16))
    expected = emulated.GROUPED.run(a, b, ends, GemmArgs(BF16))
    assert torch.equal(y[sum(sizes) :], expected[sum(sizes) :])
    if sum(sizes):
        assert relative_error(y, expected) < 2.5e-3
