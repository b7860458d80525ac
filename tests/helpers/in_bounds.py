"""Triton's interpreter with bounds: each load and store must be in a tensor that the kernel got as an argument.

The interpreter reads and writes memory of the process at any address, so that a wrong address gives other values, or
none at all where the memory beside a tensor belongs to another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


class Checked:
    """The native part of the interpreter; ``spans``: first address and the one after the last of each argument."""

    def __init__(self, native: Any) -> None:
        self._native, self.spans, self.accesses = native, np.zeros((0, 2), np.uint64), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def take(self, tensors: list[torch.Tensor]) -> None:
        """The tensors of the next launch: from the first to the last value of each view."""
        found = []
        for t in tensors:
            last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
            found.append((t.data_ptr(), t.data_ptr() + last * t.element_size()))
        self.spans = np.array(found, np.uint64).reshape(-1, 2)

    def _check(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        wanted = np.asarray(addresses)[np.asarray(mask, dtype=bool)].astype(np.uint64)
        inside = (wanted[:, None] >= self.spans[:, 0]) & (wanted[:, None] + np.uint64(size) <= self.spans[:, 1])
        self.accesses += len(wanted)
        outside = int((~inside.any(1)).sum())
        assert not outside, f"{outside} of {len(wanted)} values of a {what} are in no argument"

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._check("load", addresses, mask, np.dtype(dtype).itemsize)
        return self._native.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        self._check("store", addresses, mask, np.asarray(value).dtype.itemsize)
        return self._native.store(addresses, value, mask)


@contextmanager
def in_bounds() -> Iterator[Checked]:
    """Check each load and store of kernels that run in the interpreter."""
    from triton.runtime import interpreter

    checked = Checked(interpreter._interpreter)
    arguments = interpreter.GridExecutor._init_args_hst

    def taken(self: Any, *args: Any) -> Any:
        given = arguments(self, *args)
        checked.take([t for t in (*given[0], *given[1].values()) if isinstance(t, torch.Tensor)])
        return given

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", checked)
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", taken)
        yield checked
