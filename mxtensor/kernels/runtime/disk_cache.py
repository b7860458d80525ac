"""A cache on disk for compiled kernels: ``~/.cache/mxtensor``, or ``mxtensor`` in ``XDG_CACHE_HOME``."""

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
    """The cache folder of the user. A user without a home gets a temporary folder that is deleted with the process.

    Its name is new, so that no other user can have put a file there.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return Path(_of_this_process().name)


def cache_path(kind: str, key: object, suffix: str) -> Path:
    """The file for ``key``, a value whose repr includes everything that the file depends on."""
    return _folder() / "mxtensor" / f"{kind}-{hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()}.{suffix}"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path to write to, which is renamed to ``path`` at the end of the block: readers see all or nothing.

    Several processes may write the same path. Raises OSError if the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        yield built
        with built.open("r+b") as written:
            os.fsync(written.fileno())  # after a power failure a name must not exist without its bytes
        built.replace(path)
