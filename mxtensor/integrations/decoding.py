"""``mx.compile_decoding``: compiled steps for ``generate`` on a CPU, where transformers compiles none."""

from __future__ import annotations

import copy
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any, TypeVar

import torch

from ..compile.cpu_graphs import CpuGraph, ReplacedError, backend, kind_of
from ..compile.cpu_recording import joined, same
from ..core.arguments import described
from ..core.compat_compile import compiled_alone, compiler_errors, exceeds_limit, traced_as_symbols
from ..core.progress import clock
from ..core.tracing import is_traced

ModelT = TypeVar("ModelT", bound=Any)
Step = Callable[[Callable[..., Any], Mapping[str, Any]], Any]
COUNT = r".*\.cumulative_length_int$"
"""What Dynamo calls the count of tokens, in Python, of a static layer with a sliding window: each step changes it."""
MOST_STATES = 8
"""For so many different attributes of the modules, such as adapters in use, a model has compiled steps at a time."""
LEFT_OUT = "_modules", "_previous_max_cache_length"
"""The attribute of a module with its modules, which are listed by themselves, and one that ``generate`` writes for its
next call: it changes with each larger cache, and no step reads it."""
CONSTANTS = int, float, str, bytes, type(None), torch.dtype, torch.device


def compile_decoding(model: ModelT) -> ModelT:
    """Have ``model.generate`` compile its steps of one token on a CPU, in place; returns ``model``.

    ``model``: a model of transformers, or one of peft around it. The steps need a static cache, which ``generate``
    makes, in one size for all calls::

        mx.compile_decoding(model)
        model.generate(**inputs, cache_implementation="static", max_cache_len=1024)

    The first batch size and size of the cache have a graph, the second ones a graph for any. Models with windows have
    two, for steps before and after the windows are full. A graph takes torch some ten seconds at its first step, and
    minutes on a busy processor; a clock says so on standard error. Prompts, the first call with each cache, and steps
    with other caches stay eager; so do steps that torch cannot compile, with a UserWarning. Threads may share a model:
    their steps take turns. On a GPU transformers compiles the steps of a static cache by itself; this changes nothing
    there.

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

    ``own``: a forward that the model had as an attribute; None is that of its class. Steps of several threads wait for
    each other: they share the memory of recordings.
    """

    def __init__(self, model: Any, own: Callable[..., Any] | None = None) -> None:
        self.model, self.own = model, own
        self._lock = threading.RLock()
        self._step_of: weakref.WeakKeyDictionary[Any, Step | None] = weakref.WeakKeyDictionary()
        self._says = (
            f"compile_decoding: torch compiles the steps of {type(model).__name__}, once for each kind of cache; this "
            "takes some ten seconds, and minutes on a busy processor"
        )
        self._forget()

    def _forget(self) -> None:
        """Forget the compiled steps; the next one is compiled."""
        self.graphs: list[CpuGraph] = []
        self._steps: list[tuple[list[Any], Step]] = []  # for the attributes beside it
        self._modules: tuple[list[dict[str, Any]], list[Any]] = ([], [])
        self._names: list[str] = []
        for cache in list(self._step_of):
            self._step_of[cache] = None  # that of the attributes of the next step

    def _chosen_step(self) -> Step:
        """The step that was compiled for the attributes of now, or a new one."""
        attributes = attributes_of(self.model)
        for known, step in self._steps:
            if known == attributes:
                return step
        if len(self._steps) == MOST_STATES:
            self._forget()
        skip = torch.compiler.skip_guard_on_all_nn_modules_unsafe
        step = compiled_alone(_step, backend=backend(self.graphs, self._says), options={"guard_filter_fn": skip})
        self._steps.append((attributes, step))
        return step

    def _give_up(self, step: Step, cache: Any, error: Exception) -> None:
        """The steps with this cache stay eager, and if torch can compile none, all those with these attributes."""
        self._step_of[cache] = _step
        name, why = type(self.model).__name__, next(iter(str(error).splitlines()), type(error).__name__)
        if exceeds_limit(error):
            warnings.warn(
                f"compile_decoding: {name} has as many graphs as torch.compile allows; steps of more batch sizes and "
                f"sizes of the cache stay eager. Give all calls of generate one max_cache_len, or raise the "
                f"limit ({why})",
                stacklevel=5,
            )
            return
        self._steps = [(attributes, _step if known is step else known) for attributes, known in self._steps]
        warnings.warn(
            f"compile_decoding: torch cannot compile a step of {name}; its steps stay eager ({why})", stacklevel=5
        )

    @property
    def __signature__(self) -> inspect.Signature:
        """``generate`` reads which arguments a model takes."""
        return inspect.signature(self._eager())

    def _eager(self) -> Callable[..., Any]:
        return self.own or type(self.model).forward.__get__(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = self._eager()
        if is_traced(kwargs.get("input_ids")):
            return eager(*args, **kwargs)
        cache = _fixed_cache(kwargs)
        if cache is None or args or torch.is_grad_enabled():
            return eager(*args, **kwargs)
        with self._lock:
            if _is_step(kwargs) and cache in self._step_of:
                return self._compiled(eager, cache, kwargs)
            self._step_of[cache] = None  # a prompt, also one of a single token
        return eager(*args, **kwargs)

    def _compiled(self, eager: Callable[..., Any], cache: Any, kwargs: dict[str, Any]) -> Any:
        modules, found = self._modules
        if not same(joined(map(dict.values, modules)), found):
            self._forget()
        if not self._modules[0]:
            dicts = _dicts(self.model, "_modules")
            self._modules, self._names = (dicts, joined(map(dict.values, dicts))), self._parameter_names()
        chosen = self._step_of[cache]
        step = self._chosen_step() if chosen is None else chosen
        self._step_of[cache] = step
        try:
            if chosen:
                return step(eager, kwargs)
            with traced_as_symbols(COUNT), clock(self._says):  # torch may compile here, and later for windows
                return step(eager, kwargs)
        except (KeyError, AttributeError):
            if self._parameter_names() == self._names:  # otherwise the compiled step misses one
                raise
        except ReplacedError:
            pass
        except compiler_errors() as error:  # before the step has changed anything
            self._give_up(step, cache, error)
            return eager(**kwargs)
        self._forget()
        return self._compiled(eager, cache, kwargs)

    def _parameter_names(self) -> list[str]:
        return joined(_dicts(self.model, "_parameters"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoding:
        return Decoding(copy.deepcopy(self.model, memo), copy.deepcopy(self.own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, (self.model, self.own)


def attributes_of(model: torch.nn.Module) -> list[Any]:
    """What the code of a model reads beside modules and values: kinds of tensors, adapters in use, hooks, the config.

    To be compared by ``==`` with those of another time. Numbers and names are compared by value, also in containers and
    in configs of transformers; tensors by what a compiled graph takes to be the same; other objects by identity.
    """
    from transformers import PreTrainedConfig

    seen: set[int] = set()  # ids of containers: a config belongs to many modules, and a list may have itself

    def frozen(value: Any) -> Any:
        """A copy, which does not change when the value does."""
        if isinstance(value, CONSTANTS):
            return value
        if isinstance(value, torch.Tensor):
            return kind_of(value)
        if isinstance(value, MethodType):  # a new object each time
            return frozen(value.__func__), id(value.__self__), value.__self__
        items: Collection[tuple[Any, Any]]
        if isinstance(value, (dict, PreTrainedConfig)):
            items = (value if isinstance(value, dict) else vars(value)).items()
        elif isinstance(value, (list, tuple, set, frozenset)):
            items = list(enumerate(value))
        else:
            return id(value), value  # equal for the same object only: == is not asked where ids differ
        if not items or id(value) in seen:
            return type(value)
        seen.add(id(value))
        return type(value), [(name, frozen(each)) for name, each in items]

    found: list[Any] = []
    for module in model.modules():
        found.append(type(module))
        found += [(name, frozen(value)) for name, value in vars(module).items() if name not in LEFT_OUT]
    return found


def _dicts(model: Any, kind: str) -> list[dict[str, Any]]:
    """The dicts of a ``kind`` of all modules, but for empty ones: little of them is in the cache before a step."""
    return [found for module in model.modules() if (found := getattr(module, kind))]


def _is_step(given: Mapping[str, Any]) -> bool:
    """Whether these arguments decode one token of each sequence on a CPU."""
    ids = given["decoder_input_ids"] if given.get("decoder_input_ids") is not None else given.get("input_ids")
    return ids is not None and bool(ids.shape[1] == 1) and bool(ids.device.type == "cpu")


def _fixed_cache(given: Mapping[str, Any]) -> Any:
    """The cache among these arguments if its tensors have a fixed size, else None."""
    from transformers import DynamicCache, EncoderDecoderCache

    cache = given["cache_params"] if "cache_params" in given else given.get("past_key_values")  # of state spaces
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return cache if getattr(own, "is_compileable", False) and type(own) is not DynamicCache else None
