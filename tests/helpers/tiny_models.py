"""Small random models of the families of transformers that generate. Those with windows have one of 12 tokens."""

import torch
import transformers

WINDOW = {"sliding_window": 12}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
COMMON = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
PLAIN = COMMON | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
TEXT = PLAIN | {"head_dim": 16}
UNGROUPED = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
          "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32,
         "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
SPACES = {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
          "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 8}  # fmt: skip
BESIDE = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 8}
DECODERS = {
    "Llama": TEXT,
    "Mistral": TEXT | WINDOW,
    "Gemma2": TEXT | WINDOW,
    "Gemma3Text": TEXT | MIXED,
    "Qwen2": PLAIN | WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": TEXT,
    "Qwen3Moe": TEXT | EXPERTS,
    "Mixtral": TEXT | LOCAL_EXPERTS,
    "GptOss": TEXT | WINDOW | LOCAL_EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "Phi3": PLAIN | WINDOW,
    "Olmo2": PLAIN,
    "Olmo3": PLAIN | MIXED,
    "Granite": PLAIN,
    "Cohere": PLAIN,
    "Cohere2": TEXT | MIXED,
    "Starcoder2": PLAIN | WINDOW,
    "GPTNeoX": UNGROUPED,
    "GPT2": COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "Falcon": COMMON | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "OPT": UNGROUPED | {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "Bloom": COMMON | {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "SmolLM3": PLAIN,
    "DeepseekV3": PLAIN | LATENT,
    "Mamba": COMMON | {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
    "Jamba": PLAIN | SPACES,
    "FalconH1": PLAIN | BESIDE,
    "Qwen3Next": TEXT | EXPERTS | DELTA,
}
ENCODED = COMMON | {"d_model": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None}
LAYERS = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
          "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
SOUND = {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 200, "begin_suppress_tokens": None}
ENCODERS_AND_DECODERS = {
    "T5": ENCODED | {"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    "Bart": ENCODED | LAYERS | {"max_position_embeddings": 256},
    "Whisper": ENCODED | LAYERS | SOUND,
}
WITH_WINDOWS = [family for family, sizes in DECODERS.items() if sizes.get("sliding_window")]
FAMILIES = *DECODERS, *ENCODERS_AND_DECODERS


def made(family, seed=0):
    """A model of a family in float32, with weights that give tokens their own logits."""
    torch.manual_seed(seed)
    sizes = DECODERS.get(family) or ENCODERS_AND_DECODERS[family]
    config = getattr(transformers, f"{family}Config")(**sizes)
    if family in DECODERS:
        model = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=p.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def inputs(family, batch, length):
    """What ``generate`` of such a model takes: a prompt of so many tokens, or sounds of one size."""
    generator = torch.Generator().manual_seed(1)
    if family == "Whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    ids = torch.randint(5, 97, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
