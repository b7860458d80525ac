"""Pickles and deep copies of an MXTensor.

``torch.load(weights_only=True)`` runs no code of a file, but it calls ``rebuild`` with whatever the file names:
``stored`` checks it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ..core.names import dtype_name
from ..numerics.operand import Rotated
from ..numerics.validate import fits_outside
from ..recipe.linear_recipe import recipe_to_row
from .attributes import set_attributes, user_attributes
from .stored import stored_arguments, to_store

KINDS: dict[str, Any] = {}
"""Class of what ``rebuild`` makes, by its name: MXTensor and RotatedTensor."""


class Pickled(Tensor):
    """The part of MXTensor that pickles and copies one."""

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        out = self.detach().map_components(torch.clone).requires_grad_(self.requires_grad)
        if self._rotated is not None and out._rotated is None:
            out._rotated = Rotated(self._rotated.operand.map(torch.clone), self._rotated.signs)
        if isinstance(self, torch.nn.Parameter):
            memo[id(self)] = torch.nn.Parameter(out, out.requires_grad)
        else:
            memo[id(self)] = out
            set_attributes(out, copy.deepcopy(user_attributes(self), memo))
        return memo[id(self)]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        operands = (("_rowwise", self._rowwise), ("_columnwise", self._columnwise))
        components = {side: o.map(to_store).tensors for side, o in operands if o is not None}
        signs: tuple[int, ...] = ()
        if self._rotated is not None:
            components["_rotated"], signs = self._rotated.operand.map(to_store).tensors, (self._rotated.signs,)
        size, stride = tuple(self.shape), self.stride()
        if not fits_outside(size, stride, *self.operands):  # an expanded tensor, or the copy of a slice
            stride = torch.empty_strided(size, stride, device="meta").clone().stride()
        outer = (dtype_name(self.dtype), size, stride, self.requires_grad)
        arguments = (components, recipe_to_row(self.recipe), outer, isinstance(self, torch.nn.Parameter), *signs)
        attributes = user_attributes(self)
        return (rebuild_with_attributes, (arguments, attributes)) if attributes else (rebuild, arguments)


def rebuild(
    components: dict[str, Any],
    row: dict[str, str | None],
    outer: tuple[Any, ...],
    is_parameter: bool,
    signs: int | None = None,
) -> Any:
    """What unpickling an MXTensor calls. Its arguments are uint8 and float32 tensors, numbers and strings, so that
    ``torch.load(weights_only=True)`` accepts them.

    A file may hold anything, so every argument is checked. The result has aliases of the tensors, because a pickle can
    go on to change a tensor that it has named. Raises ValueError that names what does not fit.
    """
    try:
        *arguments, rotated = stored_arguments(components, row, outer, is_parameter, signs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"this file or pickle holds no valid MXTensor: {error}") from error
    rowwise, columnwise, recipe, dtype, size, stride = arguments
    if rowwise is None and columnwise is None:
        out = KINDS["RotatedTensor"](rotated, recipe, dtype, size, stride)
    else:
        out = KINDS["MXTensor"](rowwise, columnwise, recipe, dtype, size, stride, checked=True, rotated=rotated)
    return torch.nn.Parameter(out, outer[3]) if is_parameter else out.requires_grad_(outer[3])


def rebuild_with_attributes(arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """``rebuild`` of a tensor on which the user has set attributes."""
    return set_attributes(rebuild(*arguments), attributes)
