"""C++ sources: compiled once per machine by the system's compiler, cached on disk, loaded through ctypes.

Also here: how ops of torch in C++ are compiled against this torch, and graphs that have one from another machine.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from .disk_cache import find, forget, store, warn_once


def compiler() -> list[str] | None:
    """The command of the C++ compiler: the words of ``$CXX`` (``ccache g++``), or the first of c++, g++ and clang++ on
    the path; None if there is none.

    Raises ValueError if a quotation mark in ``$CXX`` has no end.
    """
    named = shlex.split(os.environ.get("CXX", ""))
    found = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    return named or ([found] if found else None)


def _processor() -> list[str]:
    """The instruction sets of this processor, as Linux lists them; empty elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return [line for line in lines if line.startswith(("flags", "Features"))][:1]


def instruction_sets() -> set[str]:
    """The instruction sets of this processor by the names that Linux gives them; empty elsewhere."""
    return {name for line in _processor() for name in line.partition(":")[2].split()}


def load(
    source: Path, flags: Sequence[str], headers: Sequence[Path] = (), symbols: Sequence[str] = ()
) -> ctypes.CDLL | str:
    """The shared library of ``source`` with the functions ``symbols``, or the reason why it is not available.

    The cached file depends on the texts of ``source`` and ``headers``, on ``flags`` (which include ``-shared``), on the
    compiler's command, and on the instruction sets of the processor, because of ``-march=native``. A cached file that
    cannot be loaded or lacks a function is built again, which the log says once.
    """
    try:
        command = compiler()
        if not command:
            return "there is no C++ compiler; install one or name it in CXX"
        texts = [path.read_text() for path in (source, *headers)]
        key = (*texts, tuple(flags), command, _processor())
        cached = find("native", key, "so")
        if cached is not None:
            loaded = _loaded(cached[0], symbols)
            if not isinstance(loaded, str):
                return loaded
            warn_once(f"{loaded}: it is built again")
            forget(cached[0])

        def build(built: Path) -> None:
            subprocess.run([*command, *flags, "-o", str(built), str(source)], check=True, capture_output=True)

        loaded = _loaded(store("native", key, "so", build), symbols)
        return f"{source.name} did not build: {loaded}" if isinstance(loaded, str) else loaded
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        return f"{source.name} did not build: {str(error).splitlines()[0]}"


def _loaded(path: Path, symbols: Sequence[str]) -> ctypes.CDLL | str:
    """The library, or what is wrong with it."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"{path} cannot be loaded ({error})"
    missing = [symbol for symbol in symbols if not hasattr(library, symbol)]
    return f"{path} lacks {', '.join(missing)}" if missing else library


# ---------------------------------------------------------------------------------------------- ops of torch


CPU_SOURCES = Path(__file__).parent.parent / "cpu"
OP_HEADERS = tuple(CPU_SOURCES / name for name in ("format.h", "problem.h", "op_check.h", "op_recorder.h"))
"""The headers of all of them."""
OP_FLAGS = ("-O2", "-DNDEBUG", "-std=c++20", "-shared", "-fPIC")
"""NDEBUG as torch is built: without it some of torch's classes have other members."""


def torch_flags() -> tuple[str, ...]:
    """How a library is compiled against this torch: its headers, and its libraries, which are loaded already.

    ``at::parallel_for`` uses torch's threads only where it is compiled with OpenMP, as torch was; the OpenMP that torch
    has loaded serves both.
    """
    root = Path(torch.__file__).parent
    threads = ("-fopenmp",) if sys.platform == "linux" and torch.backends.openmp.is_available() else ()
    linker = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ("-Wl,--no-as-needed",)
    return (
        *OP_FLAGS, *threads, f"-I{root / 'include'}", f"-L{root / 'lib'}", *linker, "-ltorch_cpu",
        "-lc10", f'-DMX_TORCH="{torch.__version__}"',
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )  # fmt: skip


def refuse_first_call(op: str, x: Tensor, missing: Callable[[], str | None]) -> None:
    """Raise if an op cannot run here: on another device, or without its library, which ``missing`` loads.

    The library registers the op; a compiled graph from torch's cache may come before anything has loaded it.
    """
    if x.device.type != "cpu":
        raise ValueError(f"{op} needs tensors on the CPU, not on {x.device}; use .cpu()")
    why = missing()
    if why is not None:
        raise RuntimeError(f"{op} is in a graph that was compiled elsewhere, and {why}")
