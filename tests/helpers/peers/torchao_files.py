"""torchao: its three classes with and without swizzled scales, in safetensors and pickled."""

import torch

from . import save, special

NEEDS = ("torchao",)


def tensors(shapes, dtype):
    """Name -> tensor of torchao."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
    from torchao.quantization import Float8Tensor, PerRow, PerTensor
    from torchao.quantization.granularity import PerBlock
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    out = {}
    mx = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2",
          "e2m1": torch.float4_e2m1fn_x2}  # fmt: skip
    for i, shape in enumerate(shapes):
        for swizzled in (False, True):
            end = f"{i}.{'swizzled' if swizzled else 'rows'}.weight"
            for kind, element in mx.items():
                w = special(shape, dtype, 1e30)
                if kind == "e4m3":
                    w[-1, 3], w[-1, -3] = torch.nan, torch.inf
                mode = ScaleCalculationMode.RCEIL
                out[f"mx.{kind}.{end}"] = MXTensor.to_mx(
                    w, element, 32, mode, is_swizzled_scales=swizzled,
                    act_quant_kwargs=QuantizeTensorToMXKwargs(elem_dtype=element, scaling_mode=mode),
                )  # fmt: skip
            w = special(shape, dtype)
            whole = w.abs().amax().float() / 2688
            activations = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True)
            out[f"nv.{end}"] = NVFP4Tensor.to_nvfp4(
                w, per_tensor_scale=whole, is_swizzled_scales=swizzled, act_quant_kwargs=activations
            )
            out[f"nv1.{end}"] = NVFP4Tensor.to_nvfp4(w, is_swizzled_scales=swizzled)
        for granularity in (PerRow(), PerTensor()):
            for element in ("e4m3", "e5m2"):
                out[f"float8.{i}.{type(granularity).__name__}.{element}.weight"] = Float8Tensor.from_hp(
                    special(shape, dtype), float8_dtype=mx[element], granularity=granularity,
                    act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=granularity),
                )  # fmt: skip
    if len(shapes) > 2:
        w = torch.randn(256, 384, dtype=dtype)
        out |= {f"tile{n}.weight": Float8Tensor.from_hp(w, granularity=PerBlock([n, 128])) for n in (1, 128)}
        stack = torch.randn(3, 128, 96, dtype=dtype)
        for kind in ("e4m3", "e2m1"):
            out[f"stack.{kind}.weight"] = MXTensor.to_mx(stack, mx[kind], 32, is_swizzled_scales=True)
        out["stack.float8.weight"] = Float8Tensor.from_hp(stack, granularity=PerRow())
        out["block16.weight"] = MXTensor.to_mx(w, mx["e4m3"], 16)
    out["norm.weight"] = torch.ones(5, dtype=dtype)
    return out


def dequantized(state):
    return {name: t if type(t) is torch.Tensor else t.dequantize() for name, t in state.items()}


def make(folder, shapes, dtype):
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    state = tensors(shapes, dtype)
    stored, metadata = flatten_tensor_state_dict(state)
    save(folder, stored, {"quant_method": "torchao"}, metadata)
    torch.save(state, folder / "state.pt")
    return dequantized(state)
