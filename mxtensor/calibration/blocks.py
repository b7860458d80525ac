"""Stream: the inputs of one block of a model after another, so that only one block's statistics are in memory.

The blocks are the entries of the ModuleList with the most layers to calibrate, such as ``model.layers``. The model runs
once; the inputs of its first block are recorded, and what each other block gets besides them, such as the positions.
From then on a block runs on the outputs of the one before. A model without such a list is one block.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.caches import Copies
from .in_use import Call, as_in_use, call_of, copied, first_of, fresh, with_first, with_fresh_caches

_log = logging.getLogger("mxtensor")


class Stream:
    """The blocks of a model, and the inputs of the next one to run.

    ``states`` are the inputs of the block that runs next, one for each batch; ``without_input`` are the ``layers`` that
    get no row of input from any batch.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], layers: Collection[nn.Module]) -> None:
        calls = [call_of(batch) for batch in batches]
        self._model, self._blocks, self._batches = model, _blocks(model, set(layers)), calls
        self.without_input = list(layers)
        with as_in_use(model), self._noting_inputs(layers):
            recorded = self._record(model, calls)
        if recorded is None:  # the blocks do not follow each other
            self._blocks, recorded = [model], [calls]
        self._calls = recorded
        self.states = [first_of(*call) for call in recorded[0]]

    def __len__(self) -> int:
        return len(self._blocks)

    def block(self, index: int) -> nn.Module:
        """One of the blocks, in their order."""
        return self._blocks[index]

    def is_shared(self, *modules: nn.Module) -> bool:
        """Whether a parameter of these modules has other places in the model, or they are in several blocks."""
        wanted = {id(parameter) for module in modules for parameter in module.parameters()}
        places: list[int] = []
        for module in self._model.modules():
            places += [id(p) for p in module._parameters.values() if id(p) in wanted]
        blocks = [id(p) for block in self._blocks for p in block.parameters() if id(p) in wanted]
        return len(places) > len(wanted) or len(blocks) > len(wanted)

    def run(self, index: int, batch: int, state: Any, gradient: bool = False) -> Any:
        """The output of a block for this input from a batch: the input of the next block.

        If the model is the only block: all that it returns. ``gradient``: with a graph for autograd.
        """
        block = self._blocks[index]
        call = fresh(with_first(self._calls[index][batch], state))
        with torch.set_grad_enabled(gradient), as_in_use(block):
            out = block(*call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) and len(self) > 1 else out

    def finish(self, batch: int, state: Tensor, gradient: bool = True) -> Any:
        """The output of the model for this output of the last of several blocks.

        ``gradient``: with a graph for autograd, from ``state`` on.
        """

        def replaced(module: nn.Module, args: Any, out: Any) -> Any:
            return (end, *out[1:]) if isinstance(out, tuple) else end

        end, call = state.clone(), fresh(self._batches[batch])
        hook = self._blocks[-1].register_forward_hook(replaced)
        with torch.set_grad_enabled(gradient), as_in_use(self._model), hook:
            return self._model(*call.args, **call.kwargs)

    @contextmanager
    def _noting_inputs(self, layers: Collection[nn.Module]) -> Iterator[None]:
        """Take the layers that get an input from ``without_input``."""
        hooks: dict[nn.Module, Any] = {}

        def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = first_of(args, kwargs)
            if isinstance(x, Tensor) and x.numel():
                self.without_input.remove(layer)
                hooks[layer].remove()

        with ExitStack() as stack:
            for layer in layers:
                hooks[layer] = layer.register_forward_pre_hook(note, with_kwargs=True)
                stack.callback(hooks[layer].remove)
            yield

    def _record(self, model: nn.Module, calls: list[Call]) -> list[list[Call]] | None:
        """The calls of each block. None if they do not run once each, in their order, on each other's outputs."""
        recorded: list[list[Call]] = [[] for _ in self._blocks]
        order: list[int] = []
        outputs: list[Any] = []
        caches: Copies = {}

        def before(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                call = Call(args, kwargs)
                order.append(index if not index or first_of(*call) is outputs[-1] else -1)
                # caches as the first block finds them: each block adds to a part of its own
                call = with_fresh_caches(call, caches)
                recorded[index].append(with_first(call, None if index else copied(first_of(*call))))

            return hook

        def after(module: nn.Module, args: Any, out: Any) -> None:
            outputs[:] = [out[0] if isinstance(out, tuple) else out]

        follow = True
        with ExitStack() as hooks:
            for index, block in enumerate(self._blocks):
                hooks.enter_context(block.register_forward_pre_hook(before(index), with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(after))
            for call in calls:
                order.clear()
                outputs[:] = [None]
                caches.clear()
                call = fresh(call)
                with torch.no_grad():
                    model(*call.args, **call.kwargs)
                if follow and order != list(range(len(self._blocks))):
                    follow = False
                    hooks.close()  # the other batches run for the inputs of the layers alone
        return recorded if follow else None


def warn_of_layers_without_input(caller: str, fqns: Collection[str], total: int, consequence: str) -> None:
    """Warn of layers without an input, if there are any. ``consequence``: what happens to their weights."""
    if fqns:
        _log.warning(
            f"{caller}: {len(fqns)} of {total} layers saw no input, and {consequence}: {_patterns(fqns)}; pass data "
            "that reaches them (images for a vision tower, more tokens for experts), or leave them out by filter_fn. A "
            "layer whose weight the model reads without calling the layer, such as out_proj of nn.MultiheadAttention, "
            "sees none"
        )


def warn_of_layers_without_gradient(fqns: Collection[str], total: int) -> None:
    """Warn of layers that no gradient of the output reaches, if there are any."""
    if fqns:
        _log.warning(
            f"plan: no gradient of the output reaches {len(fqns)} of {total} layers, whose errors are estimated from "
            f"their values: {_patterns(fqns)}; they run before the blocks, or inside torch.no_grad(), or before a step "
            "that rounds"
        )


def _patterns(fqns: Collection[str]) -> str:
    """Names of parameters, those of all layers of a kind as one."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", fqn) for fqn in fqns))


def _blocks(model: nn.Module, layers: set[nn.Module]) -> list[nn.Module]:
    best, most = [model], 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and None not in list(module):
            count = sum(layer in layers for block in module for layer in block.modules())
            if count > most:
                best, most = list(module), count
    return best
