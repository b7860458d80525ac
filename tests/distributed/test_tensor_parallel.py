"""Tensor parallelism on two ranks compared with one rank: the results of ``parallel_cases.py``."""

import pytest
import torch

from mxtensor.distributed.split_linear import gathered_linear, refuses
from mxtensor.numerics.cast import Cast
from mxtensor.recipe.linear_recipe import LinearRecipe, TensorCasts
from tests.distributed.parallel_cases import CONFIGS
from tests.helpers.ranks import DEVICE, SUMS

TOLERANCE = 1e-6 if DEVICE == "cpu" else 1e-5
"""Of float32 sums in another order, by norm."""
FLIPPED = 1e-6 if DEVICE == "cpu" else 0.05
"""The same for several layers: on a GPU a part has other kernels than the whole, and codes between layers differ."""


def linear_recipe(input="mxfp8", columnwise="same", **fields):
    casts = TensorCasts.of(Cast.of(input)) if columnwise == "same" else TensorCasts(Cast.of(input), columnwise)
    return LinearRecipe(casts, TensorCasts.of(Cast.of("mxfp8")), TensorCasts.of(Cast.of("mxfp8")), **fields)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_split_by_columns_and_rows_train_like_those_of_one_rank(config, bias, ranks):
    for found in ranks("columns_and_rows"):
        losses, alone, errors, products = found[config, bias]
        assert losses == pytest.approx(alone, rel=1e-5 if DEVICE == "cpu" else 1e-2) and losses[-1] < losses[0]
        assert max(errors) < max(1e-3, FLIPPED)  # in three steps other sums round a code differently
        assert [op for op, kernel in products[:5]] == ["fprop", "fprop", "dgrad", "wgrad", "wgrad"]
        assert "high precision" not in {kernel for _, kernel in products}


@pytest.mark.parametrize("sums", SUMS)
def test_the_columns_of_a_layer_are_those_of_one_rank_bit_for_bit(sums, ranks):
    for found in ranks("columns_alone", sums):
        assert len(found) == 5
        for same, error_of_x in found.values():
            assert same == [True, True, True] and error_of_x < TOLERANCE


@pytest.mark.parametrize("sums", SUMS)
def test_rows_sharded_over_the_ranks_are_gathered_as_codes(sums, ranks):
    for found in ranks("sequence_parallel", sums):
        for shape in ((128, 128), (128, 3, 128)):
            same, errors, gathers, bytes, products = found[shape]
            assert same == [True, True, True] and max(errors) < TOLERANCE
            assert gathers == [("quantized", {})] and bytes == pytest.approx((8 + 8 / 32) / 16)
            assert [op for op, _ in products] == ["gather", "fprop", "dgrad", "wgrad"]
        same, errors, gathers, bytes, _ = found[2, 128, 128]  # blocks of tokens in the order of ranks, then batch
        assert same[0] and max(errors) < TOLERANCE and gathers == [("quantized", {})]


def test_a_recipe_with_one_weight_copy_applies_to_gathered_rows_too(ranks):
    for same, other in ranks("sequence_parallel_of_one_copy"):
        assert same < TOLERANCE < 1e-4 < other


def test_rows_that_are_not_whole_blocks_are_gathered_in_high_precision_with_a_reason(ranks):
    for found in ranks("sequence_parallel"):
        same, _, gathers, bytes, _ = found[40, 128]
        ((kernel, refusals),) = gathers
        cut = "mxfp8_e4m3 has blocks of 32 values in this dimension, and 20 is not a multiple of 32"
        assert (kernel, refusals) == ("high precision", {"quantized": f"20 rows a rank: {cut}"})
        assert same == [True, True, True] and bytes == 0


def test_torchs_own_styles_raise_instead_of_running_a_recipe_in_high_precision(ranks):
    for messages, multiplies in ranks("torchs_own_styles"):
        assert len(messages) == 4 and multiplies
        assert all("mx.parallel.ColwiseParallel" in message for message in messages)


@pytest.mark.exhaustive
def test_layers_prepared_for_quantization_aware_training_train_like_those_of_one_rank(ranks):
    for errors, (kind, text) in ranks("prepared_layers"):
        assert len(errors) == 3 and max(errors.values()) < TOLERANCE
        assert kind == "NotImplementedError" and "nvfp4 has one scale for the whole tensor" in text


@pytest.mark.exhaustive
def test_frozen_weights_are_split_with_their_codes_by_our_styles_and_by_torchs_own(ranks):
    for errors, kinds in ranks("frozen_weights"):
        assert len(errors) == 20 and max(errors.values()) < FLIPPED and kinds == {"MXTensor"}


def test_torchs_own_styles_pad_uneven_shards_and_dequantize_if_blocks_would_be_cut(ranks):
    first, second = ranks("frozen_weights_of_uneven_shards")
    for found in (first, second):
        assert all(error < TOLERANCE for error, _ in found.values())
    kinds = {shape: (first[shape][1], second[shape][1]) for shape in first}
    assert kinds == {(33, 64): ("MXTensor",) * 2, (64, 96): ("Tensor",) * 2, (64, 127): ("MXTensor", "Tensor")}


def test_a_layer_that_does_not_divide_is_refused_with_its_numbers(ranks):
    for found in ranks("what_does_not_divide"):
        assert found[0].startswith("out_features=96 over 2 ranks are 48 each: mxfp8_e4m3 has blocks of 32 values")
        assert found[1].startswith("in_features=96 over 2 ranks are 48 each: mxfp8_e4m3 has blocks of 32 values")
        assert found[2].startswith("out_features=33 does not divide into 2 equal parts")
        assert found[3].startswith("in_features=33 does not divide into 2 equal parts")
        for (kind, text), scale in zip(found[4:], ("the whole tensor", "all values of this dimension"), strict=True):
            assert kind == "NotImplementedError"
            assert f"has one scale for {scale}, and tensor parallelism gives each rank a part" in text


def test_fsdp_over_the_other_dimension_of_a_mesh(ranks):
    for found in ranks("two_dimensions"):
        for gathered, products, errors in found.values():
            assert gathered == {"codes"} and max(errors) < FLIPPED
            assert [op for op, _ in products] == ["fprop", "fprop", "dgrad", "wgrad", "wgrad"]


@pytest.mark.parametrize(
    ("given", "rows", "reason"),
    [
        (linear_recipe(), 64, None),
        (linear_recipe("mxint8"), 32, None),
        (
            linear_recipe(),
            48,
            "48 rows a rank: mxfp8_e4m3 has blocks of 32 values in this dimension, and 48 is not a multiple",
        ),
        (linear_recipe("nvfp4"), 64, "nvfp4 has one scale for the whole tensor, and a rank has a part"),
        (linear_recipe("float8_e4m3_tensor"), 64, "float8_e4m3_tensor has one scale for the whole tensor"),
        (linear_recipe("mxfp8[32x32]"), 64, "has blocks of 32 rows"),
        (linear_recipe(columnwise=None), 64, "leaves the input of wgrad in high precision"),
        (
            LinearRecipe(TensorCasts(None, None), TensorCasts.of(None), TensorCasts.of(None)),
            64,
            "leaves the input of fprop in high precision",
        ),
    ],
)
def test_which_recipes_gather_rows_as_codes(given, rows, reason):
    found = refuses(given, rows, 128)
    assert found is None if reason is None else reason in found


def test_the_error_of_a_refused_gather_names_the_way_out():
    with pytest.raises(ValueError, match="gather x in high precision"):
        gathered_linear(torch.randn(3, 64), torch.randn(64, 64), None, linear_recipe(), None, torch.float32)


@pytest.mark.exhaustive
def test_a_compiled_layer_computes_what_an_eager_one_does(ranks):
    check_compiled(ranks("compiled"), 2)


@pytest.mark.exhaustive
def test_compiled_layers_of_every_kind_compute_what_eager_ones_do(ranks):
    check_compiled(ranks("compiled_others"), 8)


def check_compiled(told, number):
    for found in told:
        assert len(found) == number
        for (name, _), (error_of_y, errors) in found.items():
            assert error_of_y < FLIPPED and max(errors, default=0) < FLIPPED
            assert len(errors) == (0 if name == "frozen" else 4)


def test_a_dtensor_is_quantized_shard_by_shard_or_refused(ranks):
    for found in ranks("quantized_dtensors"):
        cut, partial = found.pop("cut"), found.pop("partial")
        assert "40 is not a multiple of 32; call redistribute" in str(cut) and "no values of its own" in str(partial)
        assert len(found) == 63 and not any(result is False for result in found.values())
        for (format, orientation, dim), result in found.items():
            one_scale = format in ("nvfp4", "float8_e4m3_tensor")
            row = format == "float8_e4m3_row"
            cuts = row and (orientation == "both" or (orientation == "rowwise") == (dim == 1))
            refused = dim is not None and (one_scale or cuts)
            assert isinstance(result, str) == refused, (format, orientation, dim, result)
            assert not refused or "call redistribute(placements=[Replicate()])" in result
