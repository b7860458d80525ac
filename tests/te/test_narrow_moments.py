"""Second moments in 8 and 16 bits: steps stay those of Adam where gradients of one parameter differ by any ratio."""

import io

import pytest
import torch
from torch import nn

import mxtensor.te as te
from mxtensor.te import optimizers
from mxtensor.te.optimizers import decode_state, encode_state, scale_of

FusedAdam = te.FusedAdam
NEIGHBOURS = 2 ** (1 / optimizers.OCTAVE)
"""How much larger a code's value is than that of the code before it."""
TABLE = torch.tensor(optimizers.TABLE)


def magnitudes(shape, decades, within_a_block):
    """Scale factors between 10^-decades and 1: one for each value, or one for each row."""
    each = torch.rand(shape) if within_a_block else torch.rand(shape[0], *(1,) * (len(shape) - 1)).expand(shape)
    return 10.0 ** -(each * decades)


def train(params, scale_factors, steps, start=0, **options):
    made = options.pop("made", None) or FusedAdam(params, **options)
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        for p, scale_factor in zip(params, scale_factors, strict=True):
            p.grad = (scale_factor * (torch.randn(p.shape, generator=generator) + 0.2)).to(p.dtype)
        made.step()
    return made


def zeros(*shapes, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


# ---------------------------------------------------------------------------------------------- codes


def test_codes_are_monotone_and_every_code_is_decoded_and_encoded_to_itself():
    assert (TABLE.diff() > 0).all() and TABLE[0] == 0 and TABLE[255] == 1 and TABLE[1] < 2.0**-42
    every = torch.arange(256, dtype=torch.uint8)
    for scale in (1.0, 3.7, 1e-20, 1e30, optimizers.LEAST_SCALE):
        scales = torch.tensor([scale])
        values = optimizers.decode_squares(every, scales)
        assert (values.diff() > 0).all() and values[0] == 0 and values[1] >= torch.finfo(torch.float32).tiny
        assert optimizers.block_scales(values).equal(scales)
        for noise in (None, torch.zeros(256), torch.full((256,), 1 - 2.0**-24)):
            if noise is None or scale == 1:
                assert optimizers.encode_squares(values, scales, noise).equal(every)
    values = (torch.rand(256 * 400) ** 12).sort().values
    codes = optimizers.encode_squares(values, torch.ones(400)).int()
    assert (codes.diff() >= 0).all() and set(range(1, 256)) <= set(codes.tolist())


def test_each_value_is_rounded_to_one_of_its_neighbours():
    """Beside every value of the table, one ulp up and down too, where a rounded logarithm would be one code off."""
    bits = TABLE[1:].view(torch.int32)
    for values in (*[(bits + ulps).view(torch.float32) for ulps in (-1, 0)], torch.rand(100_000).clamp(min=1e-3) ** 9):
        scales = torch.ones(-(-values.numel() // 256))
        below = TABLE[torch.searchsorted(TABLE, values, right=True) - 1]
        above = TABLE[(torch.searchsorted(TABLE, values)).clamp(max=255)]
        least, most = (
            optimizers.encode_squares(values, scales, torch.full_like(values, u)) for u in (1 - 2.0**-24, 0.0)
        )
        least, most, nearest = (
            optimizers.decode_squares(c, scales) for c in (least, most, optimizers.encode_squares(values, scales))
        )
        small = values < TABLE[1]  # becomes code 1 and never 0
        assert (small | (least == below)).all() and (small | (most == above)).all() and (least[small] == TABLE[1]).all()
        assert ((nearest - values).abs() <= (least - values).abs() + (most - values).abs()).all()
        assert (small | ((nearest / values - 1).abs() <= (NEIGHBOURS - 1) / 2 * 1.06)).all()


def test_random_rounding_has_the_value_as_its_mean():
    values = (torch.rand(256) * 40).neg().exp2()
    scales = optimizers.block_scales(values)
    found = torch.stack(
        [
            optimizers.decode_squares(optimizers.encode_squares(values, scales, torch.rand(256)), scales)
            for _ in range(4000)
        ]
    )
    assert ((found.mean(0) / values - 1).abs() < 0.005).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (255,), (256,), (257,), (3, 5, 100), (2, 256), (0, 4)])
def test_blocks_are_256_values_in_any_shape(shape):
    values = torch.rand(shape) ** 4 + 1e-9
    scales = optimizers.block_scales(values)
    assert scales.shape == (-(-values.numel() // 256),)
    if values.numel():
        assert scales.equal(torch.stack([part.amax() for part in values.flatten().split(256)]))
    found = optimizers.decode_squares(optimizers.encode_squares(values, scales), scales)
    assert found.shape == values.shape and (found > 0).all()
    torch.testing.assert_close(found, values, rtol=(NEIGHBOURS - 1) / 2 * 1.06, atol=0)
    transposed = values.transpose(0, -1)  # of other strides
    scales = optimizers.block_scales(transposed)
    torch.testing.assert_close(
        optimizers.decode_squares(optimizers.encode_squares(transposed, scales), scales), transposed, rtol=0.065, atol=0
    )


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen():
    values = torch.zeros(700)
    values[300], values[301] = 1e-45, 1e-30
    for bad in (None, float("nan"), float("inf")):
        if bad is not None:
            values[0] = bad
        scales = optimizers.block_scales(values)
        found = optimizers.decode_squares(optimizers.encode_squares(values, scales), scales)
        assert (found[300:302] > 0).all() and not found[302:].any()
        assert found[:256].isnan().all() if bad is not None else not found[:256].any()


def test_no_second_moment_in_float16_becomes_zero():
    values = torch.tensor([1e4, 1e-3, 1e-30, 0.0])
    scale = scale_of(values, torch.float16, squares=True)
    found = decode_state(encode_state(values, torch.float16, scale, squares=True), scale)
    assert (found[:3] > 0).all() and found[3] == 0
    assert not decode_state(encode_state(values, torch.float16, scale), scale)[2]  # as a first moment may be


# ---------------------------------------------------------------------------------------------- steps


NARROW = [  # bits of the first and the second moment, decades between gradients
    (32, 8, 3),
    (32, 8, 6),
    (8, 8, 3),  # an E4M3 first moment with one scale has five decades: below, it is 0 and its value rests
    (32, 16, 6),
    (16, 16, 6),
]


@pytest.mark.parametrize("within_a_block", [True, False])
@pytest.mark.parametrize(("first", "second", "decades"), NARROW)
def test_updates_are_those_of_adamw(first, second, decades, within_a_block):
    """In one step of AdamW no value moves by much more than the rate; rounded to 0, moments moved it by 1 / eps."""
    dtypes = {8: torch.uint8, 16: torch.float16, 32: torch.float32}
    shape = (40, 300)  # a row is more than a block, and the last block has 224 values
    scale_factors = [magnitudes(shape, decades, within_a_block)]
    options = dict(lr=1e-3, eps=1e-15)
    (p,), (q,) = zeros(shape), zeros(shape)
    train([p], scale_factors, 60, exp_avg_dtype=dtypes[first], exp_avg_sq_dtype=dtypes[second], **options)
    train([q], scale_factors, 60, **options)
    wide = torch.optim.AdamW([r := zeros(shape)[0]], weight_decay=0, **options)
    train([r], scale_factors, 60, made=wide)
    torch.testing.assert_close(q, r, rtol=1e-4, atol=1e-6)
    assert p.abs().max() < 1.5 * r.abs().max()
    assert (p - r).norm() < 0.12 * r.norm()


def test_moments_do_not_stay_behind_over_many_steps():
    """A step changes a moment by 0.1 % or less: to nearest, it would stay far below the mean of squares."""
    (p,), scale_factors = zeros((4, 256)), [torch.full((4, 256), 0.3)]
    for options in ({}, {"betas": (0.9, 0.99)}):
        p.data.zero_()
        made = train([p], scale_factors, 1500, exp_avg_sq_dtype=torch.uint8, **options)
        beta = made.param_groups[0]["betas"][1]
        square = made.state_dict()["state"][0]["exp_avg_sq"] / (1 - beta**1500)
        assert abs(square.mean() / (0.09 * 1.04) - 1) < 0.1


def test_a_narrow_optimizer_of_an_embedding():
    """Rows that are rare have small moments beside large ones."""
    tables = [nn.Embedding(64, 96) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    start = tables[0].weight.detach().clone()
    made = [FusedAdam(tables[0].parameters(), exp_avg_sq_dtype=torch.uint8), FusedAdam(tables[1].parameters())]
    for step in range(50):
        ids = (torch.rand(64, generator=torch.Generator().manual_seed(step)) ** 4 * 64).long()
        for table, each in zip(tables, made, strict=True):
            each.zero_grad()
            (table(ids) - 1).square().mean().backward()
            each.step()
    moved = [(table.weight.detach() - start).abs().max() for table in tables]
    assert moved[0] < 1.3 * moved[1] < 0.07


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 40, 33), (1000,), (7, 5)])
def test_stacked_and_16_bit_parameters(shape, dtype):
    options = dict(master_weights=True, exp_avg_sq_dtype=torch.uint8, lr=1e-2)
    (p,), (q,) = zeros(shape, dtype=dtype), zeros(shape)
    scale_factors = [magnitudes(shape, 3, True)]
    made = train([p], scale_factors, 30, **options)
    train([q], scale_factors, 30, lr=1e-2)
    assert made.state[p]["exp_avg_sq"].dtype is torch.uint8 and made.state[p]["exp_avg_sq"].shape == shape
    assert (p.float() - q).norm() < 0.12 * q.norm()


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("with_scales", [True, False])
def test_training_continues_bitwise_after_a_checkpoint(with_scales):
    """Also without ``scales``: they follow from the values."""
    params, options = zeros((3, 7, 50), (300,)), dict(exp_avg_sq_dtype=torch.uint8, lr=0.01)
    scale_factors = [magnitudes(p.shape, 4, True) for p in params]
    made = train(params, scale_factors, 3, **options)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert all(state["exp_avg_sq"].dtype is torch.float32 for state in saved["state"].values())
    if not with_scales:
        del saved["scales"]
    loaded = [nn.Parameter(p.detach().clone()) for p in params]
    other = FusedAdam(loaded, **options)
    other.load_state_dict(saved)
    for p, q in zip(params, loaded, strict=True):
        assert other.state[q]["exp_avg_sq"].equal(made.state[p]["exp_avg_sq"])
    train(params, scale_factors, 3, 3, made=made), train(loaded, scale_factors, 3, 3, made=other)
    assert all(map(torch.equal, params, loaded))


def test_states_with_one_scale_for_each_parameter_load():
    """As TransformerEngine and older versions wrote them: float32 values, and a scale that is of no use here."""
    (p,) = zeros((5, 300))
    made = train([p], [torch.ones(5, 300)], 2)
    saved = made.state_dict()
    saved["scales"] = {0: {"exp_avg_sq": torch.tensor([0.1])}}
    (q,) = zeros((5, 300))
    other = FusedAdam([q], exp_avg_sq_dtype=torch.uint8)
    other.load_state_dict(saved)
    found = other.state_dict()["state"][0]["exp_avg_sq"]
    torch.testing.assert_close(found, saved["state"][0]["exp_avg_sq"], rtol=0.065, atol=0)
