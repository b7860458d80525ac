"""Layers that train, where no backward pass follows: evaluation and exported programs make no copies for one."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.training import linear as layers
from tests.helpers.compare import relative_error

JIT = "ignore:`torch.jit.script:DeprecationWarning"  # torch's own, when inductor imports torch.utils.mkldnn
RECIPES = [mx.recipe.MXFP8BlockScaling(), mx.recipe.NVFP4BlockScaling()]


def model(recipe):
    return mx.quantize_(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)), recipe)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_layer_without_gradients_casts_for_fprop_only(recipe, without):
    net, x = model(recipe), torch.randn(16, 64)
    with mx.explain() as log:
        expected = net(x)
    with_gradients = [entry.spec for entry in log.entries]
    with mx.explain() as log, without():
        y = net(x)
    specs = [entry.spec for entry in log.entries]
    assert torch.equal(y, expected)
    assert len(specs) < len(with_gradients)
    assert not [spec for spec in specs if spec.op == "quantize" and spec.shapes[0] in ((64, 16), (96, 16))]


def test_recomputed_layers_train_as_others():
    """A reentrant checkpoint runs its first pass without gradients."""
    net, x = model(RECIPES[0]), torch.randn(16, 64)

    def gradients(run):
        input = x.clone().requires_grad_()
        net.zero_grad()
        run(input).sin().sum().backward()
        return [input.grad, *(p.grad for p in net.parameters())]

    recomputed = gradients(lambda t: torch.utils.checkpoint.checkpoint(net, t, use_reentrant=True))
    assert all(map(torch.equal, gradients(net), recomputed))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(JIT)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_an_exported_layer_runs_with_any_batch_and_says_that_it_does_not_train(recipe, monkeypatch):
    messages = []
    monkeypatch.setattr(layers, "_warn_of_export", layers._warn_of_export.__wrapped__)
    monkeypatch.setattr(layers._log, "warning", messages.append)
    net, x = mx.quantize_(nn.Sequential(nn.Linear(64, 32)), recipe), torch.randn(32, 64)
    batch = ({0: torch.export.Dim("batch", min=2, max=64)},)
    with torch.no_grad():
        program = torch.export.export(net, (x,), dynamic_shapes=batch)
    assert not messages
    torch.export.export(net, (x,))
    assert "gives no gradients; export inside torch.no_grad()" in messages[0]
    for rows in (32, 7):
        x = torch.randn(rows, 64)
        assert relative_error(program.module()(x), net(x)) < 1e-6
