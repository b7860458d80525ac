"""A stand-in for torch's scaled products: strict about layouts, in float64; and what its tests share."""

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.core.kernel import Spec
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.reference import encode
from tests.helpers.slow_swizzle import slowly_back

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HOPPER, BLACKWELL = (9, 0), (10, 0)
PAIRS = {
    HOPPER: [
        ("float8_tensor", "float8_tensor"), ("float8_row", "float8_row"), ("float8_1x128", "float8_1x128"),
        ("float8_1x128", "float8_128x128"), ("float8_128x128", "float8_1x128"), ("float8_128x128", "float8_128x128"),
        ("float8_row", "float8_tensor"), ("float8_1x128", "float8_row"), ("float8_e5m2_tensor", "float8_tensor"),
        ("float8_row", "float8_e5m2_row"), ("float8_row_pow2", "float8_row"),
        ("float8_1x128_pow2", "float8_128x128_pow2"),
    ],
    BLACKWELL: [
        ("float8_tensor", "float8_tensor"), ("float8_row", "float8_row"), ("mxfp8", "mxfp8"), ("mxfp8_e5m2", "mxfp8"),
        ("mxfp8", "mxfp8[32x32]"), ("mxfp8[1x64]", "mxfp8"), ("mxfp4", "mxfp4"), ("mxfp4", "mxfp4[32x32]"),
        ("nvfp4", "nvfp4"), ("nvfp4_single_level", "nvfp4_single_level"), ("nvfp4", "nvfp4_single_level"),
        ("nvfp4", "nvfp4[16x16]"),
    ],
}  # fmt: skip
CASES = [(capability, *pair) for capability, pairs in PAIRS.items() for pair in pairs]
SHAPES = [(1, 16, 128), (5, 33, 100), (130, 48, 520), (64, 150, 256)]
"""(M, N, K): one row; tails of all three; more than one tile of scales and of blocks; N alone."""


# ---------------------------------------------------------------------------------------------- a stand-in

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def codes(t):
    """float64 values of float8 or packed float4 codes, last dimension contracted."""
    if t.dtype is not torch.float4_e2m1fn_x2:
        return t.double()
    raw = t.view(torch.uint8).int()
    nibbles = torch.stack((raw & 15, raw >> 4), -1).flatten(-2)
    return (FP4[nibbles & 7] * torch.where(nibbles > 7, -1, 1)).double()


def spread(scale, rows, cols, block):
    """A 1- or 2-D scale tensor repeated to one value for each of rows x cols elements; one scale is for ``block``."""
    r, c = (n if n > 0 else whole for n, whole in zip(block, (rows, cols), strict=True))
    return scale.double().repeat_interleave(r, 0)[:rows].repeat_interleave(c, 1)[:, :cols]


def swizzled(scale, rows, cols, block):
    """The scales of a buffer in the 128x4 layout, read byte by byte."""
    blocks = -(-cols // block)
    need = -(-rows // 128) * 128 * (-(-blocks // 4) * 4)
    assert scale.is_contiguous() and scale.numel() == need
    plain = slowly_back(scale.view(torch.uint8).flatten(), rows, blocks).view(scale.dtype)
    return spread(plain.float(), rows, cols, (1, block))


def row_by_column(a, b):
    """Assert the layout that torch requires of the matrices; b is (N, K)."""
    for t in (a, b):
        assert t.dim() == 2 and t.stride() == (t.shape[1], 1) and t.shape[1] % 16 == 0
        assert t.storage_offset() * t.element_size() % 16 == 0
    assert a.shape[1] == b.shape[1] and b.shape[0] % 16 == 0
    assert not (a.dtype is b.dtype is torch.float8_e5m2)
    assert (a.dtype is torch.float4_e2m1fn_x2) == (b.dtype is torch.float4_e2m1fn_x2)


def finish(a, scale_a, b, scale_b, multiplier, bias, dtype):
    y = (codes(a) * scale_a) @ (codes(b) * scale_b).t() * multiplier
    if bias is not None:
        assert bias.shape == (b.shape[0],) and bias.dtype is dtype is not FP32 and bias.is_contiguous()
        y = y + bias.double()
    return y.to(dtype)


class StandIn:
    """``torch._scaled_mm`` and ``F.scaled_mm`` by their documentation, in float64, strict about layouts."""

    def __init__(self):
        self.calls = []

    def install(self, monkeypatch):
        monkeypatch.setattr(torch, "_scaled_mm", self.scaled_mm)
        monkeypatch.setattr(F, "scaled_mm", self.named)
        return self

    def scaled_mm(self, a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
        """Infer the scaling from dtypes and counts, as ScaledBlas.cpp does."""
        self.calls.append((a, b, scale_a, scale_b, bias, out_dtype))
        b = b.t()
        row_by_column(a, b)
        assert scale_a.dtype is scale_b.dtype and not use_fast_accum
        inner = a.shape[1] * (2 if a.dtype is torch.float4_e2m1fn_x2 else 1)
        if scale_a.dtype is FP32 and scale_a.numel() == scale_b.numel() == 1:
            wide = scale_a.double().reshape(1, 1), scale_b.double().reshape(1, 1)
        elif scale_a.dtype is FP32:
            assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[0])
            assert scale_a.is_contiguous() and scale_b.is_contiguous() and scale_a.stride(0) == scale_b.stride(1) == 1
            wide = scale_a.double(), scale_b.double().t()
        else:
            block = 32 if scale_a.dtype is torch.float8_e8m0fnu else 16
            assert scale_a.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn)
            wide = swizzled(scale_a, a.shape[0], inner, block), swizzled(scale_b, b.shape[0], inner, block)
        return finish(a, wide[0], b, wide[1], 1.0, bias, out_dtype)

    def named(self, a, b, scales_a, kinds_a, scales_b, kinds_b, swizzles_a, swizzles_b, bias, dtype, use_fast_accum):
        """The scaling is an argument."""
        self.calls.append((a, b, scales_a, scales_b, bias, dtype))
        b = b.t()
        row_by_column(a, b)
        assert not use_fast_accum
        sides = (a, scales_a, kinds_a, swizzles_a), (b, scales_b, kinds_b, swizzles_b)
        wide, multiplier = [], 1.0
        for t, scales, kinds, swizzles in sides:
            rows, inner = t.shape[0], t.shape[1] * (2 if t.dtype is torch.float4_e2m1fn_x2 else 1)
            blocks, kind, scale = -(-inner // 128), kinds[0], scales[0]
            tiles = kind in (F.ScalingType.BlockWise1x16, F.ScalingType.BlockWise1x32)
            assert (swizzles[0] is F.SwizzleType.SWIZZLE_32_4_4) == tiles
            if tiles:
                block, want = (
                    (16, torch.float8_e4m3fn) if kind is F.ScalingType.BlockWise1x16 else (32, torch.float8_e8m0fnu)
                )
                assert scale.dtype is want and t.dtype is torch.float4_e2m1fn_x2
                wide.append(swizzled(scale, rows, inner, block))
            elif kind is F.ScalingType.BlockWise1x128:
                assert scale.dtype is FP32 and scale.shape == (rows, blocks) and scale.stride() == (1, rows)
                assert rows % 4 == 0
                wide.append(spread(scale, rows, inner, (1, 128)))
            else:
                assert kind is F.ScalingType.BlockWise128x128 and scale.dtype is FP32
                fours = -(-blocks // 4) * 4
                assert scale.shape == (fours, -(-rows // 128)) and scale.stride() == (1, fours)
                wide.append(spread(scale.t()[:, :blocks], rows, inner, (128, 128)))
            if len(scales) > 1:
                assert len(scales) == len(kinds) == len(swizzles) == 2 and kinds[1] is F.ScalingType.TensorWise
                assert scales[1].dtype is FP32 and scales[1].numel() == 1
                multiplier *= scales[1].double().item()
        assert len(scales_a) == len(scales_b)
        assert {kinds_a[0], kinds_b[0]} != {F.ScalingType.BlockWise128x128}
        return finish(a, wide[0], b, wide[1], multiplier, bias, dtype)


@pytest.fixture
def stand_in(monkeypatch):
    return StandIn().install(monkeypatch)


def quantized_pair(left, right, m, n, k, dtype=BF16):
    x, w = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
    return Unquantized(x, mx.Cast.of(left)), encode(w, mx.Cast.of(right))


def spec_of(a, b, dtype, device="cuda"):
    formats = tuple(f.format if not isinstance(f, torch.Tensor) else f.dtype for f in (a, b))
    return Spec("mm", (tuple(a.shape), tuple(b.shape)), formats, dtype, torch.device(device))


@pytest.fixture
def asked(monkeypatch):
    """The left and right matrices of each scaled product that torch is asked for, which it checks itself."""
    products = []

    def noting(real):
        return lambda *args, **named: products.append(args[:2]) or real(*args, **named)

    for module, name in ((torch, "_scaled_mm"), (F, "scaled_mm"), (torch, "_scaled_grouped_mm")):
        monkeypatch.setattr(module, name, noting(getattr(module, name)))
    return products
