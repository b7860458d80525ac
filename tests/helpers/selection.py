"""Which tests ``make test`` runs, and which are left to ``make test-all``.

A parametrized test function multiplies its parameters: 10 formats, 3 dtypes and 4 shapes are 120 cases. What usually
breaks is one format or one shape, so the quick suite runs a covering sample of the cases: each value of each parameter
at least once (each-choice coverage), with as many different pairs of values as that number of cases holds. A function
with one parameter, and a list of rows given as one ``parametrize``, are run whole. A test marked ``exhaustive`` is
never in the sample; of one marked ``exhaustive(quick=3)`` the sample has three cases. ``--suite rest`` is the
complement, so the two suites together run each test exactly once. Of a large product that is marked ``pairs``, they run
each pair of values of two parameters at least once (pairwise coverage), and ``--suite all`` every case.

The sample depends on the cases of one function only: not on ``-k``, on other files, or on the number of processes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SUITES = ("quick", "rest", "all")


def cover(cases: Sequence[Mapping[str, int]], every_pair: bool = False) -> list[int]:
    """Indices of a small set of ``cases`` that has each value of each parameter, in the order of ``cases``; with
    ``every_pair`` also each pair of values of two parameters that is in a case.

    A greedy choice: the next case is the one with the most values not covered yet, then the most pairs of values not
    covered yet, then the first. Parameters that always change together (one ``parametrize`` of several names) make one
    axis, so that every row of such a list is in the result.
    """
    values = [set(case.items()) for case in cases]
    pairs = [set(itertools.combinations(sorted(case.items()), 2)) for case in cases]
    missing, missing_pairs = set().union(*values), set().union(*pairs)
    chosen: list[int] = []

    def order(i: int) -> tuple[int, int, int]:
        return -len(values[i] & missing), -len(pairs[i] & missing_pairs), i

    waiting = [order(i) for i in range(len(cases))]
    heapq.heapify(waiting)
    while missing or (every_pair and missing_pairs):
        best = heapq.heappop(waiting)[-1]
        now = order(best)  # what it adds has become less since it was put there, never more
        if waiting and now > waiting[0]:
            heapq.heappush(waiting, now)
            continue
        chosen.append(best)
        missing -= values[best]
        missing_pairs -= pairs[best]
    return sorted(chosen)


def axes(items: Sequence[Any]) -> list[dict[str, int]]:
    """What each case of one function chose: name of the axis -> index of the value, in order of appearance.

    One ``parametrize`` is one axis, also if it has several names; a parametrized fixture is an axis of its own.
    """
    seen: dict[str, dict[tuple[int, ...], int]] = {}
    result = []
    for item in items:
        params, case = dict(item.callspec.params), {}
        marks = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in item.iter_markers("parametrize")]
        groups = [[n.strip() for n in names.split(",")] if isinstance(names, str) else [*names] for names in marks]
        rest = params.keys() - set(itertools.chain(*groups))
        for names in [*groups, *([name] for name in sorted(rest))]:
            value = tuple(id(params[name]) for name in names)  # one object for all cases, hashable or not
            numbers = seen.setdefault(",".join(names), {})
            case[",".join(names)] = numbers.setdefault(value, len(numbers))
        result.append(case)
    return result


def spaced(sample: Sequence[int], most: float) -> list[int]:
    """``most`` of ``sample`` at equal distances, the first included; all if there are no more."""
    count = int(min(most, len(sample)))
    return [sample[i * len(sample) // count] for i in range(count)]


def function_of(nodeid: str) -> str:
    """The node id of a test function, without the case: ``tests/a.py::test_b`` for ``tests/a.py::test_b[x]``."""
    return nodeid.partition("[")[0]


def named(arguments: Iterable[str], root: os.PathLike[str] | str) -> set[str]:
    """The functions and classes that the command line names (``file::test``): all their cases run in every suite."""
    found = set()
    for argument in arguments:
        path, separator, name = argument.partition("::")
        if separator:
            found.add(f"{os.path.relpath(path, root)}::{function_of(name)}".replace(os.sep, "/"))
    return found


def choose(items: Sequence[Any], suite: str, arguments: Iterable[str] = (), root: str = ".") -> list[bool]:
    """For each pytest item whether it belongs to ``suite``: "quick", "rest" or "all"."""
    if suite == "all":
        return [True] * len(items)
    by_function: dict[tuple[str, float], list[int]] = {}
    for i, item in enumerate(items):
        mark = item.get_closest_marker("exhaustive")
        most = math.inf if mark is None else mark.kwargs.get("quick", 0)
        if most or item.get_closest_marker("pairs"):
            by_function.setdefault((function_of(item.nodeid), most), []).append(i)
    quick, left_out = set(), set()
    for (_, most), indices in by_function.items():
        parametrized = hasattr(items[indices[0]], "callspec")
        sample = cover(axes([items[i] for i in indices])) if parametrized else range(len(indices))
        quick.update(indices[i] for i in spaced(sample, most))
        if suite == "rest" and items[indices[0]].get_closest_marker("pairs"):
            left_out.update({*indices} - {indices[i] for i in cover(axes([items[i] for i in indices]), True)})
    always = named(arguments, root)
    owners = [{item.nodeid.rsplit("::", n)[0] for n in range(1, item.nodeid.count("::"))} for item in items]
    asked = [bool(always & {function_of(item.nodeid), *owner}) for item, owner in zip(items, owners, strict=True)]
    mine = quick if suite == "quick" else {*range(len(items))} - quick - left_out
    return [asked[i] or i in mine for i in range(len(items))]
