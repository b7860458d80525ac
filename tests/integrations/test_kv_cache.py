"""mx.KVCache: generate() is that with a cache that dequantizes, and every method of a cache of transformers works."""

import copy
import importlib
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, GemmaConfig, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import mxtensor as mx
from mxtensor.integrations import kv_cache, kv_storage
from mxtensor.integrations.kv_cache import KVCacheLayer
from mxtensor.integrations.kv_storage import FIRST, KVStorage, global_scale_of
from mxtensor.integrations.kv_tensor import CachedTokens

FORMATS = ["mxfp8", "mxfp6", "mxfp4", "mxint8", "nvfp4", "float8_row"]
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 32,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None}  # fmt: skip


class Dequantizing(mx.KVCache):
    """The same cache, whose keys and values are plain."""

    def update(self, *args, **kwargs):
        sides = super().update(*args, **kwargs)
        return tuple(side.dequantize() if isinstance(side, CachedTokens) else side for side in sides)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


def prompt(batch=1, tokens=20):
    return torch.randint(1, SIZES["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(0))


def both(model, ids, make=lambda kind: kind("mxfp8"), **options):
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)} | options
    return [model.generate(ids, past_key_values=make(kind), **options) for kind in (mx.KVCache, Dequantizing)]


# ---------------------------------------------------------------------------------------------- generate


@pytest.mark.exhaustive(quick=6)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("limit", [None, 40])
@pytest.mark.parametrize("format", FORMATS)
def test_generate_is_that_of_a_cache_that_dequantizes(model, format, limit, attention):
    model.set_attn_implementation(attention)
    found, wanted = both(model, prompt(), lambda kind: kind(format, max_cache_len=limit))
    assert found.shape == (1, 28) and torch.equal(found, wanted)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 7}])
def test_beams_lookups_and_chunks(model, options):
    model.set_attn_implementation("sdpa")
    found, wanted = both(model, prompt(), **options)
    assert torch.equal(found, wanted)


def test_prompts_of_different_lengths(model):
    model.set_attn_implementation("sdpa")
    ids = prompt(3)
    mask = torch.ones_like(ids)
    mask[0, :7], mask[1, :2] = 0, 0
    found, wanted = both(model, ids, attention_mask=mask)
    assert torch.equal(found, wanted)


def test_one_token_after_another_is_a_prompt_at_once_up_to_the_mean(model):
    """The mean and the codes after it are of the first update that leaves high precision."""
    model.set_attn_implementation("sdpa")
    ids, cache = prompt(1, FIRST), mx.KVCache("mxfp8")
    with torch.no_grad():
        for i in range(FIRST):
            logits = model(ids[:, i : i + 1], past_key_values=cache).logits
        whole = model(ids, past_key_values=DynamicCache()).logits[:, -1:]
    assert torch.allclose(logits, whole, atol=1e-5)  # nothing is rounded yet


@torch.no_grad()
def test_attention_reads_codes_and_no_copy(model):
    model.set_attn_implementation("sdpa")
    cache = mx.KVCache("mxfp8", config=model.config)
    with mx.explain() as log:
        model(prompt(), past_key_values=cache)
        model(prompt(1, 1), past_key_values=cache)
    kernels = [entry.kernel for entry in log.entries if entry.spec.op == "attention"]
    assert kernels[:2] == ["by heads"] * 2 and set(kernels[2:]) <= {"cpu", "by heads"} and len(kernels) == 4


def test_sliding_windows_keep_the_cache_of_transformers():
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    config = MistralConfig(**sizes, sliding_window=8)
    cache = mx.KVCache("mxfp8", config=config)
    assert not any(isinstance(layer, KVCacheLayer) for layer in cache.layers) and len(cache.layers) == 2
    model = MistralForCausalLM(config).eval().requires_grad_(False)
    out = model.generate(prompt(), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert torch.equal(out, model.generate(prompt(), max_new_tokens=4, do_sample=False))


def test_arguments():
    with pytest.raises(NotImplementedError, match="several tokens share a scale"):
        mx.KVCache("mxfp8[32x32]")
    with pytest.raises(NotImplementedError, match="reads plain keys and values"):
        mx.KVCache("mxfp8", config=GemmaConfig(attn_implementation="flex_attention"))
    with pytest.raises(ValueError, match="not a multiple of 8"):
        mx.KVCache().update(torch.ones(1, 1, 2, 12), torch.ones(1, 1, 2, 12), 0)
    with pytest.raises(ValueError, match="do not fit max_cache_len=4"):
        mx.KVCache(max_cache_len=4).update(torch.ones(1, 1, 5, 32), torch.ones(1, 1, 5, 32), 0)
    cache = mx.KVCache()
    cache.update(torch.ones(1, 1, 2, 32), torch.ones(1, 1, 2, 32), 0)
    with pytest.raises(ValueError, match=r"those before them \(1, 1, 32\)"):
        cache.update(torch.ones(2, 1, 2, 32), torch.ones(2, 1, 2, 32), 0)
    assert mx.KVCache().batch_size == -1 and not hasattr(KVCacheLayer(mx.Cast.of("mxfp8")), "batch_size")
    assert repr(cache) == "KVCache(format=mxfp8_e4m3, tokens=2, layers=1)"


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    with pytest.raises(ImportError, match=r"mx\.KVCache needs transformers 5: pip install"):
        importlib.reload(kv_cache)


# ---------------------------------------------------------------------------------------------- methods


def filled(batch=3, tokens=40, format="nvfp4", limit=None, dtype=torch.float32):
    """A cache of one layer, with its keys and values."""
    cache = mx.KVCache(format, max_cache_len=limit)
    for count in (tokens - 3, 1, 2):
        keys, values = cache.update(*(torch.randn(batch, 2, count, 64, dtype=dtype) + 1 for _ in range(2)), 0)
    return cache, keys.dequantize(), values.dequantize()


def stored(cache):
    layer = cache.layers[0]
    return layer.keys.dequantize(), layer.values.dequantize()


CALLS = {
    "reorder": (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), lambda t: t[[2, 0, 0]]),
    "repeat": (lambda c: c.batch_repeat_interleave(2), lambda t: t.repeat_interleave(2, 0)),
    "select": (lambda c: c.batch_select_indices(torch.tensor([1])), lambda t: t[[1]]),
    "select by bool": (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), lambda t: t[[0, 2]]),
    "crop": (lambda c: c.crop(-5), lambda t: t[:, :, :-5]),
    "crop into the first": (lambda c: c.crop(-30), lambda t: t[:, :, :10]),
    "crop nothing": (lambda c: c.crop(0), lambda t: t),
    "crop as before": (lambda c: c.crop(20), lambda t: t[:, :, :20]),
    "crop all": (lambda c: c.crop(-100), lambda t: t[:, :, :0]),
    "copy": (lambda c: setattr(c, "layers", copy.deepcopy(c.layers)), lambda t: t),
    "away and back": (lambda c: [(layer.offload(), layer.prefetch()) for layer in c.layers], lambda t: t),
}


@pytest.mark.parametrize("limit", [None, 64])
@pytest.mark.parametrize("call", CALLS)
def test_methods(call, limit):
    cache, keys, values = filled(limit=limit)
    change, same = CALLS[call]
    change(cache)
    assert torch.equal(stored(cache)[0], same(keys)) and torch.equal(stored(cache)[1], same(values))
    batch, length = same(keys).shape[0], same(keys).shape[2]
    assert cache.get_seq_length() == length and cache.batch_size == batch
    more = torch.randn(batch, 2, 20, 64)
    found, _ = cache.update(more, more, 0)  # and goes on
    assert torch.equal(found.dequantize()[:, :, :length], same(keys))
    assert (found.dequantize()[:, :, length:] - more).norm() < 0.15 * more.norm()


@pytest.mark.parametrize("limit", [None, 64])
def test_reset_and_sizes(limit):
    cache, *_ = filled(limit=limit)
    assert cache.get_mask_sizes(5, 0) == (45, 0) and cache.get_max_length() == (-1 if limit is None else limit)
    assert (
        cache.is_croppable and not cache.is_compileable and cache.layers[0].get_mask_sizes(torch.arange(5)) == (45, 0)
    )
    size = cache.nbytes
    cache.reset()
    assert cache.get_seq_length() == 0 and (cache.nbytes == 0 if limit is None else 0 < cache.nbytes <= size)
    fresh = mx.KVCache("nvfp4", max_cache_len=limit)
    x = torch.randn(3, 2, 30, 64)
    assert torch.equal(cache.update(x, x, 0)[0].dequantize(), fresh.update(x, x, 0)[0].dequantize())


def test_memory_is_allocated_at_once_with_a_limit():
    layer = KVCacheLayer(mx.Cast.of("mxfp8"), 100)
    layer.lazy_initialization(torch.empty(1, 2, 0, 64))
    address = layer._keys.codes[0].data_ptr()
    layer.update(*(torch.randn(1, 2, 100, 64) for _ in range(2)))
    assert layer._keys.codes[0].data_ptr() == address and layer.get_seq_length() == 100


@pytest.mark.parametrize(("format", "share"), [("mxfp8", 0.53), ("nvfp4", 0.29), ("mxfp4", 0.275)])
def test_bytes_beside_bfloat16(format, share):
    cache, count = mx.KVCache(format), 8192
    x = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16)
    cache.update(x.expand(1, 1, count, 64), x.expand(1, 1, count, 64), 0)
    cache.update(x, x, 0)  # makes room for more
    assert cache.nbytes <= share * 2 * (count + 1) * 64 * 2


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_compiled_model_has_the_values(model):
    model.set_attn_implementation("sdpa")
    torch.compiler.reset()
    compiled, ids, logits = torch.compile(model), prompt(1, 30), []
    for forward in (model, compiled):
        cache = mx.KVCache("mxfp8")
        logits.append([forward(part, past_key_values=cache).logits for part in (ids, ids[:, :1], ids[:, 1:2])])
    torch.compiler.reset()
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*logits, strict=True))


# ---------------------------------------------------------------------------------------------- what is stored


def test_the_first_tokens_are_exact_and_codes_are_of_centered_keys():
    keys, values = torch.randn(2, 2, 40, 64) + 3, torch.randn(2, 2, 40, 64)
    layer = KVCacheLayer(mx.Cast.of("mxfp8"))
    layer.update(keys, values)
    center = keys[:, :, 1:].mean(2, keepdim=True)
    wanted = mx.quantize(keys[:, :, FIRST:] - center, "mxfp8").dequantize() + center
    assert torch.allclose(layer.keys.dequantize(), torch.cat((keys[:, :, :FIRST], wanted), 2), atol=1e-6)
    rounded = mx.quantize(values[:, :, FIRST:], "mxfp8").dequantize()
    assert torch.equal(layer.values.dequantize(), torch.cat((values[:, :, :FIRST], rounded), 2))


@pytest.mark.parametrize("amax", [0.0, 1e-6, 20.0, 21.0, 1e4, math.inf, math.nan])
def test_a_global_scale_has_room_and_is_a_power_of_two(amax):
    format = mx.get_format("nvfp4")
    scale = global_scale_of(torch.tensor([0.0, amax]), format)
    assert math.frexp(float(scale))[0] == 0.5
    finite = amax if math.isfinite(amax) else 0.0
    room = max(kv_storage.ROOM * finite, kv_storage.LEAST)
    assert room <= float(scale) * 448 * 6 <= 2 * room


def test_values_beyond_the_room_saturate_and_others_stay():
    storage = KVStorage(mx.Cast.of("nvfp4"))
    storage.append(torch.randn(1, 1, 30, 64))
    late = torch.full((1, 1, 1, 64), 1e6)
    late[..., :32] = 1.0
    storage.append(late)
    values = CachedTokens(storage.tokens(), None, torch.float32).dequantize()[0, 0, -1]
    assert (values[:32] - 1).abs().max() < 0.1 and 100 < values[32:].min() < 1e6


def test_steps_of_growth_keep_tokens():
    storage, pieces = KVStorage(mx.Cast.of("mxint8")), []
    for count in (17, 1, 30, 1, 1, 5, 1, 60, 1, 1, 40, 1):  # room for 32 more each time, and one beyond
        pieces.append(torch.randn(1, 2, count, 32))
        storage.append(pieces[-1])
    values = CachedTokens(storage.tokens(), None, torch.float32).dequantize()
    assert (values - torch.cat(pieces, 2)).abs().max() < 0.03


# ---------------------------------------------------------------------------------------------- CachedTokens


def test_other_ops_have_the_values():
    cache, keys, _ = filled()
    found = cache.layers[0].keys
    assert isinstance(found, CachedTokens) and found.shape == keys.shape and found.stride() == keys.stride()
    assert torch.equal(found + 0, keys) and torch.equal(found[:, :, 3:5], keys[:, :, 3:5])
    assert torch.equal(found.transpose(2, 3).contiguous(), keys.transpose(2, 3)) and type(found * 2) is torch.Tensor
    assert repr(found) == "CachedTokens(shape=(3, 2, 40, 64), format=nvfp4, dtype=torch.float32)"


def test_repeated_heads_are_not_repeated_in_memory():
    cache, keys, values = filled(format="mxfp8")
    q = torch.randn(3, 6, 4, 64)

    def repeated(x):
        return x[:, :, None, :, :].expand(3, 2, 3, 40, 64).reshape(3, 6, 40, 64)

    k, v = (repeated(side) for side in (cache.layers[0].keys, cache.layers[0].values))
    assert isinstance(k, CachedTokens) and k.tokens.codes.shape[1] == 2 and k.shape == (3, 6, 40, 64)
    assert torch.equal(k.dequantize(), repeated(keys))
    five = cache.layers[0].keys[:, :, None, :, :]
    assert torch.equal(five + 0, keys[:, :, None]) and torch.equal(five.expand(3, 2, 3, 40, 64) + 0,
                                                                 keys[:, :, None].expand(3, 2, 3, 40, 64))  # fmt: skip
    mask = torch.randn(3, 1, 4, 40)
    with mx.explain() as log:
        found = F.scaled_dot_product_attention(q, k, v, mask)
    assert [entry.spec.op for entry in log.entries if entry.spec.op != "dequantize"] == ["attention"]
    wanted = F.scaled_dot_product_attention(q, repeated(keys), repeated(values), mask)
    assert torch.allclose(found, wanted, atol=2e-5)


def test_attention_with_dropout_or_a_gradient_takes_the_values():
    cache, keys, values = filled(format="mxfp8")
    k, v = cache.layers[0].keys, cache.layers[0].values
    q = torch.randn(3, 2, 4, 64, requires_grad=True)
    found = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(found, F.scaled_dot_product_attention(q, keys, values))
    (gradient,) = torch.autograd.grad(found.sum(), q)
    assert gradient.shape == q.shape and gradient.abs().max() > 0
    with torch.no_grad():
        torch.manual_seed(1)
        dropped = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(dropped, F.scaled_dot_product_attention(q, keys, values, dropout_p=0.5))
