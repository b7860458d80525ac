"""mx.KVCache between calls of a model: caches that are copied, cropped, reset, pickled or passed to other models."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import EncoderDecoderCache, LlamaConfig, LlamaForCausalLM
from transformers.models.mllama import MllamaTextConfig

import mxtensor as mx
from mxtensor.integrations.kv_tensor import CachedTokens, TracedTokens
from tests.integrations.test_kv_cache import SIZES, prompt

LIMIT = 48
KINDS = {
    "growing": lambda config, format="mxfp8": mx.KVCache(format),
    "limited": lambda config, format="mxfp8": mx.KVCache(format, config, LIMIT),
    "static": lambda config, format="mxfp8": mx.KVCache(format, config, LIMIT, static=True),
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


@pytest.fixture(params=KINDS)
def new_cache(request, model):
    return lambda format="mxfp8": KINDS[request.param](model.config, format)


@torch.no_grad()
def logits(model, ids, cache):
    return model(ids, past_key_values=cache).logits


# ---------------------------------------------------------------------------------------------- between calls


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "float8_row"])
def test_a_pickled_cache_goes_on(model, new_cache, format):
    cache, ids = new_cache(format), prompt(2, 33)
    logits(model, ids[:, :30], cache)
    loaded = pickle.loads(pickle.dumps(cache))
    assert torch.equal(logits(model, ids[:, 30:], loaded), logits(model, ids[:, 30:], cache))


def test_a_copied_prompt_has_two_continuations(model, new_cache):
    cache, ids = new_cache(), prompt(2, 36)
    logits(model, ids[:, :30], cache)
    first, second = copy.deepcopy(cache), copy.deepcopy(cache)
    logits(model, ids[:, 33:], first)
    assert torch.equal(logits(model, ids[:, 30:33], second), logits(model, ids[:, 30:33], cache))


def test_a_copy_of_keys_stays_when_the_cache_changes(model, new_cache):
    cache = new_cache()
    logits(model, prompt(1, 30), cache)
    copied, values = copy.deepcopy(cache.layers[0].keys), cache.layers[0].keys.dequantize()
    cache.reset()
    assert type(copied) is torch.Tensor and torch.equal(copied, values)


def test_a_prompt_in_inference_mode_goes_on_outside_of_it(model, new_cache):
    ids, cache, other = prompt(2, 33), new_cache(), new_cache()
    with torch.inference_mode():
        model(ids[:, :30], past_key_values=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
    logits(model, ids[:, :30], other)
    assert torch.equal(logits(model, ids[:, 30:], cache), logits(model, ids[:, 30:], other))


def test_after_reset_a_batch_may_have_another_size(model, new_cache):
    cache, other, ids = new_cache("nvfp4"), new_cache("nvfp4"), prompt(3, 30)
    logits(model, ids, cache)
    cache.reset()
    assert torch.equal(logits(model, ids[:2], cache), logits(model, ids[:2], other))
    assert cache.batch_size == 2 and cache.nbytes == other.nbytes


def test_after_all_tokens_are_cropped_the_next_ones_choose_the_scale(new_cache):
    cache, other, x = new_cache("nvfp4"), new_cache("nvfp4"), torch.randn(1, 2, 30, 32)
    cache.update(x, x, 0)
    cache.crop(-30)
    wanted = other.update(1e4 * x, 1e4 * x, 0)
    for found, side in zip(cache.update(1e4 * x, 1e4 * x, 0), wanted, strict=True):
        assert torch.equal(found.dequantize(), side.dequantize())


def test_no_tokens_choose_nothing(new_cache):
    cache, other, x = new_cache("nvfp4"), new_cache("nvfp4"), torch.randn(1, 2, 30, 32)
    cache.update(x[:, :, :0], x[:, :, :0], 0)
    assert torch.equal(cache.update(x, x, 0)[0].dequantize(), other.update(x, x, 0)[0].dequantize())


def test_a_prompt_that_was_too_long_can_be_made_shorter(model):
    cache = mx.KVCache("mxfp8", model.config, LIMIT)
    with pytest.raises(ValueError, match="50 tokens do not fit"):
        logits(model, prompt(1, 50), cache)
    assert logits(model, prompt(1, 30), cache).isfinite().all()


# ---------------------------------------------------------------------------------------------- static memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prompt_in_static_memory_reads_its_own_codes(model, dtype):
    """transformers takes the first places of it."""
    model = copy.deepcopy(model).to(dtype)
    cache = KINDS["static"](model.config)
    with mx.explain() as log:
        found = logits(model, prompt(2, 30), cache)
    read = [entry.spec.shapes[1] for entry in log.entries if entry.spec.op == "attention"]
    assert read == [(2, 2, 30, 32)] * 2
    assert torch.equal(found, logits(model, prompt(2, 30), mx.KVCache("mxfp8")))


@pytest.mark.parametrize("count", [1, 10, 16, 30])
def test_the_first_tokens_are_a_view(new_cache, count):
    cache, x = new_cache("mxint8"), torch.randn(2, 2, 40, 32)
    keys, values = cache.update(x, x, 0)
    first = keys[:, :, :count], values[:, :, :count, :]
    assert all(type(t) is CachedTokens and t.shape == (2, 2, count, 32) for t in first)
    assert torch.equal(first[0].dequantize(), keys.dequantize()[:, :, :count])
    traced = TracedTokens(keys.tokens, keys.center, torch.float32)[:, :, :count, :]
    assert isinstance(traced, TracedTokens) and torch.equal(traced.dequantize(), first[0].dequantize())
    q = torch.randn(2, 2, count, 32)
    wanted = F.scaled_dot_product_attention(q, *(t.dequantize() for t in first), is_causal=True)
    found = F.scaled_dot_product_attention(q, *first, is_causal=True)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert type(keys[:, :, 1:count]) is torch.Tensor and type(keys[:1, :, :count]) is torch.Tensor


def test_places_without_a_token_are_hidden_where_a_call_has_no_mask():
    x, q = torch.randn(2, 2, 30, 32), torch.randn(2, 2, 1, 32)
    cache = mx.KVCache("mxfp8", LlamaConfig(**SIZES), LIMIT, static=True)
    keys, values = cache.update(x, x, 0)
    traced = [TracedTokens(t.tokens, t.center, t.dtype) for t in (keys, values)]
    wanted = F.scaled_dot_product_attention(q, *(t.dequantize()[:, :, :30] for t in (keys, values)))
    for sides in ((keys, values), traced):
        torch.testing.assert_close(F.scaled_dot_product_attention(q, *sides), wanted, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------------------------------------- other models


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=96, d_model=64, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, num_mel_bins=8,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, max_target_positions=96,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config).eval().requires_grad_(False)


@torch.no_grad()
def heard(model, cache):
    sound = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(0))
    encoded = model.model.encoder(sound)
    ids = prompt(2, 20)
    return torch.cat([
        model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache).logits
        for part in (ids[:, :18], ids[:, 18:19], ids[:, 19:])
    ], 1)  # fmt: skip


def test_a_static_cache_of_an_encoder_has_no_mask():
    model = whisper()
    static = [mx.KVCache("mxint8", model.config, LIMIT, static=True) for _ in range(2)]
    wanted = heard(model, EncoderDecoderCache(mx.KVCache("mxint8"), mx.KVCache("mxint8")))
    torch.testing.assert_close(heard(model, EncoderDecoderCache(*static)), wanted, atol=1e-4, rtol=1e-4)


def test_one_cache_for_an_encoder_and_a_decoder():
    """Keys of the encoder would be among those of the decoder."""
    for cache in (mx.KVCache(), mx.KVCache(config=whisper().config)):
        with pytest.raises(ValueError, match=r"layer 0 got tokens twice .* pass EncoderDecoderCache\(mx\.KVCache\(\)"):
            heard(whisper(), cache)
    x = torch.randn(1, 2, 20, 32)
    keys, values = mx.KVCache().update(x, x, 0)
    with pytest.raises(ValueError, match="mask is for 19 keys, and the cache has 20; for an encoder and a decoder"):
        F.scaled_dot_product_attention(x, keys, values, torch.ones(20, 19, dtype=torch.bool))


def test_a_model_of_one_layer_gets_tokens_twice_in_a_row(model):
    cache, x = mx.KVCache(), torch.randn(1, 2, 4, 32)
    for _ in range(3):
        cache.update(x, x, 0)
    cache.reset()
    for layer in (0, 1, 0, 1):
        cache.update(x, x, layer)
    assert cache.get_seq_length() == 8


def test_keys_of_an_image_are_stored_once():
    """Mllama: one layer attends to the text and gets tokens in every call, the other one in the first call only."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"} | {"bos_token_id": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = MllamaTextConfig(**sizes, cross_attention_layers=[1], rope_parameters=rope)
    model = transformers.MllamaForCausalLM(config).eval().requires_grad_(False)
    image, ids = torch.randn(1, 12, SIZES["hidden_size"]), prompt(1, 8)

    def calls(cache):
        every = [(ids[:, :5], image), (ids[:, 5:6], None), (ids[:, 6:], None)]
        return torch.cat(
            [model(some, cross_attention_states=seen, past_key_values=cache).logits for some, seen in every], 1
        )

    wanted = calls(transformers.DynamicCache())
    for cache in (mx.KVCache("mxint8"), mx.KVCache("mxint8", config)):  # all tokens are among the first 16
        torch.testing.assert_close(calls(cache), wanted, atol=1e-5, rtol=1e-5)


STATES = {
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
              "mamba_d_state": 8, "use_mamba_kernels": False},
    "RecurrentGemma": {"attention_window_size": 8, "lru_width": 64, "num_hidden_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("family", STATES)
def test_layers_with_a_state_need_the_config(family):
    if family == "RecurrentGemma" and tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21):
        pytest.skip(f"transformers {transformers.__version__} asks for a layer of an empty cache in RecurrentGemma")
    config = getattr(transformers, f"{family}Config")(**SIZES | STATES[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with pytest.raises(ValueError, match=r"layer \d .*pass config=model\.config"):
        logits(model, prompt(2, 20), mx.KVCache())
    assert logits(model, prompt(2, 20), mx.KVCache(config=config)).isfinite().all()


def test_windows_with_a_limit_can_be_cropped(model):
    """They grow as transformers' own do: its static windows have no crop."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = transformers.MistralConfig(**sizes, sliding_window=8)
    model = transformers.MistralForCausalLM(config).eval().requires_grad_(False)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones(1, 20).long()}
    wanted = model.generate(prompt(), **options)
    cache = mx.KVCache("mxfp8", config, LIMIT)
    assert torch.equal(model.generate(prompt(), past_key_values=cache, prompt_lookup_num_tokens=3, **options), wanted)
    cache = mx.KVCache("mxfp8", config, LIMIT, static=True)
    with pytest.raises(NotImplementedError, match="layers of StaticSlidingWindowLayer have no crop; leave out static"):
        cache.crop(-1)


def test_sequences_of_static_memory_stay_as_many(model):
    cache = KINDS["static"](model.config)
    for call in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(NotImplementedError, match="layers of StaticKVLayer have no batch_"):
            call()


def test_attention_of_the_text_model_is_checked():
    config = transformers.LlavaConfig(text_config=LlamaConfig(**SIZES), attn_implementation="flash_attention_2")
    config.text_config._attn_implementation = "flex_attention"
    with pytest.raises(NotImplementedError, match="'flex_attention' attention reads plain keys"):
        mx.KVCache(config=config)
    config.text_config._attn_implementation = "sdpa"
    assert len(mx.KVCache(config=config).layers) == 2


@pytest.mark.exhaustive
def test_one_compiled_layer_among_others_of_eager_code(model):
    """Only eager code sees the order of layers."""
    torch.compiler.reset()
    ids, wanted = prompt(1, 20), logits(model, prompt(1, 20), mx.KVCache())
    compiled = copy.deepcopy(model)
    compiled.model.layers[0] = torch.compile(compiled.model.layers[0], backend="eager")
    found = logits(compiled, ids, mx.KVCache())
    torch.compiler.reset()
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
