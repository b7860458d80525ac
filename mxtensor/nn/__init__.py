"""TransformerEngine's modules, by their names and arguments. They run quantized inside ``mxtensor.autocast``.

Start with ``linear.py`` and ``base.py`` (one forward pass of any module). Functions that sort tokens by expert have
TransformerEngine's names too (``permutation.py``). ``tensor_parallel.py`` splits weights over ranks,
``context_parallel.py`` sequences.
"""

from ..core.peer_names import instead_of as _instead_of
from .attention import MultiheadAttention
from .dot_product import DotProductAttention
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .norm import LayerNorm, RMSNorm
from .padding import Fp8Padding, Fp8Unpadding
from .permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from .rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from .transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
]


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_instead_of(name)}")
