"""Activation recomputation under ``autocast``: what torch.utils.checkpoint runs again must be quantized again.

Its backward pass comes when the ``autocast`` block has been left. torch restores its own autocast there and has no hook
for anybody else's, so that the two classes through which every checkpoint goes are told to wrap what they will call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

Function = Callable[..., Any]
_first_pass: ContextVar[bool] = ContextVar("mxtensor_first_pass", default=False)
_installed: list[bool] = []
_wrappers: list[Callable[[Function], Function]] = []


def in_first_pass() -> bool:
    """Whether a reentrant checkpoint runs its forward pass: gradients are off there, and yet it is a training step."""
    return not torch.compiler.is_dynamo_compiling() and _first_pass.get()


def _keeping(function: Function) -> Function:
    return _wrappers[0](function) if _wrappers else function


def install(keeping: Callable[[Function], Function] | None = None) -> None:
    """Let checkpoints call ``keeping(function)`` for what they will run in backward, and tell their first passes.

    Once: later calls do nothing.
    """
    if keeping is not None and not _wrappers:
        _wrappers.append(keeping)
    if _installed:
        return
    _installed.append(True)
    frame = getattr(torch_checkpoint, "_CheckpointFrame", None)
    reentrant = getattr(torch_checkpoint, "CheckpointFunction", None)
    if frame is None or reentrant is None:
        warnings.warn(
            "this torch checkpoints in a way that mxtensor does not know: what torch.utils.checkpoint recomputes runs "
            "in high precision; use mx.quantize_ for training, whose weights carry their recipe",
            UserWarning,
            stacklevel=3,
        )
        return
    make, forward = frame.__init__, reentrant.forward

    @wraps(make)
    def make_keeping(self: Any, recompute_fn: Function, *args: Any, **kwargs: Any) -> None:
        make(self, _keeping(recompute_fn), *args, **kwargs)

    @wraps(forward)
    def forward_keeping(ctx: Any, run_function: Function, *args: Any) -> Any:
        token = _first_pass.set(True)
        try:
            return forward(ctx, _keeping(run_function), *args)
        finally:
            _first_pass.reset(token)

    frame.__init__ = make_keeping
    reentrant.forward = staticmethod(forward_keeping)
