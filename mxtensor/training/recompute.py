"""Activation recomputation: torch.utils.checkpoint recomputes a function as its first pass ran.

The recomputation runs in the backward pass, after the ``autocast`` block, and after other passes of the same layers.
torch restores its own autocast there and has no hook for others. ``core/compat_hooks.py`` therefore tells this file of
every checkpoint: the recomputation runs under the recipe of the first pass, and from the same histories of delayed
scaling, of which the checkpoint keeps notes until torch frees its graph (``delayed_scaling.py`` writes and reads them).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..core.compat_compile import run_uncompiled
from ..core.compat_hooks import hook_checkpoints
from ..core.scopes import Scope, Scopes

Function = Callable[..., Any]


class Note(Protocol):
    """What a checkpoint keeps of one layer."""

    def rewound(self) -> Any:
        """What ``Pass.found`` has of the layer in one recomputation. Its ops run outside of it: selective checkpoints
        compare the ops of a recomputation with those of the first pass."""


class Checkpoint:
    """One checkpoint; it lives as long as the graph that can recompute it."""

    def __init__(self, reentrant: bool) -> None:
        self.reentrant, self.has_run = reentrant, False
        self.notes: dict[object, Note] = {}
        """Layer -> note of the first pass."""

    def first_pass(self) -> Pass:
        """A context manager for the first pass."""
        return Pass(self, True)


class _Recomputed:
    """A function as it runs in the backward pass."""

    def __init__(self, checkpoint: Checkpoint, function: Function) -> None:
        self.checkpoint, self.function = checkpoint, function
        self.wrapped = _wrappers[0](function) if _wrappers else function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.checkpoint.reentrant and not self.checkpoint.has_run:  # torch calls one function for both
            return self.function(*args, **kwargs)
        with Pass(self.checkpoint, False):
            return self.wrapped(*args, **kwargs)


class Pass:
    """A context manager for one run of the function of a checkpoint: its first pass, or a recomputation."""

    def __init__(self, checkpoint: Checkpoint, first: bool) -> None:
        self.checkpoint, self.first = checkpoint, first
        self.found: dict[object, Any] = {}
        """Layer -> ``Note.rewound()``; empty in a first pass."""
        self.at_end: list[Callable[[], None]] = []
        """Called when the pass ends."""
        self._scope: Scope[Pass | None] | None = None

    def __enter__(self) -> Pass:
        if not self.first:
            self.found = {layer: note.rewound() for layer, note in self.checkpoint.notes.items()}
        with _LOCK:
            OPEN["passes"] += 1
        self._scope = _passes.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._scope is not None
        _passes.leave(self._scope)
        self._scope = None  # it refers to this pass
        self.checkpoint.has_run = True
        with _LOCK:
            OPEN["passes"] -= 1
        for call in reversed(self.at_end):
            call()


_passes: Scopes[Pass | None] = Scopes("checkpoint_passes", None)
_LOCK = threading.Lock()
OPEN = {"passes": 0}
"""The number of passes that run, in all threads. Graphs with delayed scaling have a guard on it."""
_installed: list[bool] = []
_wrappers: list[Callable[[Function], Function]] = []


def open_passes() -> tuple[list[Pass], Pass | None]:
    """The first passes that run here, from the innermost, and the recomputation that is around them, if there is one.
    What is around a recomputation has no part in it. Eager code only."""
    firsts: list[Pass] = []
    for found in _passes.values() if OPEN["passes"] else ():
        if found is not None and not found.first:
            return firsts, found
        if found is not None:
            firsts.append(found)
    return firsts, None


def restore_later(owner: Any, name: str) -> None:
    """In a recomputation, set an attribute back to its present value at the end."""
    around, present = open_passes()[1], getattr(owner, name, None)
    if around is not None and present is not None:
        around.at_end.append(lambda: setattr(owner, name, present))


def in_first_pass() -> bool:
    """Whether a reentrant checkpoint runs its first pass: a training step, although gradients are disabled there."""
    return not torch.compiler.is_dynamo_compiling() and any(p.checkpoint.reentrant for p in open_passes()[0])


def _start(function: Function, reentrant: bool) -> tuple[Function, Callable[[], Pass]]:
    checkpoint = Checkpoint(reentrant)
    return _Recomputed(checkpoint, function), checkpoint.first_pass


def install(wrapper: Callable[[Function], Function] | None = None) -> None:
    """Make checkpoints recompute ``wrapper(function)``, and tell this file of their passes.

    The first call has effect; the first ``wrapper`` stays. Warns if torch's checkpoints cannot be hooked.
    """
    if wrapper is not None and not _wrappers:
        _wrappers.append(wrapper)
    if _installed:
        return
    _installed.append(True)
    if not hook_checkpoints(_start):
        warnings.warn(
            "mxtensor does not know this version of torch.utils.checkpoint: layers that it recomputes run in high "
            "precision; use mx.quantize_ for training, whose weights carry their recipe",
            UserWarning,
            stacklevel=3,
        )


# Code that Dynamo compiles may call the backward pass; what is recomputed is compiled there as usual.
run_uncompiled(_start, Pass.__enter__, Pass.__exit__, open_passes)
run_uncompiled(_Recomputed.__call__, callees=True)
