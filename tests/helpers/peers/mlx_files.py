"""MLX: its three modes with codes, on the CPU."""

import numpy as np
import torch

from . import save, special

NEEDS = ("mlx",)
MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def _torch(array):
    """An array of mlx as a tensor, by its bytes."""
    import mlx.core as mx

    name = str(array.dtype).rpartition(".")[2]
    if name == "bfloat16":
        return torch.from_numpy(np.array(array.view(mx.uint16)).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def make(folder, shapes, dtype):
    import mlx.core as mx

    stored, wanted, modules = {}, {}, {}
    to = {torch.bfloat16: mx.bfloat16, torch.float16: mx.float16, torch.float32: mx.float32}[dtype]
    with mx.stream(mx.cpu):
        for mode, (bits, group) in MODES.items():
            for i, shape in enumerate(shapes):
                values = special(shape, torch.float32)
                values = values if i < 5 else torch.stack((values, 2 * values, -values))  # experts
                w = mx.array(values.numpy()).astype(to)
                codes, scales = mx.quantize(w, mode=mode)
                module = f"m{i}.{mode}"
                stored |= {f"{module}.weight": _torch(codes), f"{module}.scales": _torch(scales)}
                wanted[f"{module}.weight"] = _torch(mx.dequantize(codes, scales, mode=mode, dtype=to))
                modules[module] = {"group_size": group, "bits": bits, "mode": mode}
    config = {"group_size": 32, "bits": 4, "mode": "mxfp4"} | modules
    save(folder, stored, None, {"format": "mlx"}, quantization=config, dtype=str(dtype).removeprefix("torch."))
    return wanted
