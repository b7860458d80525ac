"""FSDP2 of quantized models computes bitwise what one process computes, and gathers codes if that is possible.

The cases of two ranks are in ``fsdp_cases.py``.
"""

from functools import partial
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor._collective_utils import fill_empty_tensor_to_shards

import mxtensor as mx
from mxtensor.numerics import derived
from mxtensor.numerics.cast import Cast
from mxtensor.recipe import CustomRecipe, MXFP4BlockScaling, MXFP8BlockScaling
from mxtensor.tensor.fsdp import Shard
from mxtensor.training.gathered_weight import refusal
from mxtensor.training.training_weight import TrainingWeight, values_of
from tests.distributed.fsdp_cases import (
    DIMENSIONS,
    DISTINCT,
    MORE_DIMENSIONS,
    OPERANDS,
    RECIPES,
    STEPS,
    WIDTH,
    compare,
    gathers,
    net,
    operands,
    shard,
)
from tests.helpers.ranks import BACKEND, SUMS, cases

CODES = "codes"


def test_every_case_of_two_ranks_has_a_test():
    text = Path(__file__).read_text()
    assert [
        n for n, f in cases().items() if f.__module__ == "tests.distributed.fsdp_cases" and f'ranks("{n}"' not in text
    ] == []


def what(gathered):
    """Shape -> what was gathered of it."""
    return {shape: chosen for shape, chosen, *_ in gathered}


def why(gathered):
    return {reason for _, _, *reasons in gathered for reason in reasons}


@pytest.mark.parametrize("features", DIMENSIONS)
@pytest.mark.parametrize("name", RECIPES | DISTINCT)
def test_five_steps_are_those_of_one_process(name, features, ranks):
    check_five_steps(ranks("five_steps"), name, features)


@pytest.mark.exhaustive
@pytest.mark.parametrize("features", MORE_DIMENSIONS)
@pytest.mark.parametrize("name", RECIPES | DISTINCT)
def test_five_steps_of_more_sizes_are_those_of_one_process(name, features, ranks):
    check_five_steps(ranks("five_steps_of_more_sizes"), name, features)


def check_five_steps(told, name, features):
    for results in told:
        same, gathered = results[name, features]
        assert len(same) == STEPS + 3 and all(same)
        aligned = -(-features // 2) % 32 == 0
        copies = name.partition(",")[0]
        first = {"one copy": True, "tiles": aligned}.get(copies, False)
        second = copies in ("one copy", "tiles")  # 64 rows: two whole tiles
        assert what(gathered) == {
            (features, WIDTH): CODES if first else "high precision",
            (WIDTH, features): CODES if second else "high precision",
        }
        if copies == "tiles" and not aligned:
            rows = -(-features // 2)
            format = (RECIPES | DISTINCT)[name].linear_recipe().weight.rowwise.format
            cut = f"{format} has blocks of 32 values in this dimension, and {rows} is not a multiple of 32"
            assert why(gathered) == {f"shards of {rows} rows of {features}: {cut}"}


@pytest.mark.parametrize("sums", SUMS[1:])
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("five_steps", DIMENSIONS),
        pytest.param("five_steps_of_more_sizes", MORE_DIMENSIONS, marks=pytest.mark.exhaustive),
    ],
)
def test_five_steps_of_exact_sums_are_those_of_one_process_bit_for_bit(case, sizes, sums, ranks):
    for results in ranks(case, sums):
        assert len(results) == len(RECIPES | DISTINCT) * len(sizes)
        assert [case for case, (same, _) in results.items() if not all(same)] == []


def test_the_recipes_round_differently():
    """Otherwise the steps of one recipe would be those of another."""
    found = []
    for recipe in DISTINCT.values():
        model, x = net(100, recipe), torch.linspace(-1, 1, 24 * WIDTH).view(24, WIDTH).requires_grad_()
        model(x).square().mean().backward()
        found.append((model(x).detach(), x.grad))
    two, one, tiles = found
    assert torch.equal(two[0], one[0]) and not torch.equal(two[1], one[1])
    assert not torch.equal(two[0], tiles[0]) and not torch.equal(one[1], tiles[1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_weights_may_stay_gathered(sums, ranks):
    for results in ranks("weights_stay_gathered", sums):
        assert all(all(same) for same, _ in results.values())
        assert {name for name, (_, g) in results.items() if set(what(g).values()) == {CODES}} == {"one copy", "tiles"}


def test_bytes_of_the_gathers(ranks):
    """Relative to bfloat16: 33/64 with a scale for 32 values, 1025/2048 with a scale for a tile."""
    for in_bfloat16, sent, policy in ranks("bytes_on_the_wire"):
        assert sent["two copies"] == sent["off"] == policy == in_bfloat16
        assert sent["one copy"] / in_bfloat16 == 33 / 64 <= 0.52
        assert sent["tiles"] / in_bfloat16 == 1025 / 2048 <= 0.505


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_hybrid_meshes_and_a_world_of_one(sums, ranks):
    for results in ranks("hybrid_meshes", sums):
        assert len(results) == 8 and all(all(same) for same, _ in results.values())
        assert what(results[(2, 1), "tiles"][1]) == {(96, WIDTH): CODES, (WIDTH, 96): CODES}
        assert what(results[(1, 2), "tiles"][1]) == {(96, WIDTH): "high precision", (WIDTH, 96): CODES}


def test_replicas(ranks):
    for results in ranks("replicas"):
        assert results.keys() == RECIPES.keys() and all(map(all, results.values()))


def test_mixed_precision(ranks):
    for results in ranks("mixed_precision"):
        assert results.keys() == RECIPES.keys() and all(map(all, results.values()))


@pytest.mark.exhaustive
def test_offload_checkpoints_and_accumulation(ranks):
    for results in ranks("offloaded_checkpointed_accumulated"):
        assert len(results) == 7 and all(map(all, results.values()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_other_formats_and_what_cannot_be_gathered(sums, ranks):
    for results in ranks("other_formats", sums):
        assert all(all(same) for same, _ in results.values())
        for name in ("mxfp4 tiles", "mxfp4 one copy", "torchao"):
            assert set(what(results[name][1]).values()) == {CODES}, name
        assert what(results["float8 tiles"][1]) == {(256, WIDTH): CODES, (WIDTH, 256): "high precision"}
        assert why(results["nvfp4"][1]) == {
            "nvfp4[16x16] has one scale for the whole tensor, and a rank has a part of it"
        }
        assert why(results["high precision backward"][1]) == {
            "the recipe has a product with the high-precision values of the weight"
        }


def test_attention_and_its_split_projection(ranks):
    for results in ranks("attention"):
        for same, gathered in results.values():
            assert same and what(gathered) == {(3 * WIDTH, WIDTH): CODES, (WIDTH, WIDTH): CODES}


def test_stacked_experts_are_gathered_in_high_precision_and_train_quantized(ranks):
    for same, gathered in ranks("stacked_experts"):
        assert same and set(what(gathered)) == {(3, 2 * WIDTH, WIDTH), (3, WIDTH, WIDTH)}
        assert set(what(gathered).values()) == {"high precision"}


@pytest.mark.parametrize("sums", SUMS)
def test_delayed_scaling_is_gathered_in_high_precision(sums, ranks):
    assert ranks("delayed_scaling", sums) == [[True] * 3] * 2


def test_delayed_scaling_is_restored_from_the_state_dict_of_a_sharded_model(ranks):
    assert ranks("delayed_scaling_restored") == [(2, True)] * 2


def test_shards_of_columns_fall_back(ranks):
    for results in ranks("shards_of_columns"):
        for same, gathered in results.values():
            assert same and why(gathered) == {"the shards are of columns, (64, 32) of (64, 64): they would cut blocks"}


def test_clipping(ranks):
    for mine, its, close in ranks("clipped"):
        assert mine == pytest.approx(its, rel=1e-5) and mine > 0.01 and all(close)


def test_models_made_on_meta(ranks):
    for results in ranks("from_meta"):
        for finite, same, gathered in results.values():
            assert finite and all(same) and set(what(gathered).values()) == {CODES}


@pytest.mark.exhaustive
def test_compiled_layers(ranks):
    for results in ranks("compiled_layers"):
        assert len(results) == len(RECIPES) + 1 and all(map(all, results.values()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_parameters_that_are_mxtensors(sums, ranks):
    for results in ranks("quantized_parameters", sums):
        assert len(results) == len(OPERANDS)
        assert all(all(same) and kinds == {"MXTensor"} for same, kinds in results.values())


def test_master_weights_of_shards(ranks):
    assert ranks("master_weights") == [[([True] * 3, True)] * 2] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("sums", SUMS)
def test_modules_of_transformer_engine(sums, ranks):
    for results in ranks("modules_of_transformer_engine", sums):
        assert len(results) == 4
        for name, same in results.items():
            assert len(same) > 30 and all(same), name


def test_modules_begin_on_meta_notice_writes_to_shards_and_name_mistakes(ranks):
    first, second = ranks("modules_between_steps")
    assert first == second
    (deviation, finite), count, (missing, whole), dtypes, stale = first
    assert finite and 0.01 < deviation < 1 and count == 4
    assert "has no main_grad; give it one: weight.main_grad = torch.zeros_like(weight" in missing[1]
    assert "has a main_grad that is not sharded like the weight" in whole[1]
    assert dtypes == {torch.bfloat16} and not stale


def test_mistakes_are_the_same_on_every_rank(ranks):
    first, second = ranks("mistakes")
    assert first == second
    kinds = {name: told[0] for name, told in first.items()}
    assert kinds == {
        "again": "ValueError", "values": "NotImplementedError", "autocast": "RuntimeError",
        "tiles": "NotImplementedError", "global scale": "NotImplementedError",
    }  # fmt: skip
    assert "cannot be sharded into 50 rows: rowwise mxfp8_e4m3[32x32] has blocks of 32 values" in first["tiles"][1]


# ---------------------------------------------------------------------------------------------- in one process


@pytest.fixture
def alone(on_their_device):
    dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", RECIPES)
def test_one_process_sharded_by_itself(name, alone):
    model = net(100, RECIPES[name])
    with mx.explain() as log:
        assert all(compare(shard(model), net(100, RECIPES[name]), 0, steps=2))
    assert set(what(gathers(log)).values()) == {CODES if name in ("one copy", "tiles") else "high precision"}


@pytest.mark.parametrize("make", [partial(net, 64, RECIPES["one copy"]), partial(operands, 64, "mxfp8", "both", True)])
def test_a_cached_swizzled_scale_ends_with_the_gather(make, alone):
    """FSDP2 fills the tensors again without a new version, so a swizzled scale from before would be stale."""
    model = shard(make())
    x = torch.randn(4, WIDTH)
    seen = []
    for _ in range(2):
        model(x).sum().backward()
        layer = model[0]
        layer.unshard()
        gathered = layer.weight.high_precision if isinstance(layer.weight, TrainingWeight) else layer.weight
        for operand in gathered.operands:
            assert torch.equal(
                derived.cached_value(operand.scale, "doubled", lambda scale: scale * 2), operand.scale * 2
            )
        seen.append([operand.scale.clone() for operand in gathered.operands])
        layer.reshard()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4)
    assert not any(torch.equal(a, b) for a, b in zip(*seen, strict=True))


ONE, TILES = (RECIPES[name].linear_recipe() for name in ("one copy", "tiles"))


@pytest.mark.parametrize(
    ("linear_recipe", "shard", "reason"),
    [
        (ONE, Shard((127, 64), (64, 64)), None),
        (ONE, Shard((3, 64), (2, 64)), None),
        (TILES, Shard((127, 64), (64, 64)), None),
        (TILES, Shard((100, 64), (100, 64)), None),
        (TILES, Shard((100, 64), (50, 64)), "shards of 50 rows of 100: mxfp8_e4m3[32x32] has blocks of 32 values"),
        (ONE, Shard((64, 64), (64, 32)), "the shards are of columns"),
        (ONE, None, "not a sharded matrix"),
        (MXFP8BlockScaling().linear_recipe(), Shard((64, 64), (32, 64)), "single_weight_copy=True"),
        (RECIPES["off"].linear_recipe(), Shard((64, 64), (32, 64)), "quantized_gather is off"),
        (CustomRecipe("mxfp8", None, "mxfp8").linear_recipe(), Shard((64, 64), (32, 64)), "high-precision values"),
        (
            CustomRecipe(
                weight=Cast.of("mxfp8", rounding="stochastic"), single_weight_copy=True
            ).linear_recipe(), Shard((64, 64), (32, 64)), "rounded stochastically",
        ),
        (CustomRecipe(weight="float8_tensor").linear_recipe(), Shard((64, 64), (32, 64)), "has one scale for"),
        (MXFP4BlockScaling(single_weight_copy=True).linear_recipe(), Shard((64, 64), (32, 64)), None),
    ],
)  # fmt: skip
def test_what_can_be_gathered(linear_recipe, shard, reason):
    found = refusal(linear_recipe, shard)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("tiles", ["mesh"]), ("off", ["mesh", "outer_size", "outer_stride", "module", "mp_policy"])],
)
def test_a_hook_has_the_right_parameters_and_follows_the_values(name, parameters):
    """FSDP2 counts the parameters, and reads the hook again at each gather."""
    weight = TrainingWeight(torch.randn(32, 64), RECIPES[name].linear_recipe(), Shard((64, 64), (32, 64)))
    hook = weight.fsdp_pre_all_gather
    assert list(signature(hook).parameters) == parameters
    weight.data = values = torch.randn(32, 64)
    assert hook.args[0] is not values and weight.fsdp_pre_all_gather.args[0].data_ptr() == values.data_ptr()


@pytest.mark.parametrize("name", ["tiles", "off", "frozen", "frozen nvfp4"])
def test_the_hook_takes_both_protocols_by_position_and_by_name(name):
    """Custom code calls it with ``mesh`` alone or with all five arguments of FSDP2."""
    values, policy = torch.randn(32, 64), MixedPrecisionPolicy()
    if name in RECIPES:
        weight = TrainingWeight(values, RECIPES[name].linear_recipe(), Shard((32, 64), (32, 64)))
    else:
        weight = mx.quantize(values, "nvfp4_single_level" if "nvfp4" in name else "mxfp8").zeros_of_rows(32)
        weight._shard = Shard((32, 64), (32, 64))
        weight.copy_(values)
    hook, rest = weight.fsdp_pre_all_gather, (torch.Size([32, 64]), (64, 1), nn.Linear(64, 32), policy)
    named = dict(zip(("outer_size", "outer_stride", "module", "mp_policy"), rest, strict=True))
    calls = [hook(None), hook(mesh=None), hook(None, *rest), hook(mesh=None, **named)]
    for inputs, gathered in calls:
        assert len(inputs) > 0 and all(torch.equal(a, b) for a, b in zip(inputs, calls[0][0], strict=True))
        whole, _ = weight.fsdp_post_all_gather(inputs, gathered, torch.float32)
        assert whole.shape == (32, 64)
        torch.testing.assert_close(local_values(whole), local_values(weight), rtol=0.07, atol=1e-3)
    with pytest.raises(RuntimeError, match="does not know its place"):
        mx.quantize(values, "mxfp8").fsdp_pre_all_gather(mesh=None)


def local_values(weight):
    values = values_of(weight)
    return values.dequantize() if isinstance(values, mx.MXTensor) else values


def test_weights_of_conv1d_are_gathered_in_high_precision():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D(48, 64)
    weight = mx.quantize_(conv1d, RECIPES["one copy"]).weight
    assert "(in_features, out_features)" in refusal(weight.linear_recipe, Shard((64, 48), (32, 48)))


def test_chunks_that_cut_tiles_are_refused():
    """Cross-attention makes them if its width is not a multiple of 32. A slice of whole tiles is still a weight."""
    weight = TrainingWeight(mx.quantize(torch.randn(120, 64), "mxfp8[32x32]"), TILES)
    with pytest.raises(NotImplementedError, match="quantized_gather=False"):
        weight.chunk(3)
    assert isinstance(weight[:64].high_precision, mx.MXTensor)


def test_views_and_copies_of_a_shard_have_its_shard():
    """A Shard is the shape of the whole weight and that of the largest shard."""
    whole = mx.quantize_(nn.Linear(64, 100), RECIPES["one copy"]).weight
    assert whole.shard is None
    buffer = whole.detach().new_zeros(34, 64)
    assert buffer.shard == Shard((100, 64), (34, 64))
    part = buffer.narrow(0, 0, 32)
    for each in (part, part.detach(), part.clone(), part.to(torch.bfloat16), torch.empty_like(part), part.view(-1)):
        assert isinstance(each, TrainingWeight) and each.shard == buffer.shard
    assert part.new_zeros(34, 64).shard == buffer.shard  # FSDP2 pads it again
    q = mx.quantize(torch.randn(100, 64), "mxfp8")
    padded = q.zeros_of_rows(34)
    for each in (
        padded,
        padded.narrow(0, 0, 32),
        padded.clone(),
        padded.with_dtype(torch.bfloat16),
        padded.zeros_of_rows(34),
    ):
        assert isinstance(each, mx.MXTensor) and each._shard == Shard((100, 64), (34, 64))


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxint8", "float8_1x128", "float8_128x128", "mxfp6[32x32]"])
def test_the_buffer_of_a_shard_is_zero(format):
    zeros = mx.quantize(torch.randn(128, 100), format).zeros_of_rows(128)
    assert isinstance(zeros, mx.MXTensor) and torch.equal(zeros.dequantize(), torch.zeros(128, 100))


@pytest.mark.parametrize("format", ["mxfp8", "float8_row", "mxfp6[32x32]"])
def test_a_rank_without_rows_gets_an_empty_shard(format):
    """torch makes it by ``new_zeros`` where a weight has fewer rows than there are ranks."""
    w = mx.quantize(torch.randn(1, 96), format)
    first, empty = fill_empty_tensor_to_shards([w], 0, 1)
    assert first is w and isinstance(empty, mx.MXTensor) and empty.shape == empty.dequantize().shape == (0, 96)


def test_different_recipes_raise_on_every_rank_before_anything_is_gathered(ranks):
    first, second = ranks("different_recipes")
    assert first == second
    for kind, text in first:
        assert kind == "RuntimeError" and text.startswith("ranks do not gather the weight (")
        assert "rank 0 " in text and "rank 1 " in text and text.endswith("the same recipe on every rank")
