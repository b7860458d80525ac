"""Quark: MXFP4 and MXFP6 as its export packs them. Its observers find the scales."""

import torch

from . import save, special

NEEDS = ("quark", "onnx", "onnxslim")
ELEMENTS = ("fp4", "fp6_e2m3", "fp6_e3m2")


def make(folder, shapes, dtype):
    import quark.torch.kernel as kernel
    from quark.torch.utils.numerics import to_e8m0_uint8
    from quark.torch.utils.pack import create_pack_method

    largest = {"fp4": 6.0, "fp6_e2m3": 7.5, "fp6_e3m2": 28.0}
    stored, wanted, modules = {}, {}, {}
    for element in ELEMENTS:
        pack = create_pack_method("per_group", element)
        for i, shape in enumerate(shapes):
            w, module = special(shape, torch.float32), f"m{i}.{element}"
            amax = w.reshape(shape[0], -1, 32).abs().amax(-1)
            scale = torch.exp2(torch.ceil(torch.log2((amax / largest[element]).clamp(2.0**-100))))
            values = kernel.scaled_real_quantize(
                element, w, scale, None, -1, 32, -largest[element], largest[element], 8, "per_group"
            )
            codes, bytes_ = pack.pack(values, True), to_e8m0_uint8(scale)
            stored |= {f"{module}.weight": codes, f"{module}.weight_scale": bytes_}
            back = torch.exp2(bytes_.to(torch.int16) - 127).to(dtype)
            unpacked = pack.unpack(codes, True, origin_packed_axis_size=back.shape[-1])
            wanted[f"{module}.weight"] = kernel.dequantize(element, unpacked, back, None, -1, 32, "per_group").to(dtype)
            modules[module] = {"weight": {"dtype": element, "qscheme": "per_group", "group_size": 32}}
    quantization = {"quant_method": "quark", "global_quant_config": modules["m0.fp4"], "layer_quant_config": modules}
    save(folder, stored, quantization, dtype=str(dtype).removeprefix("torch."))
    return wanted
