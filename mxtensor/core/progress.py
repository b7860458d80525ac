"""Progress bars of work that takes longer than a moment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def with_progress(items: Iterable[Item], description: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """``items`` with a progress bar, if tqdm is installed. ``total``: their number, if they have no length."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=description, unit=unit, total=total)  # type: ignore[no-any-return]
