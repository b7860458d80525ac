"""A made-up language model as llama.cpp's converter writes it, in any type of GGUF."""

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "MXFP4")
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
HEADS = 4
SCALES = {"Q4_K": (0, 2), "Q6_K": (208,)}
"""Types that the package gguf does not write -> where a block has its float16 scales."""


def gguf_name(name):
    """llama.cpp's name of a tensor of transformers' Llama."""
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"
    return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]


def permuted(name, t):
    """The rows of queries and keys in llama.cpp's order."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return t
    return t.reshape(HEADS, 2, t.shape[0] // HEADS // 2, t.shape[1]).swapaxes(1, 2).reshape(t.shape)


def encoded(t, kind):
    """(the bytes of a matrix in a type, their values)."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in SCALES:
        _, size = gguf.GGML_QUANT_SIZES[number]
        data = np.random.default_rng(0).integers(0, 256, (t.shape[0], t.shape[1] // 256, size), dtype=np.uint8)
        for at in SCALES[kind]:
            data[..., at : at + 2] = np.frombuffer(np.float16(1e-4).tobytes(), np.uint8)
        data = data.reshape(t.shape[0], -1)
    else:
        data = gguf.quantize(t, number)
    return data, torch.from_numpy(gguf.dequantize(data, number).reshape(t.shape).copy())


def save_small_gguf(path, kind):
    """Write the file; returns the values by transformers' names."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=HEADS,
        tie_word_embeddings=True, initializer_range=0.2, max_position_embeddings=512,
    )  # fmt: skip
    writer, values = gguf.GGUFWriter(path, "llama"), {}
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 512), (writer.add_embedding_length, 256),
        (writer.add_feed_forward_length, 256), (writer.add_head_count, HEADS), (writer.add_head_count_kv, HEADS),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e4), (writer.add_vocab_size, 256),
    ):  # fmt: skip
        add(value)
    for name, t in LlamaForCausalLM(config).state_dict().items():
        if name == "lm_head.weight":
            continue
        data, decoded = encoded(permuted(name, t.numpy()), kind if t.dim() == 2 else "F32")
        writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType[kind if t.dim() == 2 else "F32"])
        values[name] = unpermuted(name, decoded)
    finish(writer)
    return values


def finish(writer):
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_small_lfm2(path, kind):
    """An LFM2 of attention layers only, which transformers loads by other code; returns one matrix."""
    torch.manual_seed(0)
    writer = gguf.GGUFWriter(path, "lfm2")
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 64),
        (writer.add_feed_forward_length, 64), (writer.add_head_count, 4), (writer.add_head_count_kv, [4]),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 1e4), (writer.add_shortconv_l_cache, 3),
        (writer.add_token_list, [f"t{i}" for i in range(64)]),
    ):  # fmt: skip
        add(value)
    layer = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in ("token_embd", *(f"blk.0.{name}" for name in layer)):
        data, values = encoded(torch.randn(64, 64).numpy(), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])
    norms = {"attn_norm": 64, "ffn_norm": 64, "attn_q_norm": 16, "attn_k_norm": 16}
    for name, size in ({f"blk.0.{name}": size for name, size in norms.items()} | {"token_embd_norm": 64}).items():
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    finish(writer)
    return values


def unpermuted(name, t):
    """The inverse of ``permuted``."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return t
    return t.reshape(HEADS, t.shape[0] // HEADS // 2, 2, t.shape[1]).swapaxes(1, 2).reshape(t.shape)
