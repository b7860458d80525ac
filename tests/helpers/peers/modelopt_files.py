"""ModelOpt: NVFP4 (W4A4, W4A16 and, with another second scale, W4A8), MXFP8, MXFP4 and float8 with one scale."""

import torch

from . import save, special

NEEDS = ("modelopt", "omegaconf")


def make(folder, shapes, dtype):
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    stored, wanted = {}, {}
    for i, shape in enumerate(shapes):
        for kind, divisor in (("NVFP4", 2688.0), ("W4A8_NVFP4_FP8", 448.0)):
            w, name = special(shape, dtype), f"m{i}.{kind}.weight"
            second = w.abs().amax().float() / divisor
            codes, scale, second = NVFP4QTensor.quantize(w.clone(), 16, weights_scaling_factor_2=second)
            stored |= {name: codes._quantized_data, f"{name}_scale": scale, f"{name}_scale_2": second}
            stored[f"m{i}.{kind}.input_scale"] = torch.tensor(0.01)
            wanted[name] = codes.dequantize(scale=scale, double_scale=second, block_sizes={-1: 16})
        w, name = special(shape, dtype), f"m{i}.MXFP8.weight"
        codes, scale = MXFP8QTensor.quantize(w.clone())
        stored |= {name: codes._quantized_data, f"{name}_scale": scale}
        wanted[name] = codes.dequantize(scale=scale)
        w, name = special(shape, dtype), f"m{i}.W4A8_MXFP4_FP8.weight"
        codes, scale = MXFP4QTensor.quantize(w.clone(), 32)
        scale = scale.reshape(shape[0], -1)
        stored |= {name: codes._quantized_data, f"{name}_scale": scale}
        wanted[name] = codes.dequantize(scale=scale, block_sizes={-1: 32})
        w, name = special(shape, dtype), f"m{i}.FP8.weight"
        scale = (w.abs().amax().float() / 448).reshape(())
        codes, scale = FP8QTensor.quantize(w.float(), scales=scale)
        stored |= {name: codes._quantized_data, f"{name}_scale": scale}
        wanted[name] = codes.dequantize(torch.float32, scale=scale).to(dtype)
    save(folder, stored, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
         dtype=str(dtype).removeprefix("torch."))  # fmt: skip
    return wanted
