"""Optimizers, and all others that have the parameters of a model, from before ``quantize_`` for training."""

import copy
import gc

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.recipe import DelayedScaling, MXFP8BlockScaling

MXFP8 = MXFP8BlockScaling()
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "one by one": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))


def train(net, optimizer, steps=3):
    torch.manual_seed(1)
    for _ in range(steps):
        loss = (net(torch.randn(8, 64)) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss  # its graph stays alive


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def same(a, b):
    return all(map(torch.equal, a, b))


@pytest.mark.parametrize("config", [MXFP8, DelayedScaling()], ids=["mxfp8", "delayed"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_older_optimizer_trains_as_a_later_one(make, config):
    older, later = model(), model()
    optimizer = make(older.parameters())
    mx.quantize_(older, config)
    mx.quantize_(later, config)
    start = values(older)
    train(older, optimizer)
    train(later, make(later.parameters()))
    assert same(values(older), values(later)) and not any(map(torch.equal, start, values(older)))


def test_an_optimizer_goes_on_with_its_states():
    """The graph of the last loss is alive, and its backward pass is over."""
    net, twin = model(), model()
    optimizer, other = (torch.optim.AdamW(n.parameters(), lr=1e-2) for n in (net, twin))
    loss = train(net, optimizer)
    mx.quantize_(net, MXFP8)
    train(net, optimizer)
    train(twin, other)
    mx.quantize_(twin, MXFP8)
    later = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    later.load_state_dict(other.state_dict())
    train(twin, later)
    assert same(values(net), values(twin)) and loss.grad_fn is not None


def test_a_weight_that_is_shared_with_a_module_outside_stays_shared():
    net, head = model(), nn.Linear(64, 64)
    head.weight = net[0].weight
    mx.quantize_(net, MXFP8)
    assert head.weight is net[0].weight


@pytest.mark.parametrize("made", ["before", "after"])
def test_a_compiled_model_is_quantized(made):
    net, x = model(), torch.randn(8, 64)
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    if made == "before":
        compiled(x)
    mx.quantize_(net, MXFP8)
    assert compiled(x).equal(net(x)) and not compiled(x).equal(model()(x))


def saved_in_a_graph():
    net, x = model(), torch.randn(8, 64, requires_grad=True)
    return net, net(x)  # the graph has saved the weights


def test_a_saved_weight_becomes_a_new_parameter():
    net, y = saved_in_a_graph()
    old, expected = list(net.parameters()), torch.autograd.grad(y.sum(), list(net.parameters()), retain_graph=True)
    mx.quantize_(net, MXFP8)
    assert net[0].weight is not old[0]
    y.sum().backward()
    assert same([p.grad for p in old], expected)
    optimizer, start = torch.optim.AdamW(net.parameters(), lr=1e-2), values(net)
    train(net, optimizer)
    assert not any(map(torch.equal, start, values(net)))


def test_an_optimizer_of_a_saved_weight_is_an_error_and_the_model_unchanged():
    net, y = saved_in_a_graph()
    optimizer, before = torch.optim.AdamW(net.parameters(), lr=1e-2), list(net.parameters())
    state = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError, match=r"0.weight is a parameter of an optimizer, AdamW, and saved in the graph of a result"
    ):
        mx.quantize_(net, MXFP8)
    assert all(a is b and type(b) is nn.Parameter for a, b in zip(before, net.parameters(), strict=True))
    assert all(net.state_dict()[k].equal(v) for k, v in state.items())
    del y
    gc.collect()
    mx.quantize_(net, MXFP8)
    train(net, optimizer)
    assert all(a is b for a, b in zip(before, net.parameters(), strict=True)) and not net[0].weight.equal(
        state["0.weight"]
    )
