"""Row-scaled E4M3 in exact arithmetic: what changes when codes are rescaled to the exponent of their row."""

import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.elements import decode_elements
from mxtensor.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FORMATS, INT8, get_format
from mxtensor.numerics.reference import decode, encode
from mxtensor.numerics.row_scaled import (
    MAX_SCALE_EXPONENT,
    element_codes,
    rescaling_of,
    row_scaled,
    row_values,
    why_not,
)

TAKEN = [name for name, format in FORMATS.items() if why_not(format) is None]
SHORT = [E2M1, E2M3, E3M2]
"""Elements whose rescaled codes are exact."""
SQUARE = ["mxfp8[32x32]", "mxfp4[16x16]", "mxfp6_e3m2[1x64]"]


def values(rows, cols):
    """Gaussian rows with channel outliers; rows with a wide exponent range, zero, tiny or huge ones."""
    x = torch.randn(rows, cols) * torch.exp(1.5 * torch.randn(cols))
    exponents = torch.randint(-25, 26, (rows, -(-cols // 16))).float()
    x[8:] *= (2.0**exponents).repeat_interleave(16, 1)[8:, :cols]
    x[0], x[1, :64], x[2], x[3] = 0.0, -0.0, x[2] * 2.0**-100, x[3] * 2.0**100
    return x


def test_the_table_of_the_page():
    table = {e.name: tuple(rescaling_of(e)) for e in (*SHORT, E4M3, E5M2)}
    assert table == {"e2m1": (6, 14), "e2m3": (5, 11), "e3m2": (4, 9), "e4m3": (0, 12), "e5m2": (-7, 12)}
    for e in SHORT:
        offset, max_range = rescaling_of(e)
        magnitudes = decode_elements(torch.arange(1 << (e.bits - 1), dtype=torch.uint8), e).double() * 2.0**offset
        assert magnitudes.max() <= E4M3.max < 2 * magnitudes.max()
        products = [magnitudes * 2.0**-d for d in (max_range, max_range + 1)]
        exact = [torch.equal(m.float().to(torch.float8_e4m3fn).double(), m) for m in products]
        assert exact == [True, False]


def test_formats_with_other_scales_and_integers_are_refused():
    assert set(TAKEN) == {n for n, f in FORMATS.items() if (f.scale is E8M0 and f.element is not INT8) or "pow2" in n}
    assert "needs scales that are powers of two" in why_not(get_format("nvfp4"))
    assert "int8" in why_not(get_format("mxint8"))


@pytest.mark.parametrize("name", [*TAKEN, *SQUARE])
@pytest.mark.parametrize("mode", ["rceil", "floor", "even"])
def test_values_stay_within_the_bound(name, mode):
    operand = encode(values(64, 300), mx.Cast.of(name, mode))
    rows = row_scaled(operand)
    exact, rescaled = decode(operand, torch.float32).double(), row_values(rows, operand).double()
    in_range = ~rows.out_of_range.bool()
    change = (rescaled - exact).abs()
    assert change[~in_range].max() == 0 if not in_range.all() else True
    if operand.format.element in SHORT:
        assert change.max() == 0
        return
    assert (change <= 2.0**-10 * rows.scale.double().nan_to_num(1e300)).all()
    height, width = operand.format.block
    if height == 1 and width > 0:
        padded = torch.nn.functional.pad(torch.stack([change, exact.abs()]), (0, -300 % width))
        lost, largest = padded.unflatten(-1, (-1, width)).amax(-1)
        tiny = operand.scale == 0 if operand.scale.dtype is torch.uint8 else operand.scale < 2.0**-126
        assert (lost <= 2.0**-5 * largest)[~tiny & in_range[:, None]].all()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "float8_e4m3_1x128_pow2"])
def test_a_row_is_out_of_range_where_its_exponent_range_is_too_large(name):
    format = get_format(name)
    max_range, block = rescaling_of(format.element).max_range, format.block[1]
    x = torch.randn(3, 2 * block).clamp(-2, 2)
    x[:, 0], x[:, block] = 2.0, 2.0
    x[:, :block] *= torch.tensor([max_range, max_range + 1, max_range + 9]).float().exp2()[:, None]
    assert row_scaled(encode(x, mx.Cast.of(name))).out_of_range.tolist() == [0, 1, 1]
    x[:, block:] = 0  # a block of zeros does not count, whatever its scale
    assert row_scaled(encode(x, mx.Cast.of(name))).out_of_range.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "float8_e5m2_1x128_pow2"])
def test_rows_out_of_range_have_the_codes_of_the_operand(name):
    x = values(24, 256)
    operand = encode(x, mx.Cast.of(name))
    rows = row_scaled(operand)
    out_of_range = rows.out_of_range.bool()
    assert out_of_range.any() and not out_of_range.all()
    assert (
        torch.equal(rows.codes[out_of_range], element_codes(operand)[out_of_range])
        and rows.scale[out_of_range].isnan().all()
    )
    assert rows.scale[~out_of_range].isfinite().all()


def test_special_rows():
    x = torch.randn(5, 64)
    x[0], x[1, 3], x[2, 40] = 0.0, float("nan"), float("inf")
    x[3] *= 2.0 ** (MAX_SCALE_EXPONENT + 20)
    rows = row_scaled(encode(x, mx.Cast.of("mxfp8")))
    assert rows.out_of_range.tolist() == [0, 0, 0, 1, 0]
    assert rows.scale[0] == 1 and rows.scale[1:3].isnan().all() and (rows.codes[0] & 0x7F == 0).all()


def test_infinite_codes_and_scales_that_are_not_powers_of_two_are_out_of_range():
    operand = encode(torch.randn(3, 64), mx.Cast.of("mxfp8_e5m2"))
    operand.data.view(torch.uint8)[1, 5], operand.data.view(torch.uint8)[2, 5] = 0x7C, 0x7E
    assert row_scaled(operand).out_of_range.tolist() == [0, 1, 1]
    operand = encode(torch.randn(4, 256), mx.Cast.of("float8_e4m3_1x128_pow2"))
    operand.scale[1, 0], operand.scale[2, 1], operand.scale[3, 0] = 0.3, -1.0, 0.0
    assert row_scaled(operand).out_of_range.tolist() == [0, 1, 1, 1]
