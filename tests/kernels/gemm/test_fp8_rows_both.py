"""Row-scaled operands of a matrix and of its transpose in two passes: bitwise those of two casts."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.kernels.operands import Form, RowOperand, Unquantized, sections, values_of_rows
from mxtensor.kernels.quantize import to_row_scaled_both, triton_common
from mxtensor.kernels.quantize.to_row_scaled_both import empty_operand, rows_of_both, wants_rows, why_not_both
from mxtensor.numerics.reference import decode, encode
from mxtensor.numerics.row_scaled import row_scaled
from tests.helpers.row_scaled import check_rows, values
from tests.helpers.stand_in import BF16

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_fp8_rows.py runs the kernels on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp8[1x64]", "float8_e4m3_1x128_pow2", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2[1x64]"]


def both_ways(rows, cols):
    """Values with special rows, and with special columns."""
    x = values(rows, cols).float()
    half = cols // 2
    x[:, half:] = values(cols - half, rows).t().float()
    return x.to(BF16)


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    monkeypatch.setattr(to_row_scaled_both, "BUSY", 0)
    monkeypatch.setattr(triton_common, "EXPONENT_TILE", (16, 4))
    monkeypatch.setattr(triton_common, "ROWS_FIRST_TILE", (256, triton_common.ROWS_FIRST_TILE[1]))
    for form in triton_common.ROW_SCALED_TILES:
        monkeypatch.setitem(triton_common.ROW_SCALED_TILES, form, (1, 16, 4))


def check(made, x, cast):
    operand = encode(x, cast)
    expected = row_scaled(operand, unlimited_range=True)
    check_rows(made[:3], expected, x.shape[1])
    out_of_range = expected.out_of_range.bool()
    assert torch.equal(made.scale[out_of_range], operand.scale[out_of_range])
    assert made.shape == tuple(x.shape) and made.format is cast.format
    return out_of_range.any()


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("shape", [(32, 64), (64, 96), (48, 160)])
@pytest.mark.parametrize("name", FORMATS)
def test_both_operands_are_those_of_two_casts(name, shape):
    x, cast = both_ways(*shape), mx.Cast.of(name)
    row, column = rows_of_both(x, cast)
    check(to_row_scaled_both.PAIR.run(x, cast, Form.ROWS, None)[0], x, cast)
    assert check(row, x, cast) | check(column, x.t().contiguous(), cast)
    alone, other = rows_of_both(x, cast, rowwise=False)
    assert alone is None
    for one, two in zip(column[:3], other[:3], strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e3m2[1x64]"])
def test_rows_that_do_not_fit_into_registers_are_cast_with_the_columns(monkeypatch, name):
    x, cast = both_ways(64, 96), mx.Cast.of(name)
    launched, whole = [], to_row_scaled_both.launch
    monkeypatch.setattr(
        to_row_scaled_both, "launch", lambda kernel, *a: (launched.append(kernel.fn.__name__), whole(kernel, *a))
    )
    for widest, first in ((96, "rows_and_column_exponents"), (95, "exponents_of_both")):
        monkeypatch.setattr(to_row_scaled_both, "WIDEST", widest)
        row, column = rows_of_both(x, cast)
        assert check(row, x, cast) | check(column, x.t().contiguous(), cast)
        assert launched == [first, "cast_both_to_rows"]
        launched.clear()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_of_other_dtypes_take_a_cast_each_way(dtype):
    x, cast = values(32, 64, dtype), mx.Cast.of("mxfp8")
    row, column = rows_of_both(x, cast)
    check(row, x, cast), check(column, x.t().contiguous(), cast)
    assert row.memory is not None and column.memory is not None
    assert rows_of_both(x, cast, rowwise=False)[0] is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["floor", "even"])
def test_other_scale_rules_and_strided_values(mode):
    wide = torch.full((70, 120), float("nan"), dtype=BF16)
    wide[2:66, 8:104] = both_ways(64, 96)
    x, cast = wide[2:66, 8:104], mx.Cast.of("mxfp8", mode)
    row, column = rows_of_both(x, cast)
    check(row, x, cast)
    check(column, x.t().contiguous(), cast)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("shape", [(32, 64), (64, 96), (64, 160)])
@pytest.mark.parametrize("name", ["mxfp8[32x32]", "mxfp4[32x32]", "mxfp8_e5m2[64x64]", "float8_e4m3_128x128_pow2"])
def test_square_blocks_serve_both_ways(name, shape):
    cast, size = mx.Cast.of(name), mx.Cast.of(name).format.block[0]
    shape = [n + -n % size for n in shape]
    x = (torch.randn(shape) * 2.0 ** (3.0 * (torch.arange(shape[1]) // 32))).to(BF16)
    x[0, :size], x[5] = 0, 0  # zeros in blocks that have other rows
    x[:, -1] *= 2.0**90  # out of range
    if shape[0] > size:
        x[-1, 3] = float("inf")
    row, column = rows_of_both(x, cast)
    assert check_square(row, x, cast) | check_square(column, x.t().contiguous(), cast)
    alone, none = to_row_scaled_both.PAIR.run(x, cast, Form.ROWS, None)
    assert none is None and torch.equal(alone.codes, row.codes)
    stack = torch.stack([x, 2 * x.flip(0)])
    row, column = rows_of_both(stack, cast)
    for i, one in enumerate(stack):
        for made, matrix in ((row, one), (column, one.t().contiguous())):
            high = len(matrix)
            part = slice(i * high, (i + 1) * high)
            check_rows(
                [t[part] for t in made[:3]], row_scaled(encode(matrix, cast), unlimited_range=True), matrix.shape[1]
            )


def check_square(made, x, cast):
    """``check`` of square blocks: scales belong to several rows, and are written if one is out of range."""
    operand = encode(x, cast)
    expected = row_scaled(operand, unlimited_range=True)
    check_rows(made[:3], expected, x.shape[1])
    out_of_range = expected.out_of_range.bool().view(-1, cast.format.block[0]).any(1)
    assert torch.equal(made.scale[out_of_range], operand.scale[out_of_range])
    return out_of_range.any()


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3[1x64]", "mxfp6_e3m2"])
def test_random_numbers_are_those_of_two_casts(name):
    """The same value, and the same row, are rounded by the same word as in a cast to codes."""
    x, cast = both_ways(64, 96), mx.Cast.of(name, "rceil", "stochastic", 2**33 + 5)
    row, column = rows_of_both(x, cast)
    other = replace(cast, seed=cast.seed + 1)
    assert check(row, x, cast) | check(column, x.t().contiguous(), other)
    assert not torch.equal(row.codes, rows_of_both(x, other)[0].codes)
    alone, none = to_row_scaled_both.PAIR.run(x, cast, Form.ROWS, None)
    assert none is None and torch.equal(alone.codes, row.codes)
    flipped = to_row_scaled_both.PAIR.run(x.t(), cast, Form.ROWS, Form.ROWS)
    assert check(flipped[0], x.t().contiguous(), cast) | check(flipped[1], x, other)


def test_only_bfloat16_to_few_bits_is_rounded_stochastically():
    for name, dtype in (("mxfp8", BF16), ("mxfp4", torch.float32)):
        reason = why_not_both(torch.empty(32, 64, dtype=dtype), mx.Cast.of(name, rounding="stochastic"))
        assert "rounds bfloat16 to fewer than 8 bits stochastically" in reason


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_the_values_of_an_operand_are_those_of_its_codes_within_the_bound(name):
    x, cast = torch.randn(32, 64).to(BF16), mx.Cast.of(name)
    x[3, :32] *= 2.0**30
    x[4] *= 2.0**100
    row, _ = rows_of_both(x, cast)
    exact = decode(encode(x, cast), torch.float32)
    assert row.out_of_range.tolist() == [int(i == 4) for i in range(32)]
    assert torch.equal(values_of_rows(row)[4], exact[4])
    change = (values_of_rows(row) - exact).abs()
    assert (change <= 2.0**-10 * row.row_scale.nan_to_num(1.0)).all()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "reason"),
    [
        ("mxfp4[1x16]", (32, 64), BF16, "casts blocks of 32 values or more"),
        ("mxfp8", (32, 72), BF16, "multiples of 16 rows and columns or a stack of them, not (32, 72)"),
        ("mxfp8", (2, 2, 32, 64), BF16, "needs a matrix of multiples of 16 rows and columns or a stack of them"),
        ("mxfp8", (2, 40, 64), BF16, "not (2, 40, 64)"),
        ("mxfp8", (32, 64), torch.float64, "not for float64"),
        ("nvfp4", (32, 64), BF16, "powers of two"),
        ("mxfp8[32x32]", (32, 64), torch.float32, "blocks along rows"),
        ("mxfp8[32x32]", (48, 64), BF16, "multiples of 32 rows and columns"),
    ],
)
def test_what_is_refused(name, shape, dtype, reason):
    assert reason in why_not_both(torch.empty(shape, dtype=dtype), mx.Cast.of(name))


def test_a_traced_cast_has_the_shapes_of_the_eager_one(pretend):
    pretend((9, 0))
    cast = mx.Cast.of("mxfp8")
    x = torch.randn(32, 64).to(BF16)
    eager = [side.memory for side in rows_of_both(x, cast)]
    op = torch.ops.mxtensor.cast_both_to_rows
    arguments = ("mxfp8_e4m3", "rceil", "nearest", None, 0.0)
    with FakeTensorMode():
        fake = op(torch.empty(32, 64, dtype=BF16), *arguments, True)
        assert len(op(torch.empty(32, 64, dtype=BF16), *arguments, False)) == 1
    assert [(t.shape, t.stride(), t.dtype) for t in fake] == [(t.shape, t.stride(), t.dtype) for t in eager]
    with pytest.raises(ValueError, match="rounds bfloat16 to fewer than 8 bits stochastically"):
        op(x, "mxfp8", "rceil", "stochastic", 3, 0.0, True)


@pytest.mark.parametrize("shape", [(32, 64), (48, 80), (16, 16)])
def test_an_operand_is_one_memory(shape):
    column = empty_operand(shape, mx.Cast.of("mxfp8"), torch.device("cpu"))
    memory, rebuilt = column.memory, RowOperand.inside(column.memory, column.format, column.shape)
    slices, size = sections(column.format, column.shape)
    ends = [start + size for start, size in slices]
    assert all(start % 16 == 0 for start, _ in slices) and memory.numel() == size >= ends[-1]
    assert all(end <= start for end, (start, _) in zip(ends, slices[1:], strict=False))
    for part, same, (start, length) in zip(column[:4], rebuilt[:4], slices, strict=True):
        assert part.data_ptr() == memory.data_ptr() + start and part.nbytes == length
        assert (same.shape, same.dtype, same.data_ptr()) == (part.shape, part.dtype, part.data_ptr())


def test_operands_that_are_codes_already_are_not_wanted_as_rows():
    x, cast = torch.randn(32, 64).to(BF16), mx.Cast.of("mxfp8")
    plain, row = Unquantized(x, cast), rows_of_both(x, cast)[0]
    assert wants_rows(plain, plain) and wants_rows(plain, row)
    assert not wants_rows(plain, encode(x, cast)) and not wants_rows(plain, x)
