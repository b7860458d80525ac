"""Activation recomputation under ``autocast``: torch.utils.checkpoint recomputes with the recipe of the forward pass.

The recomputation runs in the backward pass, after the ``autocast`` block. torch restores its own autocast there and has
no hook for others. ``core/compat_hooks.py`` therefore makes every checkpoint wrap the function that it will recompute.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..core.compat_hooks import hook_checkpoints
from ..core.scopes import Scopes

Function = Callable[..., Any]
_first_pass: Scopes[bool] = Scopes("first_pass", False)
_installed: list[bool] = []
_wrappers: list[Callable[[Function], Function]] = []


def in_first_pass() -> bool:
    """Whether a reentrant checkpoint runs its forward pass: a training step, although gradients are disabled there."""
    return not torch.compiler.is_dynamo_compiling() and _first_pass.get()


def _wrapped(function: Function) -> Function:
    return _wrappers[0](function) if _wrappers else function


def _mark_first_pass() -> AbstractContextManager[bool]:
    return _first_pass.block(True)


def install(wrapper: Callable[[Function], Function] | None = None) -> None:
    """Make checkpoints recompute ``wrapper(function)``, and mark their first passes (``in_first_pass``).

    The first call has effect; the first ``wrapper`` stays. Warns if torch's checkpoints cannot be hooked.
    """
    if wrapper is not None and not _wrappers:
        _wrappers.append(wrapper)
    if _installed:
        return
    _installed.append(True)
    if not hook_checkpoints(_wrapped, _mark_first_pass):
        warnings.warn(
            "mxtensor does not know this version of torch.utils.checkpoint: layers that it recomputes run in high "
            "precision; use mx.quantize_ for training, whose weights carry their recipe",
            UserWarning,
            stacklevel=3,
        )
