"""Activation recomputation: torch.utils.checkpoint recomputes quantized, and the gradients are the same."""

import copy
import functools
import subprocess
import sys

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mxtensor as mx
from mxtensor.numerics.cast import Cast
from mxtensor.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from mxtensor.training.interception import STATE
from tests.helpers.training_reference import products

MXFP8, MXFP6 = MXFP8BlockScaling(), MXFP6BlockScaling()
WAYS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
}
ways = pytest.mark.parametrize("checkpointed", WAYS.values(), ids=WAYS)
RECIPES = [MXFP8, MXFP6, NVFP4BlockScaling(disable_stochastic_rounding=True), Float8CurrentScaling()]


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32))


def problem():
    return torch.randn(20, 64, requires_grad=True), torch.randn(20, 32)


def step(fn, net, x, g, recipe=None):
    """((y, gradients), products) of a forward pass under ``recipe`` and a backward pass outside."""
    with mx.explain() as log:
        if recipe is None:
            y = fn(x)
        else:
            with mx.autocast(recipe=recipe):
                y = fn(x)
        gradients = backward(y, net, x, g)
    return (y.detach(), *gradients), products(log)


def backward(y, net, x, g):
    """The gradients of x and the parameters, by ``backward``: reentrant checkpoints refuse ``autograd.grad``."""
    for leaf in (x, *net.parameters()):
        leaf.grad = None
    y.backward(g)
    return [leaf.grad for leaf in (x, *net.parameters())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def counted(ops):
    return {op: ops.count(op) for op in ("fprop", "dgrad", "wgrad")}


@ways
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
def test_gradients_equal_those_without_checkpointing(checkpointed, recipe):
    net, (x, g) = model(), problem()
    plain, _ = step(net, net, x, g, recipe)
    mine, ops = step(lambda x: checkpointed(net, x), net, x, g, recipe)
    assert same(plain, mine)
    assert counted(ops) == {"fprop": 4, "dgrad": 2, "wgrad": 2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_sequential_checkpoints(reentrant):
    net, (x, g) = model(), problem()
    plain, _ = step(net, net, x, g, MXFP8)
    mine, ops = step(lambda x: checkpoint_sequential(net, 2, x, use_reentrant=reentrant), net, x, g, MXFP8)
    assert same(plain, mine)
    assert counted(ops) == {"fprop": 3, "dgrad": 2, "wgrad": 2}  # the last segment is not recomputed


@ways
def test_stochastic_rounding_draws_once(checkpointed):
    """The backward pass draws, and the recomputation does not."""
    net, (x, g) = model(), problem()
    for recipe in (MXFP4BlockScaling(), NVFP4BlockScaling()):
        results = []
        for fn in (net, lambda x: checkpointed(net, x)):
            torch.manual_seed(7)
            results.append(step(fn, net, x, g, recipe)[0])
        assert same(*results)


@ways
def test_a_block_inside_a_checkpointed_function(checkpointed):
    net, (x, g) = model(), problem()

    def inside(x):
        x = net[0](x)
        with mx.autocast(recipe=MXFP6):
            return net[2](net[1](x))

    plain, _ = step(inside, net, x, g, MXFP8)
    mine, ops = step(lambda x: checkpointed(inside, x), net, x, g, MXFP8)
    assert same(plain, mine) and counted(ops)["fprop"] == 4
    disabled, ops = step(lambda x: checkpointed(mx.autocast(enabled=False)(net), x), net, x, g, MXFP8)
    assert ops == [] and same(disabled, step(net, net, x, g)[0])


@ways
def test_a_disabled_block_around_a_checkpoint_applies_to_the_recomputation(checkpointed):
    net, (x, g) = model(), problem()
    with mx.autocast(recipe=MXFP8), mx.autocast(enabled=False):
        y = checkpointed(net, x)
    with mx.explain() as log:
        gradients = backward(y, net, x, g)
    assert products(log) == [] and same(step(net, net, x, g)[0][1:], gradients)


@ways
def test_nested_checkpoints(checkpointed):
    net, (x, g) = model(), problem()
    plain, _ = step(net, net, x, g, MXFP8)

    def inner(x):
        return net[2](net[1](checkpointed(net[0], x)))

    assert same(plain, step(lambda x: checkpointed(inner, x), net, x, g, MXFP8)[0])


@ways
def test_a_recipe_edited_before_backward_does_not_change_the_recomputation(checkpointed):
    net, (x, g) = model(), problem()
    plain, _ = step(net, net, x, g, MXFP8BlockScaling())
    recipe = MXFP8BlockScaling()
    with mx.autocast(recipe=recipe):
        y = checkpointed(net, x)
    recipe.fp8_format = Format.E5M2
    assert same(plain[1:], backward(y, net, x, g))


@ways
@pytest.mark.parametrize("around", [MXFP6, None], ids=["another recipe", "disabled"])
def test_a_block_around_the_backward_pass_does_not_change_the_recomputation(checkpointed, around):
    net, (x, g) = model(), problem()
    for recipe in (MXFP8, None):
        plain, _ = step(net, net, x, g, recipe)
        if recipe is None:
            y = checkpointed(net, x)
        else:
            with mx.autocast(recipe=recipe):
                y = checkpointed(net, x)
        with mx.autocast(around is not None, around):
            assert same(plain[1:], backward(y, net, x, g))


@ways
def test_a_model_quantized_for_training_needs_no_block(checkpointed):
    net, (x, g) = mx.quantize_(model(), MXFP8), problem()
    plain, _ = step(net, net, x, g)
    mine, ops = step(lambda x: checkpointed(net, x), net, x, g)
    assert same(plain, mine) and counted(ops) == {"fprop": 4, "dgrad": 2, "wgrad": 2}
    y = checkpointed(net, x)
    with mx.autocast(recipe=MXFP6):
        assert same(plain[1:], backward(y, net, x, g))


@ways
def test_two_checkpoints_before_their_backward_passes(checkpointed):
    net, (x, g) = model(), problem()
    plain = [step(net, net, x, g, recipe)[0] for recipe in (MXFP8, MXFP6)]
    with mx.autocast(recipe=MXFP8):
        first = checkpointed(net, x)
    with mx.autocast(recipe=MXFP6):
        second = checkpointed(net, x)
    assert same(plain[1][1:], backward(second, net, x, g))
    assert same(plain[0][1:], backward(first, net, x, g))


@ways
def test_torch_autocast_and_dropout_are_restored_too(checkpointed):
    net, (x, g) = nn.Sequential(nn.Linear(64, 48), nn.Dropout(0.5), nn.Linear(48, 32)), problem()
    results = []
    for fn in (net, lambda x: checkpointed(net, x)):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16), mx.autocast(recipe=MXFP8):
            y = fn(x)
        results.append((y.detach(), *backward(y, net, x, g.bfloat16())))
    assert same(*results)


@ways
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_recomputation_does_not_count_as_a_step_of_delayed_scaling(checkpointed, way):
    """A reentrant checkpoint runs its forward pass without gradients, and that pass is the step."""
    results = []
    for wrap in (lambda net: net, lambda net: functools.partial(checkpointed, net)):
        torch.manual_seed(2)
        net, recipe = model(), DelayedScaling(amax_history_len=3)
        if way == "quantize_":
            mx.quantize_(net, recipe)
        out = []
        for size in (1.0, 3.0, 2.0, 5.0):
            x, g = (size * t.detach() for t in problem())
            out += step(wrap(net), net, x.requires_grad_(), g, recipe if way == "autocast" else None)[0]
            state = getattr(net[0].weight, STATE)
            out += [state.history.clone(), state.record.clone(), state.scale]
        results.append(out)
    assert same(*results)
    assert results[0][-3].count_nonzero() == 9


@pytest.mark.exhaustive
def test_a_model_quantized_with_delayed_scaling_needs_no_block():
    """In a process that never enters autocast."""
    code = """
import torch, mxtensor as mx
from torch.utils.checkpoint import checkpoint
from mxtensor.training.delayed_scaling import STATE
from mxtensor.recipe import DelayedScaling
layer = mx.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 48)), DelayedScaling())
for _ in range(2):
    x = torch.randn(4, 64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=True).backward(torch.randn(4, 48))
assert getattr(layer[0].weight, STATE).history[0].count_nonzero() == 3
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@ways
@pytest.mark.parametrize("tensors", ["input", "weight", "input weight grad"])
@pytest.mark.parametrize("way", ["autocast", "quantize_"])
def test_stochastic_rounding_repeats(checkpointed, tensors, way):
    """A reentrant checkpoint runs first without gradients, where a layer would need, and round, fewer copies."""
    stochastic = Cast.of("mxfp4", rounding="stochastic")
    recipe = CustomRecipe(*(stochastic if name in tensors else "mxfp4" for name in ("input", "weight", "grad")))
    net, (x, g) = model(), problem()
    if way == "quantize_":
        mx.quantize_(net, recipe)
    results = []
    for fn in (net, lambda x: checkpointed(net, x)):
        torch.manual_seed(3)
        results.append(step(fn, net, x, g, recipe if way == "autocast" else None)[0])
    assert same(*results)


def test_checkpoints_outside_autocast_behave_as_in_torch():
    net, (x, g) = model(), problem()
    with mx.autocast():
        pass
    twin = copy.deepcopy(net)
    y, z = checkpoint(net, x, use_reentrant=False), twin(x)
    assert torch.equal(y, z)
    assert same(backward(y, net, x, g), backward(z, twin, x, g))


def test_an_unknown_checkpoint_implementation_warns(monkeypatch):
    from mxtensor.training import recompute

    monkeypatch.setattr(recompute, "_installed", [])
    monkeypatch.delattr(torch_checkpoint, "_CheckpointFrame")
    with (
        pytest.warns(UserWarning, match="does not know this version of torch.utils.checkpoint.*use mx.quantize_"),
        mx.autocast(),
    ):
        pass
    with mx.autocast():  # once
        pass


@pytest.mark.parametrize("way", ["autocast", "quantize_"])
@ways
def test_compiled(way, checkpointed):
    torch._dynamo.reset()
    net, (x, g) = model(), problem()
    if way == "quantize_":
        mx.quantize_(net, MXFP8)
    recipe = MXFP8 if way == "autocast" else None
    compiled = torch.compile(lambda x: checkpointed(net, x), fullgraph=True, backend="aot_eager")
    assert same(step(net, net, x, g, recipe)[0], step(compiled, net, x, g, recipe)[0])
