"""Progress of work that takes longer than a moment: a bar, or a clock where there are no steps to count."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Item = TypeVar("Item")
SECONDS = 1.0
"""Work that takes no longer shows nothing."""
_log = logging.getLogger("mxtensor")
_shown: ContextVar[bool] = ContextVar("_shown", default=True)
_clock_runs: ContextVar[bool] = ContextVar("_clock_runs", default=False)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Whether ``with_progress`` and ``clock`` show something inside this block: the command shows no bars in files and
    pipes."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


def with_progress(items: Iterable[Item], description: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """``items`` with a progress bar, if tqdm is installed and they take more than a second. ``total``: their number, if
    they have no length."""
    if not _shown.get():
        return items
    return _with_bar(items, description, unit, len(items) if total is None and isinstance(items, Sized) else total)


def _with_bar(items: Iterable[Item], description: str, unit: str, total: int | None) -> Iterator[Item]:
    """tqdm is imported when the bar appears: quick work does not wait for it."""
    begin, bar = time.monotonic(), None
    try:
        for done, item in enumerate(items):
            yield item
            if bar is not None:
                bar.update()
            elif time.monotonic() - begin > SECONDS and total != done + 1:
                bar = _bar(desc=description, unit=unit, total=total, initial=done + 1)
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def clock(description: str) -> Iterator[None]:
    """Show ``description`` and the time since the block was entered, if it takes more than a second; once if blocks are
    nested. Without tqdm, the logger ``mxtensor`` warns with the description."""
    if not _shown.get() or _clock_runs.get():
        yield
        return
    token, end = _clock_runs.set(True), threading.Event()
    thread = threading.Thread(target=_show_clock, args=(description, time.monotonic(), end), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        _clock_runs.reset(token)


def _show_clock(description: str, begin: float, end: threading.Event) -> None:
    if end.wait(SECONDS):
        return
    bar = _bar(desc=description, bar_format="{desc}: {elapsed}")
    if bar is None:
        _log.warning(description)
        end.wait()
        return
    bar.start_t -= time.monotonic() - begin
    live = sys.stderr is not None and sys.stderr.isatty()  # in a file, each refresh is a line
    while not end.wait(1.0 if live else None):
        bar.refresh()
    bar.close()


def _bar(**options: Any) -> Any:
    """A bar of tqdm; None if it is not installed, or if there is no standard error."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return None
    return None if sys.stderr is None else tqdm(**options)
