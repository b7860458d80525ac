"""Layers in compiled graphs as two ops: the bits of eager code, what stays a graph of casts, and the logs."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import mxtensor as mx
from mxtensor.recipe import MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from mxtensor.training import graph_ops

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96, bias=bias), nn.Linear(96, 32, bias=bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(graph_ops, "DEVICES", {"cpu"})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(net, **options):
    """The net compiled without Inductor, and its graphs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return torch.compile(net, backend=aot_autograd(fw_compiler=keep), fullgraph=True, **options), graphs


def ops_of(graphs):
    """Names of our ops in the forward and the backward graphs."""
    return [n.target.__name__ for g in graphs for n in g.graph.nodes if "mxtensor" in str(n.target)]


def step(model, net, x, grad):
    x = x.detach().clone().requires_grad_(x.requires_grad)
    for p in net.parameters():
        p.grad = None
    y = model(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_one_op_each_way_with_the_bits_of_eager_code(bias, needs_dx):
    net = mx.quantize_(Net(bias).bfloat16(), MXFP8BlockScaling())
    model, graphs = compiled(net)
    for _ in range(2):
        x, grad = torch.randn(16, 64).bfloat16().requires_grad_(needs_dx), torch.randn(16, 32).bfloat16()
        assert same(step(model, net, x, grad), step(net, net, x, grad))
    assert ops_of(graphs) == ["linear_forward.default"] * 2 + ["linear_backward.default"] * 2


def test_under_autocast_and_with_frozen_weights():
    net = mx.quantize_(Net(), MXFP8BlockScaling())
    net.up.weight.requires_grad_(False)
    model, graphs = compiled(net)
    x, grad = torch.randn(4, 16, 64, requires_grad=True), torch.randn(4, 16, 32).bfloat16()
    with torch.autocast("cpu", BF16):
        ours = step(model, net, x, grad)
        assert same(ours, step(net, net, x, grad))
    assert ours[0].dtype is BF16 and ours[2] is None and ours[4].dtype is torch.float32
    assert set(ops_of(graphs)) == {"linear_forward.default", "linear_backward.default"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), MXFP4BlockScaling()], ids=lambda r: type(r).__name__)
def test_recipes_with_random_numbers_stay_casts_and_products(recipe):
    net = mx.quantize_(Net().bfloat16(), recipe)
    model, graphs = compiled(net)
    step(model, net, torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(32, 32).bfloat16())
    assert not any("linear_" in name for name in ops_of(graphs))


@pytest.mark.exhaustive
def test_a_forced_kernel_stays_casts_and_products():
    net = mx.quantize_(Net().bfloat16(), MXFP8BlockScaling())
    x, grad = torch.randn(16, 64).bfloat16().requires_grad_(), torch.randn(16, 32).bfloat16()
    model, graphs = compiled(net)
    with mx.kernels("emulated"):
        step(model, net, x, grad)
    assert not any("linear_" in name for name in ops_of(graphs))


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_one_graph_serves_every_number_of_rows_with_the_bits_of_eager_code(dtype, needs_dx, dynamic):
    net = mx.quantize_(Net().to(dtype), MXFP8BlockScaling())
    model, graphs = compiled(net, dynamic=dynamic)
    with torch.autocast("cpu", BF16, enabled=dtype is not BF16):
        for rows in (16, 48, 7, 300, 2, 33):
            x, grad = torch.randn(rows, 64, dtype=dtype).requires_grad_(needs_dx), torch.randn(rows, 32).bfloat16()
            assert same(step(model, net, x, grad), step(net, net, x, grad)), rows
    assert len(graphs) == (2 if dynamic else 4)  # forward and backward, and those of the first size
    assert ops_of(graphs)[-4:] == ["linear_of_rows.default"] * 2 + ["linear_of_rows_backward.default"] * 2


def test_a_graph_for_any_rows_has_leading_dimensions_and_frozen_weights():
    net = mx.quantize_(Net(), MXFP8BlockScaling())
    net.up.weight.requires_grad_(False)
    model, graphs = compiled(net, dynamic=True)
    with torch.autocast("cpu", BF16), mx.explain() as log:
        for batch, tokens in ((4, 16), (2, 5), (9, 3)):
            x, grad = torch.randn(batch, tokens, 64, requires_grad=True), torch.randn(batch, tokens, 32).bfloat16()
            assert same(step(model, net, x, grad), step(net, net, x, grad))
    assert len(graphs) == 2 and "chosen when it runs" in log.table()


def test_the_log_of_a_trace_has_the_decisions_of_eager_code():
    net = mx.quantize_(Net().bfloat16(), MXFP8BlockScaling())
    x, grad = torch.randn(16, 64).bfloat16().requires_grad_(), torch.randn(16, 32).bfloat16()
    model, _ = compiled(net)
    with mx.explain() as traced:
        step(model, net, x, grad)
    with mx.explain() as later:
        step(model, net, x, grad)
    with mx.explain() as eager:
        step(net, net, x, grad)

    def ops(log):
        return {entry.spec.op for entry in log.entries}

    assert {"fprop", "dgrad", "wgrad"} <= ops(traced) and ops(traced) == ops(eager)
    assert not later.entries
