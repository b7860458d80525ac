"""The records of ``benchmarks.parity``: a JSONL file for each run, and what they say together.

The first line of a file describes the run (``Header``), each line after it a point (``Point``). Kernels of a GPU add
in any order, so that a run that is repeated ends at another loss: a seed may have several runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .parity_arms import ARMS, BASE

RESULTS = Path(__file__).resolve().parent / "results" / "parity"


@dataclass(frozen=True)
class Header:
    """What a run was. Two runs compare if all fields agree but ``arm``, ``seed``, ``repeat``, ``products`` and
    ``machine``."""

    arm: str
    seed: int
    size: str
    """A name of ``examples.gpt.SIZES``."""
    parameters: int
    quantized: int
    """Parameters that carry the recipe."""
    steps: int
    batch_tokens: int
    """Tokens of a step. A token is a byte."""
    text: str
    """The digest of the text."""
    training_bytes: int
    held_out_bytes: int
    compiled: bool
    products: dict[str, int]
    """How often ``mx.explain()`` saw each product and kernel in the first step; compiled blocks share one graph."""
    machine: dict[str, Any]
    repeat: int = 0
    """Which run of this arm and seed it is."""


@dataclass(frozen=True)
class Point:
    """The state of a run after a step."""

    step: int
    tokens: int
    training: float | None
    """The mean loss of the steps since the point before, in nats a byte; None at step 0."""
    held_out: float
    seconds: float
    """Of training so far: the first steps' compilation is in it, evaluations and checkpoints are not."""
    unquantized: float | None = None
    """The held-out loss of the same weights without quantization; None: not measured, or an arm without a recipe."""
    whole: float | None = None
    """At the end: the loss over the whole held-out text, of which ``held_out`` has a sample; None: not measured."""
    whole_unquantized: float | None = None
    """The same without quantization."""


@dataclass(frozen=True)
class Result:
    """One file."""

    header: Header
    points: Sequence[Point]

    @property
    def finished(self) -> bool:
        return bool(self.points) and self.points[-1].step == self.header.steps

    @property
    def loss(self) -> float:
        """The last held-out loss."""
        return self.points[-1].held_out

    @property
    def tokens_per_second(self) -> float:
        """The median over the points but the first, whose steps compile; nan with fewer points."""
        pairs = list(zip(self.points[1:], self.points[2:], strict=False))
        speeds = [(b.tokens - a.tokens) / (b.seconds - a.seconds) for a, b in pairs if b.seconds > a.seconds]
        return statistics.median(speeds) if speeds else float("nan")


def path_of(results: Path, size: str, arm: str, seed: int, repeat: int = 0) -> Path:
    """The file of a run."""
    return results / size / f"{arm}-seed{seed}{f'-repeat{repeat}' * bool(repeat)}.jsonl"


def read(path: Path) -> Result:
    """One file. A last line that was cut off is left out."""
    first, *rest = path.read_text().splitlines(keepends=True)
    points = [Point(**json.loads(line)) for line in rest if line.endswith("\n")]
    return Result(Header(**json.loads(first)), points)


def start(path: Path, header: Header, points: Sequence[Point]) -> None:
    """Write a file anew, with these points."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [asdict(header), *map(asdict, points)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def append(path: Path, point: Point) -> None:
    """Add a point to a file."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(point)) + "\n")


def read_all(results: Path, size: str) -> list[Result]:
    """The finished runs of one size, in the order of ARMS, seeds and repeats.

    Raises ValueError if two of them had other texts, lengths or models.
    """
    found = [read(path) for path in sorted((results / size).glob("*-seed*.jsonl"))]
    found = [result for result in found if result.finished]
    for result in found[1:]:
        for name in ("parameters", "steps", "batch_tokens", "text"):
            ours, first = getattr(result.header, name), getattr(found[0].header, name)
            if ours != first:
                raise ValueError(
                    f"{results / size}: {result.header.arm} has {name} {ours}, {found[0].header.arm} {first}; keep the "
                    "records of one study in a folder"
                )
    order = list(ARMS)
    return sorted(found, key=lambda run: (order.index(run.header.arm), run.header.seed, run.header.repeat))


# ---------------------------------------------------------------------------------------------- the table

HEADER = [
    "arm", "what", "runs", "held-out loss", "over bf16 of the same seed", "spread of seeds", "tokens/s", "over bf16",
    "over bf16 if evaluated unquantized", "over bf16 on the whole text", "the same if evaluated unquantized",
]  # fmt: skip
OPTIONAL = 3
"""Columns at the end that are left out if no run measured them."""
Loss = Callable[[Result], float | None]


def at_end(name: str) -> Loss:
    """A field of the last point of a run."""
    return lambda run: getattr(run.points[-1], name)


HELD_OUT, WHOLE = at_end("held_out"), at_end("whole")


def by_arm(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Arm -> its runs."""
    arms: dict[str, list[Result]] = {}
    for result in results:
        arms.setdefault(result.header.arm, []).append(result)
    return arms


def by_seed(runs: Sequence[Result], loss: Loss = HELD_OUT) -> dict[int, float]:
    """Seed -> the mean of ``loss`` over its runs, of those that have it."""
    found: dict[int, list[float]] = {}
    for run in runs:
        value = loss(run)
        if value is not None:
            found.setdefault(run.header.seed, []).append(value)
    return {seed: statistics.fmean(losses) for seed, losses in found.items()}


def spread(runs: Sequence[Result]) -> float:
    """The largest less the smallest held-out loss of the seeds."""
    losses = by_seed(runs).values()
    return max(losses) - min(losses)


def distances(
    runs: Sequence[Result], base: Sequence[Result], loss: Loss = HELD_OUT, of_base: Loss = HELD_OUT
) -> list[float]:
    """``loss`` / loss of bf16 - 1 for each seed that both have."""
    ours, theirs = by_seed(runs, loss), by_seed(base, of_base)
    return [ours[seed] / theirs[seed] - 1 for seed in ours if seed in theirs]


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of ``values``; None for fewer than three, of which it says little."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 2 else None


def _percent(values: Sequence[float]) -> str:
    """Their mean, and its standard error if it is known."""
    if not values:
        return ""
    error = standard_error(values)
    return f"{statistics.fmean(values):+.2%}" + ("" if error is None else f" ± {error:.2%}")


def table_of(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """The header and a line for each arm, without the OPTIONAL columns that are empty."""
    found, always = lines(results), len(HEADER) - OPTIONAL
    columns = [i for i in range(len(HEADER)) if i < always or any(line[i] for line in found)]
    return [HEADER[i] for i in columns], [[line[i] for i in columns] for line in found]


def lines(results: Sequence[Result]) -> list[list[str]]:
    """A line for each arm, under HEADER."""
    arms = by_arm(results)
    base = arms.get(BASE, [])
    base_speed = statistics.fmean(run.tokens_per_second for run in base) if base else float("nan")
    found = []

    def apart(name: str, loss: Loss, of_base: Loss = HELD_OUT) -> str:
        return _percent([] if name == BASE else distances(arms[name], base, loss, of_base))

    for name, runs in arms.items():
        speed = statistics.fmean(run.tokens_per_second for run in runs)
        losses = by_seed(runs)
        found.append([
            name, ARMS[name].what, str(len(runs)), f"{statistics.fmean(losses.values()):.4f}",
            apart(name, HELD_OUT), f"{spread(runs):.4f}" if len(losses) > 1 else "",
            f"{speed:,.0f}", f"{speed / base_speed:.2f}", apart(name, at_end("unquantized")),
            apart(name, WHOLE, WHOLE), apart(name, at_end("whole_unquantized"), WHOLE),
        ])  # fmt: skip
    return found
