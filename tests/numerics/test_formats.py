"""Formats are rows: the whole table, the names that lead to a row, other blocks, and where operands can be split."""

import copy
import pickle
import re
from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor import FORMATS, Format, Orientation, get_format
from mxtensor.numerics.choices import ScaleCalculationMode
from mxtensor.numerics.formats import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2, FULL

MX_FORMATS = [f for f in FORMATS.values() if f.scale.name == "e8m0"]


def assert_lines(found: list[str], published: str) -> None:
    """Assert that the published rows are among those found, in this order. Other rows may be added."""
    wanted = published.splitlines()
    assert [line for line in found if line in wanted] == wanted


def test_the_published_formats():
    lines = [
        f"{f.name:24} {f.element.name:4} {f.scale.name:12} {f.block!s:10} {f.bits_per_value:8.6g} "
        f"{'global' if f.global_scale else '-':6} {f.data_shape((130, 200))!s:10} {f.scale_shape((130, 200))}"
        for f in FORMATS.values()
    ]
    assert_lines(
        lines,
        """\
mxfp8_e4m3               e4m3 e8m0         (1, 32)        8.25 -      (130, 200) (130, 7)
mxfp8_e5m2               e5m2 e8m0         (1, 32)        8.25 -      (130, 200) (130, 7)
mxfp6_e3m2               e3m2 e8m0         (1, 32)        6.25 -      (130, 150) (130, 7)
mxfp6_e2m3               e2m3 e8m0         (1, 32)        6.25 -      (130, 150) (130, 7)
mxfp4_e2m1               e2m1 e8m0         (1, 32)        4.25 -      (130, 100) (130, 7)
mxint8                   int8 e8m0         (1, 32)        8.25 -      (130, 200) (130, 7)
nvfp4                    e2m1 ue4m3        (1, 16)         4.5 global (130, 100) (130, 13)
nvfp4_single_level       e2m1 ue4m3        (1, 16)         4.5 -      (130, 100) (130, 13)
float8_e4m3_tensor       e4m3 float32      (-1, -1)          8 -      (130, 200) (1, 1)
float8_e4m3_row          e4m3 float32      (1, -1)           8 -      (130, 200) (130, 1)
float8_e4m3_1x128        e4m3 float32      (1, 128)       8.25 -      (130, 200) (130, 2)
float8_e4m3_128x128      e4m3 float32      (128, 128)  8.00195 -      (130, 200) (2, 2)
float8_e5m2_tensor       e5m2 float32      (-1, -1)          8 -      (130, 200) (1, 1)
float8_e5m2_row          e5m2 float32      (1, -1)           8 -      (130, 200) (130, 1)
float8_e5m2_1x128        e5m2 float32      (1, 128)       8.25 -      (130, 200) (130, 2)
float8_e5m2_128x128      e5m2 float32      (128, 128)  8.00195 -      (130, 200) (2, 2)
float8_e4m3_tensor_pow2  e4m3 float32_pow2 (-1, -1)          8 -      (130, 200) (1, 1)
float8_e4m3_row_pow2     e4m3 float32_pow2 (1, -1)           8 -      (130, 200) (130, 1)
float8_e4m3_1x128_pow2   e4m3 float32_pow2 (1, 128)       8.25 -      (130, 200) (130, 2)
float8_e4m3_128x128_pow2 e4m3 float32_pow2 (128, 128)  8.00195 -      (130, 200) (2, 2)
float8_e5m2_tensor_pow2  e5m2 float32_pow2 (-1, -1)          8 -      (130, 200) (1, 1)
float8_e5m2_row_pow2     e5m2 float32_pow2 (1, -1)           8 -      (130, 200) (130, 1)
float8_e5m2_1x128_pow2   e5m2 float32_pow2 (1, 128)       8.25 -      (130, 200) (130, 2)
float8_e5m2_128x128_pow2 e5m2 float32_pow2 (128, 128)  8.00195 -      (130, 200) (2, 2)""",
    )


def test_the_published_elements():
    elements = dict.fromkeys(f.element for f in FORMATS.values())
    lines = [
        f"{e.name} bits={e.bits} max={e.max} emax={e.emax} bias={e.bias} mantissa={e.mantissa_bits} {e.dtype} "
        f"{e.packing[0]} in {e.packing[1]} nan={e.nan_code:#x} integer={e.is_integer}"
        for e in elements
    ]
    assert_lines(
        lines,
        """\
e4m3 bits=8 max=448.0 emax=8 bias=7 mantissa=3 torch.float8_e4m3fn 1 in 1 nan=0x7f integer=False
e5m2 bits=8 max=57344.0 emax=15 bias=15 mantissa=2 torch.float8_e5m2 1 in 1 nan=0x7f integer=False
e3m2 bits=6 max=28.0 emax=4 bias=3 mantissa=2 torch.uint8 4 in 3 nan=0x0 integer=False
e2m3 bits=6 max=7.5 emax=2 bias=1 mantissa=3 torch.uint8 4 in 3 nan=0x0 integer=False
e2m1 bits=4 max=6.0 emax=2 bias=1 mantissa=1 torch.uint8 2 in 1 nan=0x0 integer=False
int8 bits=8 max=1.984375 emax=0 bias=0 mantissa=6 torch.int8 1 in 1 nan=0x0 integer=True""",
    )


def test_aliases_lead_to_rows_and_are_not_listed():
    assert not set(FORMATS) & set(FORMATS.aliases)
    assert_lines(
        [f"{a} -> {get_format(a)}" for a in FORMATS.aliases],
        """\
mxfp8 -> mxfp8_e4m3
mxfp6 -> mxfp6_e2m3
mxfp4 -> mxfp4_e2m1
fp6_e3m2 -> mxfp6_e3m2
fp6_e2m3 -> mxfp6_e2m3
float8_tensor -> float8_e4m3_tensor
float8_tensor_pow2 -> float8_e4m3_tensor_pow2
float8_row -> float8_e4m3_row
float8_row_pow2 -> float8_e4m3_row_pow2
float8_1x128 -> float8_e4m3_1x128
float8_1x128_pow2 -> float8_e4m3_1x128_pow2
float8_128x128 -> float8_e4m3_128x128
float8_128x128_pow2 -> float8_e4m3_128x128_pow2
torch.float8_e4m3fn -> mxfp8_e4m3
torch.float8_e5m2 -> mxfp8_e5m2
torch.float4_e2m1fn_x2 -> mxfp4_e2m1
torch.int8 -> mxint8""",
    )
    for alias, name in FORMATS.aliases.items():
        assert FORMATS[alias] is FORMATS[name] and alias in FORMATS


def test_get_format_takes_rows_names_dtypes_and_blocks():
    row = FORMATS["mxfp8_e4m3"]
    assert get_format(row) is row
    assert get_format("mxfp8") is row
    assert get_format(torch.float8_e4m3fn) is row
    assert get_format(torch.float8_e5m2) is FORMATS["mxfp8_e5m2"]
    assert get_format(torch.float4_e2m1fn_x2) is FORMATS["mxfp4_e2m1"]
    assert get_format(torch.int8) is FORMATS["mxint8"]
    assert get_format(DTYPE_FP6_E2M3) is FORMATS["mxfp6_e2m3"]
    assert get_format(DTYPE_FP6_E3M2) is FORMATS["mxfp6_e3m2"]
    assert get_format("mxfp8[32x32]") == row.with_block((32, 32))
    assert get_format("mxfp8_e4m3[1x32]") is row


@pytest.mark.parametrize("name", ["mxfp9", "", "mxfp8[32]", torch.complex64, None, 8])
def test_an_unknown_format_names_the_formats(name):
    with pytest.raises(ValueError) as error:
        get_format(name)
    start = re.escape(f"unknown format {name!r}; ") + r"(did you mean .*\? T|t)he formats are mxfp8_e4m3, mxfp8_e5m2, "
    assert re.match(start, str(error.value))
    for known in [*FORMATS, "mxfp8", "mxfp4", "float8_row"]:
        assert known in str(error.value)


@pytest.mark.parametrize("name", [torch.float32, torch.bfloat16, "half"])
def test_a_dtype_in_high_precision_is_not_a_format(name):
    with pytest.raises(ValueError, match=r"unknown format .*; it is not quantized: leave the layer out by filter_fn"):
        get_format(name)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_with_block_changes_the_block_alone(name, size):
    row = FORMATS[name]
    for block, shape in (((1, size), (5, -(-200 // size))), ((size, size), (1, -(-200 // size)))):
        other = row.with_block(size if block[0] == 1 else block)
        assert (other.block, other.element, other.scale) == (block, row.element, row.scale)
        assert other.global_scale == row.global_scale
        assert other.scale_shape((5, 200)) == shape
        assert other.data_shape((5, 200)) == row.data_shape((5, 200))
        assert other.square == (block[0] == block[1]) and other.rows_are_blocked == other.square
        assert get_format(other.name) == other
        assert other.with_block(block) == other
        if row.block[1] != FULL:
            assert other.with_block(row.block) is row


def test_a_block_is_part_of_the_name():
    tile = FORMATS["mxfp8"].with_block((32, 32))
    assert (tile.name, str(tile), repr(tile)) == (
        "mxfp8_e4m3[32x32]",
        "mxfp8_e4m3[32x32]",
        "Format('mxfp8_e4m3[32x32]')",
    )
    assert tile.with_block(64).name == "mxfp8_e4m3[1x64]"
    assert tile.bits_per_value == 8 + 8 / 1024


@pytest.mark.parametrize("block", [0, 8, 48, 256, -1, (32, 64), (2, 32), (32, 1), (FULL, FULL), (0, 32)])
def test_other_blocks_are_refused(block):
    message = r"block .* is not available; choose one of 16, 32, 64, 128 along the contraction, or a square tile"
    with pytest.raises(ValueError, match=message) as error:
        FORMATS["mxfp8"].with_block(block)
    assert f"block {block!r} " in str(error.value)
    if isinstance(block, tuple) and min(block) >= 0:
        with pytest.raises(ValueError, match=message):
            get_format(f"mxfp8[{block[0]}x{block[1]}]")


@pytest.mark.parametrize(
    ("name", "shape", "data", "scale"),
    [
        ("mxfp8", (33,), (33,), (2,)),
        ("mxfp8", (0,), (0,), (0,)),
        ("mxfp8", (0, 64), (0, 64), (0, 2)),
        ("mxfp8", (7, 0), (7, 0), (7, 0)),
        ("mxfp8", (2, 3, 4, 100), (2, 3, 4, 100), (2, 3, 4, 4)),
        ("mxfp6_e2m3", (3, 5), (3, 6), (3, 1)),
        ("mxfp4", (3, 33), (3, 17), (3, 2)),
        ("nvfp4", (3, 33), (3, 17), (3, 3)),
        ("mxfp8[32x32]", (33,), (33,), (2,)),
        ("mxfp8[32x32]", (5, 33, 65), (5, 33, 65), (5, 2, 3)),
        ("float8_128x128", (129, 1), (129, 1), (2, 1)),
        ("float8_row", (2, 3, 100), (2, 3, 100), (2, 3, 1)),
        ("float8_row", (2, 0), (2, 0), (2, 0)),
        ("float8_tensor", (2, 3, 100), (2, 3, 100), (1, 1, 1)),
        ("float8_tensor", (100,), (100,), (1,)),
        ("float8_tensor", (0, 8), (0, 8), (0, 1)),
    ],
)
def test_shapes_of_data_and_scale(name, shape, data, scale):
    assert get_format(name).data_shape(shape) == data
    assert get_format(name).scale_shape(shape) == scale


@pytest.mark.parametrize("name", [*FORMATS, "mxfp8[32x32]", "mxfp4[1x16]"])
def test_rows_are_values(name):
    row = get_format(name)
    for other in (pickle.loads(pickle.dumps(row)), copy.deepcopy(row), get_format(row.name)):
        assert other == row and hash(other) == hash(row)
    assert len({row, *FORMATS.values()}) == len(FORMATS) + (row not in FORMATS.values())
    with pytest.raises(AttributeError):
        row.name = "other"
    with pytest.raises(TypeError):
        FORMATS[name] = row


def test_orientations_and_modes_by_name():
    assert [o.label for o in (Orientation.ROWWISE, Orientation.COLUMNWISE, Orientation.BOTH)] == [
        "rowwise",
        "columnwise",
        "both",
    ]
    assert Orientation.ROWWISE | Orientation.COLUMNWISE is Orientation.BOTH
    for orientation in (Orientation.ROWWISE, Orientation.COLUMNWISE, Orientation.BOTH):
        assert Orientation.of(orientation) is Orientation.of(orientation.label) is orientation
    with pytest.raises(
        ValueError, match=r"unknown orientation 'diagonal'; choose 'rowwise' .*, 'columnwise' .* or 'both'"
    ):
        Orientation.of("diagonal")
    for mode in ScaleCalculationMode:
        assert ScaleCalculationMode.of(mode) is ScaleCalculationMode.of(mode.value.upper()) is mode
    with pytest.raises(ValueError, match="unknown scaling 'round'; choose one of floor, rceil, ceil, even"):
        ScaleCalculationMode.of("round")


def test_torchao_modes_are_accepted_by_value():
    torchao = pytest.importorskip("torchao.prototype.mx_formats.config")
    for mode in ScaleCalculationMode:
        assert ScaleCalculationMode.of(torchao.ScaleCalculationMode(mode.value)) is mode


@pytest.mark.parametrize(
    ("format", "dim", "cuts", "reason"),
    [
        ("mxfp8", -1, (32, 96), None),
        ("mxfp8", -1, (48,), "mxfp8_e4m3 has blocks of 32 values in this dimension, and 48 is not a multiple of 32"),
        ("mxfp8", -2, (1, 33), None),
        ("mxfp8[32x32]", -2, (64, 48), "has blocks of 32 values in this dimension, and 48 is not"),
        ("mxfp8[32x32]", -3, (5,), None),
        ("nvfp4", -1, (16,), None),
        ("nvfp4", -1, (8,), "nvfp4 has blocks of 16 values"),
        ("float8_row", -1, (7,), None),
        ("float8_row", -2, (7,), None),
        ("float8_tensor", -2, (7,), None),
    ],
)
def test_where_an_operand_can_be_split(format, dim, cuts, reason):
    found = get_format(format).why_not_split(dim, *cuts)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("format", "dim", "reason"),
    [
        ("mxfp8", -1, None),
        ("float8_128x128", -2, None),
        ("float8_row", -2, None),
        ("float8_row", -1, "float8_e4m3_row has one scale for all values of this dimension"),
        ("float8_tensor", -2, "float8_e4m3_tensor has one scale for the whole tensor"),
        ("nvfp4", -2, "nvfp4 has one scale for the whole tensor"),
        ("nvfp4_single_level", -2, None),
    ],
)
def test_scales_that_depend_on_two_parts_forbid_to_quantize_them_separately(format, dim, reason):
    assert get_format(format).why_not_split(dim, 128, scales_differ=True) == reason


def test_every_format_is_a_format():
    assert all(isinstance(f, Format) and f.name == name for name, f in FORMATS.items())
    assert {f.block for f in MX_FORMATS} == {(1, 32)}
    assert not any(f.global_scale for f in MX_FORMATS)


def test_replace_changes_the_largest_value():
    element = mx.FORMATS["mxfp8"].element
    assert replace(element, max=416.0).max == 416.0 and replace(element, name="other").max == 448.0
    with pytest.raises(ValueError, match=r"max 6\.5 needs more than 1 mantissa bits"):
        replace(mx.FORMATS["mxfp4"].element, max=6.5)
