"""Names of TransformerEngine and torchao that this package does not have, and what to use in their place.

A name that is here under the same name is in no table. Names that mean the same, such as ``ModuleFqnToConfig``, have
one name here, which the error gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KERNELS = "every device computes every format, and mx.explain() shows by which kernel"
_INTEGERS = "the format mxint8, for example 'mxint8-weight-only': integers have scales of blocks and no zero points"
_FOUR_BITS = "a format of 4 bits, for example 'mxfp4-weight-only' or 'nvfp4-weight-only'"
_QAT = "mx.QATConfig"

MODULE = {
    # TransformerEngine
    "fp8_autocast": "mx.autocast(recipe=...)", "fp8_model_init": "mx.quantized_model_init(recipe=...)",
    "apply_recipe": "mx.quantize_(model, recipe)", "get_default_recipe": "mx.recipe.MXFP8BlockScaling()",
    "get_default_fp8_recipe": "mx.recipe.MXFP8BlockScaling()", "quantizer_factory": "mx.recipe.CustomRecipe",
    "QuantizedTensor": "mx.MXTensor", "QuantizedTensorStorage": "mx.MXTensor", "Float8Tensor": "mx.MXTensor",
    "Float8TensorStorage": "mx.MXTensor", "MXFP8Tensor": "mx.MXTensor", "MXFP8TensorStorage": "mx.MXTensor",
    "Float8BlockwiseQTensor": "mx.MXTensor", "Float8BlockwiseQTensorStorage": "mx.MXTensor",
    "NVFP4Tensor": "mx.MXTensor", "NVFP4TensorStorage": "mx.MXTensor",
    "HybridQuantizer": "mx.recipe.CustomRecipe",
    "make_graphed_callables": "torch.compile(mode='reduce-overhead') or torch.cuda.CUDAGraph",
    "CudaRNGStatesTracker": "the argument get_rng_state_tracker of modules of mx.nn",
    "optimizers": "mx.optim", "FusedAdam": "mx.optim.FusedAdam", "FusedSGD": "mx.optim.SGD",
    "get_cpu_offload_context": "torch.autograd.graph.save_on_cpu()",
    "parallel_cross_entropy": "torch.distributed.tensor.parallel.loss_parallel()",
    "prepare_for_saving": "tensor.components", "restore_from_saved": "mx.MXTensor.from_components",
    "InferenceParams": "mx.KVCache, in transformers",
    "FP8GlobalStateManager": "mx.autocast(recipe=...)", "onnx_export": "torch.export.export",
    "mark_not_offload": "torch.autograd.graph.save_on_cpu()",
    "ManualOffloadSynchronizer": "torch.autograd.graph.save_on_cpu()",
    "DelayedScalingRequest": "mx.recipe.DelayedScaling()", "QuantizerRequest": "mx.recipe.CustomRecipe(qfactory=...)",
    "IdentityQuantizer": "None, in the qfactory of mx.recipe.CustomRecipe", "IdentityTensor": "a plain tensor",
    "HybridQuantizedTensor": "mx.MXTensor", "restore_from_func_ctx": "mx.MXTensor.from_components",
    "cast_master_weights_to_fp8": "weight.copy_(master), or mx.optim.FusedAdam(..., master_weights=True)",
    "quantize_master_weights": "weight.copy_(master), or mx.optim.FusedAdam(..., master_weights=True)",
    "fused_topk_with_score_function": "torch.softmax or torch.sigmoid, and torch.topk",
    "fused_compute_score_for_moe_aux_loss": "torch.softmax or torch.sigmoid, and torch.topk",
    "fused_moe_aux_loss": "the sum of (tokens of each expert) * (mean probability of each expert)",
    "apply_fused_qkv_rotary_pos_emb": "mx.nn.apply_rotary_pos_emb",
    # torchao
    "ModuleFqnToConfig": "mx.FqnToConfig", "AOPerModuleConfig": "mx.FqnToConfig",
    "convert_to_float8_training": "mx.quantize_(model, mx.Float8LinearConfig())",
    "Float8LinearRecipeName": "the name as a string: mx.Float8LinearConfig.from_recipe_name('rowwise')",
    "float8_weight_only": "mx.Float8WeightOnlyConfig()",
    "float8_dynamic_activation_float8_weight": "mx.Float8DynamicActivationFloat8WeightConfig()",
    "Float8StaticActivationFloat8WeightConfig": "mx.Float8DynamicActivationFloat8WeightConfig(), with dynamic scales",
    "NVFP4ObservedLinear": "mx.NVFP4DynamicActivationNVFP4WeightConfig(step='prepare')",
    "PerRow": "the name of the class as a string: granularity='PerRow'",
    "PerTensor": "the name of the class as a string: granularity='PerTensor'",
    "PerBlock": "a format of blocks, for example 'float8_128x128'",
    "MXFP8Dim0CastKernelChoice": "mx.KernelPreference", "MXFP8Dim1CastKernelChoice": "mx.KernelPreference",
    "MXFakeQuantizedLinear": "mx.FakeQuantizedLinear", "NVFP4FakeQuantizedLinear": "mx.FakeQuantizedLinear",
    "FakeQuantizeConfig": _QAT, "FakeQuantizeConfigBase": _QAT, "Float8FakeQuantizeConfig": _QAT,
    "IntxFakeQuantizeConfig": _QAT,
    "IntXQuantizationAwareTrainingConfig": _QAT, "FromIntXQuantizationAwareTrainingConfig": _QAT,
    "intx_quantization_aware_training": _QAT,
    "Int8WeightOnlyConfig": _INTEGERS, "Int8DynamicActivationInt8WeightConfig": _INTEGERS,
    "Int8StaticActivationInt8WeightConfig": _INTEGERS, "int8_weight_only": _INTEGERS,
    "int8_dynamic_activation_int8_weight": _INTEGERS, "Int8Tensor": _INTEGERS,
    "Int4WeightOnlyConfig": _FOUR_BITS, "IntxWeightOnlyConfig": _FOUR_BITS, "int4_weight_only": _FOUR_BITS,
    "Float8DynamicActivationInt4WeightConfig": _FOUR_BITS, "Int8DynamicActivationIntxWeightConfig": _FOUR_BITS,
    "Int4Tensor": _FOUR_BITS, "NF4Tensor": _FOUR_BITS, "to_nf4": _FOUR_BITS,
    "autoquant": "mx.plan(model, data, bits=...)", "Int8DynActInt4WeightQuantizer": _FOUR_BITS,
    "Int4WeightOnlyQuantizer": _FOUR_BITS,
}  # fmt: skip
MODULE |= {
    name: f"mx.nn.{name}" for name in (
        "DotProductAttention", "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "LayerNorm", "LayerNormLinear",
        "LayerNormMLP", "Linear", "MultiheadAttention", "RMSNorm", "RotaryPositionEmbedding", "TransformerLayer",
        "apply_rotary_pos_emb", "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
        "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute",
    )
}  # fmt: skip
MODULE |= {
    name: f"mx.recipe.{name}" for name in (
        "CustomRecipe", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "MXFP4BlockScaling",
        "MXFP6BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling", "QParams", "QuantizerRole", "Recipe",
    )
}  # fmt: skip
"""Name in a module there -> what to use here."""

NOT_NEEDED = {
    **dict.fromkeys(("is_fp8_available", "is_mxfp8_available", "is_fp8_block_scaling_available"), _KERNELS),
    **dict.fromkeys(("is_nvfp4_available", "is_bf16_available"), _KERNELS),
    **dict.fromkeys(
        ("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), "collectives do not overlap by userbuffers"
    ),
    "precompute_float8_dynamic_scale_for_fsdp": "FSDP2 gathers the codes of quantized weights by itself",
}
"""Name in a module there -> why there is nothing to call here."""

ARGUMENTS = {
    "fp8_recipe": "recipe", "fp8_group": "amax_reduction_group", "calibrating": "", "_graph": "",
}  # fmt: skip
"""Argument of ``fp8_autocast`` -> that of ``autocast``; "": none."""


def instead_of(name: str) -> str:
    """``"; use X"`` for a name of TransformerEngine or torchao; "" for others."""
    if name in NOT_NEEDED:
        return f"; leave it out: {NOT_NEEDED[name]}"
    return f"; use {MODULE[name]}" if name in MODULE else ""


def refuse_arguments(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for the first of these arguments, which ``function`` does not have."""
    for name in arguments:
        if name in ARGUMENTS:
            instead = f"use {ARGUMENTS[name]}=" if ARGUMENTS[name] else "leave it out"
            raise TypeError(f"{function}() has no argument {name!r}, which fp8_autocast has; {instead}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class Elsewhere:
    """A class attribute that raises AttributeError, which names ours. An instance may have its own attribute."""

    def __init__(self, instead: str, owner: str = "torchao") -> None:
        self.instead, self.owner = instead, owner

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError(f"an MXTensor has no {self.name!r}, as {self.owner}'s tensors have; use {self.instead}")
