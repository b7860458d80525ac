"""A layer whose recipe of delayed scaling changes keeps its histories, as in TransformerEngine."""

import dataclasses

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.recipe import DelayedScaling, Format
from mxtensor.training.interception import STATE
from tests.helpers.compare import relative_error

RECIPE = DelayedScaling(amax_history_len=4)
OTHERS = {
    "no reduction": {"reduce_amax": False},
    "longer": {"amax_history_len": 16},
    "shorter": {"amax_history_len": 2},
    "margin": {"margin": 1},
    "format": {"fp8_format": Format.E4M3},
    "newest": {"amax_compute_algo": "most_recent"},
}
LAYERS = {"plain": nn.Linear, "nn": mx.nn.Linear}
SIZE = 1e-4
"""Far below the smallest code for the scale 1."""


def state_of(layer):
    return layer._products[0].delayed if hasattr(layer, "_products") else getattr(layer.weight, STATE)


def step(layer, recipe, seed):
    generator = torch.Generator().manual_seed(seed)
    x, g = (SIZE * torch.randn(20, n, generator=generator) for n in (64, 48))
    with mx.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    return x, g


@pytest.mark.parametrize("change", OTHERS)
@pytest.mark.parametrize("kind", LAYERS)
def test_an_evaluation_under_another_recipe_has_the_scales(kind, change):
    layer, never = LAYERS[kind](64, 48, bias=False), LAYERS[kind](64, 48, bias=False)
    never.load_state_dict(layer.state_dict())
    for seed in range(3):
        step(layer, RECIPE, seed), step(never, RECIPE, seed)
    other, x = dataclasses.replace(RECIPE, **OTHERS[change]), SIZE * torch.randn(20, 64)
    with mx.autocast(recipe=other), torch.no_grad():
        y = layer(x)
    assert relative_error(y, x @ layer.weight.detach().t()) < 0.05
    more = 2.0**other.margin
    assert torch.equal(state_of(layer).amax, state_of(never).amax * more)
    for seed in range(3, 5):  # training goes on as if there had been no evaluation
        step(layer, RECIPE, seed), step(never, RECIPE, seed)
        if change != "shorter":
            assert torch.equal(state_of(layer).amax, state_of(never).amax)
            assert torch.equal(state_of(layer).history, state_of(never).history)
    assert torch.equal(layer.weight.grad, never.weight.grad) or change == "shorter"


@pytest.mark.parametrize("kind", LAYERS)
def test_a_pending_backward_pass_records_in_the_new_history(kind):
    layer = LAYERS[kind](64, 48, bias=False)
    step(layer, RECIPE, 0)
    x, g = torch.randn(20, 64), 8 * torch.randn(20, 48)
    with mx.autocast(recipe=RECIPE):
        y = layer(x)
    longer = dataclasses.replace(RECIPE, amax_history_len=8)
    with mx.autocast(recipe=longer), torch.no_grad():
        layer(x)
    y.backward(g)
    assert state_of(layer).record[2] == g.abs().max()
    assert state_of(layer).history.shape == (8, 3) and state_of(layer).history[0, 0] > 0


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_has_not_run_starts_with_scale_1(kind):
    layer = LAYERS[kind](64, 48, bias=False)
    with torch.no_grad():
        for recipe in (RECIPE, dataclasses.replace(RECIPE, fp8_format=Format.E4M3, margin=3)):
            with mx.autocast(recipe=recipe):
                layer(torch.randn(20, 64))
    assert torch.equal(state_of(layer).scale, torch.ones(3))
