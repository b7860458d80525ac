"""The row-scaled form of stored weights, cached while memory for it is left: one byte a value beside the codes.

The cache is that of ``numerics/derived.py``: an entry ends with its weight, and when the weight is written to. A CUDA
graph reads a form that was made before it was captured, and a write to the weight makes that form again in its memory,
so that a replay multiplies the weight as it is then. Where there is none yet, the graph makes it in each replay.

Not seen: a write to the codes themselves that bypasses the weight (``w.copy_`` and all else that torch does to the
weight is seen), until the weight is used outside the graph.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import recording
from ...core.devices import cached
from ...core.tracing import is_captured
from ...numerics.derived import cached_value, captured_value, known_value
from ...numerics.formats import Format
from ...numerics.operand import Operand
from ..quantize.to_row_scaled import ROWS, Rows, matrix_of, rows_of_operand

ON_THE_FLY = 4096
"""Rows of activations from which a compiled graph makes the form in each call, which is a tenth of the time of the
product: its weight may be cast in the graph."""
SHARE = 8
"""The cache takes at most this part of the memory of a device, and leaves as much free."""

_bytes: dict[torch.device, int] = {}
"""Bytes of the forms that are cached now."""


@cached
def _budget(device: torch.device) -> int:
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 34
    return int(memory) // SHARE


def _free(device: torch.device) -> float:
    """Bytes of the device that are not in use."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _release(device: torch.device, size: int) -> None:
    _bytes[device] -= size


@dataclass
class _Form:
    """A cached form, and the version of the codes that it was made from."""

    rows: Rows
    version: int

    def may_stay(self) -> bool:
        """Count the memory of the form until it is freed; False if there is too little for it."""
        device, size = self.rows[0].device, sum(t.nbytes for t in self.rows)
        used = _bytes.get(device, 0) + size
        if used > _budget(device) or _free(device) < _budget(device):
            return False
        _bytes[device] = used
        weakref.finalize(self.rows[0], _release, device, size).atexit = False
        return True

    def update(self, operand: Operand) -> None:
        """Make the form again in its memory."""
        rows_of_operand(operand, ROWS, into=self.rows)
        self.version = operand.data._version


def weight_rows(operand: Operand, matrix: Operand) -> Rows:
    """``rows_of_operand`` of a weight; ``matrix`` is the operand as a matrix."""
    tensors = operand.data, operand.scale, matrix.data, matrix.scale
    return recording.call(_weight_rows, *tensors, operand.format, operand.shape, matrix.shape[0])


def is_known(operand: Operand) -> bool:
    """Whether a graph that is captured now finds the form of this weight."""
    return not operand.scale.is_inference() and _captured(operand, False) is not None


def _layout(data: Tensor, format: Format, shape: tuple[int, ...]) -> tuple[object, ...]:
    return "row-scaled", data.data_ptr(), format.name, shape


def _captured(operand: Operand, stays: bool) -> _Form | None:
    """The cached form of a weight for a graph that is captured; ``stays``: the graph reads it in all its replays."""
    data, format, shape, scale = operand.data, operand.format, operand.shape, weakref.ref(operand.scale)

    def remake() -> None:
        now = scale()
        if form is not None and now is not None:
            form.update(matrix_of(Operand(data, now, None, format, shape)))

    form: _Form | None = captured_value(operand.scale, _layout(data, format, shape), remake if stays else None)
    return form


def _weight_rows(
    data: Tensor, scale: Tensor, flat: Tensor, flat_scale: Tensor, format: Format, shape: tuple[int, ...], high: int
) -> Rows:  # fmt: skip
    """The form of a weight (data, scale) of ``shape``, whose matrix of ``high`` rows is (flat, flat_scale)."""
    matrix = Operand(flat, flat_scale, None, format, (high, shape[-1]))
    if data.is_inference() or scale.is_inference():
        return rows_of_operand(matrix, ROWS)
    if is_captured(scale):
        found = _captured(Operand(data, scale, None, format, shape), True)
        return rows_of_operand(matrix, ROWS) if found is None or found.version != data._version else found.rows

    def make(_: Tensor) -> _Form:
        return _Form(rows_of_operand(matrix, ROWS), data._version)

    layout = _layout(data, format, shape)
    form: _Form | None = known_value(scale, layout)
    if form is None:
        form = cached_value(scale, layout, make, _Form.may_stay)
    elif form.version != data._version:
        form.update(matrix)
    return form.rows
