"""``module.fp8_meta``: what users of TransformerEngine read of a module's recipe and of delayed scaling."""

import copy
import pickle

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import DelayedScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling

MAX = {"forward": 448.0, "backward": 57344.0}


def step(module, recipe, size=(32, 64), scale=1.0):
    """One forward and backward pass; the input and the gradient of the result."""
    x, seen = torch.randn(size) * scale, []
    with mx.autocast(recipe=recipe):
        y = module(x)
    y.register_hook(seen.append)
    y.backward(torch.randn(y.shape) / scale)
    return x, seen[0]


def test_scales_and_histories_are_those_of_the_passes():
    recipe = DelayedScaling(amax_history_len=4, fp8_format=Format.HYBRID)
    layer = te.Linear(64, 32)
    passes = [step(layer, recipe, scale=2.0**i) for i in (0, 3, 1)]
    meta = layer.fp8_meta
    forward, backward = meta["scaling_fwd"], meta["scaling_bwd"]
    assert forward.amax_history.shape == (4, 3) and backward.amax_history.shape == (4, 2)
    for row, (x, grad) in enumerate(reversed(passes)):
        amaxes = torch.stack([x.abs().max(), layer.weight.detach().abs().max(), torch.zeros(())])
        assert torch.equal(forward.amax_history[row], amaxes)
        assert torch.equal(backward.amax_history[row], torch.stack([grad.abs().max(), torch.zeros(())]))
    assert forward.amax_history[3].eq(0).all()
    # the last pass was scaled by the largest amax of the passes before it
    largest = torch.stack([max(x.abs().max() for x, _ in passes[:2]), layer.weight.detach().abs().max()])
    assert torch.equal(forward.scale, torch.cat([MAX["forward"] / largest, torch.ones(1)]))
    assert torch.equal(forward.scale_inv, 1 / forward.scale)
    assert backward.scale[0] == MAX["backward"] / max(grad.abs().max() for _, grad in passes[:2])
    assert backward.scale[1] == 1
    state = layer._products[0].delayed
    assert torch.equal(forward.scale[:2], state.scale[:2]) and torch.equal(backward.scale[:1], state.scale[2:])


def test_a_read_follows_the_passes_and_changes_nothing():
    layer, recipe = te.Linear(64, 32), DelayedScaling(amax_history_len=3)
    step(layer, recipe)
    view = layer.fp8_meta["scaling_fwd"]
    before = view.amax_history
    view.scale.fill_(7), before[0].fill_(7)
    assert not view.scale.eq(7).any() and not view.amax_history.eq(7).any()
    newest = view.amax_history[0]
    step(layer, recipe, scale=16.0)
    assert torch.equal(view.amax_history[1], newest) and view.amax_history[0, 0] > newest[0]
    meta = layer.fp8_meta
    for write in (lambda: meta.__setitem__("recipe", recipe), lambda: setattr(view, "scale", None)):
        with pytest.raises(AttributeError):
            write()
    with pytest.raises(AttributeError):
        layer.fp8_meta = {}


def test_products_are_in_order():
    module, recipe = te.LayerNormMLP(64, 96), DelayedScaling()
    step(module, recipe), step(module, recipe)
    meta = module.fp8_meta
    assert (
        meta["num_gemms"] == 2 and meta["scaling_fwd"].scale.shape == (6,) and meta["scaling_bwd"].scale.shape == (4,)
    )
    history = meta["scaling_fwd"].amax_history
    weights = torch.stack([module.fc1_weight.detach().abs().max(), module.fc2_weight.detach().abs().max()])
    assert torch.equal(history[0, 1::3], weights) and history[:, 2::3].eq(0).all()
    assert history.shape == (recipe.amax_history_len, 6)


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), NVFP4BlockScaling()], ids=["mxfp8", "nvfp4"])
def test_other_recipes_have_no_scaling_state(recipe):
    layer = te.LayerNormLinear(64, 32)
    assert dict(layer.fp8_meta) == {"fp8_checkpoint": False, "fp8_group": None}
    with pytest.raises(KeyError, match="no 'recipe' before its first pass under a recipe"):
        layer.fp8_meta["recipe"]
    layer(torch.randn(32, 64))
    assert "recipe" not in layer.fp8_meta
    step(layer, recipe)
    meta = layer.fp8_meta
    assert type(meta["recipe"]) is type(recipe) and meta["num_gemms"] == 1 and len(meta) == 4
    with pytest.raises(KeyError, match=f"with {type(recipe).__name__}, whose scales belong to single tensors"):
        meta["scaling_fwd"]
    with pytest.raises(KeyError, match="no 'scale'; it has fp8_checkpoint, fp8_group, num_gemms, recipe"):
        meta["scale"]
    assert "num_gemms" in repr(meta) and meta.get("scaling_bwd") is None


def test_a_copy_has_its_own_state():
    layer, recipe = te.Linear(64, 32), DelayedScaling()
    step(layer, recipe)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert set(other.fp8_meta) == {"fp8_checkpoint", "fp8_group"}
        step(other, recipe)
        assert other.fp8_meta["scaling_fwd"].amax_history[1].equal(layer.fp8_meta["scaling_fwd"].amax_history[0])
