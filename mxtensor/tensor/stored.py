"""An MXTensor in a file: which tensors a pickle stores, and the check of what a file holds.

``torch.load(weights_only=True)`` runs no code of a file, but it calls ``rebuild`` with whatever the file names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.shapes import swapped
from ..core.tracing import is_traced
from ..kernels.quantize.hadamard import GROUP
from ..numerics.formats import Format
from ..numerics.operand import Operand, Rotated
from ..numerics.reference import DTYPES_BY_NAME
from ..numerics.validate import check_numbers, check_operand, check_outer, is_non_overlapping
from ..recipe.linear_recipe import recipe_from_row

_PLAIN = (Tensor, torch.nn.Parameter)


def to_store(t: Tensor) -> Tensor:
    """Codes as bytes; a copy of a tensor whose entries share memory, such as an expanded one."""
    t = t if is_non_overlapping(t.shape, t.stride()) else t.contiguous()
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t


def stored_arguments(components: Any, row: Any, outer: Any, is_parameter: Any, signs: Any) -> tuple[Any, ...]:
    """The first six arguments of ``MXTensor`` and its rotated copy or None, from the arguments of ``rebuild``.

    Raises TypeError for an argument of another type, ValueError for sizes that do not fit each other.
    """
    _expect(isinstance(outer, tuple) and len(outer) == 4, "(dtype, size, strides, requires_grad)", outer)
    dtype, size, stride, requires_grad = outer
    _expect(type(requires_grad) is bool and type(is_parameter) is bool, "requires_grad", (requires_grad, is_parameter))
    _expect(type(dtype) is str and dtype in DTYPES_BY_NAME, f"the dtype, one of {', '.join(DTYPES_BY_NAME)},", dtype)
    recipe, size = recipe_from_row(row), check_numbers("size", size)
    sides = {"_rowwise": size, "_columnwise": swapped(size) if len(size) > 1 else ()}
    _expect(signs is None or type(signs) is int, "the signs of a rotated copy", signs)
    if signs is not None:
        sides["_rotated"] = rotated_shape(size)
    _expect(isinstance(components, dict) and set(components) <= set(sides), "the operands by name", type(components))
    operands: dict[str, Operand | None] = {}
    for side, shape in sides.items():
        tensors = components.get(side)
        plain = isinstance(tensors, (tuple, list)) and all(type(t) in _PLAIN or is_traced() for t in tensors)
        kinds = [type(t) for t in tensors] if isinstance(tensors, (tuple, list)) else type(tensors)
        _expect(tensors is None or plain, f"the codes and scales of {side[1:]}", kinds)
        operands[side] = None if tensors is None else operand_of(tensors, recipe.stored.format, shape)
    rowwise, columnwise, rotated = (operands.get(side) for side in ("_rowwise", "_columnwise", "_rotated"))
    wanted = recipe.stored.format, DTYPES_BY_NAME[dtype], size, stride
    beside = None if rotated is None else check_rotated(Rotated(rotated, signs), no_overlap=True)
    rowwise, columnwise, size, stride = check_outer(rowwise, columnwise, *wanted, no_overlap=True, rotated=beside)
    return rowwise, columnwise, recipe, DTYPES_BY_NAME[dtype], size, stride, beside


def rotated_shape(size: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the rotated columnwise copy of a tensor (..., rows, cols): (..., cols, rows in whole groups)."""
    return (*size[:-2], size[-1], -(-size[-2] // GROUP) * GROUP) if len(size) > 1 else ()


def check_rotated(rotated: Rotated, no_overlap: bool = False) -> Rotated:
    """A rotated copy of checked tensors. Raises TypeError or ValueError as ``check_components`` does."""
    return Rotated(check_operand("rotated", rotated.operand, no_overlap), rotated.signs)


def _expect(condition: bool, what: str, value: object) -> None:
    if not condition:
        raise TypeError(f"{what} cannot be {value!r:.80}")


def operand_of(tensors: Sequence[Tensor], format: Format, shape: tuple[int, ...]) -> Operand:
    """``Operand.from_tensors``. Raises ValueError for another number of tensors than the format has."""
    expected = 3 if format.global_scale else 2
    if len(tensors) != expected:
        raise ValueError(f"{format}: an operand has {expected} tensors, got {len(tensors)}")
    return Operand.from_tensors(tensors, format, shape)
