"""Training on two ranks in combinations: DDP, FSDP2 and TP beside one process. ``ranks_case.py`` says what is compared.

    python -m pytest tests/combinations/test_ranks.py --suite all       all cases, 1 to 2 min

The id of a case names the value of each axis.
"""

import pytest

from tests.combinations.covering import id_of
from tests.combinations.ranks_case import AXES, cases, quick, space

QUICK = {id_of(case) for case in quick()}
REST = [id_of(case) for case in cases() if id_of(case) not in QUICK]


@pytest.mark.parametrize(("name",), [(name,) for name in sorted(QUICK)])  # every row: the sample is chosen there
def test_steps_of_two_ranks_are_those_of_one_process(name, ranks):
    assert [told[name] for told in ranks("combined")] == [[], []]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", REST)
def test_more_steps_of_two_ranks_are_those_of_one_process(name, ranks):
    assert [told[name] for told in ranks("combined_rest")] == [[], []]


def test_every_pair_and_every_triple_of_bold_axes_is_in_a_case():
    covered = {combination for case in cases() for combination in space().of(case)}
    assert covered >= set(space().combinations) and all(map(space().allows, cases()))
    assert {case["parallel"] for case in quick()} == set(AXES["parallel"]) and any(
        c["way"] == "blocks" for c in quick()
    )
