"""Activation recomputation under ``autocast``: what torch.utils.checkpoint runs again must be quantized again.

Its backward pass comes when the ``autocast`` block has been left. torch restores its own autocast there and has no hook
for anybody else's, so that the two classes through which every checkpoint goes are told to wrap what they will call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from ..core.compat_hooks import hook_checkpoints

Function = Callable[..., Any]
_first_pass: ContextVar[bool] = ContextVar("mxtensor_first_pass", default=False)
_installed: list[bool] = []
_wrappers: list[Callable[[Function], Function]] = []


def in_first_pass() -> bool:
    """Whether a reentrant checkpoint runs its forward pass: gradients are off there, and yet it is a training step."""
    return not torch.compiler.is_dynamo_compiling() and _first_pass.get()


def _keeping(function: Function) -> Function:
    return _wrappers[0](function) if _wrappers else function


@contextmanager
def _mark_first_pass() -> Iterator[None]:
    token = _first_pass.set(True)
    try:
        yield
    finally:
        _first_pass.reset(token)


def install(keeping: Callable[[Function], Function] | None = None) -> None:
    """Let checkpoints call ``keeping(function)`` for what they will run in backward, and tell their first passes.

    Once: later calls do nothing.
    """
    if keeping is not None and not _wrappers:
        _wrappers.append(keeping)
    if _installed:
        return
    _installed.append(True)
    if not hook_checkpoints(_keeping, _mark_first_pass):
        warnings.warn(
            "this torch checkpoints in a way that mxtensor does not know: what torch.utils.checkpoint recomputes runs "
            "in high precision; use mx.quantize_ for training, whose weights carry their recipe",
            UserWarning,
            stacklevel=3,
        )
