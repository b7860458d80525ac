"""Exported graphs take any batch: no rule compares a batch size with the size of a weight."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from tests.helpers.compare import relative_error

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.usefixtures("fresh_dynamo"),
]


class AfterConvolution(nn.Module):
    """The input of the linear layer is transposed: torch expands the weight over the batch."""

    def __init__(self):
        super().__init__()
        self.convolution, self.linear = nn.Conv1d(8, 48, 3, padding=1), nn.Linear(48, 32)

    def forward(self, x):
        return self.linear(self.convolution(x).transpose(1, 2))


class Einsum(nn.Module):
    """Heads of a projection, as einsum computes them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return torch.einsum("bds,hkd->bhsk", x, self.linear.weight.view(4, 16, 64))


@pytest.mark.parametrize(
    "kind, features, config",
    [(AfterConvolution, 8, "nvfp4-weight-only"), (AfterConvolution, 8, "mxfp8"), (Einsum, 64, "mxfp8")],
)
def test_an_exported_graph_takes_any_batch_and_length(kind, features, config):
    model = mx.quantize_(kind().eval(), config)
    dims = torch.export.Dim("batch", min=1, max=256), torch.export.Dim("length", min=2, max=128)
    with torch.no_grad():
        x = torch.randn(3, features, 7)
        program = torch.export.export(model, (x,), dynamic_shapes=({0: dims[0], 2: dims[1]},)).module()
        for batch, length in ((1, 7), (48, 5), (64, 16)):
            x = torch.randn(batch, features, length)
            assert relative_error(program(x), model(x)) < 1e-6
