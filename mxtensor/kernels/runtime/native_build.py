"""C++ sources: compiled once per machine by the system's compiler, cached on disk, loaded through ctypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .disk_cache import cache_path, new_file


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or the first of c++, g++ and clang++ on the path; None if there is none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _processor() -> list[str]:
    """The instruction sets of this processor, as Linux lists them; empty elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return [line for line in lines if line.startswith(("flags", "Features"))][:1]


def load(source: Path, flags: Sequence[str], headers: Sequence[Path] = ()) -> ctypes.CDLL | str:
    """The shared library of ``source``, or a sentence that says why it cannot be built.

    The cached file depends on the texts of ``source`` and ``headers``, on ``flags`` (which include ``-shared``), on the
    compiler's name, and on the instruction sets of the processor, because of ``-march=native``.
    """
    found = compiler()
    if not found:
        return "there is no C++ compiler; install one or name it in CXX"
    try:
        texts = [path.read_text() for path in (source, *headers)]
        path = cache_path("native", (*texts, tuple(flags), found, _processor()), "so")
        if not path.exists():
            with new_file(path) as built:
                subprocess.run([found, *flags, "-o", str(built), str(source)], check=True, capture_output=True)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{source.name} did not build: {str(error).splitlines()[0]}"
