"""Small models whose tensors transformers renames, splits, stacks or transposes while it loads them."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

TEXT = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
ENCODER = {name: value for name, value in TEXT.items() if name not in ("num_key_value_heads", "bos_token_id")}
ENCODER |= {"max_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


def _llava():
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 32},
            text_config={**TEXT, "model_type": "llama"},
            image_token_index=95,
        )
    )


def _qwen2_vl():
    vision = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 8}
    config = tf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE}, vision_config=vision, image_token_id=95, video_token_id=94,
        vision_start_token_id=93,
    )  # fmt: skip
    return tf.Qwen2VLForConditionalGeneration(config)


def _phimoe():
    return tf.PhimoeForCausalLM(tf.PhimoeConfig(**TEXT, num_local_experts=2, num_experts_per_tok=1, lm_head_bias=True))


def _neox():
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**TEXT))


def _vit():
    return tf.ViTForImageClassification(tf.ViTConfig(**VISION, num_labels=8))


def _swin():
    config = tf.SwinConfig(embed_dim=32, depths=[1], num_heads=[2], image_size=16, patch_size=4, window_size=4)
    return tf.SwinForImageClassification(config)


def _dinov2():
    config = tf.Dinov2Config(**{**VISION, "hidden_size": 96}, use_swiglu_ffn=True)
    return tf.Dinov2Model(config)


def _nomic_bert():
    return tf.NomicBertModel(tf.NomicBertConfig(**ENCODER))


def _gte():
    return tf.GteModel(tf.GteConfig(**ENCODER))


def _granite_moe():
    config = tf.GraniteMoeConfig(**TEXT, num_local_experts=2, num_experts_per_tok=1)
    return tf.GraniteMoeForCausalLM(config)


def _qwen3_vl_moe():
    text = {**TEXT, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64,
            "decoder_sparse_step": 1, "rope_parameters": ROPE}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 96, "num_heads": 4,
              "patch_size": 8, "deepstack_visual_indexes": [0], "num_position_embeddings": 4}  # fmt: skip
    config = tf.Qwen3VLMoeConfig(
        text_config=text, vision_config=vision, image_token_id=95, video_token_id=94, vision_start_token_id=93
    )
    return tf.Qwen3VLMoeForConditionalGeneration(config)


def _rwkv():
    config = tf.RwkvConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, context_length=32)
    return tf.RwkvForCausalLM(config)


def _gpt2():
    return tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    )


def _llama4():
    config = tf.Llama4TextConfig(**TEXT, head_dim=16, intermediate_size_mlp=96, num_local_experts=2)
    return tf.Llama4ForCausalLM(config)


def _aria():
    return tf.AriaTextForCausalLM(tf.AriaTextConfig(**TEXT, moe_num_experts=2, moe_topk=1, moe_num_shared_experts=1))


def _inkling2():
    own = {"head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16,
           "unpadded_vocab_size": 96, "n_routed_experts": 2, "num_experts_per_tok": 1}  # fmt: skip
    return tf.Inkling2ForCausalLM(tf.Inkling2TextConfig(**TEXT | own))


def _bark():
    config = tf.BarkSemanticConfig(
        input_vocab_size=64, output_vocab_size=64, hidden_size=64, num_layers=1, num_heads=4, block_size=32
    )
    return tf.BarkSemanticModel(config)


def _mamba2():
    config = tf.Mamba2Config(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, state_size=16, head_dim=32, num_heads=4, n_groups=1
    )
    return tf.Mamba2ForCausalLM(config)


def _zamba2():
    own = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16, "mamba_headdim": 16,
           "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "num_hidden_layers": 4}  # fmt: skip
    return tf.Zamba2ForCausalLM(tf.Zamba2Config(**{**TEXT, **own}))


def _siglip():
    return tf.SiglipVisionModel(tf.SiglipVisionConfig(**VISION))


MODELS = {
    "llava": _llava, "qwen2_vl": _qwen2_vl, "phimoe": _phimoe, "neox": _neox, "vit": _vit, "swin": _swin,
    "dinov2": _dinov2, "nomic_bert": _nomic_bert, "gte": _gte, "granite_moe": _granite_moe,
    "qwen3_vl_moe": _qwen3_vl_moe, "aria": _aria, "inkling2": _inkling2, "rwkv": _rwkv, "gpt2": _gpt2,
    "llama4": _llama4, "bark": _bark, "mamba2": _mamba2, "zamba2": _zamba2, "siglip": _siglip,
}  # fmt: skip


def as_trained(model):
    """``model`` for inference, with weights of the size that training gives, whose errors show in the outputs."""
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=p.shape[-1] ** -0.5)
    return model.eval()


def built(name):
    """A model in float32, ``as_trained``."""
    torch.manual_seed(0)
    if name == "gte" and not hasattr(tf, "GteModel"):
        pytest.skip(f"transformers {tf.__version__} has no GteModel")
    return as_trained(MODELS[name]())


def output(model):
    """The first output of a model for tokens, or for an image."""
    torch.manual_seed(1)
    given = {"input_ids": torch.arange(3, 13)[None]}
    if model.main_input_name == "pixel_values" and not hasattr(model.config, "text_config"):
        given = {"pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        return model(**given)[0]
