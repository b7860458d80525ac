"""Where a checkpoint is written: a folder beside the destination, whose content is moved to it at the end.

The destination is complete or does not exist: an error or an interrupt removes what was being written. What a killed
process has left is removed by the next one that writes there: a folder that no process has locked.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .reading import ENDINGS

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

TEMPLATES = "additional_chat_templates"
PARTIAL, OLD = ".partial", ".old"
"""Endings of the folder that is being written, and of what it replaces."""
NEW = 60.0


def check_separate(destination: str | Path, *sources: str | Path) -> None:
    """Raise ValueError if the destination is a source, is inside one or contains one. Links are followed."""
    target = Path(destination).resolve()
    for source in sources:
        place = Path(source).resolve()
        inside, around = _holds(place, target), _holds(target, place)
        if inside or around:
            how = "is" if inside and around else "is inside" if inside else "contains"
            raise ValueError(f"convert: {destination} {how} the source {source}; choose another destination")


def _holds(outer: Path, inner: Path) -> bool:
    """Whether ``inner`` is ``outer`` or is inside it, also by another name: file systems may ignore case."""
    there = outer.exists()
    return any(p == outer or (there and p.exists() and p.samefile(outer)) for p in (inner, *inner.parents))


def folders_of_model(folder: Path) -> list[Path]:
    """The subfolders that belong to a model: what ``modules.json`` of sentence-transformers lists, and transformers'
    chat templates. Others, such as ``onnx``, hold its weights in another form."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        names = [module["path"] for module in modules]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        names = []
    names = [name for name in names if isinstance(name, str) and name not in ("", "..") and Path(name).name == name]
    return [folder / name for name in dict.fromkeys([*names, TEMPLATES]) if (folder / name).is_dir()]


def _partial(path: Path) -> re.Pattern[str]:
    """The names of folders in which the destination ``path`` is written, and of those that it has replaced."""
    return re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}({re.escape(PARTIAL)}|{re.escape(OLD)})")


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder; None if another process has it, or there are no locks."""
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_left_behind(path: Path) -> None:
    """Remove what processes that were killed have left of a destination: folders that no process has locked.

    An empty one may be that of a process that locks it next; it stays for ``NEW`` seconds. What was replaced stays if
    nothing is in its place.
    """
    for place in (path.parent, path):
        with suppress(OSError):
            for entry in place.iterdir() if place.is_dir() else ():
                found = _partial(path).fullmatch(entry.name)
                if found is None or not entry.is_dir() or entry.is_symlink() or (found[1] == OLD and not path.exists()):
                    continue
                new = time.time() - entry.stat().st_mtime < NEW and not any(entry.iterdir())
                lock = None if new else _lock(entry)
                if lock is not None:
                    shutil.rmtree(entry, ignore_errors=True)
                    os.close(lock)


def _in_use(folder: Path) -> bool:
    """Whether a folder cannot be replaced: the working directory is in it, or a file system is mounted there."""
    try:
        return os.path.ismount(folder) or _holds(folder, Path.cwd())
    except FileNotFoundError:  # the working directory was removed
        return False


class Destination:
    """A context manager with a hidden folder for what is being written.

    An empty folder is filled, links are followed. With ``overwrite``, the file or the folder of a checkpoint is
    replaced. Raises FileExistsError for anything else that exists at ``path``.
    """

    is_file = True
    """Whether the destination is one file."""

    def __init__(self, path: str | Path, overwrite: bool = False) -> None:
        self.given, self.path, self.overwrite = Path(path), Path(path).resolve(), overwrite
        remove_left_behind(self.path)
        self.fills = not self.is_file and self.path.is_dir() and not any(self.path.iterdir())
        """Whether the destination is an empty folder, which stays the same folder."""
        self._check()
        beside = self.path if self.fills else self.path.parent
        beside.mkdir(parents=True, exist_ok=True)
        while True:
            self.folder = beside / f".{self.path.name}.{secrets.token_hex(4)}{PARTIAL}"
            try:
                self.folder.mkdir()  # with the permissions of the umask
            except FileExistsError:
                continue
            break
        self._lock = _lock(self.folder)
        """It ends with this process; None where the file system has no locks."""

    def _check(self) -> None:
        """Raise FileExistsError if something is there that must not be replaced."""
        if self.fills or not self.path.exists():
            return
        if not (self.path.is_dir() or self.path.is_file()):
            raise FileExistsError(f"{self.given} is a device, a pipe or a socket; choose another destination")
        if not self.overwrite:
            raise FileExistsError(f"{self.given} exists; choose another destination, or pass overwrite=True")
        if not self.path.is_dir():
            if self.path.suffix not in ENDINGS:
                raise FileExistsError(
                    f"{self.given} is a file and no checkpoint, and overwrite=True replaces only checkpoints; choose "
                    "another destination, or remove it yourself"
                )
            return
        if self.is_file:
            raise FileExistsError(f"{self.given} is a folder; pass the name of a file")
        inner = sorted(self.path.iterdir())
        known = [place for place in folders_of_model(self.path) if not any(entry.is_dir() for entry in place.iterdir())]
        folders = [entry.name for entry in inner if entry.is_dir() and entry not in known]
        if any(_partial(self.path).fullmatch(name) for name in folders):
            raise FileExistsError(f"{self.given} is being written by another process; choose another destination")
        if folders:
            raise FileExistsError(
                f"{self.given} holds the folder {folders[0]}, and overwrite=True replaces only folders without "
                "subfolders; choose another destination, or remove it yourself"
            )
        if inner and not any(entry.name == "config.json" or entry.suffix in ENDINGS for entry in inner):
            raise FileExistsError(
                f"{self.given} holds {inner[0].name} and no checkpoint, and overwrite=True replaces only checkpoints; "
                "choose another destination, or remove it yourself"
            )
        if _in_use(self.path):
            raise FileExistsError(
                f"{self.given} is the working directory or a mount point, which cannot be replaced; pass an empty "
                "folder or a new one"
            )

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """An OSError inside names the destination: that of a full disk names no file."""
        try:
            yield
        except OSError as error:
            raise OSError(f"{self.given} cannot be written: {error.strerror or error}") from error

    def move(self, file: str | None = None) -> None:
        """Put the folder, or one ``file`` of it, in the place of the destination; what was there is removed afterwards.

        Raises FileExistsError for what was put there meanwhile.
        """
        self._check()
        if file is not None:
            os.replace(self.folder / file, self.path)
            shutil.rmtree(self.folder)
            return
        if self.fills:
            self._fill()
            return
        old = self.folder.with_suffix(OLD)
        try:
            if self.path.exists():
                os.replace(self.path, old)
            os.replace(self.folder, self.path)
        except BaseException:
            if old.exists():
                os.replace(old, self.path)
            raise
        if old.exists():
            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()

    def _fill(self) -> None:
        """Move the content of the folder, which is in the destination, one floor up."""
        found = [entry.name for entry in self.path.iterdir() if entry != self.folder]
        if found:
            raise FileExistsError(f"{self.given} was empty, and holds {found[0]} now; choose another destination")
        moved: list[Path] = []
        try:
            for entry in sorted(self.folder.iterdir()):
                moved.append(self.path / entry.name)
                os.replace(entry, moved[-1])
        except BaseException:
            for place in moved:
                shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
            raise
        self.folder.rmdir()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
        except BaseException:  # an interrupt
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        if self._lock is not None:
            os.close(self._lock)
