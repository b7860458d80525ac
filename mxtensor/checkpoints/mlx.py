"""MLX: ``weight`` U32 with ``scales`` U8, of mlx-lm.

A word of 32 bits has 8 codes of 4 bits or 4 of 8 bits, the first in the lowest bits: in memory these are the bytes of
this package. Experts are stacked in one tensor of three dimensions. NVFP4 has no global scale there. The
configuration's ``quantization`` has group_size, bits and mode, and may have entries for single modules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..tensor.mxtensor import MXTensor
from .layout import Layout, Written, beside, columns_of_blocks, companions, weight
from .names import module_of
from .reading import Checkpoint, Entry

NAME = "mlx"
FORMATS_BY_MODE = {"mxfp4": "mxfp4_e2m1", "mxfp8": "mxfp8_e4m3", "nvfp4": "nvfp4_single_level"}
MODES = {format: mode for mode, format in FORMATS_BY_MODE.items()}


def _mode(checkpoint: Checkpoint, module: str) -> str:
    """The mode of a module. Raises NotImplementedError for one without a format here, such as affine."""
    config = checkpoint.config.get("quantization")
    config = config if isinstance(config, dict) else {}
    single = config.get(module)
    mode = (single if isinstance(single, dict) else config).get("mode", "affine")
    if not isinstance(mode, str) or mode not in FORMATS_BY_MODE:
        raise NotImplementedError(
            f"{checkpoint.path}, module {module}: the mode {described(mode)} is not supported; "
            f"supported are {', '.join(FORMATS_BY_MODE)}"
        )
    return mode


def _codes(words: Tensor, scale: Tensor, mode: str, dtype: torch.dtype) -> MXTensor:
    if words.dtype is not torch.uint32 or words.dim() not in (2, 3):
        raise ValueError(f"weight must be a matrix of uint32, got {words.dtype} {tuple(words.shape)}")
    return weight(words.contiguous().view(torch.uint8), scale, FORMATS_BY_MODE[mode], dtype)


def _read(checkpoint: Checkpoint) -> dict[str, Entry]:
    return {
        names[0]: Entry(names, partial(_codes, mode=_mode(checkpoint, module), dtype=checkpoint.dtype))
        for module, names in companions(checkpoint, "weight", "scales")
    }


def _write(name: str, t: MXTensor) -> dict[str, Tensor]:
    out = beside(name, t, MLX, MODES, "weight", "scales")
    return out | {name: out[name].contiguous().view(torch.uint8).view(torch.uint32)}


def _config(written: Written) -> dict[str, Any]:
    casts = {}
    for name, recipe in written.weights.items():
        format = recipe.stored.format
        casts[module_of(name)] = {
            "group_size": format.block[-1],
            "bits": format.element.bits,
            "mode": MODES[format.name],
        }
    first = next(iter(casts.values()))
    single = {module: cast for module, cast in casts.items() if cast != first}
    skipped = {module_of(name): False for name in written.others}
    return {"config.json": {"quantization": first | single | skipped}}


MLX = Layout(
    NAME,
    "mlx-lm, on Apple's devices",
    detect=lambda checkpoint: isinstance(checkpoint.config.get("quantization"), dict) and not checkpoint.method,
    read=_read,
    write=_write,
    whole=columns_of_blocks,
    config=_config,
    metadata=lambda name, t: {"format": "mlx"},
    dims=(2, 3),
    embeddings=True,
    scales=("scales",),
    orphans=(".scales",),
    formats=", ".join(MODES),
)
