"""FusedAdam against torch's Adam, and its narrow states against what they must hold."""

import io
import pickle

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.te.optimizers import decode_state, encode_state, join_master, scale_of, split_master

FusedAdam = te.FusedAdam
ERROR = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.uint8: 2.0**-4}
"""Dtype of a state -> the largest relative error of a rounded normal number."""
KINDS = [
    {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.uint8},
    {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16, "master_weights": True},
    {"exp_avg_dtype": torch.bfloat16, "master_weights": True, "store_param_remainders": True},
    {"master_weights": True, "master_weight_dtype": torch.float16},
]


def gradient(p, step):
    """A gradient that depends on the shape and the number of the step only."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(p.shape, generator=generator) * 10.0 ** (step % 4 - 2)


def train(made, params, steps=5, start=0):
    for step in range(start, start + steps):
        for p in params:
            p.grad = gradient(p, step).bfloat16().to(p.dtype)
        made.step()


def parameters(dtype=torch.float32):
    return [nn.Parameter(torch.randn(7, 5).to(dtype)) for _ in range(2)]


def copies(params, dtype=None):
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in params]


# ---------------------------------------------------------------------------------------------- the steps


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(("mode", "reference"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_float32_steps_are_those_of_torch(mode, reference, decay):
    ours = parameters()
    theirs = copies(ours)
    options = dict(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay)
    train(FusedAdam(ours, adam_w_mode=mode, **options), ours)
    train(reference(theirs, **options), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)


def test_without_bias_correction_moments_are_taken_as_they_are():
    p = nn.Parameter(torch.randn(3, 4))
    before, p.grad = p.detach().clone(), torch.full_like(p, 3.0)
    FusedAdam([p], lr=0.5, betas=(0.9, 0.99), bias_correction=False).step()
    torch.testing.assert_close(p.detach(), before - 0.5 * 0.3 / 0.09**0.5)


def test_closures_schedulers_and_decoupled_gradients():
    p, q = parameters()
    made = FusedAdam([{"params": [p]}, {"params": [q], "lr": 0.0}], lr=torch.tensor(0.1), use_decoupled_grad=True)
    before = q.detach().clone()

    def closure():
        p.decoupled_grad, q.decoupled_grad = torch.ones(7, 5, dtype=torch.bfloat16), torch.ones(7, 5)
        return (p * 2).sum()

    loss, start = made.step(closure), p.detach().clone()
    assert loss.requires_grad and torch.equal(q, before)
    made.zero_grad(set_to_none=False)
    assert not p.decoupled_grad.any()
    made.zero_grad()
    made.step()
    assert p.decoupled_grad is None and torch.equal(p, start)


# ---------------------------------------------------------------------------------------------- narrow states


@pytest.mark.parametrize("dtype", ERROR)
def test_a_narrow_moment_is_the_wide_one_rounded(dtype):
    wide = parameters()
    narrow = copies(wide)
    whole, small = FusedAdam(wide), FusedAdam(narrow, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    train(whole, wide, 1), train(small, narrow, 1)
    for number, p in enumerate(narrow):
        assert torch.equal(p, wide[number])  # the first step rounds states after it
        assert small.state[p]["exp_avg"].dtype is dtype
        for name in ("exp_avg", "exp_avg_sq"):
            found, expected = small.state_dict()["state"][number][name], whole.state[wide[number]][name]
            normal = expected.abs() > expected.abs().amax() / 64
            assert found.dtype is torch.float32 and normal.sum() > 5
            stochastic = dtype is torch.uint8 and name == "exp_avg_sq"  # to one of two codes that are 12 % apart
            assert ((found / expected - 1).abs()[normal] <= (0.123 if stochastic else ERROR[dtype] * 1.001)).all()
            if dtype is not torch.bfloat16:  # the codes have the largest value
                torch.testing.assert_close(found.abs().amax(), expected.abs().amax(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-30, -1e-30], [3e38, -1e38], [3e38, 0.0], []])
def test_zeros_and_every_magnitude_are_stored(values, dtype):
    values = torch.tensor(values)
    scale = scale_of(values, dtype)
    found = decode_state(encode_state(values, dtype, scale), scale)
    torch.testing.assert_close(found, values, rtol=ERROR[dtype], atol=0)


# ---------------------------------------------------------------------------------------------- master weights


def test_a_master_weight_is_split_in_two_and_joined():
    special = torch.tensor([0.0, -0.0, 1.0, 3.4e38, -3.4e38, 1e-45, float("inf"), -float("inf"), float("nan")])
    any_bits = torch.randint(-(2**31), 2**31 - 1, (5000,)).to(torch.int32)
    any_bits[::5] = any_bits[::5] & ~0xFFFF | 0x8000  # halves
    values = torch.cat([special, torch.randn(1000), any_bits.view(torch.float32)])
    rounded, rest = split_master(values)
    assert torch.equal(join_master(rounded, rest).view(torch.int32), values.view(torch.int32))
    finite = values.isfinite() & (values.abs() < 3e38)
    half = (values.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(rounded[finite & ~half], values[finite & ~half].bfloat16()) and rest.dtype is torch.int16
    assert (rounded[finite & half].float().abs() > values[finite & half].abs()).all()


def test_remainders_train_as_float32_parameters_do():
    split = parameters(torch.bfloat16)
    whole, wide = copies(split), copies(split, torch.float32)
    made = FusedAdam(split, lr=1e-4, master_weights=True, store_param_remainders=True)
    masters = FusedAdam(whole, lr=1e-4, master_weights=True)
    for each, params in ((made, split), (masters, whole), (FusedAdam(wide, lr=1e-4), wide)):
        train(each, params)
    for p, q, w in zip(split, whole, wide, strict=True):
        assert made.state[p]["master_param"].dtype is torch.int16
        assert torch.equal(made._master(p), w) and torch.equal(masters.state[q]["master_param"], w)
        assert torch.equal(q, w.bfloat16()) and torch.equal(p, split_master(w.detach())[0])


@pytest.mark.parametrize("master", [torch.float32, torch.float16])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_quantized_parameters_are_rounded_from_their_masters(format, master):
    values = torch.randn(32, 64)
    w, wide = nn.Parameter(mx.quantize(values, format)), nn.Parameter(mx.quantize(values, format).dequantize())
    made = FusedAdam([w], lr=0.01, master_weights=True, master_weight_dtype=master)
    train(made, [w], 3), train(FusedAdam([wide], lr=0.01), [wide], 3)
    found = made.state_dict()["state"][0]["master_param"]
    atol = 0 if master is torch.float32 else 4 * 2.0**-11 * wide.abs().max().item()
    torch.testing.assert_close(found, wide.detach(), rtol=0, atol=atol)
    if master is torch.float32:
        assert torch.equal(w.dequantize(), mx.quantize(found, format).dequantize())


def test_a_layer_that_trains_quantized():
    layer = mx.quantize_(nn.Sequential(nn.Linear(64, 32)), mx.recipe.MXFP8BlockScaling()).bfloat16()
    made = FusedAdam(layer.parameters(), lr=0.01, master_weights=True, store_param_remainders=True)
    x, losses = torch.randn(16, 64, dtype=torch.bfloat16), []
    for _ in range(8):
        made.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        losses.append(loss.item())
        made.step()
    assert losses[-1] < losses[0] / 2


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_training_continues_bitwise_after_a_checkpoint(kind, dtype):
    params = parameters(dtype)
    made = FusedAdam(params, lr=0.01, weight_decay=0.1, **kind)
    train(made, params, 3)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded = copies(params)
    other = FusedAdam(loaded, **kind)
    other.load_state_dict(torch.load(file, weights_only=True))
    unpickled, third = pickle.loads(pickle.dumps((params, made)))
    for each, its in ((made, params), (other, loaded), (third, unpickled)):
        train(each, its, 3, 3)
    assert all(map(torch.equal, params, loaded)) and all(map(torch.equal, params, unpickled))
    for p, q in zip(params, loaded, strict=True):
        assert made.state[p].keys() == other.state[q].keys()
        assert all(torch.equal(made._get(p, name), other._get(q, name)) for name in made.state[p])


def test_states_of_transformer_engine_and_of_other_dtypes_load():
    params = parameters(torch.bfloat16)
    made = FusedAdam(params, master_weights=True, exp_avg_dtype=torch.float16)
    train(made, params, 2)
    saved = made.state_dict()
    without = {key: value for key, value in saved.items() if key != "scales"}  # as TransformerEngine writes it
    loaded = copies(params)
    other = FusedAdam(loaded, master_weights=True, exp_avg_dtype=torch.uint8, store_param_remainders=True)
    for given in (saved, without):
        other.load_state_dict(given)
        assert other.param_groups[0]["step"] == 2
        for p, q in zip(params, loaded, strict=True):
            assert torch.equal(other._master(q), made._master(p))
            assert torch.equal(other._get(q, "exp_avg_sq"), made._get(p, "exp_avg_sq"))
            torch.testing.assert_close(other._get(q, "exp_avg"), made._get(p, "exp_avg"), rtol=0.07, atol=1e-3)


def test_masters_start_as_parameters_that_were_loaded_without_them():
    params = parameters(torch.bfloat16)
    made = FusedAdam(params)
    train(made, params, 2)
    loaded = copies(params)
    other = FusedAdam(loaded, master_weights=True)
    other.load_state_dict(made.state_dict())
    assert all(torch.equal(other.state[p]["master_param"], p.float()) for p in loaded)
    (wide,) = copies(loaded[:1], torch.float32)
    other = FusedAdam([wide], master_weights=True)
    state = {**made.state_dict()["state"][0], "master_param": torch.zeros(7, 5)}  # TransformerEngine writes one
    other.load_state_dict(
        {"state": {0: state}, "param_groups": [{**made.state_dict()["param_groups"][0], "params": [0]}]}
    )
    assert other.state[wide].keys() == {"exp_avg", "exp_avg_sq"} and other._master(wide).any()


def test_what_is_refused():
    (p, _), (q, _) = parameters(torch.bfloat16), parameters()
    with pytest.raises(ValueError, match=r"exp_avg_dtype is torch\.float64; choose torch\.float32"):
        FusedAdam([p], exp_avg_dtype=torch.float64)
    with pytest.raises(ValueError, match=r"master_weight_dtype is torch\.bfloat16"):
        FusedAdam([p], master_weight_dtype=torch.bfloat16)
    for name in ("amsgrad", "capturable"):
        with pytest.raises(NotImplementedError, match=f"no {name}; use mx.optim.AdamW"):
            FusedAdam([p], **{name: True})
    w = nn.Parameter(mx.quantize(torch.randn(32, 32), "mxfp8"))
    other = FusedAdam([q])
    with pytest.raises(ValueError, match="pass master_weights=True"):
        other.add_param_group({"params": [w]})
    assert len(other.param_groups) == 1
    made = FusedAdam([p], master_weights=True, store_param_remainders=True)
    train(made, [p], 1)
    with pytest.raises(ValueError, match="store_param_remainders=True"):
        other.load_state_dict(made.state_dict())
    for state in (torch.optim.AdamW([q]), FusedAdam([nn.Parameter(torch.ones(3))])):
        state.param_groups[0]["params"][0].grad = torch.ones_like(state.param_groups[0]["params"][0])
        state.step()
        with pytest.raises(ValueError, match="does not fit FusedAdam's exp_avg, exp_avg_sq, master_param"):
            other.load_state_dict(state.state_dict())
    assert not other.state
