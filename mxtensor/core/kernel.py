"""Kernel and Spec: a kernel either accepts a call or refuses it with a reason, a sentence.

Knows no tensor and no kernel. ``kernels/`` holds tuples of Kernel; ``select`` asks them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from . import devices


class Spec(NamedTuple):
    """The properties of a call by which kernels decide. Shapes are logical. Text is made on demand, for speed."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    formats: tuple[object, ...]
    """Of each operand its format, the dtype of a plain one, a name, or a pair of these (from, to)."""
    dtype: torch.dtype
    device: torch.device
    traced: bool = False
    """Under torch.compile, FakeTensorMode or make_fx, where loops and out= buffers would be baked into the graph."""

    @property
    def capability(self) -> tuple[int, int]:
        """CUDA compute capability; (0, 0) elsewhere."""
        return devices.device_capability(self.device)


@dataclass(frozen=True, eq=False)
class Kernel:
    """``refuses(spec, *operands)`` returns the reason for a refusal or None; ``run(*operands)`` does the work."""

    name: str
    refuses: Callable[..., str | None]
    run: Callable[..., Any]
    device: str | None = None
    """The type of the only device it runs on. Other devices are refused without a call of ``refuses``."""
    run_traced: Callable[..., Any] | None = None
    """Replaces ``run`` when the spec is traced: the same work as ops that a graph can hold."""
    launch_for: Callable[..., Any] | None = None
    """``launch_for(x, *operands)``: a launch for later calls that differ in the values of ``x`` only, or None if there
    is none. ``launch(x)`` returns what the op returns for ``x``; it may hold addresses of the operands, no tensor."""


def describe_operand(format: object, shape: object) -> str:
    """``mxfp8_e4m3 4096x4096``."""

    def name(part: object) -> str:
        return "->".join(map(name, part)) if isinstance(part, tuple) else str(part).removeprefix("torch.")

    return f"{name(format)} {shape if isinstance(shape, str) else 'x'.join(map(str, shape))}"  # type: ignore[call-overload]


def describe(spec: Spec) -> str:
    """Operands as text: ``bfloat16 512x4096, mxfp8_e4m3 4096x4096``."""
    return ", ".join(map(describe_operand, spec.formats, spec.shapes))


_ELSEWHERE: dict[tuple[str, str], str] = {}


def elsewhere(wanted: str, device: str) -> str:
    """Why a kernel for one type of device refuses another. The sentences are cached: every call needs a few."""
    if torch.compiler.is_dynamo_compiling():  # a guard on the cache would fail as soon as the trace adds to it
        return f"runs on {wanted}, this tensor is on {device}"
    sentence = _ELSEWHERE.get((wanted, device))
    if sentence is None:
        sentence = _ELSEWHERE[wanted, device] = f"runs on {wanted}, this tensor is on {device}"
    return sentence
