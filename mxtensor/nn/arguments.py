"""Checks of the arguments that TransformerEngine's modules take."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.arguments import described


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
