"""Row-scaled E4M3 in exact arithmetic: what changes when blocks move under the largest exponent of their row."""

import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.elements import decode_elements
from mxtensor.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FORMATS, INT8, get_format
from mxtensor.numerics.reference import decode, encode
from mxtensor.numerics.row_scaled import (
    MAX_EXPONENT,
    element_codes,
    row_scaled,
    row_values,
    shift_of,
    why_not,
)

TAKEN = [name for name, format in FORMATS.items() if why_not(format) is None]
SHORT = [E2M1, E2M3, E3M2]
"""Elements that E4M3 moves without loss."""
SQUARE = ["mxfp8[32x32]", "mxfp4[16x16]", "mxfp6_e3m2[1x64]"]


def values(rows, cols):
    """Gaussian rows with channel outliers; rows that span many octaves, are zero, tiny or huge."""
    x = torch.randn(rows, cols) * torch.exp(1.5 * torch.randn(cols))
    octaves = torch.randint(-25, 26, (rows, -(-cols // 16))).float()
    x[8:] *= (2.0**octaves).repeat_interleave(16, 1)[8:, :cols]
    x[0], x[1, :64], x[2], x[3] = 0.0, -0.0, x[2] * 2.0**-100, x[3] * 2.0**100
    return x


def test_the_table_of_the_page():
    shifts = {e.name: tuple(shift_of(e)) for e in (*SHORT, E4M3, E5M2)}
    assert shifts == {"e2m1": (6, 14), "e2m3": (5, 11), "e3m2": (4, 9), "e4m3": (0, 12), "e5m2": (-7, 12)}
    for e in SHORT:
        up, octaves = shift_of(e)
        magnitudes = decode_elements(torch.arange(1 << (e.bits - 1), dtype=torch.uint8), e).double() * 2.0**up
        assert magnitudes.max() <= E4M3.max < 2 * magnitudes.max()
        moved = [magnitudes * 2.0**-d for d in (octaves, octaves + 1)]
        exact = [torch.equal(m.float().to(torch.float8_e4m3fn).double(), m) for m in moved]
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
    exact, moved = decode(operand, torch.float32).double(), row_values(rows, operand).double()
    inside = ~rows.beyond.bool()
    change = (moved - exact).abs()
    assert change[~inside].max() == 0 if not inside.all() else True
    if operand.format.element in SHORT:
        assert change.max() == 0
        return
    assert (change <= 2.0**-10 * rows.scale.double().nan_to_num(1e300)).all()
    height, width = operand.format.block
    if height == 1 and width > 0:
        padded = torch.nn.functional.pad(torch.stack([change, exact.abs()]), (0, -300 % width))
        lost, largest = padded.unflatten(-1, (-1, width)).amax(-1)
        tiny = operand.scale == 0 if operand.scale.dtype is torch.uint8 else operand.scale < 2.0**-126
        assert (lost <= 2.0**-5 * largest)[~tiny & inside[:, None]].all()


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "float8_e4m3_1x128_pow2"])
def test_a_row_is_beyond_the_bound_where_its_blocks_are_too_far_from_each_other(name):
    format = get_format(name)
    octaves, block = shift_of(format.element).octaves, format.block[1]
    x = torch.randn(3, 2 * block).clamp(-2, 2)
    x[:, 0], x[:, block] = 2.0, 2.0
    x[:, :block] *= torch.tensor([octaves, octaves + 1, octaves + 9]).float().exp2()[:, None]
    assert row_scaled(encode(x, mx.Cast.of(name))).beyond.tolist() == [0, 1, 1]
    x[:, block:] = 0  # a block of zeros is not a distance, whatever its scale
    assert row_scaled(encode(x, mx.Cast.of(name))).beyond.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "float8_e5m2_1x128_pow2"])
def test_rows_beyond_the_bound_have_the_codes_of_the_operand(name):
    x = values(24, 256)
    operand = encode(x, mx.Cast.of(name))
    rows = row_scaled(operand)
    beyond = rows.beyond.bool()
    assert beyond.any() and not beyond.all()
    assert torch.equal(rows.codes[beyond], element_codes(operand)[beyond]) and rows.scale[beyond].isnan().all()
    assert rows.scale[~beyond].isfinite().all()


def test_special_rows():
    x = torch.randn(5, 64)
    x[0], x[1, 3], x[2, 40] = 0.0, float("nan"), float("inf")
    x[3] *= 2.0 ** (MAX_EXPONENT + 20)
    rows = row_scaled(encode(x, mx.Cast.of("mxfp8")))
    assert rows.beyond.tolist() == [0, 0, 0, 1, 0]
    assert rows.scale[0] == 1 and rows.scale[1:3].isnan().all() and (rows.codes[0] & 0x7F == 0).all()


def test_infinite_codes_and_scales_that_are_not_powers_of_two_are_beyond_the_bound():
    operand = encode(torch.randn(3, 64), mx.Cast.of("mxfp8_e5m2"))
    operand.data.view(torch.uint8)[1, 5], operand.data.view(torch.uint8)[2, 5] = 0x7C, 0x7E
    assert row_scaled(operand).beyond.tolist() == [0, 1, 1]
    operand = encode(torch.randn(4, 256), mx.Cast.of("float8_e4m3_1x128_pow2"))
    operand.scale[1, 0], operand.scale[2, 1], operand.scale[3, 0] = 0.3, -1.0, 0.0
    assert row_scaled(operand).beyond.tolist() == [0, 1, 1, 1]
