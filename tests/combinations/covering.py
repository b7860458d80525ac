"""Covering arrays: few cases that have every pair of values of all axes, and every triple of some of them.

allpairspy makes the pairs. It stops at the first row that adds nothing, so that neither triples nor pairs under rules
are complete: ``complete`` adds rows until each combination that the rules allow is in one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import pytest
from allpairspy import AllPairs

Case = dict[str, str]
"""The value of each axis."""
Combination = frozenset[tuple[str, str]]


class Rule(NamedTuple):
    """Combinations that are not cases: those for which ``excludes``, whose arguments are names of axes, is true."""

    reason: str
    excludes: Callable[..., bool]


class Space:
    """Axes (name -> values), the bold ones, whose triples are covered, and the rules."""

    def __init__(self, axes: dict[str, list[str]], bold: Iterable[str], rules: Iterable[Rule]):
        self.axes, self.bold = axes, list(bold)
        self.rules = [(list(inspect.signature(rule.excludes).parameters), rule.excludes) for rule in rules]
        assert {name for names, _ in self.rules for name in names} <= axes.keys()

    def allows(self, case: Case) -> bool:
        """Whether no rule excludes the case, whose axes may be some of them."""
        return not any(
            excludes(*(case[name] for name in names)) for names, excludes in self.rules if case.keys() >= set(names)
        )

    def row(self, wanted: Combination, missing: set[Combination] = frozenset()) -> Case | None:
        """A case with the values ``wanted``, the others such that it has many of ``missing``; None if there is none."""
        return self._extend(dict(wanted), [name for name in self.axes if name not in dict(wanted)], missing)

    def _extend(self, case: Case, free: list[str], missing: set[Combination]) -> Case | None:
        if not self.allows(case):
            return None
        if not free:
            return {name: case[name] for name in self.axes}
        name, known = free[0], list(case.items())

        bold = [pair for pair in known if pair[0] in self.bold] if name in self.bold else []

        def gain(value: str) -> int:
            new = (name, value)
            pairs = sum(frozenset((pair, new)) in missing for pair in known)
            return pairs + sum(frozenset((a, b, new)) in missing for a, b in itertools.combinations(bold, 2))

        for value in sorted(self.axes[name], key=gain, reverse=True):
            if found := self._extend(case | {name: value}, free[1:], missing):
                return found
        return None

    @cached_property
    def combinations(self) -> list[Combination]:
        """Every pair of all axes and triple of the bold ones that some case has."""
        groups = [*itertools.combinations(self.bold, 3), *itertools.combinations(self.axes, 2)]
        every = (
            frozenset(zip(names, values, strict=True))
            for names in groups
            for values in itertools.product(*(self.axes[name] for name in names))
        )
        return [combination for combination in every if self.row(combination)]

    def of(self, case: Case) -> Iterator[Combination]:
        """The combinations that a case has."""
        for names in [*itertools.combinations(self.bold, 3), *itertools.combinations(self.axes, 2)]:
            yield frozenset((name, case[name]) for name in names)

    def cases(self, first: Iterable[Case] = ()) -> list[Case]:
        """``first``, then cases until every combination that the rules allow is in one."""
        names = list(self.axes)

        def allowed(values: list[str]) -> bool:
            return self.allows(dict(zip(names, values, strict=False)))

        missing, cases = dict.fromkeys(self.combinations), []
        pairs = AllPairs(list(self.axes.values()), filter_func=allowed)
        for case in itertools.chain(first, (dict(zip(names, values, strict=True)) for values in pairs)):
            cases.append(case)
            for combination in self.of(case):
                missing.pop(combination, None)
        while missing:
            case = self.row(next(iter(missing)), missing.keys())
            assert case is not None
            cases.append(case)
            for combination in self.of(case):
                missing.pop(combination, None)
        return cases


def id_of(case: Case) -> str:
    """The id of a case: the value of each axis, by its name where the value alone does not say it."""
    return ",".join(f"{name}={value}" for name, value in case.items())


def spread(cases: Sequence[Any], count: int) -> list[Any]:
    """``count`` of the cases at equal distances."""
    return [cases[i * len(cases) // count] for i in range(count)]


def sanitized(cases: Sequence[Case], count: int = 24) -> list[Any]:
    """The cases as parameters of a test; ``count`` eager ones and compiled ones have the mark ``sanitized``.

    Not those with a static cache, which transformers compiles by itself: under the checker it takes 90 s for each.
    """
    quick = [c for c in cases if c.get("cache") != "static"]
    groups = [[c for c in quick if c["way"] == "eager"], [c for c in quick if c["way"] == "whole"]]
    marked = [id(c) for group in groups for c in spread(group, count // 2)]
    return [pytest.param(c, marks=pytest.mark.sanitized) if id(c) in marked else c for c in cases]
