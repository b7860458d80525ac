"""Progress bars of work that takes longer than a moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Item = TypeVar("Item")
_shown: ContextVar[bool] = ContextVar("_shown", default=True)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Whether ``with_progress`` shows bars inside this block: the command shows none in files and pipes."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


def with_progress(items: Iterable[Item], description: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """``items`` with a progress bar, if tqdm is installed. ``total``: their number, if they have no length."""
    if not _shown.get():
        return items
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=description, unit=unit, total=total)  # type: ignore[no-any-return]
