"""Hooks into modules of torch that are slow to import: installed when torch itself has imported them.

``__tensor_flatten__`` runs what is pending: torch's compiler calls it for each tensor of a graph before it compiles it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

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
