"""Transforms of torch.func, batched gradients and forward-mode derivatives: errors whose way out works."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
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


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f)(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).square().sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X.sin(),))[1],
    "jacrev": lambda f: torch.func.jacrev(f)(X[0]),
    "batched gradients": batched_gradients,
    "forward mode": forward_mode,
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
