"""Which weights that are DTensors ``quantize_`` can change: those that tensor parallelism has split, for inference."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

Sharded = Callable[[nn.Module, Any], bool]
"""(module, its weight, a DTensor) -> whether the weight can be changed."""


def refuse_sharded(weight: Any, fqn: str) -> None:
    """Raise ValueError for a weight that is a DTensor."""
    raise ValueError(
        f"quantize_: {fqn} is already sharded, {tuple(weight.shape)} as {weight.placements}; call quantize_ before "
        "fully_shard or parallelize_module, or on a model that is not sharded and has loaded the full state dict"
    )


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered. Between two passes a parameter may be the whole weight: it looks like one that is
    not sharded, and FSDP2 would gather it again over what has replaced it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # FSDP2 exists only after this import
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def never(module: nn.Module, weight: Any) -> bool:
    """No sharded weight is accepted."""
    return False


def by_tensor_parallelism(module: nn.Module, weight: Any) -> bool:
    """A sharded weight is accepted if torch's tensor parallelism has made it, over one dimension of a mesh. FSDP2 would
    gather the parameter that it knows, and not the one that replaces it."""
    return weight.device_mesh.ndim == 1 and getattr(module, "_distribute_module_applied", False)


def always(module: nn.Module, weight: Any) -> bool:
    """Every sharded weight is accepted."""
    return True
