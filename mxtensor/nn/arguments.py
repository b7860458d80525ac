"""Checks of the arguments that TransformerEngine's modules take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..core.arguments import described, is_one_of

NO_PARALLELISM: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (False,),
    "tp_group": (None,),
    "tp_size": (1,),
    "get_rng_state_tracker": (None,),
    "rng_tracker_name": (None,),
    "parallel_mode": (None, "row", "column"),
    "set_parallel_mode": (False, True),
}
"""Argument -> the values that ask for no parallelism; the last two have no effect on one rank."""


def check_parallelism(owner: str, **given: Any) -> None:
    """Raise NotImplementedError for an argument that asks for tensor parallelism. ``owner`` names the module."""
    for name, value in given.items():
        if not is_one_of(value, NO_PARALLELISM[name]):
            raise NotImplementedError(
                f"{owner}: {name}={described(value)} is not available: modules hold whole weights; shard them with "
                "torch.distributed (FSDP2's fully_shard, or DTensor's parallelize_module)"
            )


def one_of(what: str, value: str, choices: Iterable[str]) -> str:
    """``value``, if it is one of ``choices``. Raises ValueError otherwise; ``what`` names the argument."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{what} is {described(value)}; choose one of {', '.join(choices)}")
    return value


def check_heads(name: str, heads: int, groups: int | None) -> int:
    """The number of key and value heads. Raises ValueError unless the query heads divide into that many groups."""
    groups = heads if groups is None else groups
    if heads < 1 or groups < 1 or heads % groups:
        raise ValueError(f"{name}: num_attention_heads={heads} must be a multiple of num_gqa_groups={groups}")
    return groups
