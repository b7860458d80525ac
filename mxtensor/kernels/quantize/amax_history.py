"""One step of delayed scaling: a handful of numbers, which eager torch would take ten launches for."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.kernel import Spec
from ...core.tracing import is_traced
from ..runtime import triton_launch
from ..runtime.triton_launch import device_code, launch, on

LONGEST = 4096
"""Rows of a history that one program holds."""


def advance(history: Tensor, record: Tensor, amax: Tensor, gemm_operand: float, newest: bool) -> tuple[Tensor, Tensor]:
    """The next history and the next amax; ``record`` is zeroed in place.

    history (rows, 3) float32, the newest row first; record and amax (3,). The next amax is ``gemm_operand`` times the largest
    of the history (``newest``: its first row), or the last one where that is zero or not finite.
    """
    spec = Spec("advance history", (tuple(history.shape),), (history.dtype,), history.dtype, history.device)
    if triton_launch.missing(spec) is not None or history.shape[0] > LONGEST:
        out = _advance(history, record, amax, gemm_operand, newest)
    else:
        out = (advance_op if is_traced(history) else _on_device)(history, record, amax, gemm_operand, newest)
    record.zero_()
    return out


def _on_device(
    history: Tensor, record: Tensor, amax: Tensor, gemm_operand: float, newest: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = history.shape
    out, following = torch.empty_like(history), torch.empty_like(amax)
    with on(history.device):
        launch(
            device_code("amax_history.advance_history"),
            1,
            (history, record, amax, out, following, rows),
            (newest, gemm_operand, columns, max(16, 1 << (rows - 1).bit_length())),
            4,
        )
    return out, following


@torch.library.custom_op("mxtensor::advance_history", mutates_args=())
def advance_op(
    history: Tensor, record: Tensor, amax: Tensor, gemm_operand: float, newest: bool
) -> tuple[Tensor, Tensor]:
    """``advance`` without the zeros in ``record``, one op for torch.compile."""
    return _on_device(history, record, amax, gemm_operand, newest)


@advance_op.register_fake
def _(history, record, amax, gemm_operand, newest):  # type: ignore[no-untyped-def]
    return torch.empty_like(history), torch.empty_like(amax)


def _advance(history: Tensor, record: Tensor, amax: Tensor, gemm_operand: float, newest: bool) -> tuple[Tensor, Tensor]:
    out = torch.cat([record.unsqueeze(0), history[:-1]])
    largest = out[0] if newest else out.amax(0)
    return out, torch.where((largest > 0) & largest.isfinite(), largest * gemm_operand, amax)
