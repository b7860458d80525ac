"""Row-scaled operands of stacks of matrices and of rows in groups: bitwise those of each matrix and of each group."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.kernels.operands import Form
from mxtensor.kernels.quantize import to_row_scaled_both, triton_common
from mxtensor.kernels.quantize.choose_pair import cast_groups, cast_rows_first
from mxtensor.kernels.quantize.to_row_scaled_both import (
    columns_by_exponents,
    rows_and_column_exponents,
    rows_of_both,
    why_not_both,
    why_not_rows_first,
)
from mxtensor.numerics.groups import Groups
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import element_codes, row_scaled
from tests.helpers.row_scaled import check_rows, values
from tests.helpers.stand_in import BF16

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the same runs on the device")
FORMATS = ["mxfp8", "mxfp8_e5m2", "mxfp8[1x64]", "float8_e4m3_1x128_pow2", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2[1x64]"]
SIZES = [5, 0, 40, 33]


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(to_row_scaled_both, "BUSY", 0)
        monkeypatch.setattr(triton_common, "EXPONENT_TILE", (32, 4))
        monkeypatch.setattr(triton_common, "ROWS_FIRST_TILE", (256, triton_common.ROWS_FIRST_TILE[1]))
        for form in triton_common.ROW_SCALED_TILES:
            monkeypatch.setitem(triton_common.ROW_SCALED_TILES, form, (1, 32, 4))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Memory of operands starts with codes of values."""
    whole = to_row_scaled_both.empty_operand

    def empty(*args):
        made = whole(*args)
        made.memory.fill_(0x35)
        return made

    monkeypatch.setattr(to_row_scaled_both, "empty_operand", empty)


def wide(count, rows, cols, device="cpu"):
    """Matrices with special rows and special columns, other ones in each."""
    made = []
    for i in range(count):
        x = values(rows, cols).float()
        half = cols // 2
        x[:, half:] = values(cols - half, rows).t().float() * 2.0**i
        made.append(x.roll(3 * i, 0))
    return torch.stack(made).to(device, BF16)


def check_operand(codes, row_scale, out_of_range, scale, x, cast):
    """Against the definition of one matrix; whether a row of it is out of range."""
    operand = encode(x.cpu(), cast)
    expected = row_scaled(operand, unlimited_range=True)
    check_rows((codes.cpu(), row_scale.cpu(), out_of_range.cpu()), expected, x.shape[1])
    flagged = expected.out_of_range.bool()
    assert torch.equal(scale.cpu()[flagged], operand.scale[flagged])
    return bool(flagged.any())


def check_stack(made, x, cast):
    """Each matrix of a stack (E, N, K)."""
    assert made.shape == tuple(x.shape) and made.format is cast.format and made.groups == 1
    count, high, _ = x.shape
    found = False
    for i in range(count):
        part = slice(i * high, (i + 1) * high)
        found |= check_operand(*(t[part] for t in made[:4]), x[i], cast)
    return found


def check_groups(row, column, x, cast, ends, block):
    """The rows, and the columns of each group and of what follows the last one."""
    if row is not None:
        check_operand(*row[:4], x, cast)
    count, (rows, cols) = len(ends), x.shape
    length = Groups(torch.tensor(ends, dtype=torch.int32), rows, block).length
    assert column.shape == (cols, length) and column.groups == count
    start = column_start = 0
    found = False
    for i, end in enumerate(ends):
        padded = max(-(-(end - start) // block), 1) * block
        part = torch.zeros(padded, cols, dtype=x.dtype)
        part[: end - start] = x[start:end].cpu()
        own, here = slice(i * cols, (i + 1) * cols), slice(column_start, column_start + padded)
        blocks = slice(column_start // cast.format.block[1], (column_start + padded) // cast.format.block[1])
        four = column.codes[:, here], column.row_scale[own], column.out_of_range[own], column.scale[:, blocks]
        found |= check_operand(*four, part.t().contiguous(), cast)
        start, column_start = end, column_start + padded
    assert not column.codes[:, column_start:].any()
    return found


def ends_of(sizes):
    return torch.tensor(sizes).cumsum(0).tolist()


def stack_case(device, name, shape):
    x, cast = wide(*shape, device), mx.Cast.of(name)
    row, column = rows_of_both(x, cast)
    found = check_stack(row, x, cast)
    assert found | check_stack(column, x.mT.contiguous(), cast)
    alone, other = rows_of_both(x, cast, rowwise=False)
    assert alone is None
    check_stack(other, x.mT.contiguous(), cast)
    row, exponents = rows_and_column_exponents(x, cast)
    check_stack(row, x, cast)
    check_stack(columns_by_exponents(x, cast, exponents), x.mT.contiguous(), cast)


def groups_case(device, name, sizes, after, cols, block):
    rows = sum(sizes) + after
    rows += -rows % 16
    x, cast = wide(1, rows, cols, device)[0], mx.Cast.of(name)
    ends = ends_of(sizes)
    groups = Groups(torch.tensor(ends, dtype=torch.int32, device=device), rows, block)
    assert why_not_both(x, cast, groups) is None
    row, column = rows_of_both(x, cast, groups=groups)
    found = check_groups(row, column, x, cast, ends, block)
    alone, other = rows_of_both(x, cast, False, groups)
    assert alone is None
    check_groups(None, other, x, cast, ends, block)
    return found


def random_case(device, name, sizes, after, cols):
    """The words of stochastic rounding are those of whole casts: of the rows, and of the padded matrix transposed."""
    rows = sum(sizes) + after
    x, cast = wide(1, rows, cols, device)[0], mx.Cast.of(name, rounding="stochastic", seed=2**40 + 3)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    groups = Groups(ends, rows, 32)
    row, column = rows_of_both(x, cast, groups=groups)
    check_operand(*row[:4], x, cast)
    whole = encode(groups.padded(x).t().contiguous().cpu(), replace(cast, seed=cast.seed + 1))
    values, column_start = element_codes(whole), 0
    for i, n in enumerate(sizes):
        until = column_start + max(-(-n // 32), 1) * 32
        blocks, own = whole.scale[:, column_start // 32 : until // 32], slice(i * cols, (i + 1) * cols)
        bits = cast.format.element.bits
        packed = whole.data[:, column_start * bits // 8 : until * bits // 8]
        part = Operand(packed, blocks, None, cast.format, (cols, until - column_start))
        assert torch.equal(element_codes(part), values[:, column_start:until])
        expected = row_scaled(part, unlimited_range=True)
        made = column.codes[:, column_start:until], column.row_scale[own], column.out_of_range[own]
        check_rows([t.cpu() for t in made], expected, until - column_start)
        column_start = until


# ---------------------------------------------------------------------------------------------- in the interpreter


@interpreted
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("shape", [(2, 32, 64), (2, 48, 80), (3, 64, 32)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_operands_of_a_stack_are_those_of_its_matrices(name, shape):
    stack_case("cpu", name, shape)


@interpreted
@pytest.mark.exhaustive
@pytest.mark.parametrize("sizes, after", [([5, 0, 33], 10), (SIZES, 20), ([0, 0, 64], 0), ([40, 40], 0), ([0, 0], 32)])
@pytest.mark.parametrize("name, block", [*zip(FORMATS, (32, 32, 64, 128, 32, 32, 64), strict=True), ("mxfp8", 64)])
def test_the_operands_of_groups_are_those_of_each_group(name, block, sizes, after):
    groups_case("cpu", name, sizes, after, 48, block)


@interpreted
@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e3m2"])
def test_the_random_numbers_of_groups_are_those_of_the_padded_matrix(name):
    random_case("cpu", name, [37, 0, 40], 3, 48)


@pytest.mark.exhaustive
@interpreted
def test_a_transposed_stack_is_read_in_the_order_of_memory():
    x, cast = wide(2, 16, 32).mT, mx.Cast.of("mxfp8")
    row, column = to_row_scaled_both.PAIR.run(x, cast, Form.ROWS, Form.ROWS)
    check_stack(row, x.contiguous(), cast), check_stack(column, x.mT.contiguous(), cast)
    row, column = to_row_scaled_both.PAIR.run(x, cast, Form.ROWS, None)
    assert column is None and check_stack(row, x.contiguous(), cast)
    row, column = to_row_scaled_both.PAIR.run(x, cast, None, Form.ROWS)
    assert row is None and check_stack(column, x.mT.contiguous(), cast)


@pytest.mark.exhaustive
@interpreted
def test_a_stack_in_float32_takes_a_cast_each_way():
    x, cast = wide(2, 16, 32).float(), mx.Cast.of("mxfp8")
    row, column = rows_of_both(x, cast)
    check_stack(row, x, cast), check_stack(column, x.mT.contiguous(), cast)


@interpreted
@pytest.mark.exhaustive
@pytest.mark.parametrize("ends", [[90, 10], [200, 300], [-5, 64], [64, 64]])
def test_ends_that_are_not_ends_write_nothing_outside(ends, monkeypatch):
    """The kernels check addresses of nothing: what surrounds the operand stays."""
    cast, x = mx.Cast.of("mxfp8"), torch.randn(64, 48).to(BF16)
    groups = Groups(torch.tensor(ends, dtype=torch.int32), 64, 32)
    guards = []

    def guarded(shape, cast, device, groups=1):
        size = to_row_scaled_both.sections(cast.format, shape, groups)[1]
        memory = torch.full((size + 1024,), 0x5A, dtype=torch.uint8)
        guards.append((memory[:512], memory[512 + size :]))
        return to_row_scaled_both.RowOperand.inside(memory.narrow(0, 512, size), cast.format, shape, groups)

    monkeypatch.setattr(to_row_scaled_both, "empty_operand", guarded)
    row, _ = rows_of_both(x, cast, groups=groups)
    assert len(guards) == 2 and all((t == 0x5A).all() for pair in guards for t in pair)
    if ends == [64, 64]:
        check_operand(*row[:4], x, cast)


def test_what_is_not_cast_by_groups():
    groups = Groups(torch.zeros(2, dtype=torch.int32), 32, 32)
    x, cast = torch.randn(32, 64).to(BF16), mx.Cast.of("mxfp8")
    assert why_not_both(x, cast, groups) is None
    for words, *case in (
        ("casts groups of rows of bfloat16, not float32 (32, 64)", x.float(), cast, groups),
        ("powers of two", x, mx.Cast.of("nvfp4"), groups),
        ("pads groups to 32, 64, 128 rows and whole blocks, not to 96", x, cast, Groups(groups.given, 32, 96)),
        ("not to 32", x, mx.Cast.of("mxfp8[1x64]"), groups),
        ("at most 1023 groups, got 1024", x, cast, Groups(torch.zeros(1024, dtype=torch.int32), 32, 32)),
    ):
        assert words in why_not_both(*case)
    assert cast_groups(x, cast, groups, True) is None and cast_rows_first(x, cast) is None  # on a CPU


def test_which_rows_are_cast_as_they_are_read(monkeypatch):
    monkeypatch.setattr(to_row_scaled_both, "BUSY", 12)
    x, cast = torch.empty(4096, 4096, dtype=BF16), mx.Cast.of("mxfp8")
    assert why_not_rows_first(x, cast) is None
    for words, *case in (
        ("does not fill the device with 64 rows", x[:64], cast),
        ("to nearest, not float32", x.float(), cast),
        ("not bfloat16 to mxfp8_e4m3[32x32]", x, mx.Cast.of("mxfp8[32x32]")),
        ("to nearest", x, mx.Cast.of("mxfp4", rounding="stochastic")),
        ("at most 16384 columns", torch.empty(4096, 16416, dtype=BF16), cast),
    ):
        assert words in why_not_rows_first(*case)


def test_traced_casts_have_the_shapes_of_the_eager_ones(pretend, monkeypatch):
    pretend((9, 0))
    monkeypatch.setattr(to_row_scaled_both, "launch", lambda *_: None)
    cast, x = mx.Cast.of("mxfp8"), torch.randn(48, 64).to(BF16)
    groups = Groups(torch.tensor([30, 40], dtype=torch.int32), 48, 32)
    stack = torch.randn(2, 32, 64).to(BF16)
    arguments = ("mxfp8_e4m3", "rceil", "nearest", None, 0.0)
    eager = [
        [side.memory for side in pair] for pair in (rows_of_both(x, cast, groups=groups), rows_of_both(stack, cast))
    ]
    ops = torch.ops.mxtensor
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_x, fake_stack = torch.empty(48, 64, dtype=BF16), torch.empty(2, 32, 64, dtype=BF16)
        ends = torch.empty(2, dtype=torch.int32)
        fake = [
            ops.cast_groups_to_rows(fake_x, ends, 32, *arguments, True),
            ops.cast_both_to_rows(fake_stack, *arguments, True),
        ]
        assert len(ops.cast_groups_to_rows(fake_x, ends, 32, *arguments, False)) == 1
    for made, other in zip(eager, fake, strict=True):
        assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in other]
    first, second = ops.cast_rows_and_column_exponents, ops.cast_columns_by_exponents
    made = first(stack, *arguments)
    made.append(second(stack, made[1], *arguments))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake_stack = torch.empty(2, 32, 64, dtype=BF16)
        other = first(fake_stack, *arguments)
        other.append(second(fake_stack, other[1], *arguments))
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in other]
    with pytest.raises(ValueError, match="at most 16384 columns in registers, got 32768"):
        first(torch.zeros(16, 32768, dtype=BF16), *arguments)
    with pytest.raises(ValueError, match=r"exponents must have shape \(128,\)"):
        second(stack, made[1][1:], *arguments)
    with pytest.raises(ValueError, match="pads groups to"):
        ops.cast_groups_to_rows(x, groups.given, 96, *arguments, True)


# ---------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(3, 512, 1024), (5, 1040, 96), (2, 48, 2880), (1, 256, 4096)])
@pytest.mark.parametrize("name", FORMATS)
def test_the_operands_of_a_stack_on_the_gpu(name, shape):
    stack_case("cuda", name, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes, after", [([300, 0, 513, 1024, 3], 16), ([0, 0, 2048], 0), ([1] * 70, 100)])
@pytest.mark.parametrize("cols", [96, 1040, 2048])
@pytest.mark.parametrize("name, block", [*zip(FORMATS, (32, 32, 64, 128, 32, 32, 64), strict=True), ("mxfp8", 64)])
def test_the_operands_of_groups_on_the_gpu(name, block, cols, sizes, after):
    groups_case("cuda", name, sizes, after, cols, block)
