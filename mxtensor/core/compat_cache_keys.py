"""The keys of torch's caches of compiled graphs on disk: what a key must know of tensors inside other tensors.

Two caches have such keys. AOTAutograd's key pickles the graph of Dynamo and its inputs, which may be subclasses;
Inductor's key pickles the graph that is left when AOTAutograd has taken them apart. As in ``compat_hooks``: nothing is
changed when this file is imported, and each function says why no public API does it. Seen in torch 2.11 and 2.13.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PACKAGE = __name__.partition(".")[0].encode()
"""What is in the pickled graph of each program with an op, a class or a function of the package."""


def hook_cache_keys(state: Callable[[], Any]) -> bool:
    """Let the keys of both caches tell graphs apart by all that this package changes. True if torch has the places.

    - Tensors inside a subclass are part of the key, at any depth. A ``DTensor`` hashes its sharding only, so that
      torch took a graph for one over plain tensors also for one over quantized tensors, and wrote codes as values.
    - A graph that names this package has ``state()`` in its key: the version of the package and its settings, by which
      ops are lowered.
    - torch 2.11 does not ask ``_stable_hash_for_caching``, which is the public way to be in the key; here it does.

    The key of a graph without this package stays what it is, unless subclasses of others are inside of subclasses.
    Missing: the cache of AOTAutograd is not used, so that no program finds a wrong graph.
    """
    module = sys.modules["torch._functorch._aot_autograd.autograd_cache"]
    of_aot: Any = getattr(module, "AOTAutogradCachePickler", None)
    if not isinstance(of_aot, type) or not issubclass(of_aot, pickle.Pickler):
        _use_no_cache()
        return False
    usual = getattr(of_aot, "reducer_override", None)

    def reducer_override(self: Any, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or type(obj) is Tensor:
            return NotImplemented if usual is None else usual(self, obj)
        return _key_of(obj, NotImplemented if usual is None else usual(self, obj))

    of_aot.reducer_override = reducer_override  # type: ignore[method-assign]
    kind: Any
    for kind in of_aot.__mro__:  # the pickler of Inductor's keys, of which AOTAutograd's is a subclass
        if "dumps" in vars(kind):
            kind.dumps = _with_state(vars(kind)["dumps"], state)
            return True
    _use_no_cache()
    return False


def _key_of(t: Tensor, usual: Any) -> Any:
    """What is pickled of a subclass: torch's own key, and the wrapper subclasses inside, each of which is reduced in
    turn. NotImplemented: torch pickles its attributes, among which are the tensors inside."""
    if usual is NotImplemented and hasattr(t, "_stable_hash_for_caching"):
        usual = str, (t._stable_hash_for_caching(),)
    if usual is NotImplemented or not is_traceable_wrapper_subclass(t):
        return usual
    names, _ = t.__tensor_flatten__()
    inside = [(name, getattr(t, name)) for name in names]
    wrappers = [(name, inner) for name, inner in inside if is_traceable_wrapper_subclass(inner)]
    if not wrappers:
        return usual
    function, arguments, *_ = usual
    return _key, (type(t).__qualname__, getattr(function, "__name__", ""), arguments, wrappers)


def _key(*components: Any) -> Any:
    """The name under which the parts of a key are pickled; no key is ever unpickled."""
    return components


def _with_state(dumps: Callable[[Any, Any], bytes], state: Callable[[], Any]) -> Callable[[Any, Any], bytes]:
    @wraps(dumps)
    def dumped(self: Any, obj: Any) -> bytes:
        pickled = dumps(self, obj)
        return pickled + repr(state()).encode() if PACKAGE in pickled else pickled

    return dumped


def _use_no_cache() -> None:
    settings = torch._functorch.config
    if hasattr(settings, "enable_autograd_cache"):
        settings.enable_autograd_cache = False
