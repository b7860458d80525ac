"""The Triton casts are bitwise the reference, run by Triton's interpreter on the CPU.

These tests check arithmetic, tails, strides and addresses. ``test_gpu.py`` has what only a device shows:
its instructions, streams and graphs. A program costs the interpreter as much time as thousands of values do, so that
tiles are small where edges count and large where values do.
"""

import math
from dataclasses import replace

import pytest
import torch

from mxtensor import FORMATS, Cast, get_format
from mxtensor.kernels.quantize import hadamard, triton_columns, triton_rows
from mxtensor.numerics.choices import ScaleCalculationMode
from mxtensor.numerics.derived import swizzle
from mxtensor.numerics.formats import E8M0, FULL, UE4M3
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode, decode_local, encode
from tests.helpers.compare import assert_same_operand, assert_same_values
from tests.kernels.quantize.conftest import set_tiles

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu.py runs the kernels on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),  # numpy's about NaN and Inf
    pytest.mark.usefixtures("guarded_memory", "one_rounding", "whole_reductions"),
]

BLOCKS = [
    "mxfp8_e4m3[32x32]", "mxfp8_e5m2[1x64]", "mxfp6_e2m3[16x16]", "mxfp6_e3m2[1x128]", "mxfp4[1x16]", "mxfp4[64x64]",
    "mxint8[128x128]", "mxint8[1x16]", "nvfp4_single_level[1x128]", "nvfp4[1x64]", "nvfp4[32x32]",
]  # fmt: skip
TWICE = [n for n in FORMATS if n.startswith("float8_e5m2") and n.endswith("_pow2")]
"""Formats whose paths through the kernels are those of e4m3 with these scales and of e5m2 with other scales."""
NAMES = [n for n in (*FORMATS, *BLOCKS) if n not in TWICE]
TWO_COPIES = [n for n in NAMES if get_format(n).block[0] == 1 and get_format(n).block[1] != FULL]
KINDS = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_1x128", "float8_row", "float8_tensor", "mxfp4[16x16]"]
"""One format for each path through the kernels."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODES = list(ScaleCalculationMode)

each_format = pytest.mark.parametrize("name", NAMES)
each_kind = pytest.mark.parametrize("name", KINDS)
each_with_two_copies = pytest.mark.parametrize("name", TWO_COPIES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def values(rows, cols, dtype, specials=True):
    """Rows of every magnitude: subnormal, largest, zero of both signs, and with ``specials`` NaN and infinities."""
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-140, 120, (rows, 1)).float()
    x[rows // 2 :] = torch.randn(rows - rows // 2, cols) * 2.0 ** torch.randint(-4, 5, (1, cols)).float()
    top, low = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x = x.clamp(-top, top)
    x[0, : cols // 2], x[0, cols // 2 :] = -0.0, low * 2.0**-6
    x[1, ::40], x[2, ::3] = -top, low
    x[3] = x[3] * 1e-30
    if specials:
        x[4, cols // 3], x[5, cols // 2], x[6, -1] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def each_values(name, rows, cols, dtype):
    """``values``; also without specials if a scale depends on the whole tensor, because one NaN would decide it."""
    yield values(rows, cols, dtype)
    format = get_format(name)
    if format.global_scale or format.block[0] == FULL:
        yield values(rows, cols, dtype, specials=False)


def surrounded(x, left=4):
    """The same values as a slice of a matrix that is NaN everywhere else, from column ``left``."""
    rows, cols = x.shape
    wide = torch.full((rows + 2, cols + 12), float("nan"), dtype=x.dtype)
    wide[1:-1, left : left + cols] = x
    return wide[1:-1, left : left + cols]


# ---------------------------------------------------------------------------------------------- quantize


@each_dtype
@each_format
def test_quantize_is_encode_for_every_format_and_dtype(name, dtype, small_tiles):
    for x in each_values(name, 19, 300, dtype):
        assert_same_operand(triton_rows.quantize(x, Cast.of(name)), encode(x, Cast.of(name)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n in NAMES if get_format(n).scale is E8M0])
def test_every_scale_rule(name, mode, small_tiles):
    cast = Cast.of(name, mode)
    for dtype in (torch.bfloat16, torch.float32):
        x = values(16, 132, dtype)
        assert_same_operand(triton_rows.quantize(x, cast), encode(x, cast))


@pytest.mark.parametrize("shape", [(40, 48), (2, 33, 20)], ids=str)
@each_dtype
def test_a_rotated_columnwise_copy(dtype, shape, small_tiles, monkeypatch):
    x, cast = torch.randn(shape).to(dtype), Cast.of("nvfp4")
    expected = hadamard.quantize_rotated(x, cast, 0xD7E8).operand
    monkeypatch.setattr(hadamard, "quantize_operand", triton_rows.quantize)
    assert_same_operand(hadamard.quantize_rotated(x, cast, 0xD7E8).operand, expected)


@each_kind
def test_tiles_as_they_are_on_a_device(name):
    for dtype in (torch.bfloat16, torch.float32):
        x = values(7, 1093, dtype, specials=False)
        assert_same_operand(triton_rows.quantize(x, Cast.of(name)), encode(x, Cast.of(name)))


@pytest.mark.parametrize("shape", [(16, 128), (32, 256), (16, 132), (17, 256), (9, 130), (8, 131), (9, 1)])
@each_kind
def test_whole_tiles_and_tails_of_rows_columns_blocks_and_groups(name, shape, small_tiles):
    for dtype in (torch.bfloat16, torch.float32):
        x = surrounded(values(*shape, dtype))
        assert_same_operand(triton_rows.quantize(x, Cast.of(name)), encode(x, Cast.of(name)))


PLACES = {
    "columns from an even one": lambda x: surrounded(x, 4),
    "columns from an odd one": lambda x: surrounded(x, 3),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "rows an odd stride apart": lambda x: torch.cat([x, x[:, :1]], 1)[:, :-1],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "stored by columns": lambda x: x.t().contiguous().t(),
    "stored by columns, a part": lambda x: surrounded(x.t().contiguous(), 3).t(),
    "one row many times": lambda x: x[1:2].expand(x.shape[0], -1),
    "one column": lambda x: x[:, :1],
}


@pytest.mark.parametrize("place", PLACES)
@each_kind
def test_strides_and_offsets(name, place, small_tiles):
    for dtype in (torch.bfloat16, torch.float32):
        x = PLACES[place](values(12, 142, dtype, specials=False))
        assert_same_operand(triton_rows.quantize(x, Cast.of(name)), encode(x, Cast.of(name)))


@pytest.mark.parametrize("shape", [(1,), (33,), (300,), (1, 1), (2, 3, 70), (2, 16, 32), (2, 1, 2, 33), (2, 9, 130)])
@each_kind
def test_any_number_of_dimensions(name, shape, small_tiles):
    """Also stacks of matrices with short blocks: a block never crosses into the next matrix."""
    x = torch.randn(shape) * 2.0 ** torch.randint(-20, 20, (*shape[:-1], 1)).float()
    for y in (x, x.bfloat16()):
        assert_same_operand(triton_rows.quantize(y, Cast.of(name)), encode(y, Cast.of(name)))
    if len(shape) > 2:
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert_same_operand(triton_rows.quantize(transposed, Cast.of(name)), encode(transposed, Cast.of(name)))


# ---------------------------------------------------------------------------------------------- whole domains


def every_bfloat16():
    """All 65,536 bfloat16 values, shuffled."""
    words = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    return words[torch.randperm(65536)].view(torch.bfloat16)


def blocks_of(*columns):
    """(512, 128 * 16): in each block of 16 these values, and zeros."""
    x = torch.zeros(65536, 16, dtype=torch.bfloat16)
    for place, column in enumerate(columns):
        x[:, 3 * place] = column
    return x.view(512, 2048)


ELEMENTS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"]
DOMAIN = [f"{name}[1x16]" for name in (*ELEMENTS, "float8_e4m3_1x128", "float8_e5m2_1x128")] + ["nvfp4_single_level"]


@pytest.mark.parametrize("name", DOMAIN)
def test_every_bfloat16_value_as_a_block_of_its_own(name, large_tiles):
    x = blocks_of(every_bfloat16())
    assert_same_operand(triton_rows.quantize(x, Cast.of(name)), encode(x, Cast.of(name)))


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("name", DOMAIN)
def test_every_bfloat16_value_below_a_larger_one(name, large_tiles):
    """Each value v next to a value up to 2^8 times as large, which decides its scale; both signs of each."""
    v = every_bfloat16()
    word = v.view(torch.int16).to(torch.int32)
    larger = word + (torch.randint(0, 9, word.shape) << 7) + torch.randint(0, 128, word.shape)
    w = torch.where((larger & 0x7FFF) < 0x7F80, larger, word).to(torch.int16).view(torch.bfloat16)
    w = torch.where((w.sign() == v.sign()) | w.isnan(), w, v)
    x = blocks_of(v, -w, w.neg().roll(1) * 0)
    for y in (x, x.float()):  # bfloat16 to 4 bits has a kernel of its own
        assert_same_operand(triton_rows.quantize(y, Cast.of(name)), encode(y, Cast.of(name)))


def every_code_by_every_scale(name):
    """Row r has scale byte r (7 bits for UE4M3, which has no sign) and every code, or every byte of packed codes."""
    format = get_format(name)
    element = format.element
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(256, -1)
    if element.packing[1] > 1:  # three bytes: each of every value
        data = torch.stack([data, data.flip(1), data.roll(77, 1)], -1).flatten(1)
    cols = data.shape[1] // element.packing[1] * element.packing[0]
    byte = torch.arange(256, dtype=torch.int32) % (128 if format.scale is UE4M3 else 256)
    scale = byte.to(torch.uint8)[:, None].expand(256, cols // 16).contiguous()
    return Operand(data.contiguous().view(element.dtype), scale, None, format, (256, cols))


@each_dtype
@pytest.mark.parametrize("name", [f"{name}[1x16]" for name in ELEMENTS] + ["nvfp4_single_level", "nvfp4"])
def test_every_code_times_every_scale(name, dtype, large_tiles):
    operand = every_code_by_every_scale(name)
    if operand.format.global_scale:
        operand = replace(operand, global_scale=torch.tensor(0.7123))
    assert_same_values(triton_rows.dequantize(operand, dtype), decode(operand, dtype))


# ---------------------------------------------------------------------------------------------- both copies


@pytest.mark.exhaustive(quick=10)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_with_two_copies
def test_both_copies_of_one_pass_are_the_two_casts(name, dtype, small_tiles):
    cast = Cast.of(name)
    for x in map(surrounded, each_values(name, 36, 134, dtype)):
        rowwise, columnwise = triton_columns.pair(x, cast)
        assert_same_operand(rowwise, encode(x, cast))
        assert_same_operand(columnwise, encode(x.t(), cast))


@pytest.mark.parametrize("shape", [(64, 256), (64, 130), (67, 131), (3, 140), (131, 2)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6[1x16]", "mxfp4[1x64]", "nvfp4"])
def test_columns_of_whole_tiles_and_with_tails(name, shape, small_tiles):
    """From float32, and from bfloat16, which is read as words of two values if it is aligned."""
    cast = Cast.of(name)
    x = torch.randn(shape) * 2.0 ** torch.randint(-9, 9, shape).float()
    for y in (x, x.bfloat16()):
        rowwise, columnwise = triton_columns.pair(y, cast)
        assert_same_operand(rowwise, encode(y, cast))
        assert_same_operand(columnwise, encode(y.t(), cast))
    assert_same_operand(triton_rows.quantize(y.t(), cast), encode(y.t(), cast))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "mxfp8[1x128]"])
def test_both_copies_with_the_tiles_of_a_device(name):
    cast, x = Cast.of(name, "floor"), values(141, 150, torch.bfloat16)
    rowwise, columnwise = triton_columns.pair(x[::2], cast)
    assert_same_operand(rowwise, encode(x[::2], cast))
    assert_same_operand(columnwise, encode(x[::2].t(), cast))


# ---------------------------------------------------------------------------------------------- swizzled


@pytest.mark.parametrize("shape", [(37, 300), (130, 90), (128, 128), (128, 132), (1, 2)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6[1x64]", "mxfp4", "nvfp4"])
def test_swizzled_scales_are_the_swizzle_of_the_scales(name, shape, small_tiles):
    """Padding scales are 0; codes and global scale are those of ``quantize``."""
    cast, x = Cast.of(name), torch.randn(shape) * 2.0 ** torch.randint(-9, 9, shape).float()
    for y in (x, x.bfloat16()):
        expected = encode(y, cast)
        data, scale, global_scale = triton_rows.quantize_swizzled(y, cast)
        assert torch.equal(data, expected.data.view(torch.uint8))
        assert torch.equal(scale, swizzle(expected.scale))
        assert (global_scale is None) == (expected.global_scale is None)
        assert global_scale is None or torch.equal(global_scale, expected.global_scale)


# ---------------------------------------------------------------------------------------------- values


@pytest.mark.exhaustive(quick=4)
@each_format
def test_fake_quantize_is_encode_and_decode_without_the_global_scale(name, small_tiles):
    cast = Cast.of(name)
    for source, target in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)):
        x = surrounded(values(16, 260, source))
        got, global_scale = triton_rows.fake_quantize(x, cast, target)
        operand = encode(x, cast)
        assert_same_values(got, decode_local(operand).to(target))
        assert (global_scale is None) == (operand.global_scale is None)
        assert global_scale is None or torch.equal(global_scale, operand.global_scale)


@pytest.mark.parametrize("name", ["mxfp8[32x32]", "mxfp4", "float8_row", "nvfp4"])
def test_values_of_a_stack_and_of_one_row(name, small_tiles):
    for x in (torch.randn(2, 19, 70), torch.randn(33)):
        operand = encode(x, Cast.of(name))
        got, _ = triton_rows.fake_quantize(x, Cast.of(name), torch.bfloat16)
        assert_same_values(got, decode_local(operand).bfloat16())
        assert_same_values(triton_rows.dequantize(operand, torch.bfloat16), decode(operand, torch.bfloat16))


@each_format
def test_dequantize_is_decode(name, small_tiles):
    for shape, dtype in (((17, 300), torch.float32), ((16, 256), torch.bfloat16), ((9, 131), torch.float16)):
        operand = encode(values(*shape, torch.float32), Cast.of(name))
        assert_same_values(triton_rows.dequantize(operand, dtype), decode(operand, dtype))


def test_dequantize_takes_operands_that_are_slices():
    whole = encode(torch.randn(24, 256), Cast.of("mxfp8"))
    part = Operand(whole.data[::2, 64:192], whole.scale[::2, 2:6], None, whole.format, (12, 128))
    assert_same_values(triton_rows.dequantize(part, torch.float32), decode(part, torch.float32))
    rows = encode(torch.randn(24, 64) * torch.arange(1, 25)[:, None], Cast.of("float8_row"))
    every_second = rows.map_blocks(lambda t: t[::2], (12, 64))
    assert_same_values(triton_rows.dequantize(every_second, torch.float32), decode(rows, torch.float32)[::2])


@pytest.mark.parametrize("name", ["mxfp4", "float8_row"])
@pytest.mark.parametrize("shape", [(5, 64), (3, 5, 64)], ids=str)
def test_dequantize_takes_operands_whose_rows_share_memory(shape, name):
    row = encode(torch.randn(1, 64), Cast.of(name))
    part = row.map_blocks(lambda t: t.expand(*shape[:-1], -1), shape)
    assert_same_values(triton_rows.dequantize(part, torch.float32), decode(row, torch.float32).expand(shape))


# ---------------------------------------------------------------------------------------------- stochastic


def stochastic(name, seed):
    return Cast.of(name, rounding="stochastic", seed=seed)


@pytest.mark.exhaustive(quick=14)
@each_format
def test_a_seed_decides_every_bit_as_in_the_reference(name, small_tiles):
    for seed, dtype in ((12345, torch.float32), (2**40 + 7, torch.bfloat16)):
        for x in map(surrounded, each_values(name, 16, 134, dtype)):
            assert_same_operand(triton_rows.quantize(x, stochastic(name, seed)), encode(x, stochastic(name, seed)))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6[1x64]", "mxfp4", "mxint8", "nvfp4", "float8_1x128"])
def test_each_copy_rounds_by_a_stream_of_its_own(name, small_tiles):
    """The transposed copy uses ``seed + 1`` and the row and column of the transpose."""
    x = values(38, 132, torch.float32, specials=False)
    rowwise, columnwise = triton_columns.pair(x, stochastic(name, 99))
    assert_same_operand(rowwise, encode(x, stochastic(name, 99)))
    assert_same_operand(columnwise, encode(x.t(), stochastic(name, 100)))
    assert_same_operand(triton_rows.quantize(x.t(), stochastic(name, 5)), encode(x.t(), stochastic(name, 5)))


@each_kind
def test_values_are_rounded_by_the_same_seed(name, small_tiles):
    x = torch.randn(18, 134)
    got, _ = triton_rows.fake_quantize(x, stochastic(name, 3), torch.float32)
    assert_same_values(got, decode_local(encode(x, stochastic(name, 3))))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4"])
def test_the_mean_of_many_draws_is_the_value(name, monkeypatch):
    set_tiles(monkeypatch, rows=1024, cols=128, full=128, groups=4, wide=128)
    x = torch.randn(64)
    draws, global_scale = triton_rows.fake_quantize(x.repeat(1024, 1), stochastic(name, 3), torch.float32)
    nearest, _ = triton_rows.fake_quantize(x.repeat(1024, 1), Cast.of(name), torch.float32)
    x = x if global_scale is None else x / global_scale
    step = draws.amax(0) - draws.amin(0)
    between = step > 0
    bias = ((draws.mean(0) - x) / step)[between]
    assert bias.numel() > 40
    assert bias.abs().max() < 5 * 0.5 / math.sqrt(1024)  # 5 sigma of 1024 draws, sigma at most half a step
    assert ((nearest[0] - x) / step)[between].abs().max() > 0.35  # nearest is off by up to half a step


def test_seeds_differ_and_without_one_torchs_generator_decides():
    x, cast = torch.randn(16, 64), stochastic("mxfp4", None)
    one, other = (triton_rows.quantize(x, stochastic("mxfp4", s)).data for s in (1, 2))
    assert 0.05 < (one != other).float().mean() < 0.95
    torch.manual_seed(3)
    first, second = triton_rows.quantize(x, cast).data, triton_rows.quantize(x, cast).data
    torch.manual_seed(3)
    assert torch.equal(triton_rows.quantize(x, cast).data, first)
    assert not torch.equal(first, second)


def test_a_nearest_cast_takes_nothing_from_the_generator():
    before = torch.get_rng_state()
    triton_rows.quantize(torch.ones(4, 32), Cast.of("mxfp8", seed=1))
    assert torch.equal(torch.get_rng_state(), before)
