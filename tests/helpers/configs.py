"""What a config of ``quantize_`` is: the recipe of the weight that it quantizes, or an error that changes nothing."""

import pytest
from torch import nn

import mxtensor as mx


def quantized_by(config, weight, activation, scaling, preference):
    """A layer (64, 48) that ``config`` quantizes to the recipe of these formats, and its weight before that."""
    layer = nn.Linear(64, 48)
    original = layer.weight.detach().clone()
    mx.quantize_(layer, config)
    recipe = layer.weight.recipe
    assert (recipe.stored.format.name, recipe.stored.scaling, recipe.kernel_preference) == (weight, scaling, preference)
    assert (recipe.activation and recipe.activation.format.name) == activation
    return layer, original


def assert_refused(config, message, quantize=mx.quantize_):
    """``quantize`` raises ValueError for ``config``, and the layer (128, 64) keeps its weight."""
    layer = nn.Linear(128, 64)
    before = layer.weight
    with pytest.raises(ValueError, match=message):
        quantize(layer, config)
    assert layer.weight is before
