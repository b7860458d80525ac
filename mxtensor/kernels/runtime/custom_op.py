"""What all custom ops of kernels share: checks of what they get.

Anybody can call ``torch.ops.mxtensor``, and kernels get addresses and sizes only. A call of the package has passed the
same questions as refusals of its kernel; the checks raise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.compat import is_exporting
from ...core.kernel import Spec
from ...numerics.formats import Format
from ...numerics.operand import Operand
from ...numerics.validate import check_numbers, check_sizes, check_tensor, has_memory
from .triton_launch import interpreted


def check_device(op: str, x: Tensor) -> None:
    """Raise ValueError unless kernels of a GPU can read ``x``: on a CUDA device, or in Triton's interpreter."""
    if x.device.type != "cuda" and not interpreted():
        raise ValueError(f"{op} needs tensors on a CUDA device, not on {x.device}; use .to()")


def check_argument(
    op: str, name: str, t: Tensor, dtypes: Sequence[torch.dtype], sizes: Sequence[int | None], device: torch.device
) -> None:
    """Raise TypeError for another dtype, ValueError unless ``t`` has these sizes (None: any but 0) on this device."""
    check_tensor(f"{op}: {name}", t, *dtypes)
    fits = t.dim() == len(sizes) and all(
        n == want or (want is None and n) for n, want in zip(t.shape, sizes, strict=True)
    )
    if not fits or t.device != device or not has_memory(t):
        wanted = tuple("any" if n is None else n for n in sizes)
        raise ValueError(
            f"{op}: {name} must have shape {wanted} in memory on {device}, got {tuple(t.shape)} on {t.device}"
        )


def check_scalars(op: str, name: str, scalars: Sequence[Tensor | None], device: torch.device) -> None:
    """Raise TypeError or ValueError unless each is one float32 on this device, or None."""
    for t in scalars:
        if t is not None:
            check_argument(op, name, t, (torch.float32,), (1,) * t.dim(), device)


def check_codes(
    op: str, data: Tensor, scale: Tensor, global_scale: Tensor | None, format: Format, shape: Sequence[int]
) -> Operand:
    """The operand of an op's tensors. Raises TypeError or ValueError unless native code can read it.

    The global scale of a format that has one may come apart (None).
    """
    shape = check_numbers(f"{op}: shape", tuple(shape))
    for name, t, dtypes in (
        ("data", data, (format.element.dtype, torch.uint8)),
        ("scale", scale, (format.scale.dtype,)),
    ):
        check_tensor(f"{op}: {name}", t, *dtypes)
    operand = Operand(data, scale, global_scale, format, shape)
    check_sizes(operand)
    return operand


def exported(spec: Spec) -> str | None:
    """Why a custom op may not be in the program being traced; None if it may."""
    return "an exported program holds aten ops only" if spec.traced and is_exporting() else None
