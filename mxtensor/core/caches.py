"""Caches in the arguments of a model: keys and values of attention, states, padding. A call adds to them."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

Copies = dict[int, tuple[Any, Any]]
"""The id of a cache -> the cache, and a copy of it."""


def with_fresh_cache(value: Any, copies: Copies) -> Any:
    """A copy of ``value`` if it is a cache, so that another call gets it as it was; else ``value`` itself.

    ``copies`` has those of caches that were seen before, and gets the new one.
    """
    if not _is_cache(value):
        return value
    if id(value) not in copies:
        copies[id(value)] = value, copy.deepcopy(value)
    return copies[id(value)][1]


def _is_cache(value: Any) -> bool:
    """transformers' caches of keys and values, by their method, and those of states and of padding, by name."""
    if isinstance(value, nn.Module):
        return False
    return hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache")
