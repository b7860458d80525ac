"""The sample of the quick suite: every value of every parameter, and with the rest each case exactly once."""

import itertools

import pytest

from tests.helpers.selection import choose, cover, named

FORMATS, DTYPES, SHAPES = (tuple(f"{letter}{i}" for i in range(n)) for letter, n in (("f", 10), ("d", 3), ("s", 4)))


class Item:
    """What the choice reads of a pytest item: its id, its case, its marks."""

    def __init__(self, nodeid, params=None, names=(), **named):
        self.nodeid, self.named = nodeid, named
        self.marks = [pytest.mark.parametrize(n, []).mark for n in names]
        if params is not None:
            self.callspec = type("CallSpec", (), {"params": params})

    def get_closest_marker(self, name):
        return self.named[name].mark if name in self.named else None

    def iter_markers(self, name):
        return iter(self.marks)


def product(**marks):
    cases = itertools.product(FORMATS, DTYPES, SHAPES)
    return [Item(f"a.py::test_f[{'-'.join(c)}]", dict(zip("fds", c, strict=True)), "fds", **marks) for c in cases]


def test_every_value_is_in_the_sample_and_pairs_are_spread():
    cases = [{"f": i, "d": j, "s": k} for i, j, k in itertools.product(range(10), range(3), range(4))]
    sample = [cases[i] for i in cover(cases)]
    assert len(sample) == 10
    assert [len({case[axis] for case in sample}) for axis in "fds"] == [10, 3, 4]
    assert len({(case["d"], case["s"]) for case in sample}) == 10, "a diagonal would repeat pairs"


def test_a_list_of_rows_is_run_whole():
    rows = [(1, 2), (1, 3), (2, 2), (2, 3)]
    items = [Item(f"a.py::test_f[{i}]", {"m": m, "n": n}, ["m, n"]) for i, (m, n) in enumerate(rows)]
    assert choose(items, "quick") == [True] * 4


@pytest.mark.parametrize(("quick", "cases"), [(1, [0]), (2, [0, 5]), (3, [0, 3, 6]), (10, range(10)), (99, range(10))])
def test_a_long_test_says_how_many_cases_are_quick(quick, cases):
    mark = pytest.mark.exhaustive(quick=quick)
    items = [Item(f"a.py::test_f[{i}]", {"i": str(i)}, "i", exhaustive=mark) for i in range(10)]
    assert [i for i, mine in enumerate(choose(items, "quick")) if mine] == list(cases)


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_quick_and_rest_are_all_exactly_once(order):
    items = [*product(), Item("a.py::test_plain"), Item("a.py::test_long", exhaustive=pytest.mark.exhaustive)][::order]
    quick, rest = choose(items, "quick"), choose(items, "rest")
    assert all(q != r for q, r in zip(quick, rest, strict=True)) and sum(quick) == 11
    whole = [item for item, mine in zip(items, quick, strict=True) if mine and not hasattr(item, "callspec")]
    assert [item.nodeid for item in whole] == ["a.py::test_plain"]
    assert choose(items, "all") == [True] * len(items)


@pytest.mark.parametrize("quick", [0, 3, 99])
def test_a_product_marked_pairs_has_each_pair_in_one_of_the_suites(quick):
    items = product(pairs=pytest.mark.pairs, exhaustive=pytest.mark.exhaustive(quick=quick))
    in_quick, in_rest = choose(items, "quick"), choose(items, "rest")
    assert not any(q and r for q, r in zip(in_quick, in_rest, strict=True)) and sum(in_quick) == min(quick, 10)
    run = [item.callspec.params for item, q, r in zip(items, in_quick, in_rest, strict=True) if q or r]
    assert len(run) <= 50
    for one, other in itertools.combinations("fds", 2):
        pairs = [{(case[one], case[other]) for case in cases} for cases in (run, [i.callspec.params for i in items])]
        assert pairs[0] == pairs[1]
    assert choose(items, "all") == [True] * len(items)


def test_a_sample_does_not_depend_on_the_other_functions():
    others = [Item(f"b.py::test_g[{i}]", {"i": str(i)}, "i") for i in range(5)]
    assert choose([*others, *product()], "quick")[5:] == choose(product(), "quick")


@pytest.mark.parametrize("suite", ["quick", "rest"])
@pytest.mark.parametrize("argument", ["a.py::test_f", "a.py::test_f[f0-d0-s0]", "/top/a.py::test_f"])
def test_a_named_test_always_runs(suite, argument):
    items = [*product(), Item("a.py::test_long", exhaustive=pytest.mark.exhaustive)]
    assert choose(items, suite, [argument], "/top" if argument[0] == "/" else ".") == [True] * 120 + [suite == "rest"]


def test_files_and_folders_name_no_test():
    assert named(["tests", "tests/a.py"], ".") == set()
