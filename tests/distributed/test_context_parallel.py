"""Attention over sequences that two ranks share, compared with one rank: the results of ``context_cases.py``."""

import pytest
import torch

import mxtensor.te as te
from mxtensor.te.context_parallel import of_chunks
from tests.distributed.context_cases import ROWS
from tests.helpers.ranks import DEVICE


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_attention_over_ranks_is_that_of_one_rank(row, ranks):
    for found in ranks("attention_over_ranks"):
        assert len(found[row]) == 4 and max(found[row]) < (1e-6 if DEVICE == "cpu" else 1e-3)


@pytest.mark.parametrize(
    "name",
    ["layers_over_ranks", pytest.param("compiled_layers_over_ranks", marks=pytest.mark.exhaustive)],
)
def test_layers_in_mxfp8_give_the_results_of_one_rank_and_the_sum_of_gradients(name, ranks):
    for found in ranks(name):
        assert len(found) > 1
        for of_result, of_gradients, alone in found.values():  # other sums may round a code differently
            assert of_result < 2e-3 and of_gradients < (2e-3 if DEVICE == "cpu" else 0.05) and alone


def test_what_cannot_be_split_names_the_way_out(ranks):
    for padding, short, heads, nested, numbers, unknown, module in ranks("wrong_context_groups"):
        assert padding[0] == "NotImplementedError" and "'padding_causal' is not available with a cp_group" in padding[1]
        assert short == (
            "ValueError",
            "DotProductAttention: with cp_group each rank has two chunks of a sequence, and 31 positions do not divide "
            "into two; pad sequences to a multiple of 4 positions",
        )
        assert heads[0] == "ValueError" and "3 heads in 3 groups do not divide by 2; use cp_comm_type" in heads[1]
        assert nested[0] == "NotImplementedError" and "'a2a+p2p' is not available; pass one group" in nested[1]
        assert numbers[0] == "TypeError" and "cp_group is [0, 1]; pass a process group" in numbers[1]
        assert unknown == (
            "ValueError",
            "DotProductAttention: cp_comm_type is 'ring'; choose one of p2p, all_gather, a2a, a2a+p2p",
        )
        assert module[0] == "NotImplementedError" and "call set_context_parallel_group(cp_group" in module[1]


def test_angles_of_the_chunks_of_a_rank():
    t = torch.arange(12)
    assert [of_chunks(t, 6, 2, rank).tolist() for rank in (0, 1)] == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    x, angles = torch.randn(12, 1, 2, 8), te.RotaryPositionEmbedding(8)(12)
    whole = te.apply_rotary_pos_emb(x, angles)
    for rank in range(3):
        part = te.apply_rotary_pos_emb(of_chunks(x, 4, 3, rank), angles, cp_size=3, cp_rank=rank)
        assert torch.equal(part, of_chunks(whole, 4, 3, rank))
    with pytest.raises(ValueError, match="do not cover sbhd"):
        te.apply_rotary_pos_emb(x, angles, cp_size=2, cp_rank=0)
