"""TransformerEngine's names for the parts of an MXTensor, given to the class when this file is imported.

Codes and byte scales are uint8, float32 scales float32, in their logical, unpadded shapes; what is not held is None.
Columnwise parts are stored transposed: of mxfp8 values (256, 1024) the codes are (1024, 256) and the scales (1024, 8).
Square blocks and one scale a tensor hold one copy, whose columnwise parts are the same codes and scales turned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.operand import Operand
from ..tensor.mxtensor import MXTensor


def _held(w: MXTensor, side: str) -> Operand | None:
    if side == "rowwise":
        return w.rowwise
    return w._rotated.operand if w._rotated is not None else w.columnwise


def _codes(side: str) -> property:
    def codes(w: MXTensor) -> Tensor | None:
        operand = _held(w, side)
        return None if operand is None else operand.data.view(torch.uint8)

    return property(codes, doc=f"The {side} codes as uint8; None if they are not held.")


def _scale_inv(side: str) -> property:
    def scale_inv(w: MXTensor) -> Tensor | None:
        operand = _held(w, side)
        return None if operand is None else operand.scale

    return property(scale_inv, doc=f"The {side} scales, which codes are multiplied by; None if they are not held.")


def _transpose(self: MXTensor, dim0: int = -2, dim1: int = -1) -> Tensor:
    """``torch.Tensor.transpose``; without arguments the last two dimensions, whose copies trade places."""
    return Tensor.transpose(self, dim0, dim1)


NAMES = {
    "_data": _codes("rowwise"),
    "_rowwise_data": _codes("rowwise"),
    "_rowwise_scale_inv": _scale_inv("rowwise"),
    "_columnwise_data": _codes("columnwise"),
    "_columnwise_scale_inv": _scale_inv("columnwise"),
    "transpose": _transpose,
}
for _name, _value in NAMES.items():
    setattr(MXTensor, _name, _value)
