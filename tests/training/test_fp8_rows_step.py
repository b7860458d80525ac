"""A training step on products of row-scaled E4M3: all three products, and how often each operand is made."""

import pytest
import torch

import mxtensor as mx
from mxtensor.core.kernel import Kernel, forget_decisions
from mxtensor.kernels.gemm import fp8_rows, select
from mxtensor.recipe import MXFP8BlockScaling
from tests.helpers.stand_in import BF16, stand_in
from tests.kernels.quantize.conftest import one_rounding

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gpu_fp8_rows.py runs the kernels on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
__all__ = ["one_rounding", "stand_in"]


@pytest.mark.exhaustive
def test_the_three_products_take_it_and_make_each_operand_once(pretend, stand_in, one_rounding, monkeypatch):
    pretend((9, 0))
    made = []

    def counted(side, *rest):
        made.append(type(side).__name__)
        return row_operand(side, *rest)

    row_operand = fp8_rows.row_operand
    monkeypatch.setattr(fp8_rows, "row_operand", counted)
    layer = torch.nn.Linear(64, 32, dtype=BF16)
    x, grad = torch.randn(48, 64, dtype=BF16), torch.randn(48, 32, dtype=BF16)

    def step():
        one = x.clone().requires_grad_()
        layer.zero_grad()
        with mx.autocast(recipe=MXFP8BlockScaling()):
            y = layer(one)
        y.backward(grad)
        return y.detach(), one.grad, layer.weight.grad.clone()

    expected = step()
    assert not made
    ours = Kernel("fp8_rows", lambda spec, a, b, args: None, fp8_rows.run)
    forget_decisions()
    monkeypatch.setattr(select, "GEMM", (ours,))
    try:
        with mx.explain() as log:
            got = step()
    finally:
        forget_decisions()
    ran = {entry.spec.op: entry.kernel for entry in log.entries if entry.spec.op in ("fprop", "dgrad", "wgrad")}
    assert ran == dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8_rows")
    assert len(stand_in.calls) == 3 and len(made) == 6
    for one, other in zip(got, expected, strict=True):
        assert (one - other).norm() < 5e-3 * other.norm()
