"""Which choice each weight takes, so that the sum of errors is least within a budget of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

STATES = 1 << 14
"""Sums of bytes that the search keeps."""


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
    """The choice of each weight, so that the sum of errors is least. ``budget``: at least the bytes of the smallest
    choices.

    This is the knapsack problem with multiple choices. A greedy solution along the hulls comes first; few choices can
    still improve it, and these are searched. The result is exact unless the search meets more than ``STATES`` sums of
    bytes, and never worse than the greedy one.

    Source of the reduction: Dyer, Kayal and Walker, "A branch and bound algorithm for solving the multiple-choice
    knapsack problem", 1984.
    """
    chosen, slope = _greedy(budget, weights)
    found = None if slope is None else _improved(budget, weights, chosen, slope)
    return chosen if found is None or _error(weights, found) >= _error(weights, chosen) else found


def _error(weights: Mapping[str, Mapping[str, Choice]], chosen: Mapping[str, str]) -> float:
    return sum(weights[weight][name].error for weight, name in chosen.items())


def _greedy(budget: int, weights: Mapping[str, Mapping[str, Choice]]) -> tuple[dict[str, str], float | None]:
    """Steps along all hulls, by the error that a byte takes away, while they fit, and the gain of the first step that
    does not fit (None: all fit, and nothing is better)."""
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
    slope: float | None = None
    for step in sorted(steps, key=lambda step: -step.gain):  # stable: steps of one weight stay in their order
        if step.weight in full:
            continue
        if step.nbytes > left:
            full.add(step.weight)
            slope = step.gain if slope is None else slope
            continue
        chosen[step.weight] = step.name
        left -= step.nbytes
    return chosen, slope


def _improved(
    budget: int, weights: Mapping[str, Mapping[str, Choice]], chosen: dict[str, str], slope: float
) -> dict[str, str] | None:
    """The best choices; None if they are the ``chosen`` ones. ``slope``: the gain at which the greedy solution ran out
    of bytes.

    The cost of a choice is its error plus ``slope`` times its bytes, and its loss the cost above the least one of its
    weight. The sum of errors is a constant, plus all losses, plus ``slope`` times the bytes that are left. So a better
    solution has no choice whose loss alone reaches what the ``chosen`` ones have of both (``limit``).
    """
    losses: dict[str, dict[str, float]] = {}
    for weight, choices in weights.items():
        costs = {name: choice.error + slope * choice.nbytes for name, choice in choices.items()}
        least = min(costs.values())
        losses[weight] = {name: cost - least for name, cost in costs.items()}
    left = budget - sum(weights[weight][name].nbytes for weight, name in chosen.items())
    limit = sum(losses[weight][name] for weight, name in chosen.items()) + slope * left
    undecided, fixed = [], 0
    best = dict(chosen)
    for weight, of in losses.items():
        names = [name for name, loss in of.items() if loss < limit]
        if len(names) == 1:
            best[weight] = names[0]
            fixed += weights[weight][names[0]].nbytes
        elif names:
            undecided.append((weight, sorted(names, key=lambda name: weights[weight][name].nbytes)))
        else:  # the greedy solution has no loss
            return None
    found = _searched(budget - fixed, undecided, weights, losses, slope, limit)
    return None if found is None else best | found


def _searched(
    budget: int,
    undecided: Sequence[tuple[str, list[str]]],
    weights: Mapping[str, Mapping[str, Choice]],
    losses: Mapping[str, Mapping[str, float]],
    slope: float,
    limit: float,
) -> dict[str, str] | None:
    """The choices of the ``undecided`` weights with the least losses and bytes left; None if none is below ``limit``.

    A state is a sum of bytes, with the least loss of choices that have it. Weights are added one by one. A state is
    dropped if the smallest choices of the other weights do not fit, or if it reaches ``limit`` with the largest ones.
    """
    cpu = torch.device("cpu")  # whatever the default device is
    nbytes = [torch.tensor([weights[w][name].nbytes for name in names], device=cpu) for w, names in undecided]
    smallest, largest = (list(accumulate((int(f(n)) for n in nbytes[::-1]), initial=0))[::-1] for f in (min, max))
    sums, loss = torch.zeros(1, dtype=torch.int64, device=cpu), torch.zeros(1, dtype=torch.float64, device=cpu)
    parents: list[torch.Tensor] = []
    """For each weight and state: the index of the state before it, times the number of choices, plus the choice."""
    for i, (weight, names) in enumerate(undecided):
        more = torch.tensor([losses[weight][name] for name in names], dtype=torch.float64, device=cpu)
        new, total = (sums[:, None] + nbytes[i]).flatten(), (loss[:, None] + more).flatten()
        unused = (budget - new - largest[i + 1]).clamp(min=0)
        rest = ((new + smallest[i + 1] <= budget) & (total + slope * unused < limit)).nonzero().flatten()
        rest = rest[total[rest].argsort(stable=True)]
        rest = rest[new[rest].argsort(stable=True)]
        first = torch.ones(len(rest), dtype=torch.bool, device=cpu)
        first[1:] = new[rest][1:] != new[rest][:-1]
        rest = rest[first]
        if len(rest) > STATES:
            rest = rest[total[rest].argsort(stable=True)[:STATES]]
        if not len(rest):
            return None
        parents.append(rest)
        sums, loss = new[rest], total[rest]
    every = (loss + slope * (budget - sums)).masked_fill(sums > budget, limit)
    at = int(every.argmin())
    if every[at] >= limit:
        return None
    found: dict[str, str] = {}
    for (weight, names), rest in zip(reversed(undecided), reversed(parents), strict=True):
        at, choice = divmod(int(rest[at]), len(names))
        found[weight] = names[choice]
    return found
