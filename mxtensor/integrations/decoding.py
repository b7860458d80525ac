"""``mx.compile_decoding``: compiled steps for ``generate`` on a CPU, where transformers compiles none."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ..compile.cpu_graphs import CpuGraph, ReplacedError, backend
from ..compile.cpu_recording import joined, same
from ..core.arguments import described
from ..core.compat_compile import compiled_alone
from .module_attributes import attributes_of

ModelT = TypeVar("ModelT", bound=Any)
MOST_STATES = 8
"""For so many different attributes of the modules, such as adapters in use, a model has compiled steps at a time."""


def compile_decoding(model: ModelT) -> ModelT:
    """Have ``model.generate`` compile its steps of one token on a CPU, in place; returns ``model``.

    ``model``: a model of transformers, or one of peft around it. The steps need a static cache, which ``generate``
    makes, in one size for all calls::

        mx.compile_decoding(model)
        model.generate(**inputs, cache_implementation="static", max_cache_len=1024)

    Each batch size and each size of the cache is one graph, which takes torch some ten seconds at its first step.
    Prompts, and steps with another cache, stay eager. On a GPU transformers compiles the steps of a static cache by
    itself; this changes nothing there.

    A graph belongs to this model as it is: torch does not check the properties of its modules before each step, which
    takes 2 of 12 ms for the 30 layers of SmolLM2. Steps are compiled again when a module was replaced, or a parameter
    by one of another kind, as ``quantize_`` and new adapters do. Attributes of modules, kinds of
    tensors and the config are compared at the first step after a prompt, and of another cache: ``set_adapter``,
    ``disable_adapters``, ``set_attn_implementation`` and ``.data`` of another dtype take effect there, and a state that
    comes back finds its graphs. Values of weights may change in place at any time.

    The calls of the compiled code are recorded and made again without Python (``compile/cpu_graphs.py``).

    Raises TypeError for a model without ``generate``.
    """
    if not callable(getattr(model, "generate", None)):
        raise TypeError(f"compile_decoding: {described(model)} has no generate; pass a model of transformers")
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model  # of peft
    before = vars(inner).get("forward")
    inner.forward = Decoding(inner, before.own if isinstance(before, Decoding) else before)
    return model


def _step(forward: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    return forward(**given)


class Decoding:
    """The ``forward`` of one model: compiled for steps of one token, otherwise the model's own.

    ``own``: a forward that the model had as an attribute; None is that of its class.
    """

    def __init__(self, model: Any, own: Callable[..., Any] | None = None) -> None:
        self.model, self.own = model, own
        self._forget()

    def _forget(self) -> None:
        """Forget the compiled steps; the next one is compiled."""
        self.graphs: list[CpuGraph] = []
        self._steps: list[tuple[list[Any], Callable[..., Any]]] = []  # for the attributes beside it
        self._step: Callable[..., Any] = _step
        self._modules: tuple[list[dict[str, Any]], list[Any]] = ([], [])
        self._names: list[str] = []
        self._expect_changes()

    def _expect_changes(self) -> None:
        """Compare the attributes of the modules before the next step."""
        self._cache: Callable[[], Any] = lambda: None  # that of the step before

    def _choose_step(self) -> None:
        """The next step is the one that was compiled for the attributes of now, or a new one."""
        attributes = attributes_of(self.model)
        found = [step for known, step in self._steps if known == attributes]
        if not found:
            if len(self._steps) == MOST_STATES:
                self._forget()
            skip = torch.compiler.skip_guard_on_all_nn_modules_unsafe
            found = [compiled_alone(_step, backend=backend(self.graphs), options={"guard_filter_fn": skip})]
            self._steps.append((attributes, found[0]))
        self._step = found[0]

    @property
    def __signature__(self) -> inspect.Signature:
        """``generate`` reads which arguments a model takes."""
        return inspect.signature(self._eager())

    def _eager(self) -> Callable[..., Any]:
        return self.own or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = self._eager()
        if torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        if args or torch.is_grad_enabled() or not _is_step(kwargs):
            self._expect_changes()
            return eager(*args, **kwargs)
        modules, found = self._modules
        if not same(joined(map(dict.values, modules)), found):
            self._forget()
        if self._cache() is not (cache := kwargs["past_key_values"]):
            self._choose_step()
            self._cache = weakref.ref(cache)
        if not self._modules[0]:
            dicts = _dicts(self.model, "_modules")
            self._modules, self._names = (dicts, joined(map(dict.values, dicts))), self._parameter_names()
        try:
            return self._step(eager, kwargs)
        except (KeyError, AttributeError):
            if self._parameter_names() == self._names:  # otherwise the compiled step misses one
                raise
        except ReplacedError:
            pass
        self._forget()
        return self(**kwargs)

    def _parameter_names(self) -> list[str]:
        return joined(_dicts(self.model, "_parameters"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoding:
        return Decoding(copy.deepcopy(self.model, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, (self.model, self.own)


def _dicts(model: Any, kind: str) -> list[dict[str, Any]]:
    """The dicts of a ``kind`` of all modules, but for empty ones: little of them is in the cache before a step."""
    return [found for module in model.modules() if (found := getattr(module, kind))]


def _is_step(given: Mapping[str, Any]) -> bool:
    """Whether these arguments decode one token of each sequence on a CPU, with a cache of tensors of fixed size."""
    from transformers import DynamicCache, EncoderDecoderCache

    ids = given["decoder_input_ids"] if given.get("decoder_input_ids") is not None else given.get("input_ids")
    if ids is None or ids.shape[1] != 1 or ids.device.type != "cpu":
        return False
    cache = given.get("past_key_values")
    if isinstance(cache, EncoderDecoderCache):
        cache = cache.self_attention_cache
    return bool(getattr(cache, "is_compileable", False)) and type(cache) is not DynamicCache
