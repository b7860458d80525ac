"""Names of TransformerEngine, torchao, transformers and llm-compressor that this package does not have, and what to use
in their place: of classes and functions, of arguments, of modules to import.

A name that is here under the same name is in no table. Names that mean the same, such as ``ModuleFqnToConfig``, have
one name here, which the error gives.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_KERNELS = "every device computes every format, and mx.explain() shows by which kernel"
_INTEGERS = "the format mxint8, for example 'mxint8-weight-only': integers have scales of blocks and no zero points"
_FOUR_BITS = "a format of 4 bits, for example 'mxfp4-weight-only' or 'nvfp4-weight-only'"
_QAT = "mx.ao.QATConfig"

MODULE = {
    # TransformerEngine
    "nn": "mxtensor.te, with import mxtensor.te as te",
    "apply_recipe": "mx.quantize_(model, recipe)", "get_default_recipe": "mx.recipe.MXFP8BlockScaling()",
    "get_default_fp8_recipe": "mx.recipe.MXFP8BlockScaling()", "quantizer_factory": "mx.recipe.CustomRecipe",
    "QuantizedTensor": "mx.MXTensor", "QuantizedTensorStorage": "mx.MXTensor", "Float8Tensor": "mx.MXTensor",
    "Float8TensorStorage": "mx.MXTensor", "MXFP8Tensor": "mx.MXTensor", "MXFP8TensorStorage": "mx.MXTensor",
    "Float8BlockwiseQTensor": "mx.MXTensor", "Float8BlockwiseQTensorStorage": "mx.MXTensor",
    "NVFP4Tensor": "mx.MXTensor", "NVFP4TensorStorage": "mx.MXTensor",
    "HybridQuantizer": "mx.recipe.CustomRecipe",
    "make_graphed_callables": "torch.compile(mode='reduce-overhead') or torch.cuda.CUDAGraph",
    "CudaRNGStatesTracker": "the argument get_rng_state_tracker of modules of mxtensor.te",
    "FusedSGD": "mx.optim.SGD",
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
    "cast_master_weights_to_fp8": "weight.copy_(master), or te.FusedAdam(..., master_weights=True)",
    "quantize_master_weights": "weight.copy_(master), or te.FusedAdam(..., master_weights=True)",
    "fused_topk_with_score_function": "torch.softmax or torch.sigmoid, and torch.topk",
    "fused_compute_score_for_moe_aux_loss": "torch.softmax or torch.sigmoid, and torch.topk",
    "fused_moe_aux_loss": "the sum of (tokens of each expert) * (mean probability of each expert)",
    "apply_fused_qkv_rotary_pos_emb": "te.apply_rotary_pos_emb",
    # torchao
    "ModuleFqnToConfig": "mx.ao.FqnToConfig", "AOPerModuleConfig": "mx.ao.FqnToConfig",
    "float8_weight_only": "mx.ao.Float8WeightOnlyConfig()",
    "float8_dynamic_activation_float8_weight": "mx.ao.Float8DynamicActivationFloat8WeightConfig()",
    "Float8StaticActivationFloat8WeightConfig": "mx.ao.Float8DynamicActivationFloat8WeightConfig()",
    "NVFP4ObservedLinear": "mx.ao.NVFP4DynamicActivationNVFP4WeightConfig(step='prepare')",
    "MXFP8Dim0CastKernelChoice": "mx.ao.KernelPreference", "MXFP8Dim1CastKernelChoice": "mx.ao.KernelPreference",
    "MXFakeQuantizedLinear": "mx.ao.FakeQuantizedLinear", "NVFP4FakeQuantizedLinear": "mx.ao.FakeQuantizedLinear",
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
    # transformers
    **dict.fromkeys(
        ("TorchAoConfig", "FineGrainedFP8Config", "Mxfp4Config", "FPQuantConfig", "BitsAndBytesConfig", "QuarkConfig",
         "CompressedTensorsConfig", "MXConfig", "QuantizationConfig"),
        "mx.TransformersConfig(format) in from_pretrained, or mx.quantize_(model, format)",
    ),
    "from_pretrained": "that of transformers, with quantization_config=mx.TransformersConfig(format)",
    "save_pretrained": "that of the model, or mx.checkpoints.save(model, path)",
    "save": "mx.checkpoints.save(model, path)", "load": "mx.checkpoints.load(path)",
    "save_file": "mx.checkpoints.save(model, path)", "load_file": "mx.checkpoints.load(path)",
    "dequantize": "tensor.dequantize()", "dequantize_": "tensor.dequantize() for each weight",
    "Config": "the name of a format, as in mx.quantize_(model, 'mxfp8-weight-only')",
    # llm-compressor and ModelOpt
    "oneshot": "mx.calibrate(model, data, format), or mx.quantize_(model, format) without data",
    "QuantizationModifier": "mx.quantize_(model, format)", "GPTQModifier": "mx.calibrate(model, data, method='gptq')",
    "AWQModifier": "mx.calibrate(model, data, method=['awq', 'gptq'])",
    "SmoothQuantModifier": "mx.calibrate(model, data, method=['smooth', 'gptq'])",
    "QuantizationScheme": "the name of a format, as in mx.quantize_(model, 'mxfp8-weight-only')",
    "QuantizationArgs": "mx.Cast", "quantize_model": "mx.quantize_(model, format)",
    "MXFP8_DEFAULT_CFG": "the format 'mxfp8'", "MXFP4_DEFAULT_CFG": "the format 'mxfp4'",
    "NVFP4_DEFAULT_CFG": "the format 'nvfp4'", "FP8_DEFAULT_CFG": "the format 'float8_tensor'",
}  # fmt: skip
MODULE |= {
    name: f"te.{name}, with import mxtensor.te as te" for name in (
        "DType", "DotProductAttention", "Float8BlockQuantizer", "Float8CurrentScalingQuantizer", "Float8Quantizer",
        "Fp8Padding", "Fp8Unpadding", "FusedAdam", "GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP",
        "Linear", "MXFP8Quantizer", "MXQuantizer", "MultiheadAttention", "NVFP4Quantizer", "Quantizer", "RMSNorm",
        "RotaryPositionEmbedding", "TransformerLayer", "apply_rotary_pos_emb", "fp8_autocast", "fp8_model_init",
        "general_gemm", "get_workspace", "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
        "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute", "optimizers",
        "quantized_model_init",
    )
}  # fmt: skip
MODULE |= {
    name: f"mx.ao.{name}" for name in (
        "DTYPE_FP6_E2M3", "DTYPE_FP6_E3M2", "CastConfig", "FakeQuantizedLinear", "FakeQuantizer",
        "Float8DynamicActivationFloat8WeightConfig", "Float8LinearConfig", "Float8LinearRecipeName",
        "Float8TrainingOpConfig", "Float8WeightOnlyConfig", "KernelPreference", "MXDynamicActivationMXWeightConfig",
        "MXFP8TrainingOpConfig", "MXFP8TrainingRecipe", "MXFakeQuantizeConfig", "MXLinearConfig",
        "NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4FakeQuantizeConfig", "NVFP4TrainingConfig",
        "NVFP4WeightOnlyConfig", "PerBlock", "PerRow", "PerTensor", "QATStep", "ScaleCalculationMode",
        "convert_to_float8_training",
    )
} | {
    "FqnToConfig": "mx.ao.FqnToConfig, or a dict of configs, as in mx.quantize_(model, {'lm_head': None, '_default': "
    "'mxfp8'})",
    "QATConfig": "mx.ao.QATConfig, or mx.quantize_(model, format, step='prepare'), and step='convert' after training",
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

_SKIPPED = (
    "ignore", "ignored_layers", "skip_modules", "exclude", "modules_to_not_convert", "llm_int8_skip_modules",
)  # fmt: skip
_FORMATTED = ("scheme", "qformat", "quant_type", "recipe", "quantization_config", "dtype", "bits", "fmt")
_BLOCKED = ("block_size", "group_size", "block")
_SETTINGS = ("set_inductor_config", "inplace", "weights_only", "kernel_preference")
_DATA = ("dataset", "dataloader", "calibration_data", "forward_loop")
_SAMPLES = ("num_calibration_samples", "max_seq_length", "nsamples", "batch_size")
ARGUMENTS_OF = {
    "quantize_": {
        **dict.fromkeys((*_SKIPPED, "skip"), "pass {'NAME': None, '_default': config} as config; names "
                        "are those of model.named_modules(), and lm_head stays in any case"),
        **dict.fromkeys(("targets", "modules", "target_modules"), "pass {'re:PATTERN': config} as config, or "
                        "filter_fn=lambda module, name: ..."),
        "device": "move the model first: quantize_(model.to(device), config)",
        **dict.fromkeys((*_FORMATTED, "format"), "it is the second argument, config"),
        **dict.fromkeys(_BLOCKED, "name the block in the format, as in 'mxfp8[1x64]'"),
        **dict.fromkeys(_SETTINGS, "leave it out"),
        **dict.fromkeys(_DATA, "mx.calibrate(model, data, format) takes data"),
    },
    "quantize": {
        **dict.fromkeys(_BLOCKED, "name the block in the format, as in 'mxfp8[1x64]'"),
        **dict.fromkeys(("axis", "dim"), "orientation='columnwise' blocks the dimension before the last one"),
        **dict.fromkeys(("dtype", "elem_dtype", "target_dtype"), "it is the second argument, format"),
        **dict.fromkeys(("scaling_mode", "scale_mode", "scale_calculation_mode"), "it is scaling="),
        "device": "move the tensor first: quantize(x.to(device), format)",
    },
    "calibrate": {
        **dict.fromkeys((*_SKIPPED, "skip"), "leave layers out by filter_fn=lambda module, name: ..."),
        **dict.fromkeys((*_FORMATTED, "config"), "it is the third argument, format"),
        **dict.fromkeys(_DATA, "it is the second argument, data: a list of batches"),
        **dict.fromkeys(_SAMPLES, "data has as many batches, of as many tokens, as are to be read"),
    },
    "convert": {
        **dict.fromkeys(_SKIPPED, "it is skip="),
        **dict.fromkeys((*_FORMATTED, "config"), "it is format="),
        **dict.fromkeys(("output_dir", "save_directory", "path"), "it is the second argument, destination"),
        "device": "the CPU converts; leave it out",
    },
    "TransformersConfig": {
        **dict.fromkeys(_SKIPPED, "it is skip="),
        **dict.fromkeys(_FORMATTED, "it is the first argument, format, such as 'mxfp4-weight-only'"),
        **dict.fromkeys(_BLOCKED, "name the block in the format, as in 'mxfp8[1x64]'"),
        **dict.fromkeys(_SETTINGS, "leave it out"),
    },
    "autocast": {
        **dict.fromkeys(("dtype", "device_type", "cache_enabled"), "torch.autocast has it; both may be open at once"),
        "format": "pass recipe=, such as mx.recipe.MXFP8BlockScaling()",
    },
}  # fmt: skip
"""Function -> argument that another library's has -> what to do here."""

_TORCHAO = "the names of torchao are in mxtensor.ao, as in: from mxtensor.ao import quantize_"
_TE = "the names of transformer_engine.pytorch are in mxtensor.te, as in: import mxtensor.te as te"
MODULES = {
    **dict.fromkeys(("pytorch", "module", "optimizers", "attention", "fp8"), _TE),
    "common": "recipes are in mxtensor.recipe, and in mxtensor.te.common for users of TransformerEngine",
    **dict.fromkeys(("quantization", "quant_api", "prototype", "mx_formats", "float8", "dtypes", "qat"), _TORCHAO),
    **dict.fromkeys(("jax", "paddle", "flax", "keras", "tensorflow"), "mxtensor is for PyTorch only"),
    **dict.fromkeys(
        ("modifiers", "entrypoints", "modeling", "torch"),
        "use mx.quantize_(model, format), or mx.calibrate(model, data, format) with data",
    ),
    "transformers": "use mx.TransformersConfig(format) as the quantization_config of transformers' from_pretrained",
    "optim": "it is a name of mxtensor: from mxtensor import optim",
    "parallel": "it is a name of mxtensor: from mxtensor import parallel",
    "checkpoint": "it is a name of mxtensor: from mxtensor import checkpoint",
    "utils": "the public names are in mxtensor itself", "formats": "formats are in mx.FORMATS",
}  # fmt: skip
"""First part of the name of a module in this package that does not exist -> what to import here."""


def instead_of(name: str) -> str:
    """``"; use X"`` for a name of TransformerEngine or torchao; "" for others."""
    if name in NOT_NEEDED:
        return f"; leave it out: {NOT_NEEDED[name]}"
    return f"; use {MODULE[name]}" if name in MODULE else ""


def refuse_arguments(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise TypeError for the first of these arguments, which ``function`` does not have."""
    for name in arguments:
        if function == "autocast" and name in ARGUMENTS:
            instead = f"use {ARGUMENTS[name]}=" if ARGUMENTS[name] else "leave it out"
            raise TypeError(f"{function}() has no argument {name!r}, which fp8_autocast has; {instead}")
        if name in ARGUMENTS_OF.get(function, ()):
            raise TypeError(f"{function}() has no argument {name!r}; {ARGUMENTS_OF[function][name]}")
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


class Elsewhere:
    """A class attribute that raises AttributeError, which names ours. An instance may have its own attribute."""

    def __init__(self, instead: str, owner: str = "torchao") -> None:
        self.instead, self.owner = instead, owner

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError(f"an MXTensor has no {self.name!r}, as {self.owner}'s tensors have; use {self.instead}")


# ---------------------------------------------------------------------------------------------- modules

# What ``import mxtensor.pytorch`` and ``from mxtensor import fp8_autocast`` say: where that is here.
#
# Python asks the last finder of ``sys.meta_path`` when no other one has found a module, and also before
# ``from mxtensor import NAME`` fails, whose own error would not have the text of the package's ``__getattr__``.

PACKAGE = __name__.partition(".")[0]


class _Elsewhere(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        package, _, rest = name.partition(".")
        if package != PACKAGE:
            return
        rest = rest.removeprefix("ao.").removeprefix("te.")
        first, last = rest.partition(".")[0], rest.rpartition(".")[2]
        instead = f"; {MODULES[first]}" if first in MODULES else instead_of(last)
        if instead:  # without name=, or Python would take it for its own error, and leave out the text
            raise ModuleNotFoundError(f"there is no {name}{instead}")


if not any(type(finder).__name__ == _Elsewhere.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_Elsewhere())
