"""ParameterModule: how the modules register, initialize, reset and move their parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..training.model_init import init_recipe, preserve, preserves, weight_parameter
from ..training.state_dict import register_state_dict_hooks
from .styles import local_part
from .tensor_parallel import Init, Parallel, Tracker
from .weight_shards import STANDS_FOR, distributed_like, remember


def kaiming(weight: Tensor) -> None:
    """The initialization of torch.nn.Linear, so that a drop-in replacement starts with the same values."""
    nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


class ParameterModule(nn.Module):
    """A module whose weights ``quantized_model_init`` may quantize and FSDP2 may shard."""

    def __init__(self) -> None:
        super().__init__()
        self._sharded: dict[str, Any] = {}
        """Name -> the parameter that FSDP2 has sharded."""
        self._init_recipe = init_recipe()
        self._inits: dict[str, Init] = {}
        self._grad_placements: dict[str, Any] = {}
        """Name -> the placements of the gradient of its local part, for parameters that a style has split."""
        self.part_of: str | None = None
        """The module that this one is a part of, which a style must not split alone."""
        register_state_dict_hooks(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Parameter):
            remember(name, value, self._sharded)
        super().__setattr__(name, value)

    def local(self, name: str) -> Any:
        """Parameter ``name`` as a product takes it: of one that a style has split, the part of this rank."""
        parameter = getattr(self, name)
        placements = self._grad_placements.get(name)
        if placements is None or parameter is None:
            return parameter
        return local_part(parameter, placements, STANDS_FOR)

    def add_parameter(
        self, name: str, shape: tuple[int, ...], init: Init, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Register a parameter that ``init`` fills. Inside ``quantized_model_init``, quantize it if it has two dims."""
        values = torch.empty(shape, device=device, dtype=dtype)
        with torch.no_grad():
            init(values)
        self._inits[name] = init
        self.register_parameter(name, weight_parameter(values) if len(shape) == 2 else nn.Parameter(values))

    def add_linear(
        self, prefix: str, shape: tuple[int, int], init: Init | None, bias: bool, device: Any,
        dtype: torch.dtype | None, parallel: Parallel, pieces: Sequence[int], tracker: Tracker | None,
        suffix: str = "",
    ) -> None:  # fmt: skip
        """Register the parts of this rank of a weight (N, K) and of its bias (N,), or None. ``pieces``: rows that are
        split one by one; () for all at once.

        ``init`` fills the weight and the bias starts at zero. Without ``init`` both start as in torch.nn.Linear.
        """
        bound = 1 / math.sqrt(shape[1]) if shape[1] > 0 else 0.0
        start: Init = partial(nn.init.uniform_, a=-bound, b=bound) if init is None else nn.init.zeros_
        pieces = pieces or shape[:1]
        fill = parallel.initialize(init or kaiming, pieces, tracker)
        weight_name, bias_name = f"{prefix}weight{suffix}", f"{prefix}bias{suffix}"
        self.add_parameter(weight_name, parallel.shape(shape), fill, device, dtype)
        if bias:
            fill = parallel.initialize(start, pieces, None)
            self.add_parameter(bias_name, parallel.shape(shape[:1]), fill, device, dtype)
        else:
            self.register_parameter(bias_name, None)
        parallel.mark(getattr(self, weight_name), getattr(self, bias_name))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all parameters again, in place: after ``to_empty()``, for example. Sharded parameters take the
        values that the first rank draws."""
        for name, init in self._inits.items():
            parameter = getattr(self, name)
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            init(values)
            parameter.copy_(distributed_like(values, parameter))
            if preserves(parameter):
                preserve(parameter, values)
