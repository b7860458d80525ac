"""Products of a weight that trains that no rule reads as a linear layer: logged exactly once, refused in strict()."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxtensor as mx
from mxtensor.core.compat import disable_subclass_torch_function, no_torch_function
from mxtensor.training.training_weight import TrainingWeight

RECIPE = mx.recipe.MXFP8BlockScaling()


class Off(torch.Tensor):
    """A class whose torch functions turn those of all classes off."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with disable_subclass_torch_function():
            return func(*args, **(kwargs or {}))


class Without(torch.Tensor):
    """A class without torch functions of its own: those of the weight are called."""

    __torch_function__ = no_torch_function


class Wrapper(torch.Tensor):
    """A class that does the same and unwraps aten ops."""

    @staticmethod
    def __new__(cls, inner):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, requires_grad=False)
        self.inner = inner
        return self

    __torch_function__ = Off.__torch_function__

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(t.inner if isinstance(t, Wrapper) else t for t in args), **(kwargs or {}))


CALLS = {
    "linear": ((8, 64), lambda x, w, b: F.linear(x, w, b)),
    "linear without a bias": ((8, 64), lambda x, w, b: F.linear(x, w)),
    "linear of one vector": ((64,), lambda x, w, b: F.linear(x, w)),
    "mm": ((8, 64), lambda x, w, b: torch.mm(x, w.t())),
    "matmul": ((8, 64), lambda x, w, b: x @ w.t()),
    "matmul of a batch": ((2, 4, 64), lambda x, w, b: x @ w.t()),
    "addmm": ((8, 64), lambda x, w, b: torch.addmm(b, x, w.t())),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def layer():
    return mx.quantize_(nn.Linear(64, 32), RECIPE)


def high_precision(log):
    return [entry for entry in log.entries if entry.kernel == "high precision"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["Off", "Wrapper"])
def test_a_class_that_turns_torch_functions_off(kind, call, mode):
    shape, product = CALLS[call]
    wrapped, plain = layer(), torch.randn(shape)
    x = plain.as_subclass(Off) if kind == "Off" else Wrapper(plain)
    with MODES[mode](), mx.explain() as log:
        y = product(x, wrapped.weight, wrapped.bias)
    (entry,) = log.entries
    assert entry.kernel == "high precision" and "turns torch functions off" in entry.refusals["quantized"]
    assert sorted(entry.spec.shapes[1]) == [32, 64] and entry.spec.op.startswith("aten.")
    dense = wrapped.weight.high_precision, wrapped.bias.detach()
    assert torch.equal(torch.as_tensor(y).as_subclass(torch.Tensor).detach(), product(plain, *dense))
    with (
        MODES[mode](),
        mx.strict(),
        pytest.raises(NotImplementedError, match=r"multiply by a weight \((32, 64|64, 32)\)"),
    ):
        product(x, wrapped.weight, wrapped.bias)


def test_the_backward_pass_and_a_recomputation_are_not_logged_again():
    wrapped = layer()
    x = torch.randn(8, 64).as_subclass(Off).requires_grad_()
    with mx.explain() as log:
        checkpoint(lambda x: F.linear(x, wrapped.weight, wrapped.bias), x, use_reentrant=False).sum().backward()
    assert len(log.entries) == 1 and wrapped.weight.grad is not None


def test_a_class_without_torch_functions_runs_quantized():
    wrapped, x = layer(), torch.randn(8, 64)
    with mx.strict(), mx.explain() as log:
        y = F.linear(x.as_subclass(Without), wrapped.weight, wrapped.bias)
    assert torch.equal(y, wrapped(x)) and log.entries and not high_precision(log)


OTHERS = {
    "inner": lambda x, w: torch.inner(x, w),
    "einsum of a matrix": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "addmm with alpha": lambda x, w: torch.addmm(torch.zeros(32), x, w.t(), alpha=2),
    "aten.mm": lambda x, w: torch.ops.aten.mm.default(x, w.t()),
    "mm with out": lambda x, w: torch.mm(x, w.t(), out=torch.empty(8, 32)),
    "mv": lambda x, w: torch.mv(w, x[0]),
}


@pytest.mark.parametrize("call", OTHERS)
def test_functions_that_are_not_a_linear_layer(call):
    wrapped, x = layer(), torch.randn(8, 64)
    with torch.no_grad(), mx.explain() as log:
        OTHERS[call](x, wrapped.weight)
    assert len(log.entries) == len(high_precision(log)) == 1
    with torch.no_grad(), mx.strict(), pytest.raises(NotImplementedError, match=r"use F\.linear or x @ weight\.t"):
        OTHERS[call](x, wrapped.weight)


def test_what_the_user_wants_in_high_precision_is_not_logged():
    wrapped, x = layer(), torch.randn(8, 64)
    for given in (x, x.as_subclass(Off)):
        with mx.strict(), mx.explain() as log, mx.autocast(enabled=False):
            y = F.linear(given, wrapped.weight, wrapped.bias)
        assert log.entries == []
        assert torch.equal(y.as_subclass(torch.Tensor), F.linear(x, wrapped.weight.high_precision, wrapped.bias))


def test_a_product_of_two_weights_is_not_a_layer():
    a, b = (mx.quantize_(nn.Linear(64, 64, bias=False), RECIPE).weight for _ in range(2))
    assert isinstance(a, TrainingWeight)
    with mx.strict(), mx.explain() as log:
        a @ b
    assert log.entries == []
