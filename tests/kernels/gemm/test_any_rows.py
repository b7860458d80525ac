"""A product in a graph for any number of rows is one op, which chooses its kernel when it runs."""

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import mxtensor as mx
from mxtensor.kernels.gemm import select
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics.operand import Operand
from tests.helpers.stand_in import BLACKWELL, HOPPER

FORMATS = ["mxfp8", "mxfp8-weight-only", "mxfp4", "mxfp6", "mxint8", "nvfp4", "nvfp4-weight-only", "float8_row"]
SIZES = (16, 48, 7, 300, 2, 129)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 32, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def compiled(net, **options):
    """The net compiled without Inductor, and its graphs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return torch.compile(net, backend=aot_autograd(fw_compiler=keep), fullgraph=True, **options), graphs


def products_of(graph):
    return [n for n in graph.graph.nodes if "mxtensor" in str(n.target)]


@pytest.mark.exhaustive(quick=3)
@pytest.mark.parametrize("dynamic", [True, None], ids=["dynamic", "automatic"])
@pytest.mark.parametrize("format", FORMATS)
def test_one_graph_serves_every_number_of_rows_with_the_bits_of_eager_code(monkeypatch, format, dynamic):
    monkeypatch.setattr(select, "CHOSEN_LATER", {"cpu"})
    net = mx.quantize_(Net().bfloat16(), format)
    model, graphs = compiled(net, dynamic=dynamic)
    with torch.no_grad(), mx.explain() as log:
        for rows in SIZES:
            x = torch.randn(rows, 64).bfloat16()
            assert torch.equal(model(x), net(x)), rows
    assert len(graphs) == (1 if dynamic else 2)
    names = [n.target.__name__ for n in products_of(graphs[-1])]
    assert names == ["product.default"] * 2 and "chosen when it runs" in log.table()


@pytest.mark.parametrize("cast", [None, "mxfp8", "mxfp4", "nvfp4", "float8_row"])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_row"])
@pytest.mark.parametrize("capability", [(8, 0), HOPPER, BLACKWELL], ids=["sm80", "sm90", "sm100"])
def test_on_a_gpu_no_decision_reads_the_number_of_rows(device, capability, format, cast):
    """A refusal or a cost that compared or formatted an unbacked symbol would raise."""
    device(capability)
    row, shapes = mx.get_format(format), ShapeEnv()
    with FakeTensorMode(shape_env=shapes) as mode:
        weight = Operand.empty(row, (4096, 4096), "cuda")
        rows = shapes.create_unbacked_symint()
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")
        y = select.gemm("linear", x if cast is None else Unquantized(x, mx.Cast.of(cast)), weight, GemmArgs(x.dtype))
    assert y.shape == (rows, 4096) and y.fake_mode is mode and y.dtype is x.dtype
