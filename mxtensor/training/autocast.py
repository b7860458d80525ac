"""``autocast``: the recipe that is active around a model, for the thread and the asyncio task that entered it.

Two things say so. A ContextVar is what eager code asks: each asyncio task has its own. A torch function mode, of which
``interception.py`` holds the rules, is how the linear layers of unmodified models are reached, and what torch.compile
sees. All modes ask the same ContextVar, so that it does not matter in which order interleaved tasks pop them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..core.compat import function_mode_stack
from ..core.compat_hooks import run_uncompiled
from ..recipe import MXFP8BlockScaling, Recipe
from ..recipe.default import recipe_or_default
from ..recipe.linear_recipe import LinearRecipe
from ..training import recompute
from .interception import MODE_BODIES, MODE_FUNCTIONS


@dataclass(eq=False)
class AutocastState:
    """What the innermost ``autocast`` says."""

    recipe: Recipe | None
    """None: not to quantize."""
    group: Any = None
    """The process group that shares delayed scaling's amax."""
    thread: int = 0
    before: AutocastState | None = None
    """What held around the block."""
    mode: AutocastMode | None = None
    open: bool = True
    """False once the block is left: a task that was started in it may outlive it."""


_autocast_state: ContextVar[AutocastState | None] = ContextVar("mxtensor_autocast", default=None)


def autocast_state() -> AutocastState | None:
    """The innermost ``autocast`` of this thread and task; None where there is none."""
    if torch.compiler.is_dynamo_compiling():
        modes = [mode for mode in function_mode_stack() if isinstance(mode, AutocastMode)]
        return modes[-1].state if modes else None
    state = _autocast_state.get()
    while state is not None and not state.open:
        state = state.before
    # asyncio.to_thread and its like copy the context, but modes, as torch.autocast, stay with their thread.
    return state if state is not None and state.thread == threading.get_ident() else None


def get_recipe() -> Recipe | None:
    """The active recipe; None outside ``autocast`` and where it is disabled."""
    state = autocast_state()
    return None if state is None else state.recipe


def is_enabled() -> bool:
    """Whether linear layers are to be quantized here."""
    return get_recipe() is not None


class AutocastMode(TorchFunctionMode):
    """Hands the functions that multiply by weights to their rules."""

    def __init__(self, state: AutocastState) -> None:
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unflatten:  # whose body calls super(), which Dynamo cannot trace when a mode calls it
            return torch.unflatten(*args, **(kwargs or {}))
        if func is checkpoint and self.state.recipe is not None:  # Dynamo runs its body without the modes around it
            raise NotImplementedError(
                "torch.compile cannot carry autocast into torch.utils.checkpoint, whose layers would run in high "
                "precision; use mx.quantize_(model, recipe), or leave one of the two away"
            )
        state = self.state if torch.compiler.is_dynamo_compiling() else autocast_state()
        if state is not None and func in MODE_BODIES:
            with AutocastMode(self.state):  # torch takes a mode off while it asks
                return MODE_BODIES[func](*args, **(kwargs or {}))
        rule = MODE_FUNCTIONS.get(func)
        if rule is None or state is None:  # None: the mode of another task
            return func(*args, **(kwargs or {}))
        return rule(linear_recipe_of(state), state.group, func, args, kwargs or {})


class autocast(ContextDecorator):  # noqa: N801  (as torch and TransformerEngine write it)
    """Inside the block, linear layers run quantized as ``recipe`` says: forward, and later their backward.

    Reaches ``nn.Linear``, ``nn.MultiheadAttention``, ``F.linear``, products with parameters, ``mxtensor.nn``. Blocks
    nest, the inner one wins, and ``enabled=False`` inside leaves high precision. The recipe (default:
    ``MXFP8BlockScaling()``) may be edited: every forward pass asks it anew. ``amax_reduction_group``: the process group
    that shares delayed scaling's amax. Holds for this thread and asyncio task. Also a decorator.

    Raises TypeError for what is no recipe, ValueError for a recipe with impossible fields, with nothing changed.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, *, amax_reduction_group: Any = None) -> None:
        self.recipe = recipe_or_default("autocast", enabled, recipe)
        self.group = amax_reduction_group
        self._entered: list[AutocastState] = []
        """The blocks that are open, of all threads and tasks."""

    def __enter__(self) -> autocast:
        if self.recipe is not None:
            self.recipe.linear_recipe()  # an impossible one raises here, before anything is set
        traced = torch.compiler.is_dynamo_compiling()  # Dynamo reads modes, neither threads nor ContextVars
        state = AutocastState(self.recipe, self.group)
        state.mode = AutocastMode(state)
        if not traced:
            recompute.install(keeping)
            state.thread, state.before = threading.get_ident(), _autocast_state.get()
            _autocast_state.set(state)
        state.mode.__enter__()
        self._entered.append(state)
        return self

    def __exit__(self, *exception: Any) -> None:
        traced = torch.compiler.is_dynamo_compiling()
        current = None if traced else _autocast_state.get()
        state = current if current is not None and current in self._entered else self._entered[-1]
        self._entered.remove(state)
        assert state.mode is not None
        state.mode.__exit__(*exception)
        state.open = False
        if state is current:
            _autocast_state.set(state.before)


# A block may be entered between two graphs: compiled, these functions would leave out the ContextVar.
run_uncompiled(autocast.__enter__, autocast.__exit__, AutocastMode.__torch_function__, autocast_state)
MXFP8BlockScaling()  # the default, whose roles Dynamo cannot be the first to spell


def linear_recipe_of(state: AutocastState | None) -> LinearRecipe | None:
    """The casts that a state asks for now."""
    return None if state is None or state.recipe is None else state.recipe.linear_recipe()


@contextmanager
def _nothing_active() -> Iterator[None]:
    token = _autocast_state.set(None)
    try:
        yield
    finally:
        _autocast_state.reset(token)


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` under the recipe that is active now, as it is now, wherever it is called."""
    state = autocast_state()
    recipe, group = (None, None) if state is None else (copy.copy(state.recipe), state.group)

    def call(*args: Any, **kwargs: Any) -> Any:
        here = autocast(recipe is not None, recipe, amax_reduction_group=group) if state else _nothing_active()
        with here:
            return function(*args, **kwargs)

    return call
