"""FSDP1 and ``nn.DataParallel`` are refused: both copy parameters to plain tensors, without formats and recipes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..core.compat_hooks import PACKAGE, hook_flat_parameters, hook_replicas
from ..core.when_imported import after_import


def _refuse(parameters: Iterable[Tensor], what: str, way_out: str) -> None:
    """Raise NotImplementedError if one of the parameters is of a class of this package."""
    for p in parameters:
        if type(p).__module__.startswith(PACKAGE):
            raise NotImplementedError(
                f"{what} copies parameters to plain tensors, and those of class {type(p).__name__}, such as one "
                f"{tuple(p.shape)}, would be multiplied in high precision; {way_out}"
            )


def _before_flattening(parameters: Iterable[Tensor]) -> None:
    way_out = "use FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version=2 of accelerate and transformers"
    _refuse(parameters, "FullyShardedDataParallel (FSDP1)", way_out)


def _before_replication(parameters: Iterable[Tensor]) -> None:
    way_out = "run a process for each GPU (torchrun, DistributedDataParallel), or show this one a single GPU"
    _refuse(parameters, "nn.DataParallel", f"{way_out} (CUDA_VISIBLE_DEVICES=0)")


after_import("torch.distributed.fsdp._flat_param", lambda: hook_flat_parameters(_before_flattening))
hook_replicas(_before_replication)
