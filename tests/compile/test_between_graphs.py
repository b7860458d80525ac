"""Eager code between two compiled graphs: Dynamo leaves the rules of quantized tensors alone there.

It would compile them as functions of the user, and see neither ``strict()`` nor ``explain()`` in them.
"""

import pytest
import torch
from torch import nn

import mxtensor as mx

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo")
ATTRIBUTES = ["mT", "T", "data", "real", "is_leaf", "is_cpu", "is_meta", "itemsize", "dtype", "shape"]


def frozen():
    return mx.quantize(torch.randn(64, 64), "mxfp8")


def trained():
    return mx.quantize_(nn.Linear(64, 64), mx.recipe.MXFP8BlockScaling()).weight


def compiled(function, *args):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager")(*args)


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("made", [frozen, trained])
def test_an_attribute_is_read_beside_a_graph_break(made, name):
    def read(w, x):
        value = getattr(w, name)
        torch._dynamo.graph_break()
        return (x @ value, None) if isinstance(value, torch.Tensor) else (x + 1, value)

    w, x = made(), torch.randn(3, 64)
    with torch.no_grad():
        (found, value), (expected, same) = compiled(read, w, x), read(w, x)
    assert torch.equal(found, expected) and value == same


def test_strict_refuses_what_eager_code_dequantizes():
    w = frozen()
    with mx.strict(), pytest.raises(NotImplementedError, match=r"cumsum.* would dequantize"):
        compiled(lambda w: w.cumsum(-1), w)
    with pytest.raises(NotImplementedError, match="its bytes are codes and scales"):
        compiled(lambda w: w.mT.view(torch.int32), w)


def test_explain_names_what_eager_code_dequantizes():
    def run(w):
        torch._dynamo.graph_break()
        return w.cumsum(-1)

    w = frozen()
    with mx.explain() as log:
        assert torch.equal(compiled(run, w), w.dequantize().cumsum(-1))
    assert ("aten.cumsum.default", "dequantized") in {(e.spec.op, e.kernel) for e in log.entries}


def test_a_module_that_dynamo_leaves_to_eager_code_has_no_graph():
    """Dynamo skips the frames of torch's own modules: without a class of the user, nothing is compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module, x = mx.quantize_(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)), "mxfp8"), torch.randn(3, 64)
    with torch.no_grad():
        expected = module(x)
        module.compile(backend="aot_eager")
        assert torch.equal(module(x), expected)
    assert not torch._dynamo.utils.counters["frames"]
