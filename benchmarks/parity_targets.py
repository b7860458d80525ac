"""What the runs of ``benchmarks.parity`` should show. A distance is to the runs of the other arm with the same
seed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from .cuda import Target
from .parity_arms import BASE
from .parity_record import HELD_OUT, WHOLE, Loss, Result, by_arm, by_seed, distances, spread

Figures = Iterable[tuple[str, float]]
MXFP8, EXACT = "mxfp8", "mxfp8-dequant"
NVFP4 = "nvfp4-last-bf16"
"""With all ingredients."""
TWO_BLOCKS = "nvfp4-two-blocks"


def _percent(arm: str, results: Sequence[Result], loss: Loss = HELD_OUT) -> Figures:
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
    Target("MXFP8, distance from bf16 [%]", "<=", 0.3, lambda rows: _percent(MXFP8, rows)),
    Target("MXFP8, distance from bf16 [spread of seeds]", "<=", 2.0, lambda rows: _spreads(MXFP8, BASE, rows)),
    Target("MXFP8, distance from bf16 on the whole held-out text [%]", "<=", 0.3, lambda r: _percent(MXFP8, r, WHOLE)),
    Target("NVFP4 with all ingredients, distance from bf16 [%]", "<=", 1.0, lambda rows: _percent(NVFP4, rows)),
    Target("the same with two blocks in bf16 [%]", "<=", 1.0, lambda rows: _percent(TWO_BLOCKS, rows)),
    Target(
        "FP8 tensor cores, distance from dequantized values [spread of seeds]", "<=", 1.0,
        lambda rows: _spreads(MXFP8, EXACT, rows),
    ),
)  # fmt: skip
SPEED = Target("MXFP8, tokens/s over bf16", ">=", 1.0, lambda rows: _speed(MXFP8, rows))
TARGETS = (*QUALITY, SPEED)
