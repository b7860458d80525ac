"""Reasons to refuse a call that kernels of several files share."""

from __future__ import annotations

import torch

from ...core.compat import is_exporting
from ...core.kernel import Spec
from . import nvrtc


def other_build() -> str | None:
    """Why this build of torch cannot run CUDA kernels; None if it can."""
    return None if torch.version.hip is None else "written for CUDA devices, this build of torch is for ROCm"


def exported(spec: Spec) -> str | None:
    """Why a custom op may not be in the program being traced; None if it may."""
    return "an exported program holds aten ops only" if spec.traced and is_exporting() else None


def no_cuda_sources(spec: Spec) -> str | None:
    """Why the CUDA sources of the package cannot be compiled for the device of ``spec``; None if they can."""
    reason = other_build()
    if reason is not None:
        return reason
    if spec.capability < nvrtc.OLDEST:
        return f"needs sm80, this device is sm{spec.capability[0]}{spec.capability[1]}"
    return nvrtc.missing() or nvrtc.unknown(spec.capability) or exported(spec)
