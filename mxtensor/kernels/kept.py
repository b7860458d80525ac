"""What is compiled once a machine: files under ``~/.cache/mxtensor`` (``XDG_CACHE_HOME``)."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def kept_path(kind: str, key: object, suffix: str) -> Path:
    """Where what was made of ``key`` lies, a value whose repr says all that it depends on."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "mxtensor" / f"{kind}-{hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()}.{suffix}"


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes ``path`` at the end of the block: whole or not at all, whoever else writes it.

    Raises OSError where the folder cannot be written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        yield built
        built.replace(path)
