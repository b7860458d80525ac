"""One step of delayed scaling in one launch; eager torch needs ten launches for these few numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core import custom_ops
from ...core.kernel import Spec
from ...core.tracing import is_traced
from ..runtime import triton_launch
from ..runtime.custom_op import check_argument, check_device
from ..runtime.triton_launch import device_code, launch, on

LONGEST = 4096
"""The longest history, in rows, that one Triton program can read."""


def advance(history: Tensor, record: Tensor, amax: Tensor, multiplier: float, newest: bool) -> tuple[Tensor, Tensor]:
    """(next history, next amax); ``record`` is set to zero in place.

    history (rows, 3) float32, the newest row first; record and amax (3,). The next amax is ``multiplier`` times the
    largest row of the next history (``newest``: its first row). It stays ``amax`` if that value is zero or not finite.
    """
    spec = Spec("advance history", (tuple(history.shape),), (history.dtype,), history.dtype, history.device)
    if triton_launch.missing(spec) is not None or history.shape[0] > LONGEST:
        moved = torch.cat([record.unsqueeze(0), history[:-1]])
        largest = moved[0] if newest else moved.amax(0)
        out = moved, torch.where((largest > 0) & largest.isfinite(), largest * multiplier, amax)
    else:
        out = (advance_op if is_traced(history) else _on_device)(history, record, amax, multiplier, newest)
    record.zero_()
    return out


def _on_device(history: Tensor, record: Tensor, amax: Tensor, multiplier: float, newest: bool) -> tuple[Tensor, Tensor]:
    rows, columns = history.shape
    out, following = torch.empty_like(history), torch.empty_like(amax)
    with on(history.device):
        launch(
            device_code("quantize.advance_history"),
            1,
            (history, record, amax, out, following, rows),
            (newest, multiplier, columns, max(16, 1 << (rows - 1).bit_length())),
            4,
        )
    return out, following


@custom_ops.define("mxtensor::advance_history")
def advance_op(history: Tensor, record: Tensor, amax: Tensor, multiplier: float, newest: bool) -> tuple[Tensor, Tensor]:
    """``advance`` that leaves ``record`` as it is: one op for torch.compile."""
    op, kind = "mxtensor::advance_history", (torch.float32,)
    check_argument(op, "history", history, kind, (None, None), history.device)
    for name, t in (("record", record), ("amax", amax)):
        check_argument(op, name, t, kind, (history.shape[1],), history.device)
    if history.shape[0] > LONGEST:
        raise ValueError(f"{op} reads histories of at most {LONGEST} rows, got {history.shape[0]}")
    check_device(op, history)
    history, record, amax = history.contiguous(), record.contiguous(), amax.contiguous()
    return _on_device(history, record, amax, multiplier, newest)


@custom_ops.fake_of(advance_op)
def _(history, record, amax, multiplier, newest):  # type: ignore[no-untyped-def]
    return torch.empty_like(history), torch.empty_like(amax)
