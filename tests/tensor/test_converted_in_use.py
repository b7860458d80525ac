"""Modules that are converted while something else refers to their weights: the graph of a result, a view."""

import pytest
import torch
from torch import nn

import mxtensor as mx

WAYS = {
    "to": lambda m: m.to(torch.bfloat16),
    "half": lambda m: m.half(),
    "cpu": lambda m: m.cpu(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
}
MXFP8 = mx.recipe.MXFP8BlockScaling()


def model(config):
    torch.manual_seed(0)
    return mx.quantize_(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)), config)


def result(net):
    torch.manual_seed(1)
    x = torch.randn(8, 64, requires_grad=True)
    return x, net(x).square().sum()


@pytest.mark.parametrize("config", ["mxfp8", "nvfp4-weight-only"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_frozen_weights_are_converted_and_the_graph_keeps_the_old_ones(way, config):
    net = model(config)
    x, loss = result(model(config))
    (expected,) = torch.autograd.grad(loss, [x])
    x, loss = result(net)
    weight, biases = net[0].weight, [net[0].bias, net[2].bias]
    way(net)
    assert net[0].weight is weight
    for bias in biases:
        bias.requires_grad_(False)  # torch's own, whose gradient has the old dtype
    (got,) = torch.autograd.grad(loss, [x])
    assert got.equal(expected)


@pytest.mark.parametrize("way", ["to", "half"])
def test_the_converted_model_computes_as_one_that_nothing_referred_to(way):
    used, other = model("mxfp8"), model("mxfp8")
    alive = result(used)[1], used[0].weight[32:]
    for net in (used, other):
        WAYS[way](net)
    x = torch.randn(8, 64, dtype=other[0].weight.dtype)
    with torch.no_grad():
        assert used(x).equal(other(x)) and used[0].weight.dtype == x.dtype
    assert alive[1].dtype == torch.float32 and alive[1].dequantize().equal(model("mxfp8")[0].weight[32:].dequantize())


@pytest.mark.parametrize("way", ["to", "half", "cpu"])
def test_a_weight_that_trains_names_the_way_out(way):
    net = model(MXFP8)
    x, loss = result(net)
    with pytest.raises(RuntimeError, match="Couldn't swap Linear") as raised:
        WAYS[way](net)
    assert "run its backward pass or delete the result" in str(raised.value.__cause__)
    loss.backward()
    WAYS[way](net)
    twin = model(MXFP8)
    result(twin)[1].backward()
    dtype = net[0].weight.dtype
    assert net[0].weight.grad.equal(twin[0].weight.grad.to(dtype)) and isinstance(x.grad, torch.Tensor)
