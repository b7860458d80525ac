"""A layer whose recipe of delayed scaling changes keeps its histories, as in TransformerEngine."""

import dataclasses

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
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
LAYERS = {"plain": nn.Linear, "nn": te.Linear}
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


@pytest.mark.parametrize("quantized", [False, True], ids=["to quantized weights", "to plain weights"])
def test_a_split_weight_takes_the_state_of_another_number_of_products(quantized):
    """Plain parameters are one product, quantized ones are three."""

    def make(enabled):
        with te.quantized_model_init(enabled=enabled, recipe=RECIPE):
            return te.Linear(64, 96, bias=False, parameters_split=("query", "key", "value"))

    layer, other, x = make(quantized), make(not quantized), SIZE * torch.randn(20, 64)
    for _ in range(2):
        with mx.autocast(recipe=RECIPE):
            y = layer(x)
        y.backward(SIZE * torch.randn(20, 96))
    assert len(layer._products) == (3 if quantized else 1)
    state = {key: v.dequantize() if isinstance(v, mx.MXTensor) else v for key, v in layer.state_dict().items()}
    assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
    with mx.autocast(recipe=RECIPE), torch.no_grad():
        ours, theirs = other(x), layer(x)
    for mine, wanted in zip(ours.chunk(3, -1), theirs.chunk(3, -1), strict=True):
        assert relative_error(mine, wanted) < 0.06
    amaxes = [product.delayed.amax[[0, 2]] for product in other._products if product.delayed is not None]
    assert len(amaxes) == (1 if quantized else 3)
    largest = torch.stack([product.delayed.amax for product in layer._products]).amax(0)
    assert all(torch.equal(amax, largest[[0, 2]]) for amax in amaxes)
