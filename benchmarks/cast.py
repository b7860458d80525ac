"""Casts on a GPU beside its copy bandwidth and torchao: ``python -m benchmarks.cast --json FILE``.

A cast's share of the copy is its bandwidth over that of a large copy in the same rounds. Its bytes are those that any
implementation moves: the input read once, codes and scales written once; for dequantize the other way round.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import mxtensor as mx
from mxtensor.kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from mxtensor.kernels.quantize.choose_pair import quantize_operands
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FULL, Format, Orientation, get_format

from . import peers
from .cuda import Deadline, copies, event_clock, host_clock, log_kernels, rotate_inputs
from .harness import Prepare, Progress, Row, Section, parser, print_table, run, timed

FORMATS = (
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8", "nvfp4", "mxfp8_e4m3[32x32]",
    "float8_e4m3_tensor", "float8_e4m3_row", "float8_e4m3_1x128", "float8_e4m3_128x128",
)  # fmt: skip
WITH_FLOOR = ("mxfp8_e4m3",)
"""Formats that are cast under FLOOR too, in the same rounds."""
WORKS = ("rowwise", "columnwise", "both", "dequantize")
SIZES, TINY = (8192, 16384), (64,)
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
class CastRow(Row):
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


def cast_row(name: str, work: str, size: int, args: argparse.Namespace, deadline: Deadline) -> CastRow:
    """One work on one format and size, beside the copy and, where it has the like, torchao."""
    format = get_format(name)
    nbytes = moved_bytes(format, work, size, size)
    row = CastRow(f"{name} {work} {size}x{size}", {}, nbytes, format=name, kind=work, size=f"{size}x{size}")
    row.twice_nbytes = nbytes + 2 * size * size if reads_twice(format, work) else 0
    copied = 1 << 12 if args.tiny else COPY_BYTES
    row.copy_nbytes = 2 * copied
    source = torch.randint(256, (copied,), dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    inputs = [torch.randn(size, size, dtype=torch.bfloat16, device=args.device) for _ in range(copies(2 * size * size))]
    found = {COPY: rotate_inputs([source], target.copy_)} | contenders(row, inputs)
    if size in PEER_SIZES:
        beside = peers.cast_contenders(name, work, inputs, compile=not args.tiny)
        found |= {peer: deadline.guard(prepare) for peer, prepare in beside.items()}
    return timed(row, found, args.repeats, clock=event_clock(2.0), seconds=1.5)


def host_row(name: str, args: argparse.Namespace) -> CastRow:
    """Milliseconds of host time of one ``mx.quantize`` of a small tensor, one orientation and both."""
    row = CastRow(f"{name} {HOST}", {}, format=name, kind=HOST, size=f"{SMALL}x{SMALL}")
    x = [torch.randn(SMALL, SMALL, dtype=torch.bfloat16, device=args.device)]
    found = {OURS: log_kernels(row, OURS, x, lambda x: mx.quantize(x, name))}
    if not get_format(name).square:
        found["mxtensor, both"] = rotate_inputs(x, lambda x: mx.quantize(x, name, orientation="both"))
    found |= {k: v for k, v in peers.cast_contenders(name, "rowwise", x, compile=False).items() if k == "torchao"}
    return timed(row, found, args.repeats, clock=host_clock(2 if args.tiny else CALLS), seconds=1.0)


# ---------------------------------------------------------------------------------------------- tables

HEADER = ["format", "size", *WORKS, "kernels"]
PEER_HEADER = ["work", "contender", "ms", "time over mxtensor"]
HOST_HEADER = ["format", "mxtensor", "mxtensor, both", "torchao"]


def _cell(row: CastRow, contender: str) -> str:
    """The fraction of the copy, as a range where the input may count once or twice, and the time."""
    if contender not in row.times:
        return ""
    upper = row.fraction(contender, twice=True)
    text = f"{row.fraction(contender):.2f}" + ("" if upper != upper else f" to {upper:.2f}")
    return f"{text} ({row.times[contender]:.3f} ms)"


def lines(rows: Sequence[CastRow]) -> list[list[str]]:
    """A line for every format and size: the works side by side."""
    found = []
    sizes, formats = (dict.fromkeys(getattr(row, name) for row in rows) for name in ("size", "format"))
    for size, format in itertools.product(sizes, formats):
        mine = {row.kind: row for row in rows if (row.size, row.format) == (size, format)}
        for contender in (OURS, FLOOR):
            if any(contender in row.times for row in mine.values()):
                label = format + (", floor" if contender == FLOOR else "")
                kernels = dict.fromkeys(row.kernels[contender] for row in mine.values() if contender in row.kernels)
                figures = [_cell(mine[work], contender) if work in mine else "" for work in WORKS]
                found.append([label, size, *figures, "; ".join(kernels)])
    return found


def casts(args: argparse.Namespace) -> list[CastRow]:
    """The casts of all formats and sizes."""
    deadline = Deadline(args.seconds)
    wanted = [
        (name, work, size)
        for size in (TINY if args.tiny else SIZES)
        for name in FORMATS
        for work in works(get_format(name))
    ]
    rows: dict[tuple[str, str, int], CastRow] = {}
    progress = Progress(len(wanted), "casts")
    with torch.no_grad():
        for key in sorted(wanted, key=lambda key: key[0] in peers.CASTS and key[2] in PEER_SIZES):  # peers come last
            rows[key] = cast_row(*key, args, deadline)
            progress.step(rows[key].work)
    progress.close()
    done = [rows[key] for key in wanted]
    print_table(HEADER, lines(done))
    peer = [(row, name) for row in done for name in row.times if name.startswith("torchao")]
    if peer:
        print_table(PEER_HEADER, [[r.work, n, f"{r.times[n]:.3f}", f"{r.ratio(OURS, n):.2f}"] for r, n in peer])
    return done


def host(args: argparse.Namespace) -> list[CastRow]:
    """The host time of one small cast."""
    rows = [host_row(name, args) for name in FORMATS]
    print(f"microseconds of host time of mx.quantize({SMALL}x{SMALL})")
    cells = [[f"{r.times[n] * 1e3:.1f}" if n in r.times else "" for n in HOST_HEADER[1:]] for r in rows]
    print_table(HOST_HEADER, [[row.format, *line] for row, line in zip(rows, cells, strict=True)])
    return rows


SECTIONS = {
    "casts": Section("how near do casts come to the bandwidth of a copy, and to torchao?", casts, gpu=True),
    "host": Section("how much host time does one small cast take?", host, gpu=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Time casts."""
    options = parser(__doc__ or "", SECTIONS)
    options.add_argument("--seconds", type=float, default=150, help="skip torchao after this time (%(default)s)")
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
