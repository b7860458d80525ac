"""Errors for the attributes of torchao's tensors, whose codes may be stored otherwise. They name ours."""

from __future__ import annotations

from torch import Tensor

from ..core.peer_names import Elsewhere


class TorchAOAttributes(Tensor):
    """The part of MXTensor that refuses what code written for torchao's quantized tensors reads."""

    qdata = Elsewhere("tensor.rowwise.data")
    scale = Elsewhere("tensor.rowwise.scale")
    per_tensor_scale = Elsewhere("tensor.rowwise.global_scale")
    act_quant_kwargs = Elsewhere("tensor.recipe.activation")
    elem_dtype = Elsewhere("tensor.format.element")
    block_size = Elsewhere("tensor.format.block")
    orig_dtype = Elsewhere("tensor.dtype")
    is_swizzled_scales = Elsewhere("tensor.rowwise.scale, which is never swizzled")
    from_qdata_and_scales = Elsewhere("mx.MXTensor.from_components")
    to_nvfp4 = Elsewhere("mx.quantize(x, 'nvfp4')")
    from_hp = Elsewhere("mx.quantize(x, 'float8_row')")
    get_hp_scales = Elsewhere("tensor.rowwise.scale and tensor.rowwise.global_scale")
