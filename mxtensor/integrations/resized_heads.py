"""transformers: ``resize_token_embeddings`` keeps a quantized head quantized. Imported when its models are.

transformers writes new rows of an embedding into the parameter that there is. For a head that shares no weight it makes
a new layer, in high precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.instance_methods import show_format
from ..core.compat_hooks import hook_method
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from ..training.state_dict import register_state_dict_hooks, with_recipe
from ..training.training_weight import TrainingWeight


def install(module: Any) -> None:
    """Let ``transformers.modeling_utils.PreTrainedModel`` quantize heads that it has resized.

    ``_get_resized_lm_head`` is the one method that all its models call; no public one has the old head and the new one.
    """
    hook_method(module.PreTrainedModel, "_get_resized_lm_head", _quantizing)


def _quantizing(method: Callable[..., Any]) -> Callable[..., Any]:
    def resized(self: Any, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        before: Any = old_lm_head.weight
        new = method(self, old_lm_head, *args, **kwargs)
        trains = isinstance(before, TrainingWeight)
        if new is old_lm_head or not (trains or isinstance(before, MXTensor)):
            return new
        register_state_dict_hooks(new)
        show_format(new)
        if trains:
            new.weight = with_recipe(new.weight, before)
        else:
            new.weight = nn.Parameter(_with_codes(before.detach(), new.weight.detach()), requires_grad=False)
        return new

    return resized


def _with_codes(before: MXTensor, values: Tensor) -> Tensor:
    """``values`` quantized as ``before``, with its codes for the rows that it has, if whole blocks are in them."""
    made = quantize_as(values, before.recipe, before.orientation)
    count = before.shape[0]
    same = before[: len(values)].clone() if len(values) <= count else torch.cat([before, made[count:]])
    return same if isinstance(same, MXTensor) else made
