"""A state dict that is loaded between two steps of a sharded model changes nothing, if its values are the same.

Where rows do not divide by the ranks, FSDP2 then replaces the local tensors of some ranks: the ranks must not compare
their recipes again, because only some would ask. The cases of two ranks are in ``reload_cases.py``.
"""

import copy
import pickle

import pytest
import torch

from mxtensor.recipe import MXFP8BlockScaling
from mxtensor.training.training_weight import TrainingWeight
from tests.distributed.reload_cases import NAMES, SIZES, STEPS, WAYS


@pytest.mark.parametrize("features", SIZES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", [*WAYS, "before the first step"])
def test_losses_and_parameters_are_those_of_a_run_that_loads_nothing(way, name, features, ranks):
    for told in ranks("reloaded"):
        assert told[way, name, features] == [True] * (STEPS + 3)


def weight(rows=64):
    return TrainingWeight(torch.randn(rows, 64), MXFP8BlockScaling().linear_recipe())


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.new_zeros((33, 64)), lambda w: w.clone(), lambda w: w.view(-1), lambda w: w.narrow(0, 0, 8),
        lambda w: w.detach(), lambda w: w.bfloat16(), lambda w: torch.chunk(w, 2)[1], lambda w: torch.empty_like(w),
        copy.deepcopy, lambda w: copy.deepcopy(torch.nn.Parameter(w)), torch.nn.Parameter, lambda w: w.double().t(),
    ],
)  # fmt: skip
def test_what_is_made_of_a_weight_shares_its_agreement(make):
    first = weight()
    assert make(first).agreement is first.agreement is not weight().agreement


def test_new_values_keep_the_agreement():
    first = weight()
    agreement = first.agreement
    first.data = weight(32)
    assert first.agreement is agreement and first.shape == (32, 64)


def test_a_file_has_no_agreement():
    """What another program has agreed on says nothing about this one."""
    first = weight()
    first.agreement.reached.add(("key", "codes", None))
    reloaded = pickle.loads(pickle.dumps(first))
    assert not reloaded.agreement.reached
