"""mx.KVCache in other models than Llama: softcaps, sinks, sliding windows, heads of two sizes, encoder and decoder."""

import pytest
import torch
import transformers

import mxtensor as mx
from tests.integrations.test_kv_cache import SIZES, Dequantizing

HIDDEN = {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
          "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
          "moe_intermediate_size": 32, "first_k_dense_replace": 1}  # fmt: skip
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MODELS = {
    "Gemma 2: eager, softcap, windows": ("Gemma2", SIZES | {"sliding_window": 8}),
    "gpt-oss: eager, sinks, windows": ("GptOss", SIZES | {"sliding_window": 8} | EXPERTS),
    "DeepSeek 3: keys longer than values": ("DeepseekV3", HIDDEN | LATENT),
    "Mistral: windows": ("Mistral", HIDDEN | {"num_key_value_heads": 2, "sliding_window": 8}),
    "OPT: no group": ("OPT", {k: v for k, v in HIDDEN.items() if k != "intermediate_size"}
                      | {"ffn_dim": 64, "word_embed_proj_dim": 64}),
}  # fmt: skip


def generated(model, cache):
    ids = torch.randint(2, 96, (2, 24), generator=torch.Generator().manual_seed(0))
    return model.generate(
        ids, past_key_values=cache, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("knows_the_model", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_generate_is_that_of_a_cache_that_dequantizes(name, knows_the_model):
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    given = model.config if knows_the_model else None
    found, wanted = (generated(model, kind("mxfp8", config=given)) for kind in (mx.KVCache, Dequantizing))
    assert found.shape == (2, 30) and torch.equal(found, wanted)


@pytest.mark.exhaustive
def test_an_encoder_and_a_decoder_have_a_cache_each():
    config = transformers.T5Config(vocab_size=96, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
                                   pad_token_id=0, decoder_start_token_id=0, eos_token_id=None)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval().requires_grad_(False)
    pairs = [transformers.EncoderDecoderCache(kind(), kind()) for kind in (mx.KVCache, Dequantizing)]
    found, wanted = (generated(model, pair) for pair in pairs)
    assert found.shape == (2, 7) and torch.equal(found, wanted)
