"""A cache on disk for compiled kernels: ``~/.cache/mxtensor``, or ``mxtensor`` in ``XDG_CACHE_HOME``.

A process runs what it loads from here. So a folder or a file counts only if it belongs to this user and nobody else can
write it; what does not is left alone, and a temporary folder of this process takes its place. The name of a file ends
with a digest of its content, so that a file that was cut short is noticed before it is loaded, and built again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

_log = logging.getLogger("mxtensor")
BUILD = "build-"
"""The prefix of the folders in which files are written before they are renamed."""
_LEFT_BEHIND = re.compile(rf"{BUILD}.+|tmp[a-z0-9_]{{8}}")
"""Names of such folders; the second form is of earlier versions."""
OLD = 3600
"""Seconds after which a folder of a build that is not finished is that of a killed process."""


@cache
def warn_once(sentence: str) -> None:
    """Log a warning, once in each process."""
    _log.warning(sentence)


@cache
def _of_this_process() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="mxtensor-")


# ---------------------------------------------------------------------------------------------- whom to trust


def _not_private(found: os.stat_result) -> str | None:
    """Why another user may have written a file or folder with this status; None if only this user can."""
    if not hasattr(os, "geteuid"):  # Windows
        return None
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to this user, {os.geteuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users can write it (mode {stat.S_IMODE(found.st_mode):04o}); change that with chmod go-w"
    return None


def _why_not_folder(path: Path) -> str | None:
    """Why ``path``, which is created if it is missing, cannot store code that this process runs; None if it can."""
    try:
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            with suppress(FileExistsError):  # made by another process, or a link that points nowhere
                missing.mkdir(mode=0o700)
        found, link = path.stat(), path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            return "it is not a folder"
        if link.st_uid != found.st_uid:
            return f"it is a link of user {link.st_uid}"
        for parent in path.resolve().parents:  # in a sticky folder, only the owner of an entry can rename it
            mode = parent.stat().st_mode
            if hasattr(os, "geteuid") and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return f"every user can rename it in {parent} (mode {stat.S_IMODE(mode):04o})"
        return _not_private(found)
    except OSError as error:
        return str(error)


def _folders() -> Iterator[Path]:
    """The folders in which files may be: that of the user if it is safe, then one that goes with the process.

    The name of the second is new, so that no other user can have put a file there.
    """
    try:
        wanted = Path(os.environ.get("XDG_CACHE_HOME") or "")
        path = (wanted if wanted.is_absolute() else Path.home() / ".cache") / "mxtensor"  # as the XDG standard says
    except RuntimeError:
        path = None
    if path is not None:
        reason = _why_not_folder(path)
        if reason is None:
            yield path
        else:
            warn_once(f"compiled kernels are not cached in {path}: {reason}. Each process compiles them again")
    try:
        name = _of_this_process().name
    except OSError:  # no temporary folder either
        return
    yield Path(name)


# ---------------------------------------------------------------------------------------------- files


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def _stem(kind: str, key: object) -> str:
    """The start of the name of the file for ``key``, a value whose repr includes all that the file depends on."""
    return f"{kind}-{_digest(repr(key).encode())}"


def _content(path: Path) -> bytes | None:
    """The bytes of a file that only this user can have written and that is whole; None, and why in the log, if not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            reason = _not_private(found) if stat.S_ISREG(found.st_mode) else "it is not a file"
            content = file.read() if reason is None else b""
    except OSError as error:
        reason = str(error)
    if reason is not None:
        warn_once(f"{path} is not loaded: {reason}")
        return None
    if _digest(content) != path.stem.rpartition("-")[2]:
        warn_once(f"{path} is damaged ({len(content)} bytes): it is built again")
        forget(path)
        return None
    return content


def find(kind: str, key: object, suffix: str) -> tuple[Path, bytes] | None:
    """The cached file for ``key`` and its bytes, checked; None unless one may be loaded."""
    for folder in _folders():
        for path in sorted(folder.glob(f"{_stem(kind, key)}-*.{suffix}")):
            content = _content(path)
            if content is not None:
                return path, content
    return None


def store(kind: str, key: object, suffix: str, write: Callable[[Path], object]) -> Path:
    """The new file for ``key``: ``write`` makes it at a path that it gets, then it is renamed; readers see all or
    nothing.

    Several processes may store the same file. Raises OSError if it cannot be written, and what ``write`` raises.
    """
    folder = next((folder for folder in _folders() if os.access(folder, os.W_OK)), None)
    if folder is None:
        raise OSError("no folder for compiled kernels can be written; set XDG_CACHE_HOME to one of this user")
    _remove_left_behind(folder)
    with tempfile.TemporaryDirectory(prefix=BUILD, dir=folder) as scratch:
        built = Path(scratch) / f"{kind}.{suffix}"
        write(built)
        built.chmod(0o600)
        with built.open("r+b") as written:
            content = written.read()
            os.fsync(written.fileno())  # after a power failure a name must not exist without its bytes
        path = folder / f"{_stem(kind, key)}-{_digest(content)}.{suffix}"
        built.replace(path)
    return path


def forget(path: Path) -> None:
    """Remove a file that cannot be used; another process may have done so."""
    with suppress(OSError):
        path.unlink()


def _remove_left_behind(folder: Path) -> None:
    """Remove the folders of builds that were killed: those of this user that are older than ``OLD``."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _LEFT_BEHIND.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                mine = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
                if mine and time.time() - found.st_mtime > OLD:
                    shutil.rmtree(entry.path, ignore_errors=True)


def contents() -> tuple[Path | None, list[Path]]:
    """The folder that compiled kernels go to, and its files; None if no folder can be written."""
    folder = next((folder for folder in _folders() if os.access(folder, os.W_OK)), None)
    return folder, sorted(path for path in folder.iterdir() if path.is_file()) if folder is not None else []
