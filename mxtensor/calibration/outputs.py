"""The tensors of what a model or a block returns: a tensor, or any nest of tuples, dicts and dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_of(out: Any) -> list[Tensor]:
    """The floating-point tensors of an output, in their order. Objects of other kinds, such as caches, have none."""
    return list(_tensors(out))


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
    else:
        for item in _items(out):
            yield from _tensors(item)


def _items(out: Any) -> list[Any]:
    if isinstance(out, Mapping):  # transformers' ModelOutput is one
        return list(out.values())
    if isinstance(out, (tuple, list)):
        return list(out)
    if is_dataclass(out) and not isinstance(out, type):
        return [getattr(out, field.name) for field in fields(out)]
    return []
