"""What ``benchmarks.parity`` trains (its arms), the JSONL file of each run, and what the runs say together.

The first line of a file describes the run (``Header``), each line after it a point (``Point``). Kernels of a GPU add
in any order, so that a run that is repeated ends at another loss: a seed may have several runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mxtensor.recipe import (
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from mxtensor.recipe.block_scaling import RANDOM_SIGNS
from mxtensor.recipe.linear_recipe import LinearRecipe

from .harness import Target

# ---------------------------------------------------------------------------------------------- arms

BASE = "bf16"


@dataclass(frozen=True)
class Arm:
    """One way to train the model."""

    what: str
    """The arm in words."""
    recipe: Callable[[], Recipe | LinearRecipe] | None = None
    """None: unquantized, under torch.autocast in bfloat16, as the unquantized operations of all arms are."""
    kernel: str | None = None
    """The product kernel that all products must take; None: the one that mxtensor chooses."""
    last: float = 0.0
    """The share of the steps, at the end, that run unquantized."""
    blocks: int = 0
    """The last blocks of the model that stay unquantized."""


def _mxfp8_floor() -> MXFP8BlockScaling:
    return MXFP8BlockScaling(input_scaling="floor", weight_scaling="floor", grad_scaling="floor")


def _mxfp8_backward() -> LinearRecipe:
    recipe = MXFP8BlockScaling().linear_recipe()
    x, weight = (replace(casts, rowwise=None) for casts in (recipe.input, recipe.weight))
    return replace(recipe, input=x, weight=weight, name="MXFP8, dgrad and wgrad")


def _mxfp4_rotated() -> LinearRecipe:
    recipe = MXFP4BlockScaling().linear_recipe()
    x, grad = (replace(casts, signs=RANDOM_SIGNS) for casts in (recipe.input, recipe.grad))
    return replace(recipe, input=x, grad=grad, name="MXFP4, rotated")


LAST = 0.1
ARMS: dict[str, Arm] = {
    BASE: Arm("not quantized"),
    "mxfp8": Arm("E4M3, RCEIL scales", MXFP8BlockScaling),
    "mxfp8-floor": Arm("FLOOR scales, the rule of the OCP specification", _mxfp8_floor),
    "mxfp8-e5m2": Arm("E5M2 gradients", partial(MXFP8BlockScaling, fp8_format=Format.HYBRID)),
    "mxfp8-32x32": Arm("32x32 tiles of weights", partial(MXFP8BlockScaling, two_dimensional_weights=True)),
    "mxfp8-dequant": Arm("products of dequantized values in bfloat16", MXFP8BlockScaling, kernel="dequant"),
    "mxfp8-fprop": Arm(
        "fprop quantized, not dgrad and wgrad", partial(MXFP8BlockScaling, backward_override="high_precision")
    ),
    "mxfp8-backward": Arm("dgrad and wgrad quantized, not fprop", _mxfp8_backward),
    "mxfp8-same": Arm(
        "dgrad and wgrad with the values of fprop", partial(MXFP8BlockScaling, backward_override="dequantized")
    ),
    "float8-current": Arm("float8, one scale per tensor, E5M2 gradients", Float8CurrentScaling),
    "float8-e4m3": Arm("float8, one scale per tensor, E4M3 gradients", partial(Float8CurrentScaling, Format.E4M3)),
    "float8-power-2": Arm(
        "float8, one scale per tensor, a power of two", partial(Float8CurrentScaling, use_power_2_scales=True)
    ),
    "mxfp6": Arm("E2M3", MXFP6BlockScaling),
    "nvfp4": Arm("rotation, stochastic rounding, 16x16 tiles of weights", NVFP4BlockScaling),
    "nvfp4-no-rotation": Arm("NVFP4 without rotation", partial(NVFP4BlockScaling, disable_rht=True)),
    "nvfp4-nearest": Arm(
        "NVFP4 without stochastic rounding", partial(NVFP4BlockScaling, disable_stochastic_rounding=True)
    ),
    "nvfp4-1d": Arm("NVFP4 without tiles of weights", partial(NVFP4BlockScaling, disable_2d_quantization=True)),
    "nvfp4-last-bf16": Arm(f"NVFP4, the last {LAST:.0%} of the steps in bfloat16", NVFP4BlockScaling, last=LAST),
    "nvfp4-two-blocks": Arm(
        "the same, and the last two blocks in bfloat16 in all steps", NVFP4BlockScaling, last=LAST, blocks=2
    ),
    "mxfp4": Arm("stochastic rounding", MXFP4BlockScaling),
    "mxfp4-rotation": Arm("MXFP4 with the rotation of NVFP4", _mxfp4_rotated),
    "mxfp4-nearest": Arm("MXFP4 without stochastic rounding", partial(MXFP4BlockScaling, stochastic_rounding=False)),
    "mxfp4-32x32": Arm(
        "MXFP4 with 32x32 tiles of weights", partial(MXFP4BlockScaling, two_dimensional_weights=True)
    ),
    "mxfp4-last-bf16": Arm(f"MXFP4, the last {LAST:.0%} of the steps in bfloat16", MXFP4BlockScaling, last=LAST),
}  # fmt: skip
"""Name -> arm, in the order of the tables."""


# ---------------------------------------------------------------------------------------------- records

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


# ---------------------------------------------------------------------------------------------- targets

Figures = Iterable[tuple[str, float]]
MXFP8, EXACT = "mxfp8", "mxfp8-dequant"
NVFP4 = "nvfp4-last-bf16"
"""With all ingredients."""
TWO_BLOCKS = "nvfp4-two-blocks"


def _apart(arm: str, results: Sequence[Result], loss: Loss = HELD_OUT) -> Figures:
    """The distance of the arm's ``loss`` from that of bf16, in percent."""
    runs = by_arm(results)
    found = distances(runs.get(arm, []), runs.get(BASE, []), loss, loss)
    return [(arm, abs(100 * statistics.fmean(found)))] if found else []


def _spreads(arm: str, other: str, results: Sequence[Result]) -> Figures:
    """The distance of the mean losses of two arms, in units of the larger spread of their seeds."""
    runs = by_arm(results)
    ours, theirs = (by_seed(runs.get(name, [])) for name in (arm, other))
    apart = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    unit = max((spread(runs[name]) for name, seeds in ((arm, ours), (other, theirs)) if len(seeds) > 1), default=0.0)
    return [(f"{arm} and {other}", abs(sum(apart) / len(apart)) / unit)] if apart and unit else []


def _speed(arm: str, results: Sequence[Result]) -> Figures:
    """Tokens a second of the arm over those of bf16, the means over their seeds."""
    runs = by_arm(results)
    if arm not in runs or BASE not in runs:
        return []
    ours, base = ([run.tokens_per_second for run in runs[name]] for name in (arm, BASE))
    return [(arm, sum(ours) / len(ours) * len(base) / sum(base))]


QUALITY = (
    Target("MXFP8, distance from bf16 [%]", "<=", 0.3, lambda rows: _apart(MXFP8, rows)),
    Target("MXFP8, distance from bf16 [spread of seeds]", "<=", 2.0, lambda rows: _spreads(MXFP8, BASE, rows)),
    Target("MXFP8, distance from bf16 on the whole held-out text [%]", "<=", 0.3, lambda r: _apart(MXFP8, r, WHOLE)),
    Target("NVFP4 with all ingredients, distance from bf16 [%]", "<=", 1.0, lambda rows: _apart(NVFP4, rows)),
    Target("the same with two blocks in bf16 [%]", "<=", 1.0, lambda rows: _apart(TWO_BLOCKS, rows)),
    Target(
        "FP8 tensor cores, distance from dequantized values [spread of seeds]", "<=", 1.0,
        lambda rows: _spreads(MXFP8, EXACT, rows),
    ),
)  # fmt: skip
SPEED = Target("MXFP8, tokens/s over bf16", ">=", 1.0, lambda rows: _speed(MXFP8, rows))
TARGETS = (*QUALITY, SPEED)
