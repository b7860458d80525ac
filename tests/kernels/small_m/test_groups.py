"""Small-M products of rows in groups with a stack of weights: the CUDA sources on the CPU."""

from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import encode
from tests.helpers.small_m import PIPELINED, TOLERANCE, WHOLE, error, on_the_cpu, product, values

pytestmark = on_the_cpu


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "mxfp8[32x32]", "float8_row"])
def test_each_group_of_rows_is_multiplied_by_its_weight(format):
    w, ends = mx.quantize(torch.randn(3, 40, 96), format).rowwise, torch.tensor([2, 2, 20], dtype=torch.int32)
    if w.has_stack_scales:  # ``grouped_gemm`` multiplies the result by those of the matrices
        w = replace(w, global_scale=w.global_scale.amax())
    x = torch.randn(23, 96).bfloat16()
    y = product(x, w, PIPELINED, ends=ends)
    reference = torch.zeros(23, 40, dtype=torch.float64)
    reference[:2], reference[2:20] = x[:2].double() @ values(w)[0].t(), x[2:20].double() @ values(w)[2].t()
    assert error(y, reference) < TOLERANCE and (y[20:] == 0).all()


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("config", [PIPELINED, WHOLE])
@pytest.mark.parametrize("groups, rows, tail", [(40, 9, 2), (300, 30, 1), (129, 1, 0), (33, 40, 3), (5, 3, 3)])
def test_groups_without_rows_take_no_block(groups, rows, tail, config, monkeypatch):
    """There are as many blocks as rows, if these are fewer than groups. The memory of results is poisoned."""
    chosen = torch.linspace(groups - 1, 0, rows - tail).round().long().flip(0)  # in all of them, the last one too
    ends = torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32)
    w, x = mx.quantize(torch.randn(groups, 24, 64), "mxfp8").rowwise, torch.randn(rows, 64).bfloat16()
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *size, **options: empty(t, *size, **options).fill_(7))
    y = product(x, w, config, ends=ends)
    expected = torch.zeros(rows, 24, dtype=torch.float64)
    if rows > tail:
        expected[: rows - tail] = torch.einsum("mk,mnk->mn", x[: rows - tail].double(), values(w)[chosen])
    assert error(y, expected) < TOLERANCE if rows > tail else not y.any()
    assert not y[rows - tail :].any()


@pytest.mark.parametrize("ends", [[2, 99], [-7, 23], [30, 2], [2**31 - 1, -(2**31)]])
def test_ends_of_groups_never_reach_outside(ends, monkeypatch):
    """The ends are data that the host does not read: no row after the last one of x is read or written."""
    w, x = mx.quantize(torch.randn(2, 40, 96), "mxfp8").rowwise, torch.randn(123, 96).bfloat16()
    whole, new_empty = torch.full((323, 40), 7.0), torch.Tensor.new_empty

    def inside(t, *size, **options):
        return whole[100:123] if size == (23, 40) else new_empty(t, *size, **options)

    monkeypatch.setattr(torch.Tensor, "new_empty", inside)
    y = product(x[:23], w, PIPELINED, ends=torch.tensor(ends, dtype=torch.int32))
    assert y.data_ptr() == whole[100:].data_ptr() and (whole[:100] == 7).all() and (whole[123:] == 7).all()


def test_groups_are_cast_to_nvfp4_by_the_largest_of_all_rows():
    w, ends = mx.quantize(torch.randn(4, 40, 256), "mxfp8").rowwise, torch.tensor([1, 2, 2, 4], dtype=torch.int32)
    x = (torch.randn(4, 256) * torch.tensor([[0.1], [1.0], [30.0], [0.3]])).bfloat16()
    cast, group = Cast.of("nvfp4"), torch.tensor([0, 1, 3, 3])
    exact = torch.einsum("mk,mnk->mn", values(encode(x, cast)), values(w)[group])
    for y, expected in zip(product(x, w, None, cast, ends=ends), exact, strict=True):
        assert error(y, expected) < TOLERANCE
    with pytest.raises(RuntimeError, match="cannot run 40x256 in mxfp8_e4m3, 4 groups"):
        product(x, w, WHOLE, cast, ends=ends)
