"""Experts on two and four ranks compared with one rank: the results of ``expert_cases.py``, and what a second cast of
rows that were sent as codes does."""

import pickle

import pytest
import torch
import torch.multiprocessing as mp

import mxtensor as mx
from mxtensor.distributed.all_to_all import refuses
from mxtensor.kernels.quantize.choose_cast import dequantize_operand, quantize_operand
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.formats import FORMATS, Rounding, ScaleCalculationMode
from mxtensor.recipe import DelayedScaling, MXFP8BlockScaling
from mxtensor.recipe.linear_recipe import HIGH_PRECISION
from tests.distributed import expert_cases
from tests.helpers.ranks import DEVICE, SUMS, joined

MXFP8 = MXFP8BlockScaling().linear_recipe()
SENT_AS_CODES = sorted(name for name in FORMATS if refuses(Cast.of(name), MXFP8) is None)
VALUES = ("high precision", "quantize_combined is False")
TOLERANCE = {"of the kernels": 0 if DEVICE == "cpu" else 1e-2, "exact": 0}
"""By how results add up: a GPU may multiply groups of other sizes by other kernels, which add in another order."""
CLOSE = 1e-5 if DEVICE == "cpu" else 0.05
"""Of several layers: on a GPU other sums between them may give other codes."""
BITS = {"mxfp8": 8, "mxfp6": 6, "mxfp4": 4, "mxint8": 8}


# ---------------------------------------------------------------------------------------------- what is sent as codes


def test_which_formats_are_sent_as_codes():
    assert {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8"} <= set(SENT_AS_CODES)
    for name, reason in (
        ("nvfp4", "one scale for the whole tensor"), ("float8_e4m3_tensor", "one scale for the whole tensor"),
        ("nvfp4_single_level", "not powers of two"), ("float8_e4m3_row", "not powers of two"),
        ("mxfp8[32x32]", "blocks of 32 rows"),
    ):  # fmt: skip
        assert reason in refuses(Cast.of(name), MXFP8)
    assert "high precision" in refuses(None, HIGH_PRECISION)
    assert "delayed scaling" in refuses(Cast.of("mxfp8"), DelayedScaling().linear_recipe())


@pytest.mark.parametrize("mode", list(ScaleCalculationMode))
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("name", SENT_AS_CODES)
def test_a_second_cast_of_values_that_were_sent_gives_the_same_values(name, rounding, mode):
    format = mx.get_format(name)
    cast = Cast(format, mode, rounding) if format.scale.name == "e8m0" else Cast.of(format)
    if format.scale.name == "e8m0" and (rounding, mode) == (Rounding.STOCHASTIC, ScaleCalculationMode.EVEN):
        assert "EVEN" in refuses(cast, MXFP8)
        return
    assert refuses(cast, MXFP8) is None
    x = torch.randn(64, 96) * 2.0 ** torch.randint(-20, 20, (64, 1))
    x[:, 0] = 448 * 2.0 ** torch.randint(-3, 4, (64,))  # at the edge of a power of two
    x[3], x[4, :32], x[5, 1] = 0, -1e-30, float("nan")
    once = dequantize_operand(quantize_operand(x, cast), torch.float32)
    twice = dequantize_operand(quantize_operand(once, cast), torch.float32)
    torch.testing.assert_close(twice, once, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------------- several ranks


def check(name, told, sums):
    """The result of ``against_one_rank`` on one rank: bitwise equality, and codes in both directions to experts."""
    errors, exchanges, sent, products = told
    if name in ("mxfp4", "nvfp4"):  # gradients are rounded by random numbers that ranks draw for their rows
        assert min(errors.pop(key) for key in ("dx", "up", "down")) > 0
    assert max(errors.values()) <= TOLERANCE[sums], (name, errors)
    assert len(exchanges) == 4 and sent["y over dx"] == 1 and "high precision" not in products
    return exchanges, sent


@pytest.mark.parametrize("sums", SUMS)
def test_experts_on_two_ranks_compute_what_those_of_one_rank_do_bit_for_bit(sums, ranks):
    for told in ranks("experts_of_two_ranks", sums):
        exchanges, sent = check("mxfp8", told, sums)
        assert exchanges == [("codes", ""), VALUES] * 2
        assert sent["x"] == sent["dy"] == (8 + 8 / 32) / 16  # of the bytes of bfloat16


def check_every_recipe(found, sums="of the kernels"):
    for (name, dtype), told in found.items():
        exchanges, sent = check(name, told, sums)
        bits = BITS.get({"autocast": "mxfp8", "both ways": "mxfp8"}.get(name, name))
        if bits is None:
            assert {kernel for kernel, _ in exchanges} == {"high precision"}
            assert sent["x"] == sent["dy"] == dtype.itemsize / 2
        else:
            assert exchanges == [("codes", ""), ("codes", "") if name == "both ways" else VALUES] * 2
            assert sent["x"] == sent["dy"] == (bits + 8 / 32) / 16
    assert len(found) == 15


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_every_recipe_on_two_ranks(sums, ranks):
    for found in ranks("experts_of_every_recipe", sums):
        check_every_recipe(found, sums)


@pytest.mark.parametrize("sums", SUMS)
def test_an_exchange_changes_no_bit_of_the_result_and_of_the_gradient_of_the_tokens(sums, ranks):
    for found in ranks("without_an_exchange", sums):
        for same_y, same_dx, errors in found.values():
            assert same_y and same_dx and max(errors) < 1e-3  # columnwise operands are cast twice


@pytest.mark.parametrize("sums", SUMS)
def test_what_wgrad_takes_in_more_bits_is_sent_as_values(sums, ranks):
    """The result of experts that take a list of row counts, too."""
    for found in ranks("precise_wgrad", sums):
        for sent, errors in found.values():
            assert max(errors) < 1e-5 and sent[1:] == ["high precision"] * 3
        assert found["high precision"][0][0] == "high precision" and found["more bits"][0][0] == "codes"


def test_a_compiled_model_trains_its_experts_as_an_eager_one(ranks):
    for found in ranks("compiled_experts"):
        assert len(found) == 3
        for error, *quantized in found.values():
            assert error < 1e-6 and quantized == [False, True]


def test_wrong_calls_raise_on_every_rank(ranks):
    first, second = ranks("wrong_dispatches")
    for rank, told in enumerate((first, second)):
        assert [kind for kind, _ in told] == ["ValueError"] * 2 + ["RuntimeError", "NotImplementedError", "ValueError"]
        assert "the counts sum to 3, and there are 4 rows" in told[0][1]
        assert "3 experts do not divide into 2 equal parts" in told[1][1] and "3 experts" in told[4][1]
        assert f"ranks [{1 - rank}] of the group send rows in another form" in told[2][1]
        assert "Linear has weight (64, 64), bias (64,)" in told[3][1]


def test_experts_that_take_as_many_rows_each_are_split(ranks):
    for found, (kind, text) in ranks("equal_rows_of_every_expert"):
        assert len(found) == 2
        for (y, dx, up, down), sent, products in found.values():
            assert max(y, dx) <= TOLERANCE["of the kernels"] and max(up, down) < CLOSE
            assert sent == ["codes", "high precision"] * 2 and "high precision" not in products
        assert kind == "ValueError" and "each of its 8 experts, and 9 rows do not divide" in text


@pytest.mark.exhaustive
def test_llama4_trains_and_predicts_on_two_ranks(ranks):
    for found in ranks("experts_of_llama4"):
        assert len(found) == 3
        for name, (error, of_stacks, sent) in found.items():
            assert error < CLOSE and len(of_stacks) == (4 if name == "mxfp8" else 0)
            assert max(of_stacks, default=0) < max(1e-3, CLOSE)
            assert ("codes" in sent) is (name != "weight-only") and len(sent) == (8 if name == "mxfp8" else 4)


@pytest.mark.exhaustive
def test_mixtures_of_transformers_on_two_ranks(ranks):
    for found in ranks("experts_of_transformers"):
        for (kind, _), (error, of_stacks, of_biases, codes, exchanges, products) in found.items():
            assert error < CLOSE and of_stacks < max(1e-3, CLOSE) and (codes, exchanges) == (4, 8)
            assert "high precision" not in products
            # a bias of an expert sums gradients that were sent as codes
            assert (0.001 < of_biases < 0.05) if kind.startswith("GptOss") else of_biases == 0
        assert len(found) == 4


@pytest.mark.exhaustive
def test_experts_for_inference_are_split_in_their_codes(ranks):
    for found in ranks("frozen_experts"):
        for (format, _), (error, sent, kind) in found.items():
            assert error < 1e-6 and kind == "MXTensor"
            assert sent == ["codes" if format == "mxfp8" else "high precision", "high precision"] * 2  # two layers
        assert len(found) == 4


@pytest.mark.exhaustive
def test_fsdp_over_the_other_dimension_of_a_mesh(ranks):
    for found in ranks("experts_and_fsdp"):
        for errors, shapes in found.values():
            assert max(errors) < CLOSE and shapes == [(8, 96, 64), (8, 64, 96)]
        assert len(found) == 2


def of_four(rank, folder):
    """What each of four processes runs."""
    with joined(rank, folder, 120, world=4):
        told = expert_cases.experts_of_every_recipe(rank, folder), expert_cases.experts_and_fsdp(rank, folder)
        with open(f"{folder}/{rank}", "wb") as file:
            pickle.dump(told, file)


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 4, reason="needs four GPUs, or none")
def test_every_recipe_on_four_ranks(tmp_path):
    mp.spawn(of_four, args=(str(tmp_path),), nprocs=4)
    for rank in range(4):
        recipes, sharded = pickle.loads((tmp_path / str(rank)).read_bytes())
        check_every_recipe(recipes)
        assert {max(errors) < CLOSE for errors, _ in sharded.values()} == {True}
        assert set(sharded) == {(2, 2)}
