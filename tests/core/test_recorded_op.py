"""Custom ops whose repeated calls run a program: the bits of the first call, for other data, lists and errors."""

import pytest
import torch

import mxtensor as mx
from mxtensor.core.repeated import KINDS, recorded
from mxtensor.kernels.operands import RowOperand
from mxtensor.kernels.quantize.to_row_scaled_both import rows_of_both
from mxtensor.kernels.quantize.triton_ops import cast_arguments
from tests.helpers.stand_in import BF16

CAST = ("rceil", "nearest", None, 0.0)


pytestmark = pytest.mark.usefixtures("recorded_on_a_cpu")


def programs():
    return [kind.program for kind in KINDS.values()]


def test_later_calls_compute_from_their_own_arguments():
    ran = []

    @recorded
    def work(x, others, times):
        ran.append(times)
        return [x * times, torch.cat(others)]

    for step in range(4):
        x, others = torch.randn(3, 2), [torch.randn(2), torch.randn(1)]
        scaled, joined = work(x, others, 2.0)
        assert torch.equal(scaled, x * 2.0) and torch.equal(joined, torch.cat(others))
        assert len(ran) == min(step + 1, 2)
    for other in (3.0, 5.0):  # another value is another kind
        assert torch.equal(work(x, others, other)[0], x * other)
    assert ran == [2.0, 2.0, 3.0, 5.0] and [p is not None for p in programs()] == [True, False, False]


def test_a_kind_that_comes_a_few_times_only_is_not_recorded():
    @recorded(after=4)
    def work(x):
        return x + 1

    for step in range(6):
        x = torch.randn(3)
        assert torch.equal(work(x), x + 1)
        assert [p is not None for p in programs()] == [step >= 3]


def test_one_tensor_stays_one_tensor_and_other_shapes_are_other_kinds():
    @recorded
    def work(x):
        return x + 1

    for shape in ((2, 3), (2, 3), (2, 3), (4,)):
        x = torch.randn(shape)
        assert torch.equal(work(x), x + 1)
    assert torch.equal(work(x=x), x + 1)
    assert [p is not None for p in programs()] == [True, False]


def test_a_call_that_cannot_be_recorded_runs_every_time():
    ran = []

    @recorded
    def work(x):
        ran.append(x)
        return x * float(x.sum())

    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(work(x), x * float(x.sum()))
    assert len(ran) == 4 and programs() == [None]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
def test_the_casts_of_a_training_graph_are_programs():
    pytest.importorskip("triton")
    op = torch.ops.mxtensor.cast_both_to_rows
    for cast in (mx.Cast.of("mxfp8"), mx.Cast.of("mxfp4", rounding="stochastic", seed=7), mx.Cast.of("mxfp8[32x32]")):
        for _ in range(3):
            x = torch.randn(32, 64).to(BF16)
            made = op(x, *cast_arguments(cast), True)
            for memory, expected in zip(made, rows_of_both(x, cast), strict=True):
                one = RowOperand.inside(memory, expected.format, expected.shape)
                assert all(torch.equal(a, b) for a, b in zip(one[:3], expected[:3], strict=True))
        assert all(p is not None for p in programs()) and programs()
    with pytest.raises(ValueError, match="casts blocks of 32 values or more"):
        op(x, "mxfp4[1x16]", *CAST, True)
