"""Nested tensors train quantized: all their rows are the matrix of one layer."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mxtensor as mx

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
SEQUENCES = [torch.randn(n, 64) for n in (3, 5, 1)]
LAYOUTS = [torch.jagged, torch.strided]
WAYS = ["quantize_", "autocast", "qat"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 48, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.norm(x + self.up(x))))


def model(way):
    torch.manual_seed(0)
    made = Block()
    if way == "autocast":
        return made
    if way == "quantize_":
        return mx.quantize_(made, mx.recipe.MXFP8BlockScaling())
    return mx.quantize_(made, "mxfp8", step="prepare")


def step(model, x, way):
    with mx.autocast() if way == "autocast" else contextlib.nullcontext():
        y = model(x)
    y = torch.cat(y.unbind()) if y.is_nested else y
    y.sin().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_that_of_all_rows(layout, way):
    leaves, rows = [s.clone().requires_grad_() for s in SEQUENCES], torch.cat(SEQUENCES).requires_grad_()
    got = step(model(way), torch.nested.as_nested_tensor(leaves, layout=layout), way)
    expected = step(model(way), rows, way)
    assert all(map(torch.equal, got, expected))
    assert torch.equal(torch.cat([leaf.grad for leaf in leaves]), rows.grad)
    assert not torch.equal(got[0], torch.cat([model("autocast")(s) for s in SEQUENCES]))  # high precision


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
@pytest.mark.parametrize("way", WAYS)
def test_compiled_is_eager(way):
    x = torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged)
    compiled = torch.compile(model(way), fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, step(compiled, x, way), step(model(way), torch.cat(SEQUENCES), way)))


@pytest.mark.parametrize("way", ["quantize_", "autocast"])
def test_products_are_logged(way):
    x = torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged)
    with mx.explain() as log:
        step(model(way), x, way)
    assert sorted(e.spec.op for e in log.entries if e.spec.op in ("fprop", "dgrad", "wgrad")) == [
        "dgrad", "fprop", "fprop", "wgrad", "wgrad"
    ]  # fmt: skip


def test_the_dimension_of_the_lengths_may_be_another_one():
    x = torch.nested.nested_tensor([torch.randn(n, 4, 64) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    layer = nn.Linear(64, 48)
    with mx.autocast():
        y, rows = layer(x), layer(x.values())
    assert y.shape[:3] == x.shape[:3] and torch.equal(y.values(), rows)


def test_rows_of_different_lengths_are_a_value_error():
    x = torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged).transpose(1, 2)
    with mx.autocast(), pytest.raises(ValueError, match="the last dimension of a nested tensor"):
        nn.Linear(9, 48)(x)


def test_a_stack_of_weights_names_the_way_out():
    x = torch.nested.nested_tensor(SEQUENCES, layout=torch.jagged)
    with mx.autocast(), pytest.raises(NotImplementedError, match="stack of weights"):
        x @ nn.Parameter(torch.randn(3, 64, 48))
