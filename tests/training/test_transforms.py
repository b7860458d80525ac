"""Transforms of torch.func, batched gradients, forward-mode and second derivatives: errors whose way out works."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import functional
from torch.autograd.forward_ad import dual_level, make_dual

import mxtensor as mx

X, G = torch.randn(4, 64), torch.randn(3, 4, 48)


def layer(way):
    torch.manual_seed(0)
    made = nn.Linear(64, 48)
    return mx.quantize_(made, mx.recipe.MXFP8BlockScaling()) if way == "quantize_" else made


def batched_gradients(f):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(f(x), x, G, is_grads_batched=True)[0]


def forward_mode(f):
    with dual_level():
        return torch.autograd.forward_ad.unpack_dual(f(make_dual(X, X.sin()))).tangent


def gradient_penalty(f):
    """The gradient that reaches the layer has no graph, so that torch's once_differentiable would raise nothing."""
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(f(x), x, torch.ones(4, 48), create_graph=True)
    return torch.autograd.grad(dx.square().sum(), f.weight)[0]


def of_weight_and_input(f):
    """The gradient of the weight depends on an input that has ended."""
    x = X.clone().requires_grad_()
    (dw,) = torch.autograd.grad(f(x.sin()).sum(), f.weight, create_graph=True)
    return torch.autograd.grad(dw.square().sum(), x)[0]


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X.sin(),))[1],
    "jacrev": lambda f: torch.func.jacrev(f)(X[0]),
    "batched gradients": batched_gradients,
    "forward mode": forward_mode,
    "hessian": lambda f: functional.hessian(lambda x: f(x).square().sum(), X),
    "hvp": lambda f: functional.hvp(lambda x: f(x).sin().sum(), X, X.cos())[1],
    "vhp": lambda f: functional.vhp(lambda x: f(x).square().sum(), X, X.cos())[1],
    "jvp, backward twice": lambda f: functional.jvp(f, X, X.sin())[1],
    "gradient penalty": gradient_penalty,
    "penalty of wgrad": of_weight_and_input,
}


@pytest.mark.parametrize("way", ["quantize_", "autocast"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_say_how_to_leave_the_quantized_layer_out(name, way):
    transform, made = TRANSFORMS[name], layer(way)
    with nullcontext() if way == "quantize_" else mx.autocast():
        with pytest.raises(NotImplementedError, match=r"linear: .*mx\.autocast\(enabled=False\)"):
            transform(made)
        with mx.autocast(enabled=False):
            torch.testing.assert_close(transform(made), transform(layer("plain")))


@pytest.mark.parametrize("way", ["quantize_", "autocast"])
def test_first_derivatives_with_a_graph_are_those_without(way):
    results = []
    for create_graph in (False, True):
        made, x = layer(way), X.clone().requires_grad_()
        with nullcontext() if way == "quantize_" else mx.autocast():
            loss = made(x).square().sum()
        results.append(torch.autograd.grad(loss, (x, made.weight, made.bias), create_graph=create_graph))
        with torch.no_grad():
            results[-1][0].mul_(2)  # as clipping does
    assert all(map(torch.equal, *results))
