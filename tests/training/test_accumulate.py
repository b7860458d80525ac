"""``mx.accumulate``: each weight is cast once for several passes, with the same results, and anew when it changed."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor.convert.training import training_parameter
from mxtensor.recipe import Format, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from mxtensor.training import accumulate, passes
from mxtensor.training.training_weight import TrainingWeight

RECIPES = {"mxfp8": MXFP8BlockScaling(), "e5m2 gradients": MXFP8BlockScaling(fp8_format=Format.HYBRID),
           "mxfp4": MXFP4BlockScaling()}  # fmt: skip
ROWS = 4


def model(recipe):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(torch.bfloat16)
    return mx.quantize_(net, recipe)


def batch(i, rows=ROWS):
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)


def step(net, i, rows=ROWS):
    torch.manual_seed(i)  # of stochastic rounding
    (net(batch(i, rows)).float() ** 2).mean().backward()


def gradients(net):
    return [p.grad.clone() for p in net.parameters()]


@pytest.fixture
def casts(monkeypatch):
    """The shapes of what was cast."""
    seen = []
    whole = passes.copies_of, passes.copies

    def counted(cast):
        def run(x, *rest):
            seen.append(tuple(x.shape))
            return cast(x, *rest)

        return run

    monkeypatch.setattr(passes, "copies_of", counted(whole[0]))
    monkeypatch.setattr(passes, "copies", counted(whole[1]))
    return seen


WEIGHTS = {(96, 64), (32, 96)}


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradients_are_those_of_steps_that_cast_each_time(name):
    alone, together = model(RECIPES[name]), model(RECIPES[name])
    for i in range(3):
        step(alone, i)
    with mx.accumulate():
        for i in range(3):
            step(together, i)
    assert all(map(torch.equal, gradients(alone), gradients(together)))


def of_weights(casts):
    return [shape for shape in casts if shape in WEIGHTS]


def test_a_weight_is_cast_once_in_a_block_and_each_time_outside(casts):
    net = model(RECIPES["mxfp8"])
    with mx.accumulate():
        for i in range(3):
            step(net, i)
        assert sorted(of_weights(casts)) == sorted(WEIGHTS)
        with mx.accumulate():
            step(net, 3)
        step(net, 4)
        assert len(of_weights(casts)) == 2
    step(net, 5)
    assert len(of_weights(casts)) == 4


def test_a_write_in_the_block_is_seen():
    net, other = model(RECIPES["mxfp8"]), model(RECIPES["mxfp8"])
    for one in (net, other):
        one[0].weight.requires_grad_(True)
    with mx.accumulate():
        step(net, 0)
        with torch.no_grad():
            net[0].weight.mul_(0.5)
            net[2].weight.add_(0.25)
        net.zero_grad()
        step(net, 1)
    with torch.no_grad():
        other[0].weight.mul_(0.5)
        other[2].weight.add_(0.25)
    step(other, 1)
    assert all(map(torch.equal, gradients(net), gradients(other)))


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_step_of_an_optimizer_in_the_block_is_seen(options):
    net, other = model(RECIPES["mxfp8"]), model(RECIPES["mxfp8"])
    for one, block in ((net, mx.accumulate()), (other, nullcontext())):
        one.requires_grad_(True)
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, **options)
        with block:
            for i in range(2):
                step(one, i)
                optimizer.step()
    assert all(map(torch.equal, gradients(net), gradients(other)))


def test_nothing_stays_after_the_block():
    net = model(RECIPES["mxfp8"])
    with mx.accumulate():
        step(net, 0)
        store = accumulate._open[0]
        tensors = [weakref.ref(t) for *_, cast in store._operands.values() for t in cast.tensors]
        assert len(tensors) == 3
    net.zero_grad()
    del store
    gc.collect()
    assert all(t() is None for t in tensors) and not accumulate._open


def test_an_error_ends_the_block_and_a_function_can_be_one(casts):
    net = model(RECIPES["mxfp8"])
    with pytest.raises(ZeroDivisionError), mx.accumulate():
        1 / 0  # noqa: B018
    assert not accumulate._open

    @mx.accumulate()
    def work():
        step(net, 0)
        step(net, 1)

    work()
    assert len(of_weights(casts)) == 2 and not accumulate._open


def test_other_rows_and_passes_without_gradients_have_casts_of_their_own(casts):
    net = model(RECIPES["mxfp8"])
    expected = net(batch(1)).detach()
    casts.clear()
    with mx.accumulate():
        step(net, 0)
        step(net, 0, rows=2)
        assert len(of_weights(casts)) == 4
        with torch.no_grad():
            assert torch.equal(net(batch(1)), expected)
            net(batch(2))


def test_a_recomputed_layer_takes_the_same_cast(casts):
    net = model(RECIPES["mxfp8"])
    with mx.accumulate():
        for i in range(2):
            (checkpoint(net, batch(i).requires_grad_(), use_reentrant=False).float() ** 2).mean().backward()
    assert {shape: of_weights(casts).count(shape) for shape in WEIGHTS} in ({(96, 64): 1, (32, 96): 1},)


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), mx.recipe.DelayedScaling()], ids=["nvfp4", "delayed"])
def test_other_recipes_run_as_outside(recipe):
    nets = model(recipe), model(recipe)
    for i in range(2):
        step(nets[0], i)
    with mx.accumulate():
        for i in range(2):
            step(nets[1], i)
    assert all(map(torch.equal, gradients(nets[0]), gradients(nets[1])))


def test_weights_that_are_filled_anew_are_not_stored(casts):
    net = model(RECIPES["mxfp8"])
    for layer in (net[0], net[2]):
        layer.weight.refilled = True
    view = net[0].weight.detach()
    assert isinstance(view, TrainingWeight) and view.refilled
    with mx.accumulate():
        step(net, 0)
        step(net, 1)
    assert len(of_weights(casts)) == 4


# ---------------------------------------------------------------------------------------------- stacks of weights

STACK = (3, 32, 48)


class Experts(nn.Module):
    """A stack (experts, out, in), or (experts, in, out) as ``F.grouped_mm`` takes it."""

    def __init__(self, recipe, transposed, dtype=torch.bfloat16):
        super().__init__()
        torch.manual_seed(0)
        weight = torch.randn(STACK).to(dtype)
        self.weight = training_parameter(
            nn.Parameter(weight.mT.contiguous() if transposed else weight), recipe.linear_recipe()
        )
        self.transposed = transposed

    def forward(self, x, ends=None):
        weight = self.weight if self.transposed else self.weight.mT
        return torch.bmm(x, weight) if ends is None else torch._grouped_mm(x, weight, offs=ends)


def step_of_experts(net, i, grouped, rows=40):
    torch.manual_seed(i)
    if grouped:
        ends = torch.tensor([10 + i, 10 + i, rows - 2 - i], dtype=torch.int32)
        y = net(torch.randn(rows, 48).to(torch.bfloat16).requires_grad_(), ends)
    else:
        y = net(torch.randn(3, rows, 48).to(torch.bfloat16).requires_grad_())
    (y.float() ** 2).mean().backward()


@pytest.mark.parametrize("name", ["mxfp8", "e5m2 gradients"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_stack_is_cast_once_in_a_block_with_the_same_bits(casts, grouped, transposed, name):
    alone, together = (Experts(RECIPES[name], transposed) for _ in range(2))
    for i in range(3):
        step_of_experts(alone, i, grouped)
    assert casts.count(STACK) == 6  # for fprop and for dgrad of each step
    casts.clear()
    with mx.accumulate():
        for i in range(3):
            step_of_experts(together, i, grouped)
    assert casts.count(STACK) == 1
    assert all(map(torch.equal, gradients(alone), gradients(together)))


def test_a_write_to_a_stack_is_seen_and_other_rows_are_another_cast(casts):
    net, other = (Experts(RECIPES["mxfp8"], False) for _ in range(2))
    with mx.accumulate():
        step_of_experts(net, 0, True)
        step_of_experts(net, 0, True, rows=64)
        assert casts.count(STACK) == 2
        with torch.no_grad():
            net.weight[1].mul_(0.5)
        net.zero_grad()
        step_of_experts(net, 1, True)
    with torch.no_grad():
        other.weight[1].mul_(0.5)
    step_of_experts(other, 1, True)
    assert all(map(torch.equal, gradients(net), gradients(other)))


def test_a_stack_with_a_scale_for_each_weight_is_cast_each_time(casts):
    net = Experts(NVFP4BlockScaling(disable_stochastic_rounding=True), False)
    with mx.accumulate():
        step_of_experts(net, 0, True)
        step_of_experts(net, 1, True)
    assert casts.count(STACK) == 4
