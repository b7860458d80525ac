"""Modules of ``te`` split over two ranks compared with one rank: the results of ``nn_cases.py``."""

import copy
import pickle

import pytest
import torch

import mxtensor.te as te
from mxtensor.te.tensor_parallel import WHOLE, Parallel
from tests.helpers.ranks import DEVICE, SUMS

TOLERANCE = 1e-6 if DEVICE == "cpu" else 1e-5
"""Of float32 sums in another order, by norm."""
EXACT = {"of the kernels": 0 if DEVICE == "cpu" else TOLERANCE, "exact": 0}
"""By how results add up: a GPU may multiply a part by another kernel than the whole."""


FLIPPED = {"of the kernels": 1e-6 if DEVICE == "cpu" else 0.05, "exact": 1e-6}
"""The same for several layers, between which other sums may give other codes."""


def check(errors, gathers, kernels, sequence, recipe="mxfp8", tolerance=TOLERANCE):
    """Everything is that of one rank; an input that is sharded is gathered as codes if the recipe allows it."""
    noise = {name: error for name, error in errors.items() if "key_bias" in name}  # a gradient of zeros, and rounding
    assert max(error for name, error in errors.items() if name not in noise) < tolerance, errors
    assert "high precision" not in kernels
    if recipe != "none" and sequence:
        assert set(gathers) <= {"quantized" if recipe == "mxfp8" else "high precision"}
    else:
        assert gathers == []


@pytest.mark.parametrize("sums", SUMS)
def test_a_linear_layer_of_two_ranks_computes_what_one_rank_does(sums, ranks):
    for found in ranks("linear_of_two_ranks", sums):
        for (mode, sequence), told in found.items():
            check(*told, sequence and mode == "column")
            errors = told[0]
            if mode == "column":  # nothing is added up in another order but the gradient of x
                assert max(errors[name] for name in ("y", "weight", "bias")) <= EXACT[sums]
                assert told[1] == (["quantized"] if sequence else [])
            else:
                assert max(errors[name] for name in ("x", "weight")) <= EXACT[sums]
        assert len(found) == 4


@pytest.mark.parametrize("sums", SUMS)
def test_norms_of_heads_and_after_a_layer_get_the_gradients_of_all_ranks(sums, ranks):
    """Each rank has the whole weight of a norm of heads and some of the heads: ranks would train other weights."""
    for found in ranks("norms_of_two_ranks", sums):
        for (_, sequence), told in found.items():
            told[0].pop("self_attention.k_norm.bias", None)  # zero, and rounding: softmax ignores it
            assert "self_attention.q_norm.weight" in told[0] and "layernorm.weight" in told[0]
            check(*told, sequence, tolerance=FLIPPED[sums])
        assert len(found) == 4


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_all_modules_and_recipes_on_two_ranks(sums, ranks):
    for found in ranks("modules_of_two_ranks", sums):
        for (_, recipe, sequence), told in found.items():
            check(*told, sequence, recipe, FLIPPED[sums])
        assert len(found) == 2 * (2 * 5 + 3 * 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_styles_split_modules_with_one_weight(sums, ranks):
    for found in ranks("styles_of_modules", sums):
        assert len(found) == 12 + 9
        for error, kinds in found.values():
            assert error < FLIPPED[sums] and kinds == {"DTensor"}


@pytest.mark.exhaustive
def test_modules_split_by_styles_compile_and_are_sharded_by_fsdp(ranks):
    for found in ranks("styles_compiled_and_sharded"):
        assert len(found) == 6 and max(map(max, found.values())) < FLIPPED["of the kernels"], found


def test_styles_that_do_not_fit_a_module_say_what_does(ranks):
    first, second = ranks("styles_that_do_not_fit")
    assert first == second and len(first) == 16
    for name in ("mlp", "layer", "attention", "part"):
        assert first[name][0] == "NotImplementedError"
        assert "with set_parallel_mode=True, tp_group=mesh.get_group()" in first[name][1]
    for name, mode in (("experts", "row"), ("main_grad", "column"), ("bias", "column"), ("quantized", "column")):
        assert first[name][0] == "NotImplementedError"
        assert first[name][1].endswith(f"Linear with parallel_mode='{mode}', tp_group=mesh.get_group()")
    for name, text in (
        ("norm", "NotImplementedError: RowwiseParallel: LayerNormLinear begins with a norm of whole rows"),
        ("group", "ValueError: RowwiseParallel: Linear is split already"),
        ("again", "ValueError: ColwiseParallel: Linear is split already"),
        ("uneven", "ValueError: ColwiseParallel of Linear: out_features=33 does not divide into 2 equal parts"),
        ("pieces", "ValueError: ColwiseParallel: Linear has parameters_split"),
        ("torch's", "NotImplementedError: ColwiseParallel currently only support nn.Linear"),
        ("DTensor", "NotImplementedError: Linear: the input is a DTensor; split the module with mx.parallel."),
        ("features", "ValueError: Shard(1) of an input (4, 64) is not a dimension of tokens; use Shard(-1)"),
    ):
        assert ": ".join(first[name]).startswith(text)


@pytest.mark.exhaustive
def test_options_of_a_split_module(ranks):
    for found in ranks("options_of_a_split_module"):
        assert found.pop("main_grad") < TOLERANCE and found.pop("return_bias") < TOLERANCE
        assert found.pop("quantized") <= EXACT["of the kernels"] and found.pop("gathered norm") < TOLERANCE
        kind, text = found.pop("no group")
        assert kind == "RuntimeError" and "call set_tensor_parallel_group first" in text
        assert found == {"late": True, "own numbers": False, "experts": (256, 64)}


@pytest.mark.exhaustive
def test_modules_compile_into_one_graph(ranks):
    for found in ranks("compiled_modules"):
        assert len(found) == 6 and max(max(errors) for errors in found.values()) < FLIPPED["of the kernels"]


def test_ranks_share_the_largest_amax_of_a_step(ranks):
    (mine, shared, same), (other, shared_there, same_there) = ranks("amax_of_all_ranks")
    assert not torch.equal(mine, other) and same and same_there
    assert torch.equal(shared, torch.maximum(mine, other)) and torch.equal(shared, shared_there)


def test_a_part_is_initialized_as_the_part_of_the_whole():
    torch.manual_seed(1)
    whole = te.LayerNormMLP(32, 64, activation="swiglu")
    torch.manual_seed(1)
    part = te.LayerNormMLP(32, 64, activation="swiglu", set_parallel_mode=True, tp_size=4)
    halves = whole.fc1_weight.chunk(2)
    assert torch.equal(part.fc1_weight, torch.cat([half[:16] for half in halves]))
    assert torch.equal(part.fc2_weight, whole.fc2_weight[:, :16])
    assert part.fc1_bias.shape == (32,) and torch.equal(part.fc2_bias, whole.fc2_bias)
    assert (part.fc1_weight.tensor_model_parallel, part.fc1_weight.partition_dim) == (True, 0)
    assert part.fc2_weight.partition_dim == 1 and part.fc2_bias.sequence_parallel is False
    torch.manual_seed(1)
    part.reset_parameters()
    torch.manual_seed(1)
    whole.reset_parameters()
    assert torch.equal(part.fc2_weight, whole.fc2_weight[:, :16])


def test_one_rank_is_not_split_whatever_the_arguments():
    layer = te.Linear(32, 64, parallel_mode="row", sequence_parallel=True)
    assert layer.weight.shape == (64, 32) and layer.parallel.mode is None and not layer.parallel.sequence
    x = torch.randn(4, 32)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert copy.deepcopy(layer).parallel is layer.parallel and WHOLE.into(x) is x
    assert Parallel("layer", None, 2, "column", True).rank == 0
