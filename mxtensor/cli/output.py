"""What the command prints: lines of text, or one JSON value with ``--json``; progress and notes on standard error.

Messages are in the words of the command: the package names the arguments of its Python functions (``overwrite=True``),
and the command has an option for most of them (``--overwrite``). Libraries that it calls are quiet.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from ..core.explain import text_table

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
    print(json.dumps(finite(fields), indent=2) if arguments.json else visible(text))
    return DONE


CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}
CONTROLS |= {i: f"\\u{i:04x}" for i in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029)}
"""Characters that move the cursor, change colours or the order of letters, and how they are shown."""


def visible(text: str) -> str:
    """``text`` without control characters: a name in a file must not command the terminal."""
    return text.translate(CONTROLS)


@contextmanager
def any_letters() -> Iterator[None]:
    """Letters that the encoding of standard output does not have are printed as \\x.., as on standard error: a name of
    a file must not make an error of a command that is done."""
    stream: Any = sys.stdout
    errors = getattr(stream, "errors", None)
    if errors not in ("strict", "surrogateescape") or not hasattr(stream, "reconfigure"):
        yield
        return
    stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        stream.reconfigure(errors=errors)


def note(text: str) -> None:
    """Print a line to standard error, after all that was printed before; nothing if nobody reads that."""
    with suppress(OSError):
        if sys.stdout is not None:
            sys.stdout.flush()
    if sys.stderr is not None:  # print would take standard output
        with suppress(OSError):
            print(f"mxtensor: {visible(text)}", file=sys.stderr, flush=True)


def status(text: str) -> None:
    """Print what is being done, if a person waits for it."""
    if is_terminal():
        note(text)


def check_page(file: str) -> None:
    """Raise OSError that names the path if no file can be written there: before what is written is measured."""
    path = Path(file)
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
        line = in_options(" ".join(str(message).split()), options)
        if stream is not None:
            with suppress(OSError):
                print(f"mxtensor: warning: {visible(line)}", file=stream, flush=True)

    stream = sys.stderr  # which a library does not redirect
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; the first column is aligned to the left, the others to the right."""
    return text_table(header, [[visible(cell).replace("\n", "\\n") for cell in row] for row in rows], rule=False)


@contextmanager
def progress(total: int, description: str, unit: str) -> Iterator[Callable[[], object]]:
    """A function to call after each step, which moves a bar on standard error if tqdm is installed."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda: None
        return
    disable = None if sys.stderr is not None else True  # None: only on a terminal
    with tqdm(total=total, desc=description, unit=unit, leave=False, disable=disable) as bar:
        yield bar.update


# ---------------------------------------------------------------------------------------------- words of the command


VALUE = r"""(?P<value>True|False|None|'[^']*'|"[^"]*"|\d+)?"""


def in_options(text: str, options: Mapping[str, str]) -> str:
    """``text`` with ``name=value`` of Python as an option of the command. ``options``: name -> option."""
    if not options:
        return text
    names = "|".join(map(re.escape, sorted(options, key=len, reverse=True)))

    def option(found: re.Match[str]) -> str:
        flag, value = options[found["name"]], found["value"]
        if value == "False":
            return f"without {flag}"
        if value in (None, "True"):
            return flag
        return f"{flag} " + value.strip("\"'")

    return re.sub(rf"(?<![\w./=-])(?P<name>{names})={VALUE}(?![\w/])", option, text)


# ---------------------------------------------------------------------------------------------- libraries


def transformers_quietly() -> Any:
    """The module transformers, without its messages, its progress bars and the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a path on this machine is all that is read
    logging.getLogger("mxtensor").setLevel(logging.ERROR)  # the tables say the bits
    try:
        import transformers
    except ImportError as error:
        raise ImportError("this command needs transformers: pip install 'mxtensor[cli]'") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def library_output() -> Iterator[None]:
    """What a library prints goes to standard error if that is a terminal, and is dropped otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", category=UserWarning, module=r"mxtensor\.")
        target = sys.stderr if is_terminal() else io.StringIO()
        with redirect_stdout(target), redirect_stderr(target):
            yield
