"""The row-scaled form of stored weights, cached while memory for it is left: one byte a value beside the codes.

The cache is that of ``numerics/derived.py``: an entry ends with its weight, and when the weight is written to. Under a
CUDA graph or a trace nothing is cached, because a replay has to read the weight as it is then.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ...core import recording
from ...core.devices import cached
from ...numerics.derived import cached_value, known_value
from ...numerics.formats import Format
from ...numerics.operand import Operand
from .fp8_rows_operand import ROWS, rows_of_operand

ON_THE_FLY = 4096
"""Rows of activations from which the form is made for each product, unless it is cached: a tenth of its time."""
SHARE = 8
"""The cache takes at most this part of the memory of a device."""

Rows = tuple[Tensor, Tensor, Tensor]
_bytes: dict[torch.device, int] = {}
"""Bytes of the forms that are cached now."""


@cached
def _budget(device: torch.device) -> int:
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 1 << 34
    return int(memory) // SHARE


def _release(device: torch.device, size: int) -> None:
    _bytes[device] -= size


def _reserve(made: Rows) -> bool:
    """Count the memory of a form until it is freed; False if there is too little for it."""
    device, size = made[0].device, sum(t.nbytes for t in made)
    used = _bytes.get(device, 0) + size
    if used > _budget(device):
        return False
    _bytes[device] = used
    weakref.finalize(made[0], _release, device, size).atexit = False
    return True


def weight_rows(operand: Operand, matrix: Operand, rows: int) -> Rows:
    """``rows_of_operand`` of a weight for a product with so many rows; ``matrix`` is the operand as a matrix."""
    tensors = operand.data, operand.scale, matrix.data, matrix.scale
    return recording.call(_weight_rows, *tensors, operand.format, operand.shape, matrix.shape[0], rows)


def _weight_rows(
    data: Tensor, scale: Tensor, flat: Tensor, flat_scale: Tensor, format: Format, shape: tuple[int, ...], high: int,
    rows: int,
) -> Rows:  # fmt: skip
    """The form of a weight (data, scale) of ``shape``, whose matrix of ``high`` rows is (flat, flat_scale)."""

    def make(scale: Tensor) -> Rows:
        return rows_of_operand(Operand(flat, flat_scale, None, format, (high, shape[-1])), ROWS)

    if data.is_inference():
        return make(scale)
    layout = "row-scaled", data._version, data.data_ptr(), format.name, shape
    known = known_value(scale, layout)
    return known if known is not None else cached_value(scale, layout, make, _reserve if rows < ON_THE_FLY else _never)


def _never(made: Rows) -> bool:
    return False
