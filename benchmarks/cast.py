"""Casts on a GPU beside its copy bandwidth and torchao: ``python -m benchmarks.cast --json F`` (``--quick``)."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxtensor as mx
from mxtensor.kernels.quantize.select import dequantize_operand, quantize_operand
from mxtensor.kernels.quantize.select_pair import quantize_operands
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FULL, Format, Orientation, get_format

from . import peers
from .cuda import (
    Deadline,
    GpuRow,
    Target,
    cold_copies,
    event_clock,
    gpu_arguments,
    host_clock,
    log_kernels,
    machine_line,
    print_failures,
    print_verdicts,
    rotate_inputs,
)
from .harness import Prepare, print_table, timed, write_json

FORMATS = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8", "nvfp4", "mxfp8_e4m3[32x32]",
    "float8_e4m3_tensor", "float8_e4m3_row", "float8_e4m3_1x128", "float8_e4m3_128x128",
)  # fmt: skip
WITH_FLOOR = ("mxfp8_e4m3",)
"""Formats that are cast under FLOOR too, in the same rounds."""
WORKS = ("rowwise", "columnwise", "both", "dequantize")
SIZES, QUICK_SIZES = (8192, 16384), (2048,)
PEER_SIZES = (2048, 8192)
"""Sizes at which torchao stands beside us: it compiles anew for each."""
SMALL, CALLS = 256, 100
"""Host time: rows and columns of the tensor, and calls queued for one sample."""
COPY_BYTES = 1 << 29
"""Of the buffer whose copy is the limit; a copy reads and writes them."""
OURS, FLOOR, COPY, HOST = "mxtensor", "mxtensor, floor", "copy", "host time"


# ---------------------------------------------------------------------------------------------- bytes


def operand_bytes(format: Format, shape: tuple[int, ...]) -> int:
    """Bytes of data and scales of values of ``shape``, as they are stored."""
    data, scale = 1, 1
    for extent in format.data_shape(shape):
        data *= extent
    for extent in format.scale_shape(shape):
        scale *= extent
    # Codes are one byte, or packed in bytes.
    return data + scale * format.scale.dtype.itemsize + (4 if format.global_scale else 0)


def moved_bytes(format: Format, work: str, rows: int, cols: int, itemsize: int = 2) -> int:
    """What any implementation reads and writes: each input once, each output once."""
    values = rows * cols * itemsize
    rowwise, columnwise = operand_bytes(format, (rows, cols)), operand_bytes(format, (cols, rows))
    return values + {"columnwise": columnwise, "both": rowwise + columnwise}.get(work, rowwise)


def reads_twice(format: Format, work: str) -> bool:
    """Whether a scale needs more values than a block of threads can keep: the tensor, or a column of it."""
    if work == "dequantize":
        return False
    whole_tensor = format.global_scale or format.block[0] == FULL
    return whole_tensor or (format.block[1] == FULL and work != "rowwise")


def works(format: Format) -> tuple[str, ...]:
    """What is timed of a format: one copy of square blocks serves both orientations."""
    return ("rowwise", "dequantize") if format.square else WORKS


# ---------------------------------------------------------------------------------------------- rows


@dataclass
class CastRow(GpuRow):
    """One work on one format and size; the first contender is the copy (of host time, our own)."""

    format: str = ""
    kind: str = ""
    """One of WORKS, or HOST."""
    size: str = ""
    twice_nbytes: int = 0
    """``nbytes`` with the input counted twice, where a scale needs all of it first; else 0."""
    copy_nbytes: int = 0

    def fraction(self, contender: str, twice: bool = False) -> float:
        """Of the bandwidth that the copy reached in the same rounds."""
        nbytes = self.twice_nbytes if twice else self.nbytes
        if contender not in self.relative or not self.copy_nbytes or not nbytes:
            return float("nan")
        return nbytes / self.copy_nbytes / self.relative[contender]


def contenders(row: CastRow, inputs: Sequence[Tensor]) -> dict[str, Prepare]:
    """Our own: ``row.kind`` on these inputs, under FLOOR too where the format is in WITH_FLOOR."""
    rules = {OURS: "rceil"} | ({FLOOR: "floor"} if row.format in WITH_FLOOR else {})
    if row.kind == "dequantize":
        cast = Cast.of(row.format)

        def prepare() -> Any:
            operands = [quantize_operand(x, cast) for x in inputs]
            return log_kernels(row, OURS, operands, lambda q: dequantize_operand(q, torch.bfloat16))()

        return {OURS: prepare}
    orientation = Orientation.of(row.kind)

    def quantizing(cast: Cast) -> Callable[[Tensor], Any]:
        return lambda x: quantize_operands(x, cast, orientation)

    return {name: log_kernels(row, name, inputs, quantizing(Cast.of(row.format, rule))) for name, rule in rules.items()}


def cast_row(name: str, work: str, size: int, args: Any, deadline: Deadline) -> CastRow:
    """One work on one format and size, beside the copy and, where it has the like, torchao."""
    format = get_format(name)
    nbytes = moved_bytes(format, work, size, size)
    row = CastRow(f"{name} {work} {size}x{size}", {}, nbytes, format=name, kind=work, size=f"{size}x{size}")
    row.twice_nbytes = nbytes + 2 * size * size if reads_twice(format, work) else 0
    row.copy_nbytes = 2 * COPY_BYTES
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    inputs = [
        torch.randn(size, size, dtype=torch.bfloat16, device=args.device) for _ in range(cold_copies(2 * size * size))
    ]
    found = {COPY: rotate_inputs([source], target.copy_)} | contenders(row, inputs)
    if size in PEER_SIZES:
        beside = peers.cast_contenders(name, work, inputs, compile=not args.quick)
        found |= {peer: deadline.guard(prepare) for peer, prepare in beside.items()}
    return timed(row, found, args.repeats, clock=event_clock(2.0), seconds=1.5)


def host_row(name: str, args: Any) -> CastRow:
    """Milliseconds of host time of one ``mx.quantize`` of a small tensor, one orientation and both."""
    row = CastRow(f"{name} {HOST}", {}, format=name, kind=HOST, size=f"{SMALL}x{SMALL}")
    x = [torch.randn(SMALL, SMALL, dtype=torch.bfloat16, device=args.device)]
    found = {OURS: log_kernels(row, OURS, x, lambda x: mx.quantize(x, name))}
    if not get_format(name).square:
        found["mxtensor, both"] = rotate_inputs(x, lambda x: mx.quantize(x, name, orientation="both"))
    found |= {k: v for k, v in peers.cast_contenders(name, "rowwise", x, compile=False).items() if k == "torchao"}
    return timed(row, found, args.repeats, clock=host_clock(CALLS), seconds=1.0)


# ---------------------------------------------------------------------------------------------- targets

Figures = Callable[[Sequence[CastRow]], Iterable[tuple[str, float]]]


def fractions(kind: str, *names: str, twice: bool = False) -> Figures:
    """The fraction of the copy of our contenders for these formats and one work."""
    return lambda rows: [
        (f"{row.format} {row.size}" + (", floor" if contender == FLOOR else ""), row.fraction(contender, twice))
        for row in rows
        if row.kind == kind and row.format in names
        for contender in (OURS, FLOOR)
        if contender in row.times
    ]


def rceil_over_floor(rows: Sequence[CastRow]) -> list[tuple[str, float]]:
    """Time of RCEIL over that of FLOOR in the same rounds."""
    return [(f"{r.format} {r.kind} {r.size}", r.ratio(FLOOR, OURS)) for r in rows if FLOOR in r.times]


def host_us(rows: Sequence[CastRow]) -> list[tuple[str, float]]:
    """Microseconds of one ``mx.quantize``."""
    return [(r.format, r.times[OURS] * 1e3) for r in rows if r.kind == HOST and OURS in r.times]


_MXFP8 = ("mxfp8_e4m3", "mxfp8_e5m2")
TARGETS = (
    Target("rowwise MXFP8, of the copy", ">=", 0.90, fractions("rowwise", *_MXFP8)),
    Target("columnwise MXFP8, of the copy", ">=", 0.85, fractions("columnwise", *_MXFP8)),
    Target("both of MXFP8 in one pass, of the copy", ">=", 0.85, fractions("both", *_MXFP8)),
    Target("rowwise MXFP4, of the copy", ">=", 0.80, fractions("rowwise", "mxfp4_e2m1")),
    Target("rowwise NVFP4, input counted once", ">=", 0.80, fractions("rowwise", "nvfp4")),
    Target("rowwise NVFP4, input counted twice", ">=", 0.80, fractions("rowwise", "nvfp4", twice=True)),
    Target("dequantize MXFP8, of the copy", ">=", 0.90, fractions("dequantize", *_MXFP8)),
    Target("dequantize MXFP4 and NVFP4, of the copy", ">=", 0.90, fractions("dequantize", "mxfp4_e2m1", "nvfp4")),
    Target("time of RCEIL over FLOOR", "<=", 1.03, rceil_over_floor),
    Target("host time of a call [us]", "<=", 35, host_us),
)


# ---------------------------------------------------------------------------------------------- tables

HEADER = ["work", "contender", "ms", "TB/s", "of copy", "input twice", "over mxtensor", "kernels"]
SUMMARY_HEADER = ["format", "size", *WORKS, "kernels"]
PEER_HEADER = ["work", "contender", "ms", "of copy", "time over mxtensor"]
HOST_HEADER = ["format", "mxtensor", "mxtensor, both", "torchao"]


def number(value: float, digits: int = 2) -> str:
    """Empty for what was not measured."""
    return "" if value != value else f"{value:.{digits}f}"


def cells(row: CastRow) -> list[list[str]]:
    """A line of the printed table for every contender."""
    lines = []
    for name in row.times:
        nbytes, ms = (row.copy_nbytes if name == COPY else row.nbytes), row.times[name]
        tbps = nbytes / ms / 1e9 if nbytes else float("nan")
        figures = [f"{ms:.4f}", number(tbps), number(row.fraction(name)), number(row.fraction(name, twice=True))]
        if name == COPY:
            figures[2:] = ["1.00", ""]
        lines.append([row.work, name, *figures, number(row.ratio(OURS, name)), row.kernels.get(name, "")])
    return lines + [[row.work, name, "fails", *[""] * 5] for name in row.failed]


def _cell(row: CastRow, contender: str) -> str:
    """The fraction of the copy, as a range where the input may count once or twice, and the time."""
    if contender not in row.times:
        return ""
    upper = row.fraction(contender, twice=True)
    text = number(row.fraction(contender)) + ("" if upper != upper else f" to {upper:.2f}")
    return f"{text} ({row.times[contender]:.3f} ms)"


def summary(rows: Sequence[CastRow]) -> list[list[str]]:
    """A line for every format and size: the works side by side."""
    lines = []
    timed_rows = [row for row in rows if row.kind != HOST]
    sizes, formats = (dict.fromkeys(getattr(row, name) for row in timed_rows) for name in ("size", "format"))
    for size, format in itertools.product(sizes, formats):
        mine = {row.kind: row for row in timed_rows if (row.size, row.format) == (size, format)}
        for contender in (OURS, FLOOR):
            if any(contender in row.times for row in mine.values()):
                label = format + (", floor" if contender == FLOOR else "")
                kernels = dict.fromkeys(row.kernels[contender] for row in mine.values() if contender in row.kernels)
                figures = [_cell(mine[work], contender) if work in mine else "" for work in WORKS]
                lines.append([label, size, *figures, "; ".join(kernels)])
    return lines


def peer_cells(row: CastRow) -> list[list[str]]:
    """Lines of what torchao did beside us; none where it did not take part."""
    names = [name for name in [*row.times, *row.failed] if name.startswith("torchao")]
    if row.kind == HOST or not names:
        return []
    lines = []
    for name in [OURS, *((FLOOR,) if FLOOR in row.times else ()), *names]:
        if name in row.times:
            figures = [f"{row.times[name]:.3f}", number(row.fraction(name)), number(row.ratio(OURS, name))]
        else:
            figures = ["fails", "", ""]
        lines.append([row.work, name, *figures])
    return lines


def host_cells(row: CastRow) -> list[str]:
    """Microseconds of a call, by format."""
    return [row.format, *(number(row.times.get(name, float("nan")) * 1e3, 1) for name in HOST_HEADER[1:])]


def main() -> None:
    """Time every row, print tables, failures and targets."""
    args = gpu_arguments(__doc__ or "", seconds=150)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    deadline = Deadline(args.seconds)
    wanted = [
        (name, work, size)
        for size in (QUICK_SIZES if args.quick else SIZES)
        for name in FORMATS
        for work in works(get_format(name))
    ]
    rows: dict[tuple[str, str, int], CastRow] = {}
    with torch.no_grad():
        for key in sorted(wanted, key=lambda key: key[0] in peers.CASTS and key[2] in PEER_SIZES):  # peers come last
            row = rows[key] = cast_row(*key, args, deadline)
            print(f"{row.work}: " + ", ".join(f"{n} {t:.4f} ms" for n, t in row.times.items()), flush=True)
        host = [host_row(name, args) for name in FORMATS]
    done = [*(rows[key] for key in wanted), *host]
    print(f"\n{machine_line()}\n")
    print_table(HEADER, [line for row in done if row.kind != HOST for line in cells(row)])
    print(f"\nmicroseconds of host time of mx.quantize({SMALL}x{SMALL})")
    print_table(HOST_HEADER, [host_cells(row) for row in host])
    print_failures(done)
    print_verdicts(TARGETS, done)
    write_json(args.json, done)


if __name__ == "__main__":
    main()
