"""Operands of row-scaled products: the kernels are bitwise the definition, also with the instructions of sm_90."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.quantize import to_row_scaled
from mxtensor.kernels.quantize.to_row_scaled import Tile, matrix_of, rows_of_operand, rows_of_values, why_not_in_one
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import row_scaled
from tests.helpers.float8_instructions import float8_instructions
from tests.helpers.row_scaled import STORED, check_rows, stored, values
from tests.helpers.stand_in import BF16, FP16, FP32

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_fp8_rows.py runs the kernels on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
__all__ = ["float8_instructions"]
IN_ONE = [n for n in STORED if why_not_in_one(torch.empty(1), mx.Cast.of(n)) is None]


@pytest.fixture(params=["whole rows", "steps"])
def tiles(request, monkeypatch):
    if request.param == "steps":
        for name in ("CAST", "OPERAND"):
            monkeypatch.setattr(to_row_scaled, name, Tile(128, 128, 1024, 16))


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("cols", [256, 300])
@pytest.mark.parametrize("name", STORED)
def test_a_stored_operand_is_rescaled_bit_for_bit(tiles, name, cols):
    operand = stored(name, 18, cols)
    check_rows(rows_of_operand(matrix_of(operand), 16), row_scaled(operand), cols)


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("cols", [256, 300])
@pytest.mark.parametrize("name", IN_ONE)
@pytest.mark.pairs
def test_a_cast_to_rows_is_quantize_then_rescale(tiles, name, cols, dtype):
    x, cast = values(15, cols, dtype), mx.Cast.of(name)
    operand = encode(x, cast)
    made, expected = rows_of_values(x, cast), row_scaled(operand)
    check_rows(made, expected, cols)
    out_of_range = expected.out_of_range.bool()
    assert torch.equal(made[3][out_of_range], operand.scale[out_of_range]) and (out_of_range.any() or dtype is FP16)


@pytest.mark.parametrize("mode", ["floor", "ceil", "even"])
def test_every_scale_rule(mode):
    x, cast = values(15, 128, BF16), mx.Cast.of("mxfp6", mode)
    check_rows(rows_of_values(x, cast), row_scaled(encode(x, cast)), 128)


def test_strided_values_and_codes():
    x, cast = values(15, 128, BF16), mx.Cast.of("mxfp8")
    wide = torch.full((17, 150), float("nan"), dtype=BF16)
    wide[1:16, 9:137] = x
    check_rows(rows_of_values(wide[1:16, 9:137], cast), row_scaled(encode(x, cast)), 128)
    operand = encode(x, cast)
    codes = operand.data.view(torch.uint8).t().contiguous().t().view(operand.data.dtype)
    other = Operand(codes, operand.scale.t().contiguous().t(), None, operand.format, operand.shape)
    check_rows(rows_of_operand(matrix_of(other), 1), row_scaled(operand), 128)


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("name", STORED)
def test_stored_operands_with_float8_instructions(float8_instructions, name):
    operand = stored(name, 18, 256)
    if operand.format.element.name == "e4m3":
        operand.data.view(torch.uint8)[2, 3], operand.data.view(torch.uint8)[3, 5] = 0x7F, 0xFF
    expected = row_scaled(operand)
    check_rows(rows_of_operand(matrix_of(operand), 16), expected, 256)
    values_of_nan = expected.codes[~expected.out_of_range.bool()].view(torch.float8_e4m3fn).isnan()
    assert (expected.codes[~expected.out_of_range.bool()][values_of_nan] == 0x7F).all()


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("name", IN_ONE)
def test_casts_with_float8_instructions(float8_instructions, tiles, name, dtype):
    """Blocks with a NaN or an infinity have the NaN code in all places, as after any other cast."""
    x, cast = values(15, 300, dtype), mx.Cast.of(name)
    operand = encode(x, cast)
    check_rows(rows_of_values(x, cast), row_scaled(operand), 300)
