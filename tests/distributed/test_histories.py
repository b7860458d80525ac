"""The amax histories of sharded models are saved, loaded and shared: the results of ``history_cases.py``."""

import pytest
import torch

import mxtensor as mx
from tests.distributed.history_cases import HISTORIES, RECIPE, WIDTH


@pytest.mark.parametrize("how", ["sharded", "assigned", "from meta"])
def test_histories_of_gathered_weights_are_those_of_the_shards(how, ranks):
    for told in ranks("histories_of_shards"):
        straight, continued, histories = told[how]
        assert continued == straight and histories >= HISTORIES


@pytest.mark.parametrize("how", ["replicated", "broadcast", "broadcast to the CPU", "whole on each rank"])
def test_functions_of_torch_load_histories_on_every_rank(how, ranks):
    for told in ranks("histories_in_torchs_state_dicts"):
        straight, continued = told[how]
        assert continued == straight


@pytest.mark.parametrize("how", ["from meta", "experts"])
def test_a_model_that_has_not_run_loads_histories_from_a_checkpoint(how, ranks):
    for told in ranks("histories_in_checkpoints"):
        straight, continued = told[how]
        assert continued == straight


def test_ranks_share_the_amax_of_experts_that_one_of_them_has_run(ranks):
    first, second = ranks("histories_of_experts_without_tokens")
    assert first == second and len(first) == 3
    assert [min(amax) > 0 for _, amax in sorted(first.items())] == [
        False,
        True,
        True,
    ]  # that of the whole stack is first


def test_histories_that_a_state_dict_lacks_are_named(ranks):
    for (said,) in ranks("histories_of_plain_layers"):
        assert "lacks the amax histories of 0" in said and "call quantize_(model, recipe) before fully_shard" in said


def test_without_a_process_group_there_is_nothing_to_share():
    model = mx.quantize_(torch.nn.Linear(WIDTH, WIDTH), RECIPE)
    model(torch.randn(4, WIDTH)).sum().backward()
    before = model.state_dict()["_extra_state"]
    mx.parallel.share_amax(model)
    assert model.state_dict()["_extra_state"].equal(before)
