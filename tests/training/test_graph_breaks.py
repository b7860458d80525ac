"""A copy of a weight that leaves one compiled graph and enters the next: the values and gradients of eager code."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx

MXFP8 = mx.recipe.MXFP8BlockScaling()
COPIES = {
    "clone": lambda w: w.clone(),
    "converted": lambda w: w.to(torch.bfloat16).float(),
    "slice": lambda w: w[:32],
    "leaf": lambda w: w.detach().clone().requires_grad_(),
    "parameter": lambda w: nn.Parameter(w.detach().clone()),
    "deepcopy": copy.deepcopy,
}


def step(function, layer, x):
    """The result and the gradients of x, of the weight and of its copy."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, w = function(layer, x)
    y.sum().backward()
    return [y.detach(), x.grad, layer.weight.grad, w.grad if w.is_leaf else None]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo asks, of plain tensors too
@pytest.mark.parametrize("name", COPIES)
def test_gradients_of_a_copy(name):
    def call(layer, x):
        w = COPIES[name](layer.weight)
        torch._dynamo.graph_break()
        return F.linear(x, w), w

    torch._dynamo.reset()
    layer, x = mx.quantize_(nn.Linear(32, 64, bias=False), MXFP8), torch.randn(8, 32)
    expected, got = step(call, layer, x), step(torch.compile(call, backend="aot_eager"), layer, x)
    assert sum(g is not None for g in expected) == 3  # the gradient arrives at the weight or at its copy
    assert all(a is b is None or (type(b) is torch.Tensor and a.equal(b)) for a, b in zip(expected, got, strict=True))


def test_a_gradient_of_the_class_of_the_weight():
    """Such as one that a hook of the user has made."""
    torch._dynamo.reset()
    layer, grad = mx.quantize_(nn.Linear(32, 64, bias=False), MXFP8), torch.randn(64, 32)
    w = torch.compile(lambda w: w.clone(), backend="aot_eager")(layer.weight)
    w.backward(type(layer.weight)(grad, MXFP8.linear_recipe()))
    assert layer.weight.grad.equal(grad)


@pytest.mark.parametrize("config", ["mxfp8", MXFP8], ids=["frozen", "trains"])
def test_a_deep_copy_in_compiled_code_keeps_the_attributes_of_the_user(config):
    w, x = mx.quantize_(nn.Linear(32, 64), config).weight.detach(), torch.randn(8, 32)
    w.mark = {"of": "the user"}

    def call(x):
        copied = copy.deepcopy(w)
        return F.linear(x, copied), copied

    torch._dynamo.reset()
    with torch.no_grad():
        y, copied = torch.compile(call, backend="eager")(x)
        assert y.equal(F.linear(x, w)) and copied.mark == w.mark and copied.mark is not w.mark
