"""What the command prints: lines of text, or one JSON value with ``--json``; and progress on standard error."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..core.text_table import text_table
from .spelling import in_options

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
"""Exit codes: all is done; a file, a tensor or a device is refused; wrong arguments; an interrupt."""


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


@contextmanager
def any_letters() -> Iterator[None]:
    """Letters that the encoding of standard output does not have are printed as \\x.., as on standard error: a name of
    a file must not make an error of a command that is done."""
    stream: Any = sys.stdout
    errors = getattr(stream, "errors", None)
    if errors != "strict" or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)


def note(text: str) -> None:
    """Print a line to standard error, after all that was printed before."""
    if sys.stdout is not None:
        sys.stdout.flush()
    print(f"mxtensor: {text}", file=sys.stderr, flush=True)


def status(text: str) -> None:
    """Print what is being done, if a person waits for it."""
    if is_terminal():
        note(text)


def check_page(path: Path) -> None:
    """Raise OSError that names the path if no file can be written there: before what is written is measured."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the name of a file")
    if path.exists() and not path.is_file():  # a device or a pipe
        return
    path = path.resolve()  # through links
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())


def message_of(error: BaseException) -> str:
    """The same; of an error of the system, its reason and the file, without its number."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename!r}"
    return one_line(error)


def is_terminal() -> bool:
    """Whether a person reads standard error, and not a file or a pipe."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def warnings_as_notes(options: Mapping[str, str]) -> Iterator[None]:
    """Warnings for the user are one line each. ``options``: as in ``in_options``."""

    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        print(f"mxtensor: warning: {in_options(' '.join(str(message).split()), options)}", file=stream, flush=True)

    stream = sys.stderr  # which a library does not redirect
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


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
