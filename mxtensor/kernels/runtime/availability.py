"""What kernels of several files refuse with, each sentence once."""

from __future__ import annotations

import torch

from ...core.compat import is_exporting
from ...core.kernel import Spec


def other_build() -> str | None:
    """Why nothing written for CUDA runs with this build of torch; None if it does."""
    return None if torch.version.hip is None else "written for CUDA devices, this build of torch is for ROCm"


def exported(spec: Spec) -> str | None:
    """Why an op of our own does not go into what is being traced; None if it does."""
    return "an exported program holds aten ops only" if spec.traced and is_exporting() else None
