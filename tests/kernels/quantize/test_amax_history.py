"""One step of delayed scaling by the kernel equals the step in plain torch."""

import pytest
import torch

from mxtensor.kernels.quantize.amax_history import advance
from mxtensor.kernels.runtime.triton_launch import device_code, launch

INF, NAN = float("inf"), float("nan")


def by_kernel(history, record, amax, multiplier, newest):
    """``advance`` as it runs on a CUDA device."""
    out, following = torch.full_like(history, 7.0), torch.full_like(amax, 7.0)
    block = max(16, 1 << (len(history) - 1).bit_length())
    arguments = (history, record, amax, out, following, len(history))
    launch(device_code("quantize.advance_history"), 1, arguments, (newest, multiplier, 3, block), 4)
    return out, following


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 17, 1024])
@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("multiplier", [1.0, 8.0])
def test_the_kernel_is_the_definition(rows, newest, multiplier):
    history = torch.rand(rows, 3) * 100
    amax = torch.rand(3)
    for record in (torch.rand(3), torch.tensor([0.0, INF, NAN]), torch.tensor([1e-45, 3.4e37, 200.0])):
        expected = advance(history, record.clone(), amax, multiplier, newest)
        actual = by_kernel(history, record, amax, multiplier, newest)
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a.view(torch.int32), e.view(torch.int32))
        history, amax = expected


def test_by_hand():
    history, record, amax = torch.tensor([[3.0, 1, 0], [2, 5, 0]]), torch.tensor([1.0, 2, 0]), torch.tensor([9.0, 9, 9])
    out, following = advance(history, record, amax, 2.0, newest=False)
    assert out.tolist() == [[1, 2, 0], [3, 1, 0]] and following.tolist() == [6, 4, 9] and not record.any()
    assert advance(history, torch.tensor([1.0, NAN, 0]), amax, 1.0, newest=True)[1].tolist() == [1, 9, 9]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 1024, 5000])
def test_on_a_device(rows):
    history, record, amax = torch.rand(rows, 3), torch.tensor([0.5, INF, NAN]), torch.rand(3)
    expected = advance(history, record.clone(), amax, 2.0, False)
    traced = torch.compile(advance, fullgraph=True, backend="aot_eager")
    for run in (advance, traced):
        there = record.cuda()
        actual = run(history.cuda(), there, amax.cuda(), 2.0, False)
        assert not there.any()
        assert all(torch.equal(a.cpu().nan_to_num(-1), e.nan_to_num(-1)) for a, e in zip(actual, expected, strict=True))
