"""What is compiled once a machine: files under ``~/.cache/mxtensor`` (``XDG_CACHE_HOME``)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


@cache
def _of_this_process() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="mxtensor-")


def _folder() -> Path:
    """Where a user has no home, a folder that goes with the process: nobody else can have put something there."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return Path(_of_this_process().name)


def cache_path(kind: str, key: object, suffix: str) -> Path:
    """Where what was made of ``key`` lies, a value whose repr says all that it depends on."""
    return _folder() / "mxtensor" / f"{kind}-{hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()}.{suffix}"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` at the end of the block: whole or not at all, whoever else writes it.

    Raises OSError where the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        yield built
        with built.open("r+b") as written:
            os.fsync(written.fileno())  # a machine that stops now must not leave a name without its bytes
        built.replace(path)
