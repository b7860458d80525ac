"""Where a checkpoint is written: a folder beside the destination, whose content is moved to it at the end.

The destination is whole or absent: an error or an interrupt removes what was being written.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

Result = TypeVar("Result")


class Destination:
    """A context manager with a hidden folder for what is being written.

    Raises FileExistsError if ``path`` exists and is no empty folder, unless ``overwrite``, and for a folder instead of
    a file.
    """

    is_file = True
    """Whether the destination is one file."""

    def __init__(self, path: str | Path, overwrite: bool = False) -> None:
        self.path = Path(path)
        empty = self.path.is_dir() and not any(self.path.iterdir()) and not self.is_file
        if self.path.exists() and not empty and not overwrite:
            raise FileExistsError(f"{self.path} exists; choose another destination, or pass overwrite=True")
        if self.is_file and self.path.is_dir():
            raise FileExistsError(f"{self.path} is a folder; pass the name of a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".partial", dir=self.path.parent))

    def told(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """``call(*arguments)``, whose OSError names the destination: that of a full disk names no file."""
        try:
            return call(*arguments)
        except OSError as error:
            raise OSError(f"{self.path} cannot be written: {error.strerror or error}") from error

    def move(self) -> None:
        """Put the folder in the place of the destination; what was there is removed afterwards."""
        os.chmod(self.folder, 0o755)  # mkdtemp makes it private
        old = self.folder.with_suffix(".old")
        if self.path.exists():
            os.replace(self.path, old)
        try:
            os.replace(self.folder, self.path)
        except BaseException:
            if old.exists():
                os.replace(old, self.path)
            raise
        if old.exists():
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()

    def move_file(self, name: str) -> None:
        """Put one file of the folder in the place of the destination."""
        os.replace(self.folder / name, self.path)
        shutil.rmtree(self.folder)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        if self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
