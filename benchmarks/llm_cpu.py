"""Tokens a second of language models on a CPU, beside plain torch, torchao and llama.cpp.

    python -m benchmarks.llm_cpu --json benchmarks/results/llm_cpu.json

The models are SmolLM2-135M-Instruct and a Llama of 1.2 billion random weights (the shape of Llama 3.2 1B). All
contenders of a row take turns in one process: bfloat16, float32, torchao's int8 weights, our formats (head included),
and llama.cpp with files of the same weights. A step decodes one token of each sequence of the batch after a prompt.

    python -m benchmarks.llm_cpu --modes prompt --prompt 512 --batches 1 --add --json benchmarks/results/llm_cpu.json

times the prompt instead.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from examples import smollm2

from .bandwidth import MEGABYTES, readers, take_bandwidth
from .cuda import Target, print_failures, print_verdicts
from .harness import (
    Clock,
    Progress,
    Row,
    add_options,
    command,
    cpu_clock,
    machine,
    print_table,
    read_json,
    timed,
    wall_clock,
    write_json,
)  # fmt: skip
from .llama_cpp_peer import LlamaCpp, write_gguf
from .llm_contenders import (
    PLAIN,
    PROMPT,
    READING,
    TORCHAO,
    Steps,
    llama_cpp_contender,
    load,
    read_bytes,
    torch_contender,
    variant,
)

CAST = "mxfp4-weight-mxint8-activation"
FORMATS = ("mxfp8-weight-only", "mxfp4-weight-only", "nvfp4-weight-only", "mxint8", CAST)
EQUAL_BITS = {
    "mxfp8-weight-only": "llama.cpp Q8_0", "mxint8": "llama.cpp Q8_0",
    "mxfp4-weight-only": "llama.cpp MXFP4", CAST: "llama.cpp MXFP4",
}  # fmt: skip
"""Our format -> the type of llama.cpp at about the same bits per weight (8.25 and 8.5; 4.25 and 4.25). llama.cpp casts
activations to integers of 8 bits, as ``mxint8`` and the last one do."""
MODELS, MODES = ("smollm2", "llama-1b"), ("eager", "attention", "compiled", "decoding")
"""``attention``: eager, our formats with ``attn_implementation="mxtensor"``. ``compiled``: the model as one graph.
``decoding``: the same by ``mx.compile_decoding``, which leaves out Dynamo's checks of modules.

Another mode is ``prompt``: eager, and a step is the whole prompt."""


@dataclass
class LlmRow(Row):
    """One model, number of threads, batch and mode. ``times`` are those of a step."""

    model: str = ""
    threads: int = 1
    batch: int = 1
    mode: str = "eager"
    prompt: int = PROMPT
    """Tokens before those of the steps."""
    read: dict[str, int] = field(default_factory=dict)
    """Contender -> bytes of weights that a step reads."""
    bandwidth: float = 0.0
    """GB/s at which this process reads memory with these threads, in turn with the contenders."""
    load: float = 0.0
    """The system's load average of the last minute when the row was finished: this benchmark alone is about 1."""

    def tokens_a_second(self, name: str) -> float:
        tokens = self.batch * (self.prompt if self.mode == READING else 1)
        return 1e3 * tokens / self.times[name] if name in self.times else math.nan

    def over_plain(self, name: str) -> float:
        """The speed over that of the faster of bfloat16 and float32."""
        plain = [self.times[base] for base in PLAIN if base in self.times]
        return min(plain) / self.times[name] if plain and name in self.times else math.nan

    def over(self, name: str, other: str) -> float:
        """The speed over that of another contender."""
        return self.ratio(name, other)

    def share(self, name: str) -> float:
        """The share of the memory bandwidth that reading the weights takes."""
        return self.read.get(name, 0) / self.times[name] / 1e6 / self.bandwidth if name in self.times else math.nan


def _work(model: str, threads: int, batch: int, mode: str, prompt: int) -> str:
    work = f"{model}, {threads} threads, batch {batch}, {mode}"
    if mode == READING:
        return f"{work} of {prompt} tokens"
    return work if prompt == PROMPT else f"{work}, after {prompt} tokens"


class Bench:
    """All contenders of one model, in memory together."""

    def __init__(self, name: str, formats: Sequence[str], include_head: bool, peers: bool, folder: Path) -> None:
        self.name, base = name, load(name)
        self.failed: dict[str, str] = {}
        self.variants: dict[str, Any] = {}
        for contender in (*PLAIN, *((TORCHAO,) if peers else ()), *formats):
            self._add(contender, partial(variant, base, contender, include_head), self.variants)
        self.files: dict[str, Path] = {}
        if name == "smollm2" and peers:
            self.files["llama.cpp Q4_1"] = smollm2.gguf_path()
        for kind in ("Q8_0", "MXFP4") if peers else ():
            path = folder / f"{name}-{kind}.gguf"
            self._add(f"llama.cpp {kind}", partial(write_gguf, base, path, kind), self.files)

    def _add(self, name: str, make: Callable[[], Any], found: dict[str, Any]) -> None:
        try:
            found[name] = make()
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]

    def row(
        self, threads: int, batch: int, mode: str, repeats: int, seconds: float, fastest: bool = False,
        clock: Clock = wall_clock, prompt: int = PROMPT,
    ) -> LlmRow:  # fmt: skip
        """Time a step of every contender, in turn; ``fastest``: the fastest step counts, not the median."""
        row = LlmRow(_work(self.name, threads, batch, mode, prompt), {})
        row.model, row.threads, row.batch, row.mode, row.prompt = self.name, threads, batch, mode, prompt
        row.failed = dict(self.failed)
        steps: list[Steps] = []
        peers: list[LlamaCpp] = []
        others = "eager" if mode == "attention" else mode
        contenders = {
            name: torch_contender(model, batch, others if name in (*PLAIN, TORCHAO) else mode, prompt, steps)
            for name, model in self.variants.items()
        }
        contenders |= {n: llama_cpp_contender(p, batch, threads, mode, prompt, peers) for n, p in self.files.items()}
        megabytes = 8 if self.name == "tiny" else MEGABYTES
        contenders |= readers(megabytes)
        row.read = {n: read_bytes(m) for n, m in self.variants.items()}
        row.read |= {n: p.stat().st_size for n, p in self.files.items()}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            summary = min if fastest else statistics.median
            timed(row, contenders, repeats, 2, clock, seconds, summary)
            row.bandwidth = take_bandwidth(row, megabytes)
            return row
        finally:
            row.load = os.getloadavg()[0]
            torch.set_num_threads(before)
            for step in steps:
                step.restore()
            for peer in peers:
                peer.close()
            torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- targets

Figures = Callable[[Sequence[LlmRow]], Iterable[tuple[str, float]]]


def over_plain(name: str) -> Figures:
    return lambda rows: [(row.work, row.over_plain(name)) for row in rows if row.batch == 1 and row.mode != READING]


def over_llama_cpp(rows: Sequence[LlmRow]) -> Iterable[tuple[str, float]]:
    return [(f"{row.work}, {ours}", row.over(ours, peer)) for row in rows for ours, peer in EQUAL_BITS.items()]


def share_of_bandwidth(rows: Sequence[LlmRow]) -> Iterable[tuple[str, float]]:
    of_1b = [row for row in rows if row.model == "llama-1b" and row.batch == 1 and row.mode != READING]
    return [(f"{row.work}, {name}", row.share(name)) for row in of_1b for name in row.times if name in FORMATS]


TARGETS = (
    Target("mxfp8 over the faster of bf16 and f32, batch 1", ">=", 1.6, over_plain("mxfp8-weight-only")),
    Target("mxfp4 over the faster of bf16 and f32, batch 1", ">=", 2.3, over_plain("mxfp4-weight-only")),
    Target("over llama.cpp at equal bits", ">=", 0.8, over_llama_cpp),
    Target("share of the bandwidth, 1B model, batch 1", ">=", 0.7, share_of_bandwidth),
)
HEADER = ["work", "contender", "ms per step", "tokens/s", "over plain", "over llama.cpp", "of bandwidth"]


def _number(value: float, digits: int = 2) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def lines(rows: Sequence[LlmRow]) -> list[list[str]]:
    """One line for every contender of every row; the rows in which our formats gain least come first."""

    def worst(row: LlmRow) -> float:
        ours = [row.over_plain(name) for name in row.times if name.startswith(("mx", "nv", "float8"))]
        return min([ratio for ratio in ours if not math.isnan(ratio)], default=math.inf)

    return [
        [
            row.work, name, _number(row.times[name]), _number(row.tokens_a_second(name), 1),
            _number(row.over_plain(name)), _number(row.over(name, EQUAL_BITS.get(name, ""))), _number(row.share(name)),
        ]
        for row in sorted(rows, key=worst)
        for name in sorted(row.times, key=row.over_plain)
    ]  # fmt: skip


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser, repeats=9)
    add = parser.add_argument
    add("--models", nargs="+", default=MODELS, choices=(*MODELS, "tiny"), help="(both)")
    add("--threads", nargs="+", type=int, default=(1, 2), help="numbers of threads (1 2)")
    add("--batches", nargs="+", type=int, default=(1, 4, 16), help="sequences that are decoded together (1 4 16)")
    add("--modes", nargs="+", default=MODES, choices=(*MODES, READING), help="(all but prompt); llama.cpp has one")
    add("--compiled-batches", nargs="+", type=int, help="batches of the mode compiled, which takes minutes (--batches)")
    add("--prompt", type=int, default=PROMPT, help="tokens before those of the steps, or of a step (%(default)s)")
    add("--formats", nargs="+", default=FORMATS, metavar="NAME", help="what quantize_ takes")
    add("--seconds", type=float, default=20, help="for the rounds of one row (%(default)s)")
    add("--fastest", action="store_true", help="the fastest step counts, not the median: for a machine in use")
    add("--no-peers", action="store_true", help="without torchao and llama.cpp")
    add("--no-head", action="store_true", help="leave head and embedding in bfloat16")
    add("--cpu-time", action="store_true", help="the CPU time of this process, on one thread: for a machine in use")
    add("--add", action="store_true", help="keep the rows of the record that are not measured again")
    args = parser.parse_args(argv)
    if args.add and args.json is None:
        parser.error("--add needs --json, the record to add to")
    if args.cpu_time and set(args.threads) != {1}:
        parser.error("--cpu-time needs --threads 1: threads that wait for each other use CPU time too")
    return args


def measured(args: argparse.Namespace, saved: Sequence[LlmRow]) -> list[LlmRow]:
    """The rows that these arguments ask for; the record is written after each, behind the rows ``saved``."""
    work, clock = wanted(args), cpu_clock if args.cpu_time else wall_clock
    rows, progress = [], Progress(len(work), "row")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            bench = Bench(name, args.formats, not args.no_head, not args.no_peers, Path(folder))
            for _, threads, batch, mode in (found for found in work if found[0] == name):
                rows.append(
                    bench.row(threads, batch, mode, args.repeats, args.seconds, args.fastest, clock, args.prompt)
                )
                progress.step(rows[-1].work)
                write_json(args.json, [*saved, *rows])
            del bench
    progress.close()
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every model, number of threads, batch and mode; print the table and the targets."""
    args = parsed(argv)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    saved = saved_rows(args.json, args) if args.add else []
    rows = [*saved, *measured(args, saved)]
    info = machine()
    print(f"\n{command()}\n{info['cpu']}, memory is read at {bandwidths(rows)}\n")
    print_table(HEADER, lines(rows))
    print_failures(rows)
    print_verdicts(TARGETS, rows)


def wanted(args: argparse.Namespace) -> list[tuple[str, int, int, str]]:
    """What these arguments measure, in its order: (model, threads, batch, mode)."""
    batches = {mode: args.batches for mode in args.modes}
    if args.compiled_batches is not None and "compiled" in batches:
        batches["compiled"] = args.compiled_batches
    return [
        (model, threads, batch, mode)
        for model, mode, threads in product(args.models, args.modes, args.threads)
        for batch in batches[mode]
    ]


def saved_rows(path: Path, args: argparse.Namespace) -> list[LlmRow]:
    """The rows of a record that these arguments do not measure."""
    if not path.exists():
        return []
    _, rows = read_json(path, LlmRow)
    repeated = {(*each, args.prompt) for each in wanted(args)}
    return [row for row in rows if (row.model, row.threads, row.batch, row.mode, row.prompt) not in repeated]


def bandwidths(rows: Sequence[LlmRow]) -> str:
    """The greatest bandwidth of each number of threads."""
    best: dict[int, float] = {}
    for row in rows:
        best[row.threads] = max(row.bandwidth, best.get(row.threads, 0.0))
    return ", ".join(f"{gbps:.1f} GB/s on {threads} threads" for threads, gbps in best.items())


if __name__ == "__main__":
    main()
