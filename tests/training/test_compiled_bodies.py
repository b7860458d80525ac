"""Bodies of checkpoints, branches, loops and regions in compiled code run under the ``autocast`` around their call."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor import recipe

MXFP8 = recipe.MXFP8BlockScaling()
FLOAT8 = recipe.Float8CurrentScaling()
ONE = torch.tensor(1)
region = torch.compiler.nested_compile_region(lambda net, x: net(x))
TRAINED = {
    "no body": lambda net, x: net(x),
    "reentrant": lambda net, x: checkpoint(net, x, use_reentrant=True),
    "not reentrant": lambda net, x: checkpoint(net, x, use_reentrant=False),
    "nested": lambda net, x: checkpoint(lambda x: checkpoint(net, x, use_reentrant=False), x, use_reentrant=False),
    "cond": lambda net, x: torch.cond(x.sum() > 0, lambda x: net(x), lambda x: -net(x), (x,)),
    "region": lambda net, x: region(net, x) + region(net, 2 * x),
}
"""Functions of torch that call functions, with the layers of ``net`` in them."""
CALLED = {
    "map": lambda net, x: torch_map(lambda row: net(row), x.unsqueeze(1)).squeeze(1),
    "scan": lambda net, x: scan(lambda carry, row: (carry + 1, net(row)), ONE.clone(), x.unsqueeze(1))[1].squeeze(1),
    "while_loop": lambda net, x: while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, net(x)), (ONE, net(x)))[1],
}
"""Those that torch cannot differentiate, or not in every version."""
HERE = {"enabled": (True, MXFP8), "disabled": (False, None), "nothing": None}
"""The block inside the compiled function."""


def model(wrapped):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    return mx.quantize_(net, MXFP8) if wrapped else net


def block(arguments):
    return nullcontext() if arguments is None else mx.autocast(arguments[0], arguments[1])


def step(function, net, around):
    """The result and all gradients of ``function(net, x)``, called inside the block ``around``."""
    torch.manual_seed(1)
    x, g = torch.randn(8, 64, requires_grad=True), torch.randn(8, 32)
    net.zero_grad()
    with block(around):
        y = function(net, x)
    y.backward(g)
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def inside(function, arguments):
    def call(net, x):
        with block(arguments):
            return function(net, x)

    return call


@pytest.mark.exhaustive(quick=10)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("outside", [None, (True, FLOAT8)], ids=["-", "in enabled"])
@pytest.mark.parametrize("here", HERE.values(), ids=HERE)
@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.pairs
def test_a_training_step_equals_that_of_eager_code(name, here, outside, wrapped, backend):
    if name == "region" and backend == "eager" and not wrapped and here is outside is None:
        pytest.skip("torch's own op refuses two calls without a fake mode")
    torch._dynamo.reset()
    net, call = model(wrapped), inside(TRAINED[name], here)
    expected = step(call, net, outside)
    assert same(expected, step(torch.compile(call, fullgraph=True, backend=backend), net, outside))


@pytest.mark.parametrize("outside", [None, (True, FLOAT8)], ids=["-", "in enabled"])
@pytest.mark.parametrize("here", ["enabled", "disabled"])
@pytest.mark.parametrize("name", ["map", "while_loop"])
def test_an_inference_call_equals_that_of_eager_code(name, here, outside):
    net, x = model(False).requires_grad_(False), torch.randn(8, 64)
    call = inside(CALLED[name], HERE[here])
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), block(outside):
        got = compiled(net, x)
    with torch.no_grad(), block(HERE[here]):
        expected = torch.stack([net(row) for row in x.unsqueeze(1)]).squeeze(1) if name in ("map", "scan") else net(x)
    assert got.equal(expected)


@pytest.mark.parametrize("here", ["enabled", "disabled"])
def test_autocast_around_a_scan_is_refused(here):
    net, x = model(False).requires_grad_(False), torch.randn(8, 64)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"cannot carry autocast into scan|NotImplementedError"):
        torch.compile(inside(CALLED["scan"], HERE[here]), backend="aot_eager", fullgraph=True)(net, x)


FORMATS = ["mxfp8", "mxfp8-weight-only", "nvfp4", "mxfp4-weight-only", "float8_e4m3_row"]


@pytest.mark.exhaustive(quick=5)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["cond", "region", "map", "scan", "while_loop"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # from inductor
@pytest.mark.pairs
def test_frozen_weights_in_bodies(name, format, backend):
    net = mx.quantize_(model(False), format).requires_grad_(False)
    function = (TRAINED | CALLED)[name]
    torch.manual_seed(1)
    x = torch.randn(8, 64)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = torch.cat([net(row) for row in x.unsqueeze(1)]) if name in ("map", "scan") else function(net, x)
        got = torch.compile(function, fullgraph=True, backend=backend)(net, x)
        assert got.equal(expected) or (backend == "inductor" and torch.allclose(got, expected, atol=1e-4, rtol=1e-4))


@pytest.mark.parametrize("config", ["mxfp8", MXFP8], ids=["frozen", "trains"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_that_is_passed_as_an_operand(config, compiled):
    layer = mx.quantize_(nn.Linear(64, 32), config)
    x = torch.randn(8, 64)

    def call(w, x):
        return torch.cond(x.sum() > 1e9, lambda w, x: -F.linear(x, w), lambda w, x: F.linear(x, w), (w, x))

    torch._dynamo.reset()
    y = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)(layer.weight, x)
    expected = F.linear(x, layer.weight)
    assert y.equal(expected)
    if config is MXFP8:
        g = torch.randn(8, 32)
        assert torch.autograd.grad(y, layer.weight, g)[0].equal(torch.autograd.grad(expected, layer.weight, g)[0])


def test_the_cases_differ():
    """Each block gives other values, so that none of the tests above can pass under the wrong one."""
    results = [step(TRAINED["no body"], model(p), b)[0] for p, b in ((0, None), (0, (True, FLOAT8)), (1, None))]
    assert not any(results[i].equal(results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_context_function_is_called_as_it_is():
    """``context_fn`` of a checkpoint chooses what is saved: it computes no layer."""
    policy = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    net = model(False)

    def call(net, x):
        with mx.autocast(recipe=MXFP8):
            return checkpoint(net, x, use_reentrant=False, context_fn=policy)

    expected = step(TRAINED["no body"], net, (True, MXFP8))
    assert same(expected, step(torch.compile(call, fullgraph=True, backend="aot_eager"), net, None))
