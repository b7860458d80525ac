"""Hooks into modules of torch that are slow to import: installed when torch itself has imported them.

``__tensor_flatten__`` runs what is pending: torch's compiler calls it for each tensor of a graph before it compiles it.
``after_import`` is for modules of other libraries, which never call this package: it runs when they are imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from threading import get_ident
from types import ModuleType
from typing import Any

PENDING: dict[str, list[Callable[[], object]]] = {}
"""Module -> what to call once it is imported. Empty when all is installed."""


def when_imported(module: str, install: Callable[[], object]) -> None:
    """Call ``install`` once at the next ``install_pending`` after ``module`` was imported."""
    PENDING.setdefault(module, []).append(install)


def install_pending() -> None:
    """Call what waits for modules that are imported by now."""
    for module in [name for name in PENDING if name in sys.modules]:
        for install in PENDING.pop(module, ()):
            install()


class _Announcing(Loader):
    """A loader that calls something after a module has run; for the rest, the module's loader."""

    def __init__(self, loader: Loader, waiting: _Waiting) -> None:
        self.loader, self.waiting = loader, waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.waiting in sys.meta_path:
            sys.meta_path.remove(self.waiting)
            self.waiting.call()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class _Waiting(MetaPathFinder):
    """A finder of one module until it has run: it finds what the other finders find, and adds the call.

    Others may look for the module without importing it, as ``importlib.util.find_spec`` does.
    """

    def __init__(self, module: str, call: Callable[[], object]) -> None:
        self.module, self.call = module, call
        self._asking: set[int] = set()
        """The threads that ask the other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        thread = get_ident()
        if name != self.module or thread in self._asking:
            return None
        self._asking.add(thread)
        try:
            spec = find_spec(name)
        finally:
            self._asking.discard(thread)
        if spec is not None and spec.loader is not None:
            spec.loader = _Announcing(spec.loader, self)
        return spec


def after_import(module: str, call: Callable[[], object]) -> None:
    """Call ``call`` once: now if ``module`` is imported, otherwise right after it is."""
    if module in sys.modules:
        call()
    else:
        sys.meta_path.insert(0, _Waiting(module, call))
