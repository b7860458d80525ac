"""The benchmark of casts: bytes, and the share of the copy."""

import argparse
import math

import pytest
import torch

import mxtensor as mx
from benchmarks import cast, cuda
from mxtensor.kernels.quantize.choose_pair import quantize_operands
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import Orientation, get_format

ON_CPU = argparse.Namespace(device="cpu", repeats=2, tiny=True)


def cast_row(format, kind, size=8192, over_copy=0.5, **others):
    """A row whose copy took 0.25 ms and whose contenders took ``over_copy`` times as long."""
    f = get_format(format)
    nbytes = cast.moved_bytes(f, kind, size, size) if kind in cast.WORKS else 0
    relative = {cast.COPY: 1.0, cast.OURS: over_copy} | others
    row = cast.CastRow(f"{format} {kind} {size}x{size}", {n: r * 0.25 for n, r in relative.items()}, nbytes)
    row.format, row.kind, row.size, row.relative = format, kind, f"{size}x{size}", relative
    row.twice_nbytes = nbytes + 2 * size * size if cast.reads_twice(f, kind) else 0
    row.copy_nbytes = 2 * cast.COPY_BYTES
    row.kernels = {cast.OURS: "triton"}
    return row


@pytest.mark.parametrize("name", cast.FORMATS)
@pytest.mark.parametrize("shape", [(256, 512), (129, 72)])
def test_moved_bytes_match_the_operands(name, shape):
    format, x = get_format(name), torch.randn(shape, dtype=torch.bfloat16)
    for work in cast.works(format):
        kind = Orientation.ROWWISE if work == "dequantize" else Orientation.of(work)
        operands = [o for o in quantize_operands(x, Cast.of(name), kind) if o is not None]
        assert cast.moved_bytes(format, work, *shape) == x.nbytes + sum(o.nbytes for o in operands)


def test_moved_bytes_of_known_shapes():
    values = 8192 * 8192
    assert cast.moved_bytes(get_format("mxfp8"), "rowwise", 8192, 8192) == 3 * values + values // 32
    assert cast.moved_bytes(get_format("mxfp4"), "both", 8192, 8192) == 3 * values + values // 16
    assert cast.moved_bytes(get_format("nvfp4"), "dequantize", 8192, 8192) == values * 5 // 2 + values // 16 + 4
    assert cast.moved_bytes(get_format("float8_row"), "columnwise", 8192, 4096) == 3 * 8192 * 4096 + 4 * 4096


def test_which_casts_read_their_input_twice():
    twice = {(name, work) for name in cast.FORMATS for work in cast.WORKS if cast.reads_twice(get_format(name), work)}
    casts = ("rowwise", "columnwise", "both")
    assert twice == {
        *(("nvfp4", work) for work in casts),
        *(("float8_e4m3_tensor", work) for work in casts),
        ("float8_e4m3_row", "columnwise"),
        ("float8_e4m3_row", "both"),
    }


def test_square_blocks_have_one_orientation():
    for name in cast.FORMATS:
        square = mx.quantize(torch.randn(256, 256), name, orientation="both").nbytes == (
            mx.quantize(torch.randn(256, 256), name).nbytes
        )
        assert ("both" not in cast.works(get_format(name))) == square


def test_the_fraction_is_bandwidth_over_that_of_the_copy():
    row = cast_row("nvfp4", "rowwise", over_copy=0.25)
    tbps = row.nbytes / (0.25 * 0.25) / 1e9
    assert row.fraction(cast.OURS) == pytest.approx(tbps / (2 * cast.COPY_BYTES / 0.25 / 1e9))
    more = (row.nbytes + 2 * 8192**2) / row.nbytes
    assert row.fraction(cast.OURS, twice=True) == pytest.approx(row.fraction(cast.OURS) * more)
    assert math.isnan(row.fraction("torchao")) and math.isnan(cast_row("mxfp8", "rowwise").fraction(cast.OURS, True))


@pytest.mark.parametrize("work", cast.WORKS)
def test_every_format_is_cast(work):
    for name in cast.FORMATS:
        if work in cast.works(get_format(name)):
            row = cast.cast_row(name, work, 64, ON_CPU, cuda.Deadline(60))
            ours = {cast.OURS, cast.FLOOR} if name in cast.WITH_FLOOR and work != "dequantize" else {cast.OURS}
            assert set(row.times) == {cast.COPY} | ours and row.failed == {}
            assert set(row.kernels) == ours and all(row.kernels.values())
            assert row.fraction(cast.OURS) > 0


def test_host_time_is_the_time_of_one_call():
    row = cast.host_row("mxfp8_e4m3[32x32]", ON_CPU)
    assert set(row.times) == {cast.OURS} and 0.001 < row.times[cast.OURS] < 1000


def test_a_line_has_a_cell_for_each_work():
    rows = [
        cast_row(name, kind, size, 0.3) for name in ("mxfp8_e4m3", "nvfp4") for kind in cast.WORKS for size in (64, 128)
    ]
    rows.append(cast_row("mxfp8_e4m3[32x32]", "rowwise", 64))
    lines = cast.lines(rows)
    assert [line[:2] for line in lines[:2]] == [["mxfp8_e4m3", "64x64"], ["nvfp4", "64x64"]]
    assert all(len(line) == len(cast.HEADER) for line in lines)
    square = next(line for line in lines if line[0] == "mxfp8_e4m3[32x32]")
    assert square[3:5] == ["", ""] and square[6] == "triton" and " to " in lines[1][2]
