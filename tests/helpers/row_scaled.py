"""Operands of row-scaled products for tests: values of all kinds, stored operands, and what a kernel has to write."""

import torch

import mxtensor as mx
from mxtensor.numerics.formats import get_format
from mxtensor.numerics.reference import decode_local, encode
from mxtensor.numerics.row_scaled import FLOAT32_SUMS, exact_product, product_bound

FP32 = torch.float32


STORED = [
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxfp8[32x32]", "mxfp4[16x16]", "mxfp8[1x64]",
    "float8_e4m3_1x128_pow2", "float8_e5m2_row_pow2", "float8_e5m2_tensor_pow2", "float8_e4m3_128x128_pow2",
]  # fmt: skip


def values(rows, cols, dtype=FP32):
    """Rows with outliers; from row 8 on: wide spans, zeros, NaN, an infinity, tiny, huge."""
    x = torch.randn(rows, cols) * torch.exp(1.5 * torch.randn(cols))
    if rows > 14:
        x[8] *= (2.0 ** torch.randint(-25, 26, (cols,)).float()).sort().values
        x[9, : cols // 2] *= 2.0**-30
        x[10], x[11, 3], x[12, -1] = 0.0, float("nan"), float("inf")
        x[13], x[14] = x[13] * 2.0**-90, x[14] * 2.0**90
    return x.to(dtype)


def stored(name, rows, cols):
    """A stored operand; specials are in single rows only if no scale has several."""
    format = get_format(name)
    operand = encode(values(rows, cols) if format.block[0] == 1 else torch.randn(rows, cols), mx.Cast(format))
    if format.element.name == "e5m2":
        operand.data.view(torch.uint8)[2, 3], operand.data.view(torch.uint8)[3, 5] = 0x7C, 0x7E
    return operand


def same(got, expected):
    return torch.equal(torch.nan_to_num(got.float(), 77.0), torch.nan_to_num(expected.float(), 77.0))


def check_rows(made, expected, cols):
    codes, scale, out_of_range = made[:3]
    rows = expected.codes.shape[0]
    used = ~(
        expected.scale[:, 0].isnan() & ~expected.out_of_range.bool()
    )  # a row with a NaN scale is NaN, whatever its codes
    assert torch.equal(codes[:rows, :cols][used], expected.codes[used]) and not codes[rows:].any()
    assert not codes[:rows, cols:][used].any()
    assert same(scale[:rows], expected.scale) and (scale[rows:] == 1).all()
    assert torch.equal(out_of_range[:rows], expected.out_of_range) and not out_of_range[rows:].any()


def assert_within_the_bound(y, a, b, bias=None, sums=FLOAT32_SUMS):
    """Each value of y is within ``product_bound`` of the exact one, and each NaN is where it belongs."""
    exact, allowed = exact_product(a, b, bias), product_bound(a, b, y.dtype, sums, bias)
    magnitude = decode_local(a).double().abs() @ decode_local(b).double().abs().t()
    overflows = magnitude.isfinite() & (magnitude > 1e37)  # float32 sums may be infinite or NaN, in any order
    assert torch.equal(y.isnan() & ~overflows, exact.isnan() & ~overflows)
    fine = exact.isfinite() & (exact.abs() < torch.finfo(y.dtype).max) & ~overflows
    assert ((y.double() - exact).abs() <= allowed)[fine].all()
    assert (y.isfinite() == fine)[~exact.isnan() & ~overflows].all()
    return exact, fine
