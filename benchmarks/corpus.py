"""Real text that every machine with Python has: sources and documentation of the standard library and of packages.

Tokens are bytes. Files are split into training and held-out text by a hash of their path, so that no file is in both
halves, and a file that differs from an earlier one in white space only is left out. Equal packages give equal text.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = (".py", ".md", ".rst", ".txt")
PACKAGES = ("site-packages", "dist-packages")
LEAST, MOST = 256, 1 << 20
"""Bytes of a file. Longer ones are tables that a program wrote."""
HELD_OUT = 64
"""One of so many files is held out."""


@dataclass(frozen=True)
class Corpus:
    """The text and its halves."""

    text: Tensor
    """uint8 (bytes,): the training text, then the held-out text; a zero byte ends each file."""
    cut: int
    """Bytes of the training text."""
    files: tuple[int, int]
    """Numbers of files for training, and held out."""

    @property
    def training(self) -> Tensor:
        return self.text[: self.cut]

    @property
    def held_out(self) -> Tensor:
        return self.text[self.cut :]

    @property
    def digest(self) -> str:
        """Tells one text from another."""
        return hashlib.sha256(self.text.numpy().data).hexdigest()[:16]


def default_roots() -> list[Path]:
    """The folders of the standard library and of installed packages."""
    paths = sysconfig.get_paths()
    return [Path(p) for p in dict.fromkeys((paths["stdlib"], paths["purelib"], paths["platlib"]))]


def names(root: Path) -> Iterator[str]:
    """The files of text below ``root``, relative to it, in order; not those of packages inside the standard library."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in PACKAGES and not f.startswith((".", "__pycache__")))
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix in SUFFIXES and not path.is_symlink() and LEAST <= path.stat().st_size <= MOST:
                yield path.relative_to(root).as_posix()


def is_held_out(name: str) -> bool:
    """Whether a file is held out, by the hash of its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % HELD_OUT == 0


def halves(roots: Iterable[Path]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Name -> content of the files for training, and of those that are held out."""
    training: dict[str, bytes] = {}
    held_out: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for root in roots:
        for name in names(root):
            content = (root / name).read_bytes()
            key = hashlib.sha256(b" ".join(content.split())).digest()
            if key in seen or b"\0" in content or name in training or name in held_out:
                continue
            seen.add(key)
            (held_out if is_held_out(name) else training)[name] = content
    return training, held_out


def load(roots: Iterable[Path], cache: Path | None = None) -> Corpus:
    """The text below ``roots``, read from ``cache`` if it has that of the same files.

    Raises ValueError if a half is empty.
    """
    roots = list(roots)
    listed = "\n".join(f"{name} {(root / name).stat().st_size}" for root in roots for name in names(root))
    key = hashlib.sha256(listed.encode()).hexdigest()
    if cache is not None and cache.exists():
        stored = torch.load(cache, weights_only=True)
        if stored["key"] == key:
            return Corpus(stored["text"], stored["cut"], tuple(stored["files"]))
    training, held_out = halves(roots)
    if not training or not held_out:
        raise ValueError(
            f"{len(training)} files for training and {len(held_out)} held out in {', '.join(map(str, roots))}: one of "
            f"{HELD_OUT} is held out by its name; name folders with more files"
        )
    joined = [b"".join(content + b"\0" for content in half.values()) for half in (training, held_out)]
    text = torch.frombuffer(bytearray(b"".join(joined)), dtype=torch.uint8)
    corpus = Corpus(text, len(joined[0]), (len(training), len(held_out)))
    if cache is not None:
        cache.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"key": key, "text": text, "cut": corpus.cut, "files": list(corpus.files)}, cache)
    return corpus
