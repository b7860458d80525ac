"""Which choice each weight takes, so that the sum of errors is least within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple


class Choice(NamedTuple):
    """One way to store a weight."""

    nbytes: int
    error: float


class _Step(NamedTuple):
    """From one choice of a weight to a larger one."""

    gain: float
    """The error that a byte more takes away."""
    weight: str
    name: str
    nbytes: int
    """What the step costs."""


def hull(choices: Mapping[str, Choice]) -> list[str]:
    """The names of choices on the lower convex hull of error over bytes, from the smallest choice on.

    Each step along it takes away error, and less for each byte than the step before.
    """
    found: list[str] = []
    for name in sorted(choices, key=lambda name: choices[name]):
        new = choices[name]
        if found and new.error >= choices[found[-1]].error:
            continue
        while len(found) > 1 and _gain(choices[found[-1]], new) >= _gain(choices[found[-2]], choices[found[-1]]):
            found.pop()
        if len(found) == 1 and choices[found[0]].nbytes == new.nbytes:
            found.pop()
        found.append(name)
    return found


def _gain(before: Choice, after: Choice) -> float:
    return (before.error - after.error) / max(after.nbytes - before.nbytes, 1)


def within(budget: int, weights: Mapping[str, Mapping[str, Choice]]) -> dict[str, str]:
    """The choice of each weight: steps along all hulls, by the error that a byte takes away, while they fit.

    This is the Lagrangian solution, and steps that still fit into the bytes it leaves. ``budget``: bytes, at least
    those of the smallest choices.
    """
    hulls = {weight: hull(choices) for weight, choices in weights.items()}
    chosen = {weight: names[0] for weight, names in hulls.items()}
    left = budget - sum(weights[weight][name].nbytes for weight, name in chosen.items())
    assert left >= 0
    steps: list[_Step] = []
    for weight, names in hulls.items():
        for small, large in pairwise(names):
            before, after = weights[weight][small], weights[weight][large]
            steps.append(_Step(_gain(before, after), weight, large, after.nbytes - before.nbytes))
    full: set[str] = set()
    for step in sorted(steps, key=lambda step: -step.gain):  # stable: steps of one weight stay in their order
        if step.weight in full:
            continue
        if step.nbytes > left:
            full.add(step.weight)
            continue
        chosen[step.weight] = step.name
        left -= step.nbytes
    return chosen
