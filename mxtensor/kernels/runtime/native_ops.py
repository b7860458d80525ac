"""Ops of torch in C++: how they are compiled against this torch, and graphs that have one from another machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent.parent / "cpu"
HEADERS = tuple(HERE / name for name in ("format.h", "problem.h", "op_check.h", "op_recorder.h"))
"""The headers of all of them."""
FLAGS = ("-O2", "-DNDEBUG", "-std=c++20", "-shared", "-fPIC")
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
        *FLAGS, *threads, f"-I{root / 'include'}", f"-L{root / 'lib'}", *linker, "-ltorch_cpu",
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
