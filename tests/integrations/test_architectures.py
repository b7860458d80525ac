"""Decoders of different kinds, each with sizes that are not multiples of a block: quantized, they compute with the
dequantized values of their weights, dequantize none outside of a product, decode with each cache, and train."""

import copy

import pytest
import torch

import mxtensor as mx
from tests.helpers.compare import relative_error

tf = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 99, "hidden_size": 72, "intermediate_size": 104, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
SMALL = {"n_embd": 72, "n_layer": 2, "n_head": 6, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": None}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20}
MODELS = {
    "Bloom": {"hidden_size": 72, **SMALL},  # ALiBi, one fused projection
    "Cohere2": {**TEXT, "sliding_window": 8},  # attention and MLP in parallel, scaled logits, a tied head
    "DeepseekV3": TEXT | EXPERTS | LATENT | {
        "num_key_value_heads": 6, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },  # latent attention, shared experts
    "FalconH1": TEXT | {"mamba_d_ssm": 144, "mamba_n_heads": 6, "mamba_d_head": 24, "mamba_d_state": 16,
                        "mamba_chunk_size": 8},  # a state space beside attention
    "Gemma3nText": TEXT | {
        "head_dim": 12, "hidden_size_per_layer_input": 20, "vocab_size_per_layer_input": 99, "altup_num_inputs": 2,
        "laurel_rank": 12, "num_kv_shared_layers": 0, "sliding_window": 8,
    },  # low-rank branches, embeddings for each layer
    "Olmoe": TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40},
    "Qwen3Next": TEXT | EXPERTS | DELTA | {
        "head_dim": 12, "num_experts": 4, "shared_expert_intermediate_size": 40,
        "layer_types": ["linear_attention", "full_attention"],
    },  # gated delta rule
    "Nemotron": TEXT,  # squared ReLU, norms with one more, half of a head rotated
}  # fmt: skip


def built(family):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(getattr(tf, f"{family}Config")(**MODELS[family])).eval()
    for p in model.parameters():
        if p.dim() > 1:
            p.data.normal_(std=p.shape[-1] ** -0.5)
    return model


def with_values_of(model, quantized):
    model = copy.deepcopy(model)
    for name, p in quantized.named_parameters():
        if isinstance(p, mx.MXTensor):
            model.get_parameter(name).data = p.dequantize()
    return model


@pytest.mark.parametrize("family", MODELS)
def test_a_decoder_runs_decodes_and_trains_as_with_the_values_of_its_codes(family):
    model, ids = built(family), torch.arange(3, 15)[None]
    for format in ("mxfp8-weight-only", "nvfp4-weight-only"):
        quantized = mx.quantize_(copy.deepcopy(model), format)
        wanted = with_values_of(model, quantized)
        with torch.no_grad(), mx.strict():
            assert relative_error(quantized(ids).logits, wanted(ids).logits) < 1e-4
    for cache in ({}, {"cache_implementation": "static"}):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **cache}
        assert torch.equal(quantized.generate(ids, **options), wanted.generate(ids, **options))
    with torch.no_grad(), mx.strict():
        error = relative_error(mx.quantize_(copy.deepcopy(model), "mxint8")(ids).logits, model(ids).logits)
    assert 1e-3 < error < 0.3
    trained = mx.quantize_(copy.deepcopy(model), mx.recipe.MXFP8BlockScaling())
    with mx.strict():
        trained(ids, labels=ids).loss.backward()
    model(ids, labels=ids).loss.backward()
    for (name, p), q in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) or "experts" in name, name  # a token may go to other experts
