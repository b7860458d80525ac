"""Stream: the inputs of one block of a model after another, so that only one block's statistics are in memory.

The blocks are the entries of the ModuleList with the most layers to calibrate, such as ``model.layers``. The model runs
once; the inputs of its first block are recorded, and what each other block gets besides them, such as the positions.
From then on a block runs on the outputs of the one before. A model without such a list is one block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Call(NamedTuple):
    """The arguments of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call_of(batch: Any) -> Call:
    """A batch of ``data`` as the arguments of the model: a dict by name, a tuple or a list one by one, else the one."""
    if isinstance(batch, Mapping):
        return Call((), dict(batch))
    return Call(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})


class Stream:
    """The blocks of a model, and the inputs of the next one to run.

    ``states`` are the inputs of the block that runs next, one for each batch. Raises ValueError if ``batches`` is
    empty.
    """

    def __init__(self, model: nn.Module, batches: Iterable[Any], layers: Collection[nn.Module]) -> None:
        calls = [call_of(batch) for batch in batches]
        if not calls:
            raise ValueError("calibrate: data is empty; pass batches, such as [input_ids, ...] or [{'input_ids': ids}]")
        self._model, self._blocks, self._batches = model, _blocks(model, set(layers)), calls
        with _as_in_use(model):
            recorded = self._record(model, calls)
        if recorded is None:  # the blocks do not follow each other
            self._blocks, recorded = [model], [calls]
        self._calls = recorded
        self.states = [_state(call) for call in recorded[0]]

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

        ``gradient``: with a graph for autograd.
        """
        block = self._blocks[index]
        call = _with_state(self._calls[index][batch], state)
        with torch.set_grad_enabled(gradient), _as_in_use(block):
            out = block(*call.args, **call.kwargs)
        return out[0] if isinstance(out, tuple) else out

    def finish(self, batch: int, state: Tensor, gradient: bool = True) -> Any:
        """The output of the model for this output of the last of several blocks.

        ``gradient``: with a graph for autograd, from ``state`` on.
        """

        def replaced(module: nn.Module, args: Any, out: Any) -> Any:
            return (state, *out[1:]) if isinstance(out, tuple) else state

        call = self._batches[batch]
        hook = self._blocks[-1].register_forward_hook(replaced)
        with torch.set_grad_enabled(gradient), _as_in_use(self._model), hook:
            return self._model(*call.args, **call.kwargs)

    def _record(self, model: nn.Module, calls: list[Call]) -> list[list[Call]] | None:
        """The calls of each block. None if they do not run once each, in their order, on each other's outputs."""
        recorded: list[list[Call]] = [[] for _ in self._blocks]
        order: list[int] = []
        outputs: list[Any] = []

        def before(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                call = Call(args, kwargs)
                order.append(index if not index or _state(call) is outputs[-1] else -1)
                recorded[index].append(call if not index else _with_state(call, None))

            return hook

        def after(module: nn.Module, args: Any, out: Any) -> None:
            outputs[:] = [out[0] if isinstance(out, tuple) else out]

        with ExitStack() as hooks:
            for index, block in enumerate(self._blocks):
                hooks.enter_context(block.register_forward_pre_hook(before(index), with_kwargs=True))
                hooks.enter_context(block.register_forward_hook(after))
            for call in calls:
                order.clear()
                with torch.no_grad():
                    model(*call.args, **call.kwargs)
                if order != list(range(len(self._blocks))):
                    return None
        return recorded


def _blocks(model: nn.Module, layers: set[nn.Module]) -> list[nn.Module]:
    best, most = [model], 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            count = sum(layer in layers for block in module for layer in block.modules())
            if count > most:
                best, most = list(module), count
    return best


def _state(call: Call) -> Any:
    return call.args[0] if call.args else next(iter(call.kwargs.values()), None)


def _with_state(call: Call, state: Any) -> Call:
    if call.args:
        return Call((state, *call.args[1:]), call.kwargs)
    return Call((), call.kwargs | dict.fromkeys(list(call.kwargs)[:1], state))


@contextmanager
def _as_in_use(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, and without a cache of keys and values, which a block would fill at each call."""
    training = {m: m.training for m in module.modules()}
    config = getattr(module, "config", None)
    cached = getattr(config, "use_cache", None)
    try:
        module.eval()
        if cached:
            config.use_cache = False  # type: ignore[union-attr]
        yield
    finally:
        for m, was in training.items():
            m.training = was
        if cached:
            config.use_cache = cached  # type: ignore[union-attr]
