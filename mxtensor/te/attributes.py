"""TransformerEngine's names for what an MXTensor has: attributes that the door gives to the class when it is imported.

Codes and byte scales are uint8, float32 scales float32, in their logical, unpadded shapes; a copy that is not stored is
None. Columnwise components are stored transposed: for mxfp8 values (256, 1024) the columnwise codes are (1024, 256)
and the scales (1024, 8). Formats with square blocks or one scale per tensor store one copy; its columnwise components
are the same codes and scales, transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.arguments import TENSOR, Kind, check, optional
from ..core.peer_names import Elsewhere
from ..numerics.operand import Operand
from ..tensor.graph_attributes import give_attributes
from ..tensor.mxtensor import MXTensor

NOOP_FLAG = optional(
    Kind(
        "a dense torch.Tensor with values",
        lambda flag: isinstance(flag, Tensor) and flag.layout is torch.strided and not flag.is_meta,
    )
)


def is_noop(flag: Tensor | None) -> bool:
    """Whether a ``noop_flag`` is set. On a GPU this synchronizes."""
    return flag is not None and bool(flag.any())


def _elsewhere(instead: str) -> Any:
    return Elsewhere(instead, "TransformerEngine")


class TransformerEngineAttributes:
    """What code written for TransformerEngine's quantized tensors reads and calls."""

    _quantizer = _elsewhere("a quantizer for tensor.format, such as te.MXQuantizer(tensor.format)")
    _get_quantizer = _elsewhere("a quantizer for tensor.format, such as te.MXQuantizer(tensor.format)")
    _fp8_dtype = _elsewhere("tensor.format.element")
    _fp4_dtype = _elsewhere("tensor.format.element")
    fp8_dtype = _elsewhere("tensor.format.element")
    _transpose = _elsewhere("tensor._columnwise_data")
    _transpose_invalid = _elsewhere("tensor.get_usages(): copies are always those of the values")
    _amax_rowwise = _elsewhere("tensor.rowwise.global_scale")
    _amax_columnwise = _elsewhere("tensor.columnwise.global_scale")
    _with_gemm_swizzled_scales = _elsewhere("tensor._rowwise_scale_inv, which is never swizzled")
    get_metadata = _elsewhere("tensor.components and mx.MXTensor.from_components")
    get_data_tensors = _elsewhere("tensor.components")
    prepare_for_saving = _elsewhere("tensor.components, which save_for_backward takes")
    restore_from_saved = _elsewhere("mx.MXTensor.from_components")

    def quantize_(self: Any, tensor: Tensor, *, noop_flag: Tensor | None = None) -> MXTensor:
        """Quantize ``tensor`` in place into every copy, without a gradient; returns this tensor.

        It is ``copy_`` for a tensor of the same shape. ``noop_flag``: one number; unless it is zero, nothing is
        written; on a GPU, reading it synchronizes. Raises ValueError for another shape.
        """
        check("quantize_", "tensor", tensor, TENSOR)
        check("quantize_", "noop_flag", noop_flag, NOOP_FLAG)
        if tensor.shape != self.shape:
            raise ValueError(
                f"quantize_: the tensor is {tuple(tensor.shape)}, this one {tuple(self.shape)}; pass one of its shape"
            )
        if not is_noop(noop_flag):
            with torch.no_grad():
                self.copy_(tensor)
        return self  # type: ignore[no-any-return]

    @property
    def _scale_inv(self: Any) -> Tensor | None:
        """The rowwise scales, by which codes are multiplied; None if they are not stored."""
        return None if self.rowwise is None else self.rowwise.scale

    @property
    def _is_2D_scaled(self: Any) -> bool:  # noqa: N802
        """Whether a square tile of values shares a scale."""
        return self.format.square  # type: ignore[no-any-return]

    @property
    def _data(self: Any) -> Tensor | None:
        """The rowwise codes as uint8; None if they are not stored."""
        return _codes(self.rowwise)

    _rowwise_data, _rowwise_scale_inv = _data, _scale_inv

    @property
    def _columnwise_data(self: Any) -> Tensor | None:
        """The columnwise codes as uint8; None if they are not stored."""
        return _codes(_columnwise_operand(self))

    @property
    def _columnwise_scale_inv(self: Any) -> Tensor | None:
        """The columnwise scales, by which codes are multiplied; None if they are not stored."""
        operand = _columnwise_operand(self)
        return None if operand is None else operand.scale

    def get_usages(self: Any) -> dict[str, bool]:
        """Which copies are stored, under the keys ``rowwise`` and ``columnwise``."""
        return {"rowwise": self.rowwise is not None, "columnwise": _columnwise_operand(self) is not None}

    def update_usage(self: Any, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop a copy (False) or require one (True); None leaves it as it is.

        Formats with square blocks or one scale per tensor store one copy for both orientations, which stays. Raises
        RuntimeError for a copy that is required and missing, ValueError if no copy would be left.
        """
        has, wanted = self.get_usages(), {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        for side, usage in wanted.items():
            if usage and not has[side]:
                raise RuntimeError(
                    f"{side}_usage=True: {self!r} has no {side} copy; quantize its values again with {side}=True"
                )
        drops = {side for side, usage in wanted.items() if usage is not None and not usage and has[side]}
        if self.format.square and len(drops) < 2:
            return
        if not {side for side, stored in has.items() if stored} - drops or (
            "rowwise" in drops and self._rotated is not None
        ):
            raise ValueError(
                f"update_usage: {self!r} would have no copy left that torch's ops can read; keep one of the two"
            )
        for side in drops:
            vars(self)[f"_{side}"] = None
        if "columnwise" in drops:
            self._rotated = None

    def transpose(self: Any, dim0: int = -2, dim1: int = -1) -> Tensor:
        """``torch.Tensor.transpose``; without arguments it swaps the last two dimensions."""
        return Tensor.transpose(self, dim0, dim1)


def _codes(operand: Operand | None) -> Tensor | None:
    return None if operand is None else operand.data.view(torch.uint8)


def _columnwise_operand(w: Any) -> Operand | None:
    operand: Operand | None = w.columnwise if w._rotated is None else w._rotated.operand
    return operand


ATTRIBUTES = {name: value for name, value in vars(TransformerEngineAttributes).items() if not name.startswith("__")}
give_attributes(MXTensor, ATTRIBUTES)
