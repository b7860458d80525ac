"""Progress bars of work that takes longer than a moment."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def with_progress(items: Collection[Item], description: str, unit: str) -> Iterable[Item]:
    """``items`` with a progress bar, if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=description, unit=unit)  # type: ignore[no-any-return]
