"""MXFP8GradientScaler: torch's GradScaler with a count of the skipped steps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mxtensor import optim
from mxtensor.recipe import MXFP8BlockScaling
from mxtensor.tensor.quantize import quantize
from mxtensor.training.grad_scaler import MXFP8GradientScaler
from mxtensor.training.mxfp8 import MXFP8Config, MXFP8Linear

DTYPES = [torch.float32, torch.bfloat16]


def make(dtype=torch.float32):
    model = nn.Sequential(MXFP8Linear(40, 48), nn.GELU(), MXFP8Linear(48, 8)).to(dtype)
    return model, torch.randn(6, 40, dtype=dtype), torch.randn(6, 8, dtype=dtype)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def loop(model, optimizer, scaler, x, target, poison=None):
    """One step as in torch's documentation; ``poison`` is written into a gradient."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), target)
    scaler.scale(loss).backward()
    if poison is not None:
        next(model.parameters()).grad[0, 0] = poison
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_unmodified_training_loop_uses_it(dtype):
    model, x, target = make(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = MXFP8GradientScaler(MXFP8Config(), "cpu")
    assert isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() and scaler.get_scale() == 65536
    losses = [loop(model, optimizer, scaler, x, target) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    assert (scaler.skipped_steps, scaler.total_steps) == (0, 20)


def test_the_default_device_is_the_available_one():
    assert MXFP8GradientScaler()._device == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("poison", [float("inf"), float("-inf"), float("nan")])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_and_counted(poison, fused):
    model, x, target = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = MXFP8GradientScaler(device="cpu", init_scale=1024.0)
    loop(model, optimizer, scaler, x, target)
    before = weights(model)
    loop(model, optimizer, scaler, x, target, poison)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert (scaler.skipped_steps, scaler.total_steps, scaler.get_scale()) == (1, 2, 512.0)
    loop(model, optimizer, scaler, x, target)
    assert not torch.equal(before[0], weights(model)[0])
    assert (scaler.skipped_steps, scaler.total_steps) == (1, 3)


def test_an_infinite_loss_is_skipped_too():
    model, x, target = make()
    scaler = MXFP8GradientScaler(device="cpu")
    before = weights(model)
    x[2, 3] = float("inf")
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, x, target)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grad", ["e4m3", "e5m2"])
def test_scaling_by_a_power_of_two_changes_no_bit_of_the_training(dtype, grad):
    model, x, target = make(dtype)
    for layer in (model[0], model[2]):
        layer.config = MXFP8Config(e5m2_backward=grad == "e5m2")
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    scaler = MXFP8GradientScaler(device="cpu")
    for _ in range(5):
        loop(model, optimizer, scaler, x, target)
        other.zero_grad()
        F.mse_loss(twin(x), target).backward()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


def test_master_weights_are_skipped_with_their_parameters():
    p = nn.Parameter(quantize(torch.randn(8, 32), "mxfp8", orientation="both"))
    optimizer = optim.AdamW([p], lr=0.1, fused=True)
    scaler = MXFP8GradientScaler(device="cpu", init_scale=4.0)
    x = torch.randn(3, 32)

    def step(poison):
        optimizer.zero_grad()
        scaler.scale(F.linear(x, p).square().sum()).backward()
        p.grad[1, 2] *= poison
        scaler.step(optimizer)
        scaler.update()
        return optimizer.state_dict()["state"][0]["master_weight"].clone()

    start, values = p.detach().dequantize(), None
    skipped = step(float("inf"))
    assert torch.equal(skipped, start) and torch.equal(p.detach().dequantize(), start)
    F.linear(x, p).square().sum().backward()
    values = step(1.0)
    assert not torch.equal(values, start) and (scaler.skipped_steps, scaler.total_steps) == (1, 2)


def test_each_of_several_optimizers_is_counted():
    model, x, target = make()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2]))
    scaler = MXFP8GradientScaler(device="cpu")
    scaler.scale(F.mse_loss(model(x), target)).backward()
    model[0].weight.grad[0, 0] = float("inf")
    before = weights(model)
    scaler.unscale_(first)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    after = weights(model)
    assert torch.equal(before[0], after[0]) and not torch.equal(before[2], after[2])
    assert (scaler.skipped_steps, scaler.total_steps) == (1, 2)


def test_a_disabled_scaler_steps_and_scales_nothing():
    model, x, target = make()
    scaler = MXFP8GradientScaler(device="cpu", enabled=False)
    before = weights(model)
    loop(model, torch.optim.SGD(model.parameters(), lr=0.1), scaler, x, target)
    assert not torch.equal(before[0], weights(model)[0])
    assert (scaler.skipped_steps, scaler.total_steps, scaler.get_scale(), scaler.state_dict()) == (0, 1, 1.0, {})


def test_counts_are_in_the_state_dict_and_torchs_own_loads(tmp_path):
    model, x, target = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = MXFP8GradientScaler(device="cpu")
    for poison in (None, float("inf"), None):
        loop(model, optimizer, scaler, x, target, poison)
    torch.save(scaler.state_dict(), tmp_path / "scaler.pt")
    fresh = MXFP8GradientScaler(device="cpu")
    fresh.load_state_dict(torch.load(tmp_path / "scaler.pt", weights_only=True))
    loop(model, optimizer, fresh, x, target, float("nan"))
    assert (fresh.skipped_steps, fresh.total_steps, fresh.get_scale()) == (2, 4, 65536 / 4)
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0)
    fresh.load_state_dict(theirs.state_dict())
    assert (fresh.skipped_steps, fresh.total_steps, fresh.get_scale()) == (0, 0, 8.0)


def test_arguments_are_torchs():
    scaler = MXFP8GradientScaler(
        MXFP8BlockScaling(), "cpu", init_scale=4.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2
    )
    model, x, target = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = []
    for poison in (None, None, float("inf")):
        loop(model, optimizer, scaler, x, target, poison)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 16.0, 4.0]
    with pytest.raises(TypeError, match="'cuda' is not a recipe; pass an MXFP8Config as config"):
        MXFP8GradientScaler("cuda")


@pytest.mark.gpu
def test_on_a_gpu_a_fused_step_is_skipped_and_counted_without_synchronizing():
    model, x, target = make()
    model, x, target = model.cuda(), x.cuda(), target.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = MXFP8GradientScaler()
    before = weights(model)
    loop(model, optimizer, scaler, x, target, float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert scaler.skipped_steps == 1 and scaler._skipped.is_cuda
