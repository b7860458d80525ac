"""``autocast``: the active recipe of the thread and the asyncio task that entered the block.

The state is stored in two places. A ContextVar serves eager code: each asyncio task has its own value. A torch function
mode, whose rules are in ``interception.py``, intercepts the linear layers of unmodified models, and torch.compile can
see it. All modes read the same ContextVar, so the order in which interleaved tasks leave their blocks does not matter.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..core.compat import function_mode_stack, remove_function_mode
from ..core.compat_compile import HigherOrderOperator, break_at_checkpoint, run_uncompiled
from ..core.peer_names import refuse_arguments
from ..core.scopes import Scope, Scopes
from ..recipe import MXFP8BlockScaling, Recipe
from ..recipe.block_scaling import recipe_or_default
from ..recipe.linear_recipe import HIGH_PRECISION, LinearRecipe
from ..training import recompute
from .grouped import watched
from .interception import MODE_BODIES, MODE_FUNCTIONS


@dataclass(eq=False)
class AutocastState:
    """The state of one ``autocast`` block."""

    recipe: Recipe | None
    """None: do not quantize."""
    group: Any = None
    """The process group that shares delayed scaling's amax."""
    mode: AutocastMode | None = None
    traced: bool = False
    """Whether Dynamo has entered it, so that it is a part of the graph."""


REGION = "invoke_subgraph"
"""The op of ``torch.compiler.nested_compile_region``: a body that torch compiles once for several calls."""
WITH_BODIES = frozenset({"checkpoint", "tag_activation_checkpoint", "cond", "while_loop", "scan", "map_impl", REGION})
"""Functions and ops of torch whose bodies Dynamo traces without the modes around the call."""
_autocast_state: Scopes[AutocastState | None] = Scopes("autocast", None)
"""None inside a block: as if there were no ``autocast`` around it."""


def autocast_state() -> AutocastState | None:
    """The innermost ``autocast`` of this thread and task; None outside."""
    if torch.compiler.is_dynamo_compiling():
        modes = [mode for mode in function_mode_stack() if isinstance(mode, AutocastMode)]
        return modes[-1].state if modes else None
    scope = _autocast_state.innermost()
    # asyncio.to_thread copies the context to another thread, but modes, and torch.autocast, belong to one thread.
    return scope.value if scope is not None and scope.thread == threading.get_ident() else None


def get_recipe() -> Recipe | None:
    """The active recipe; None outside ``autocast`` and inside a disabled block."""
    state = autocast_state()
    return None if state is None else state.recipe


class AutocastMode(TorchFunctionMode):
    """Calls the rule of every function that multiplies by a weight."""

    def __init__(self, state: AutocastState) -> None:
        self.state = state

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unflatten:  # its body calls super(), which Dynamo cannot trace inside a mode
            return torch.unflatten(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling() and (func is checkpoint or isinstance(func, HigherOrderOperator)):
            return self._call_with_body(func, args, kwargs or {})
        state = self.state if torch.compiler.is_dynamo_compiling() else autocast_state()
        if state is not None and func in MODE_BODIES:
            with AutocastMode(self.state):  # torch removes the mode while it calls this method
                return MODE_BODIES[func](*args, **(kwargs or {}))
        rule = MODE_FUNCTIONS.get(func)
        if rule is None or state is None:  # no state: this is the mode of another task
            if state is None or state.recipe is None:
                return func(*args, **(kwargs or {}))
            return watched(func, args, kwargs or {})
        linear_recipe = HIGH_PRECISION if self._runs_in_others() else linear_recipe_of(state)
        return rule(linear_recipe, state.group, func, args, kwargs or {})

    def _runs_in_others(self) -> bool:
        """Whether a graph that Dynamo traces in a disabled block will run inside a block that quantizes.

        The mode of that block sees the calls of the graph again if a backend runs them as they are ("eager").
        """
        if self.state.recipe is not None or not torch.compiler.is_dynamo_compiling():
            return False
        around = [mode.state for mode in function_mode_stack() if isinstance(mode, AutocastMode)]
        return any(state.recipe is not None and not state.traced for state in around)

    def _call_with_body(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function that calls functions of the user, which Dynamo traces: each enters this mode for its calls."""
        if func.__name__ not in WITH_BODIES:
            return func(*args, **kwargs)
        if func is checkpoint and self.state.recipe is not None and self.state.recipe.delayed():
            break_at_checkpoint()
        if func.__name__ == REGION:  # torch would compile it once for the blocks of all its calls
            return _within(self.state, args[0])(*args[1:], **kwargs)
        if func.__name__ == "scan":  # Dynamo reads what its wrapper of the function has stored in it
            raise NotImplementedError(
                "torch.compile cannot carry autocast into scan, whose layers would run without it; use "
                "mx.quantize_(model, recipe) in place of autocast, or leave scan out"
            )
        with AutocastMode(self.state):  # Dynamo permits bodies to enter modes if the graph around them has
            pass
        bodies = [_within(self.state, a) if _is_function(a) else a for a in args]
        named = {k: _within(self.state, a) if _is_function(a) and k != "context_fn" else a for k, a in kwargs.items()}
        return func(*bodies, **named)


def _is_function(argument: Any) -> bool:
    return callable(argument) and not isinstance(argument, torch.Tensor)


def _within(state: AutocastState, body: Callable[..., Any]) -> Callable[..., Any]:
    """``body`` inside the ``autocast`` block of this state, for Dynamo."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with AutocastMode(state):
            return body(*args, **kwargs)

    return call


class autocast(ContextDecorator):  # noqa: N801  (as torch and TransformerEngine write it)
    """Inside the block, linear layers run quantized by ``recipe``: the forward pass, and later its backward pass.

    Quantizes ``nn.Linear``, ``nn.MultiheadAttention``, ``F.linear``, products with parameters and ``mxtensor.te``.
    Blocks nest, and the innermost applies; a block with ``enabled=False`` runs in high precision. The recipe (default
    ``MXFP8BlockScaling()``) may be edited: every forward pass reads it again. ``amax_reduction_group``: the process
    group that shares delayed scaling's amax. Applies to this thread and asyncio task. Also a decorator.

    Raises TypeError for an object that is not a recipe, ValueError for a recipe with impossible fields; nothing has
    changed then.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, *, amax_reduction_group: Any = None, **others: Any
    ) -> None:
        refuse_arguments("autocast", others)
        self.recipe = recipe_or_default("autocast", enabled, recipe)
        self.group = amax_reduction_group
        self._entered: list[Scope[AutocastState | None]] = []
        """The open blocks of all threads and tasks."""

    def __enter__(self) -> autocast:
        if self.recipe is not None:
            self.recipe.linear_recipe()  # impossible fields raise here, before anything changes
        state = AutocastState(self.recipe, self.group, traced=torch.compiler.is_dynamo_compiling())
        state.mode = AutocastMode(state)
        if torch.compiler.is_dynamo_compiling():  # Dynamo sees modes, but neither threads nor ContextVars
            scope: Scope[AutocastState | None] = Scope(state, None, 0)
        else:
            recompute.install(with_present_state)
            scope = _autocast_state.enter(state)
        state.mode.__enter__()
        self._entered.append(scope)
        return self

    def __exit__(self, *exception: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            state = self._entered.pop().value
            assert state is not None and state.mode is not None
            state.mode.__exit__(*exception)
            return
        state = _autocast_state.leave_one_of(self._entered).value
        assert state is not None and state.mode is not None
        remove_function_mode(state.mode)


# A block may be entered between two graphs. If Dynamo compiled these functions, they would skip the ContextVar.
run_uncompiled(autocast.__enter__, autocast.__exit__, AutocastMode.__torch_function__, autocast_state)
MXFP8BlockScaling()  # enters the default LinearRecipe in the table, because Dynamo cannot build one


def linear_recipe_of(state: AutocastState | None) -> LinearRecipe | None:
    """The current LinearRecipe of a state; None: do not quantize."""
    return None if state is None or state.recipe is None else state.recipe.linear_recipe()


def with_present_state(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that runs ``function`` under the present recipe (a copy of it), wherever it is called."""
    state = autocast_state()
    recipe, group = (None, None) if state is None else (copy.copy(state.recipe), state.group)

    def call(*args: Any, **kwargs: Any) -> Any:
        here = (
            autocast(recipe is not None, recipe, amax_reduction_group=group) if state else _autocast_state.block(None)
        )
        with here:
            return function(*args, **kwargs)

    return call
