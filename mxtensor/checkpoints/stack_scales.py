"""One global scale for all matrices of experts that transformers stacks, because a stack has one (NVFP4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from threading import Lock

import torch
from torch import Tensor

from ..numerics.formats import Orientation
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .known import Known
from .layout import MERGES


class StackScales:
    """Quantizes matrices as they would be in their stack, bit for bit.

    ``load(name)`` gives a tensor of the checkpoint: all matrices of a stack are read before the first one is quantized.
    It may be called by several threads.
    """

    def __init__(self, known: Known, names: Iterable[str], load: Callable[[str], Tensor]) -> None:
        self._load = load
        self._stack_of: dict[str, str] = {}
        self._members: dict[str, list[str]] = defaultdict(list)
        for name in names:
            loaded = known.loaded(name)
            if loaded.operations in MERGES and loaded.parameters:
                self._stack_of[name] = loaded.parameters[0]
                self._members[loaded.parameters[0]].append(name)
        self._locks = {stack: Lock() for stack in self._members}
        self._amax: dict[str, Tensor] = {}

    def applies(self, name: str, recipe: LinearRecipe) -> bool:
        """Whether a tensor is in a stack, and its format has a global scale."""
        return name in self._stack_of and recipe.stored.format.global_scale

    def quantized(self, name: str, value: Tensor, recipe: LinearRecipe, side: Orientation) -> Tensor:
        """``value`` (rows, columns) in the format of ``recipe``: one more row has the amax of the stack."""
        row = value.new_zeros(1, value.shape[1])
        row[0, 0] = self._amax_of(self._stack_of[name])
        return quantize_as(torch.cat([value, row]), recipe, side)[:-1].clone()

    def _amax_of(self, stack: str) -> Tensor:
        with self._locks[stack]:
            if stack not in self._amax:
                self._amax[stack] = torch.stack([_amax(self._load(name)) for name in self._members[stack]]).amax()
            return self._amax[stack]


def _amax(value: Tensor) -> Tensor:
    values = value.dequantize() if isinstance(value, MXTensor) else value
    return values.abs().amax()
