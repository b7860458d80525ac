"""TransformerEngine's modules, by their names and arguments. They run quantized inside ``mxtensor.autocast``."""

from .attention import MultiheadAttention
from .dot_product import DotProductAttention
from .grouped_linear import GroupedLinear
from .layernorm_linear import LayerNormLinear
from .layernorm_mlp import LayerNormMLP
from .linear import Linear
from .padding import Fp8Padding, Fp8Unpadding
from .rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from .transformer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]
