"""TransformerLayer: attention and a feed-forward network, each with a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.arguments import COUNT, POSITIVE, SHARE, TEXT, check, checked, instance, optional
from .arguments import one_of, refuse_others
from .attention_masks import PaddingMask, Window
from .context_parallel import SequenceSplit
from .dot_product_attention import MASK, WINDOW
from .layernorm_mlp import LayerNormMLP
from .multihead_attention import MultiheadAttention, check_sequences
from .norm import NORMS
from .tensor_parallel import Init, Parallel, SplitModule

LAYER_TYPES = ("encoder", "decoder")
OF_TP_COMM_OVERLAP = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad")
"""Arguments without effect where ``ub_tp_comm_overlap`` is False, and True by default there."""
LAYER = instance(
    (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
    "an nn.TransformerEncoderLayer or an nn.TransformerDecoderLayer",
)


class TransformerLayer(SplitModule, SequenceSplit):
    """(s, b, hidden_size) -> the same, for ``bshd`` (b, s, hidden_size); a norm precedes each block.

    The blocks have TransformerEngine's names: ``self_attention``, for ``decoder`` ``inter_attention``, then
    ``layernorm_mlp``.

    - ``output_layernorm`` moves the first norm to the end of the layer (``layernorm``).
    - ``apply_residual_connection_post_layernorm`` takes residuals after the norms.
    - ``parallel_attention_mlp`` gives both blocks the same input.
    - ``drop_path_rate`` skips self-attention and the feed-forward network for that share of samples.
    - ``seq_length`` and ``micro_batch_size`` have no effect: nothing is compiled ahead of time.
    - ``set_parallel_mode`` splits heads and ``ffn_hidden_size`` over the ranks of ``tp_group``; with
      ``sequence_parallel`` each rank passes and gets a part of the first dimension.

    A state dict of nn.TransformerEncoderLayer (of nn.TransformerDecoderLayer, for ``decoder``) with
    ``norm_first=True`` loads too. Raises ValueError for sizes that do not divide, unknown names and options that
    exclude each other.
    """

    @checked(
        hidden_size=COUNT, ffn_hidden_size=COUNT, num_attention_heads=COUNT, num_gqa_groups=optional(COUNT),
        kv_channels=optional(COUNT), layernorm_epsilon=POSITIVE, hidden_dropout=SHARE, attention_dropout=SHARE,
        drop_path_rate=SHARE,
    )  # fmt: skip
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        *,
        self_attn_mask_type: str = "causal",
        window_size: Window | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: Window | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        **others: Any,
    ) -> None:
        super().__init__()
        title = name or type(self).__name__
        refuse_others(title, others, OF_TP_COMM_OVERLAP)
        check(title, "enc_dec_window_size", enc_dec_window_size, WINDOW)
        one_of(f"{title}: layer_type", layer_type, LAYER_TYPES)
        post_norm = apply_residual_connection_post_layernorm
        if parallel_attention_mlp and (layer_type == "decoder" or post_norm or output_layernorm):
            raise ValueError(
                f"{title}: parallel_attention_mlp excludes layer_type='decoder', output_layernorm and "
                "apply_residual_connection_post_layernorm; leave those out"
            )
        self.layer_type, self.residual_after_norm = layer_type, post_norm
        self.parallel_attention_mlp, self.output_layernorm = parallel_attention_mlp, output_layernorm
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        common: dict[str, Any] = {
            "init_method": init_method, "output_layer_init_method": output_layer_init_method, "bias": bias,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "params_dtype": params_dtype, "device": device,
            "zero_centered_gamma": zero_centered_gamma, "normalization": normalization,
            "return_layernorm_output": post_norm, "tp_group": tp_group, "tp_size": tp_size,
            "sequence_parallel": sequence_parallel, "get_rng_state_tracker": get_rng_state_tracker,
            "set_parallel_mode": set_parallel_mode,
        }  # fmt: skip
        of_attention: dict[str, Any] = {
            "layer_number": layer_number, "num_gqa_groups": num_gqa_groups, "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved, "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format, "qk_norm_type": qk_norm_type, "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope, **common,
        }  # fmt: skip

        def attention(kind: str, attribute: str, mask_type: str, window: Window | None, normed: bool) -> nn.Module:
            return MultiheadAttention(
                hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
                attn_mask_type=mask_type, window_size=window, input_layernorm=normed, attention_type=kind,
                name=f"{title}.{attribute}", **of_attention,
            )  # fmt: skip

        self.self_attention = attention(
            "self", "self_attention", self_attn_mask_type, window_size, not output_layernorm
        )
        if layer_type == "decoder":
            self.inter_attention = attention(
                "cross", "inter_attention", enc_dec_attn_mask_type, enc_dec_window_size, True
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps=layernorm_epsilon, activation=activation,
            activation_params=activation_params, name=f"{title}.layernorm_mlp", **common,
        )  # fmt: skip
        if output_layernorm:
            self.layernorm = NORMS[normalization](
                hidden_size, layernorm_epsilon, None, params_dtype, zero_centered_gamma, device=device
            )
            split = Parallel(title, tp_group, tp_size, "row" if set_parallel_mode else None, sequence_parallel)
            split.mark_whole(*self.layernorm.parameters())
        self.batch_dim = attn_input_format.index("b")
        self.register_load_state_dict_pre_hook(_from_torch_names)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: PaddingMask | None = None,
        self_attn_mask_type: str | None = None,
        window_size: Window | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: PaddingMask | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: Window | None = None,
        is_first_microbatch: bool | None = None,
        *,
        checkpoint_core_attention: bool = False,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Masks: see DotProductAttention; those that start with ``enc_dec`` are for ``inter_attention``.

        ``rotary_pos_emb`` rotates queries and keys of self-attention. Raises ValueError for a decoder without
        ``encoder_output`` and for an encoder with one.
        """
        refuse_others("TransformerLayer", others)
        is_decoder, option = self.layer_type == "decoder", f"layer_type={self.layer_type!r}"
        check_sequences("TransformerLayer", hidden_states, encoder_output, is_decoder, option)
        if not is_decoder:
            check("TransformerLayer", "enc_dec_attn_mask", enc_dec_attn_mask, MASK)
            check("TransformerLayer", "enc_dec_attn_mask_type", enc_dec_attn_mask_type, optional(TEXT))
            check("TransformerLayer", "enc_dec_window_size", enc_dec_window_size, WINDOW)
        both: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
        }
        x = hidden_states
        attended = self.self_attention(
            x, attention_mask, attn_mask_type=self_attn_mask_type, window_size=window_size,
            rotary_pos_emb=rotary_pos_emb, **both,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            y = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
            return self._residual(attended + y, x, self.drop_path_rate, False)
        x = self._residual(attended, x, self.drop_path_rate, self.residual_after_norm and not self.output_layernorm)
        if is_decoder:
            attended = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, enc_dec_attn_mask_type, enc_dec_window_size, **both
            )
            x = self._residual(attended, x, 0.0, self.residual_after_norm)
        y = self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch)
        x = self._residual(y, x, self.drop_path_rate, self.residual_after_norm)
        return self.layernorm(x) if self.output_layernorm else x

    def _residual(self, block: Any, x: Tensor, drop_path_rate: float, after_norm: bool) -> Tensor:
        """The output of a block added to its input, or to the result of its norm that it returned too."""
        y, x = block if after_norm else (block, x)
        y = F.dropout(y, self.hidden_dropout, self.training)
        if self.training and drop_path_rate > 0.0:
            shape = [1] * y.dim()
            shape[self.batch_dim] = y.shape[self.batch_dim]
            y = y * F.dropout(y.new_ones(shape), drop_path_rate)
        return x + y

    @classmethod
    def from_torch(
        cls, module: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, **options: Any
    ) -> TransformerLayer:
        """A layer with the function of ``module`` and copies of its parameters; ``options`` override arguments.

        Its mask type is ``no_mask``; use ``arbitrary`` for masks that torch takes as tensors. torch's dropout after
        the activation has no counterpart. Raises NotImplementedError for ``norm_first=False`` and activations that
        LayerNormMLP does not have.
        """
        check("TransformerLayer.from_torch", "module", module, LAYER)
        if not module.norm_first:
            raise NotImplementedError(
                "TransformerLayer.from_torch: norm_first=False puts norms after the residual connections; only "
                "norm_first=True is supported: use torch's module, which autocast quantizes too"
            )
        activation: Any = module.activation
        name = TORCH_ACTIVATIONS.get(activation) or TORCH_ACTIVATIONS.get(type(activation))
        if isinstance(activation, nn.GELU) and activation.approximate == "tanh":
            name = "gelu"
        if name is None:
            raise NotImplementedError(
                f"TransformerLayer.from_torch: activation {activation!r}; torch's relu, gelu and silu are supported: "
                "use torch's module, which autocast quantizes too"
            )
        decoder = isinstance(module, nn.TransformerDecoderLayer)
        weight = module.linear1.weight
        known: dict[str, Any] = {
            "layernorm_epsilon": module.norm1.eps,
            "hidden_dropout": module.dropout1.p,
            "attention_dropout": module.self_attn.dropout,
            "self_attn_mask_type": "no_mask",
            "layer_type": "decoder" if decoder else "encoder",
            "bias": module.linear1.bias is not None,
            "activation": name,
            "attn_input_format": "bshd" if module.self_attn.batch_first else "sbhd",
            "params_dtype": weight.dtype,
            "device": weight.device,
        }
        made = cls(weight.shape[1], weight.shape[0], module.self_attn.num_heads, **(known | options))
        made.load_state_dict(module.state_dict())
        return made.train(module.training)


ENCODER_NAMES = {
    "norm1.": "self_attention.layernorm_qkv.layer_norm_",
    "self_attn.": "self_attention.",
    "norm2.": "layernorm_mlp.layer_norm_",
    "linear1.": "layernorm_mlp.fc1_",
    "linear2.": "layernorm_mlp.fc2_",
}
DECODER_NAMES = ENCODER_NAMES | {
    "norm2.": "inter_attention.layernorm_query.layer_norm_",
    "multihead_attn.": "inter_attention.",
    "norm3.": "layernorm_mlp.layer_norm_",
}
"""Prefix of a name in torch's layers -> prefix here; MultiheadAttention renames the rest."""


def _from_torch_names(module: TransformerLayer, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a state dict is loaded: rename the parameters of torch's layers."""
    names = DECODER_NAMES if module.layer_type == "decoder" else ENCODER_NAMES
    for theirs, ours in names.items():
        found = [key for key in state_dict if key.startswith(prefix + theirs)]
        for key in found:
            state_dict[f"{prefix}{ours}{key.removeprefix(prefix + theirs)}"] = state_dict.pop(key)
        # torch's layers without biases have norms without biases; LayerNorm here always has one.
        if theirs.startswith("norm") and found == [f"{prefix}{theirs}weight"]:
            state_dict[f"{prefix}{ours}bias"] = torch.zeros_like(state_dict[f"{prefix}{ours}weight"])


TORCH_ACTIVATIONS = {
    F.relu: "relu", torch.relu: "relu", nn.ReLU: "relu", F.silu: "silu", nn.SiLU: "silu",
    F.gelu: "gelu_erf", nn.GELU: "gelu_erf",
}  # fmt: skip
"""Function or class of torch -> the name of the activation here."""
