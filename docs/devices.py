"""Which product kernel each format gets on a device, asked of the kernels themselves; the devices need not be here."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch

from docs.markdown import table

DEVICES = {"sm80": (8, 0), "sm89": (8, 9), "sm90": (9, 0), "sm100": (10, 0), "sm120": (12, 0)}


def chosen(name: str, weight_only: bool, capability: tuple[int, int]) -> str:
    """The kernel for a bfloat16 linear layer in this format on a device of this compute capability."""
    import mxtensor as mx
    from mxtensor.core import devices
    from mxtensor.core.kernel import Spec
    from mxtensor.kernels.gemm import cublas, scaled_mm_contract
    from mxtensor.kernels.gemm.select import GEMM
    from mxtensor.kernels.gemm.spec import GemmArgs
    from mxtensor.kernels.operands import Unquantized
    from mxtensor.kernels.runtime import triton_launch

    x, cast = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"), mx.Cast.of(name)
    formats = (x.dtype if weight_only else cast.format, cast.format)
    spec = Spec("linear", ((4096, 4096),) * 2, formats, x.dtype, torch.device("cuda", 0))
    gemm_operands = (x if weight_only else Unquantized(x, cast), Unquantized(x, cast))
    with ExitStack() as pretended:  # the device, and a torch with CUDA 13 and Triton
        for module, function, answer in (
            (devices, "device_capability", capability),
            (scaled_mm_contract, "toolkit_version", (13, 0)),
            (triton_launch, "_installed", True),
            (cublas, "refuses", None),
        ):
            pretended.enter_context(patch.object(module, function, lambda *args, answer=answer: answer))
        pretended.enter_context(patch.object(torch.version, "hip", None))
        args = GemmArgs(x.dtype)
        return next(kernel.name for kernel in GEMM if kernel.refuses(spec, *gemm_operands, args) is None)


def devices() -> str:
    """A row for each set of formats that get the same kernels."""
    import mxtensor as mx

    rows: dict[tuple[str, ...], list[str]] = {}
    for name in mx.FORMATS:
        kernels = [chosen(name, False, capability) for capability in DEVICES.values()]
        weight_only = {chosen(name, True, capability) for capability in DEVICES.values()}
        assert len(weight_only) == 1, f"{name}: {weight_only}"
        cells = tuple(f"`{kernel}`" for kernel in [*kernels, *weight_only])
        rows.setdefault(cells, []).append(f"`{name}`")
    header = ["format", *DEVICES, "weight-only"]
    return table(", ".join(header), [(", ".join(names), *cells) for cells, names in rows.items()])
