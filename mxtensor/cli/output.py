"""What the command prints: lines of text, or one JSON value with ``--json``; and progress on standard error."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..core.text_table import text_table

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all is done; a file, a tensor or a device is refused; a wrong call; an interrupt."""


def finite(value: Any) -> Any:
    """The value with None for every number that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(arguments: argparse.Namespace, text: str, fields: Any) -> int:
    """Print the text, or the fields as JSON, and return the exit code of a call that is done."""
    print(json.dumps(finite(fields), indent=2) if arguments.json else text)
    return DONE


def note(text: str) -> None:
    """Print a line to standard error."""
    print(f"mxtensor: {text}", file=sys.stderr, flush=True)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; the first column is aligned to the left, the others to the right."""
    return text_table(header, rows, rule=False)


@contextmanager
def progress(total: int, description: str, unit: str) -> Iterator[Callable[[], object]]:
    """A function to call after each step, which moves a bar on standard error if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc=description, unit=unit, leave=False, disable=None) as bar:  # None: only on a terminal
        yield bar.update
