"""Edits: parameters that take the place of others for a while, or for good once everything is done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import nn


class Edit(NamedTuple):
    """A parameter for one place in a model."""

    module: nn.Module
    name: str
    value: nn.Parameter


@contextmanager
def in_place(edits: Iterable[Edit]) -> Iterator[None]:
    """The parameters of ``edits`` in the model, and afterwards those of before."""
    replaced: list[Edit] = []
    try:
        for module, name, value in edits:
            replaced.append(Edit(module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        restore(replaced)


def restore(replaced: Iterable[Edit]) -> None:
    """Put parameters back, the last one first."""
    for module, name, value in reversed(list(replaced)):
        setattr(module, name, value)
