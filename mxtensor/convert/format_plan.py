"""``Plan``: a format for each weight, chosen by measured errors under a budget of bits.

plan = mx.plan(model, data, bits=5.0)
plan.save("plan.json")
mx.quantize_(model, mx.Plan.load("plan.json"))
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.arguments import POSITIVE, check, described
from ..core.explain import text_table
from ..recipe.base import KnownFields
from .configs import recipe_of

VERSION = 1
LARGEST, MOST = 1 << 28, 1 << 62
"""Bytes of a file that is read; the largest size, error and count in it."""
KEYS = ("version", "measure", "weights")
"""What the file of a plan has."""
MEASURES = {"kl": "KL", "squared": "error", "layer": "error"}
"""How errors were measured, and the head of their column."""


class PlannedWeight(NamedTuple):
    """What was measured of one weight."""

    values: int
    nbytes: Mapping[str, int]
    """Format -> bytes of codes and scales."""
    errors: Mapping[str, float]
    """Format -> error of the model, or of the layer, with this weight in this format and all others unquantized."""
    estimated: bool = False
    """Whether the errors are estimated from those of the weight: no input of it was seen."""


@dataclass(repr=False)
class Plan(KnownFields):
    """A format for each weight by its name, with the errors by which it was chosen. ``print`` shows a table.

    ``quantize_`` and ``calibrate`` take it, and an entry of ``formats`` can be replaced by another format that was
    measured. Bits are counted over the weights of the plan, scales included.
    """

    formats: dict[str, str]
    """By the name of the parameter, its format."""
    weights: Mapping[str, PlannedWeight] = field(default_factory=dict)
    """By the name of the parameter, what was measured."""
    measure: str = "kl"
    """``"kl"``: errors are KL divergences in nats per token; see ``mx.plan``."""

    def config_and_step(self) -> tuple[dict[str, str], None]:
        """The formats, for ``quantize_``."""
        return self.formats, None

    def _of(self, kind: str) -> list[float]:
        for fqn, weight in self.weights.items():
            if self.formats.get(fqn) not in weight.errors:
                raise ValueError(
                    f"Plan: the format of {fqn} is {self.formats.get(fqn)!r}, which was not measured; choose one of "
                    f"{', '.join(weight.errors)}"
                )
        return [getattr(weight, kind)[self.formats[fqn]] for fqn, weight in self.weights.items()]

    @property
    def values(self) -> int:
        """Values of all weights of the plan."""
        return sum(weight.values for weight in self.weights.values())

    @property
    def bits(self) -> float:
        """Stored bits for one value, over the weights of the plan. Raises ValueError for a format not measured."""
        return 8 * sum(self._of("nbytes")) / max(self.values, 1)

    @property
    def error(self) -> float:
        """The sum of the errors of all weights: for ``"kl"`` about the KL divergence, if rounded to nearest."""
        return sum(self._of("errors"))

    def with_bits(self, bits: float) -> Plan:
        """The plan for another budget, from the same errors. Raises ValueError if the formats need more bits."""
        return planned_for(self.weights, bits, self.measure)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file, which is whole or stays as it was. Links are followed."""
        weights = {fqn: {"format": self.formats[fqn], **weight._asdict()} for fqn, weight in self.weights.items()}
        fields = {"version": VERSION, "measure": self.measure, "bits": self.bits, "weights": weights}
        text, path = json.dumps(fields, indent=1) + "\n", Path(path)
        if path.exists() and not path.is_file():  # a device or a pipe, such as /dev/stdout, must not be replaced
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()
        new = path.with_name(f"{path.name}.new")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file of ``save``. Raises ValueError for another file, OSError for one that cannot be read."""
        if (size := Path(path).stat().st_size) > LARGEST:
            raise ValueError(f"{path} has {size} bytes, and a plan has at most {LARGEST}; make one by mx.plan")
        raw = Path(path).read_bytes()
        try:
            fields = json.loads(raw.decode("utf-8"))
            lacks = [key for key in KEYS if key not in fields] if isinstance(fields, dict) else KEYS
            if lacks:
                raise ValueError(f"it has no {' and no '.join(lacks)}")
            if fields["version"] != VERSION or not _is(fields["measure"], str) or fields["measure"] not in MEASURES:
                raise ValueError(f"version {fields['version']!r:.40}, measure {fields['measure']!r:.40}")
            if not isinstance(fields["weights"], dict):
                raise ValueError("weights is not a dict of names")
            rows = {fqn: _checked(fqn, row) for fqn, row in fields["weights"].items()}
            formats = {fqn: format for fqn, (format, _) in rows.items()}
            plan = cls(formats, {fqn: row for fqn, (_, row) in rows.items()}, fields["measure"])
            plan._of("errors")
        except (ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(
                f"{path} was not written by mx.Plan.save: {why}; make one by mx.plan or `mxtensor plan`"
            ) from error
        return plan

    def __str__(self) -> str:
        names: dict[str, list[str]] = {}
        for fqn in self.weights:
            names.setdefault(re.sub(r"\.\d+\.", ".*.", fqn), []).append(fqn)
        errors = dict(zip(self.weights, self._of("errors"), strict=True))
        lines = []
        for pattern, fqns in (*names.items(), ("all", list(self.weights))):
            counts = Counter(self.formats[fqn] for fqn in fqns) if pattern in names else Counter()
            formats = ", ".join(f"{n} {format}" for format, n in counts.most_common())
            values = sum(self.weights[fqn].values for fqn in fqns)
            nbytes = sum(self.weights[fqn].nbytes[self.formats[fqn]] for fqn in fqns)
            bits, error = 8 * nbytes / max(values, 1), sum(errors[fqn] for fqn in fqns)
            lines.append((pattern, formats, f"{values:,}", f"{bits:.2f}", f"{error:.4f}"))
        return text_table(("weights", "formats", "values", "bits", MEASURES[self.measure]), lines, left=(0, 1))

    __repr__ = __str__


def _is(value: object, *kinds: type) -> bool:
    """Whether a value of a JSON file has one of these types; true and false are not numbers."""
    return type(value) in kinds


def _checked(fqn: str, row: Any) -> tuple[str, PlannedWeight]:
    """The format of a weight and what was measured of it. Raises ValueError for other types, and for numbers that no
    measurement gives: sizes below 0, errors that are not finite."""
    if not isinstance(row, dict) or row.keys() - {"estimated"} != {"format", "values", "nbytes", "errors"}:
        raise ValueError(f"{fqn:.80} needs a format, values, nbytes and errors, got {described(row)}")
    format, values, nbytes, errors = (row[key] for key in ("format", "values", "nbytes", "errors"))
    estimated = row.get("estimated", False)
    if not (_is(format, str) and _is(values, int) and _is(estimated, bool) and _is(nbytes, dict) and _is(errors, dict)):
        raise ValueError(f"{fqn:.80} has values of other types")
    sizes = all(_is(n, int) and 0 <= n <= MOST for n in (values, *nbytes.values()))
    if not sizes or not all(_is(n, int, float) and abs(n) <= MOST for n in errors.values()):
        raise ValueError(f"{fqn:.80} has sizes or errors that are not numbers, or not finite")
    if nbytes.keys() != errors.keys():
        raise ValueError(f"{fqn:.80} has a number of bytes and an error for other formats")
    for name in errors:
        try:
            recipe_of(name)
        except ValueError as error:
            raise ValueError(f"{fqn:.80} has the format {name!r:.80}, which there is not") from error
    return format, PlannedWeight(values, nbytes, errors, estimated)


def planned_for(weights: Mapping[str, PlannedWeight], bits: float, measure: str) -> Plan:
    """The plan with the least sum of errors whose weights have at most ``bits`` bits per value, all together."""
    check("plan", "bits", bits, POSITIVE)
    values = sum(weight.values for weight in weights.values())
    choices = {
        fqn: {format: Choice(weight.nbytes[format], error) for format, error in weight.errors.items()}
        for fqn, weight in weights.items()
    }
    sizes = {fqn: weight.nbytes for fqn, weight in weights.items()}
    smallest = check_budget(bits, {fqn: weight.values for fqn, weight in weights.items()}, sizes)
    return Plan(within(max(int(bits * values / 8), smallest), choices), weights, measure)


def check_budget(bits: float, values: Mapping[str, int], sizes: Mapping[str, Mapping[str, int]]) -> int:
    """The bytes of all weights, each in its smallest format (``sizes``: weight -> format -> bytes).

    Raises ValueError if they are more than ``bits`` bits for each of their ``values``.
    """
    smallest, count = sum(min(row.values()) for row in sizes.values()), sum(values.values())
    if bits * count < 8 * smallest:
        raise ValueError(
            f"plan: bits is {bits:g}, and the smallest formats take {8 * smallest / count:.4g} bits per value; "
            "pass more bits, or smaller formats"
        )
    return smallest


# ---------------------------------------------------------------------------------------------- the search

STATES = 1 << 14
"""Sums of bytes that the search keeps."""


class Choice(NamedTuple):
    """One way to store a weight."""

    nbytes: int
    error: float


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
    steps: list[tuple[float, str, str, int]] = []  # gain, weight, the name of the larger choice, bytes that it costs
    for weight, names in hulls.items():
        for small, large in pairwise(names):
            before, after = weights[weight][small], weights[weight][large]
            steps.append((_gain(before, after), weight, large, after.nbytes - before.nbytes))
    full: set[str] = set()
    slope: float | None = None
    for gain, weight, name, nbytes in sorted(steps, key=lambda step: -step[0]):  # stable: those of a weight in order
        if weight in full:
            continue
        if nbytes > left:
            full.add(weight)
            slope = gain if slope is None else slope
            continue
        chosen[weight] = name
        left -= nbytes
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
