"""Where the amax histories of delayed scaling are stored: attributes of the weight of their layer.

A view of a weight has the same histories, a copy has copies of them. FSDP2 makes a new tensor of what it gathers of a
weight; its histories are those of the shard, which the module, its state dict and ``share_amax`` see between steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

STATE = "_mxtensor_delayed_state"
"""The attribute of a weight that stores the DelayedState of its layer."""
LOADED = "_mxtensor_loaded_state"
"""The attribute of a plain weight that stores the tensors of a loaded state, until a recipe is known; then the name
goes on as that of STATE does."""
OWNER = "_mxtensor_history_owner"
"""The attribute of a gathered weight, and of views of it, that stores the shard."""
GATHERS = {aten.index.Tensor, aten.index_select.default}
"""Ops whose results are stacks of some of the matrices of a stack, in any order, and weights too."""
COPIES = {aten.clone.default, aten._to_copy.default}
SHARDS = {aten.new_zeros.default}
"""Ops whose results get the amax history of delayed scaling: a copy of it, or, as all views do, the same one. FSDP2
makes a shard by ``new_zeros``."""


def owner_of(weight: Tensor) -> Tensor:
    """The tensor whose attributes are the histories of ``weight``: itself, or the shard of a gathered weight."""
    owner: Tensor = getattr(weight, OWNER, weight)
    return owner


def delayed_states(weight: Tensor) -> dict[str, Any]:
    """Name of the attribute -> DelayedState, of all layers that ``weight`` serves: it, and slices of it."""
    return {name: state for name, state in vars(owner_of(weight)).items() if name.startswith(STATE)}


def with_states(out: Tensor, weight: Tensor, func: Any) -> Any:
    """``out``, the result of ``func``, with the histories of ``weight`` if it stands for the same weight."""
    if func in COPIES or func in SHARDS or func in GATHERS or func.is_view:
        owner = owner_of(weight)
        if owner is not weight and func not in COPIES:
            setattr(out, OWNER, owner)
            return out
        for name, state in delayed_states(weight).items():
            setattr(out, name, state.to(out.device) if func in COPIES else state)
    return out
