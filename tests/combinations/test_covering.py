"""The arrays cover what they promise, and no case breaks a rule."""

import itertools

import pytest

from tests.combinations import axes
from tests.combinations.covering import Rule, Space, id_of


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("what", ["training", "inference"])
def test_every_pair_and_every_triple_of_bold_axes_is_in_a_case(what, gpu):
    space, cases = getattr(axes, f"{what}_space")(gpu), getattr(axes, what)(gpu)
    covered = {combination for case in cases for combination in space.of(case)}
    assert covered >= set(space.combinations)
    assert all(space.allows(case) for case in cases)
    free = [name for name in space.axes if not any(name in names for names, _ in space.rules)]
    for a, b in itertools.combinations(free, 2):  # which no rule can exclude: counted without Space
        assert len({(case[a], case[b]) for case in cases}) == len(space.axes[a]) * len(space.axes[b])


def test_what_a_rule_excludes_is_in_no_case_and_is_not_asked_for():
    rules = [Rule("a1 needs b1", lambda a, b: a == "1" and b != "1"), Rule("b1 needs c1", lambda b, c: b == c == "1")]
    space = Space({"a": ["0", "1"], "b": ["0", "1"], "c": ["0", "1"]}, ("a", "b", "c"), rules)
    cases = space.cases()
    assert {(case["a"], case["b"], case["c"]) for case in cases} == {
        ("0", "0", "0"), ("0", "0", "1"), ("0", "1", "0"), ("1", "1", "0"),
    }  # fmt: skip
    assert frozenset({("a", "1"), ("c", "1")}) not in space.combinations


def test_an_id_names_every_axis():
    case = axes.training(gpu=False)[0]
    assert id_of(case).split(",") == [f"{name}={case[name]}" for name in axes.TRAINING]
