"""A door for users of TransformerEngine: ``import mxtensor.te as te`` in place of ``transformer_engine.pytorch``.

It has TransformerEngine's names and arguments; ``te.recipe`` stands for ``transformer_engine.common.recipe``. Nothing
else in the package imports it. Start with ``linear.py`` and ``module.py`` (one forward pass of any module).

    ``quantizers.py``, ``general_gemm.py``, ``attributes.py``   single casts and products, and names of components
    ``contexts.py``, ``optimizers.py``                           autocast, quantized_model_init; FusedAdam
    ``tensor_parallel.py``, ``context_parallel.py``              weights and sequences that are split over ranks
    ``moe.py``                                                   tokens sorted by expert, groups of rows padded
    ``product_state.py``, ``extra_state.py``                     fp8_meta, and the extra states of its checkpoints
"""

import sys as _sys

from .. import recipe
from ..core.peer_names import instead_of as _instead_of
from ..recipe import QuantizerRole
from . import attributes as _attributes  # noqa: F401  (gives MXTensor TransformerEngine's attributes)
from . import common, optimizers
from .contexts import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from .dot_product_attention import DotProductAttention
from .general_gemm import general_gemm, get_workspace
from .layernorm_mlp import LayerNormMLP
from .linear import GroupedLinear, LayerNormLinear, Linear
from .moe import (
    Fp8Padding,
    Fp8Unpadding,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .multihead_attention import MultiheadAttention
from .norm import LayerNorm, RMSNorm
from .optimizers import FusedAdam
from .quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    MXQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from .rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from .transformer_layer import TransformerLayer

__all__ = [
    "DType",
    "DotProductAttention",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Fp8Padding",
    "Fp8Unpadding",
    "FusedAdam",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "MXQuantizer",
    "MultiheadAttention",
    "NVFP4Quantizer",
    "Quantizer",
    "QuantizerRole",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "common",
    "fp8_autocast",
    "fp8_model_init",
    "general_gemm",
    "get_workspace",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "optimizers",
    "quantized_model_init",
    "recipe",
]


def __getattr__(name: str) -> object:
    instead = "; use torch.utils.checkpoint.checkpoint" if name == "checkpoint" else _instead_of(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")


_sys.modules[f"{__name__}.recipe"] = recipe
