"""Amax histories in ``set_model_state_dict`` and ``set_state_dict`` of ``torch.distributed.checkpoint``.

These functions pass on what the classes of modules save. The histories of a layer that ``quantize_`` has converted are
the extra state of one module (``state_dict.py``): they are loaded here, from the state dict of each rank, or from that
of rank 0 (``broadcast_from_rank0``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ..core.compat_hooks import hook_model_state_dicts
from .state_dict import EXTRA_STATE, has_histories, load_histories


def install() -> None:
    """Let the functions load histories."""
    hook_model_state_dicts(_load)


def _modules(model: nn.Module, name_of: Callable[[str], str]) -> Iterator[tuple[str, nn.Module]]:
    """The name of an extra state in a state dict, and its module."""
    for fqn, module in model.named_modules():
        if has_histories(module):
            yield name_of(f"{fqn}.{EXTRA_STATE}" if fqn else EXTRA_STATE), module


def _load(
    usual: Callable[[dict[str, Any]], Any], model: nn.Module, state_dict: dict[str, Any], broadcast: bool,
    name_of: Callable[[str], str],
) -> Any:  # fmt: skip
    modules = dict(_modules(model, name_of))
    found = {name: state_dict[name] for name in modules if name in state_dict}
    rest = {key: value for key, value in state_dict.items() if key not in found} if found else state_dict
    done = usual(rest)
    if broadcast and modules:
        said = [found]
        dist.broadcast_object_list(said, src=0)
        found = said[0]
    errors: list[str] = []
    for name, histories in found.items():
        load_histories(modules[name], name, histories, errors)
    if errors:
        raise RuntimeError(f"the amax histories of this state dict cannot be loaded: {'; '.join(errors)}")
    return done
