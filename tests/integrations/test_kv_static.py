"""The static layer of mx.KVCache: it stores what the growing one stores, and a model compiles into one graph."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

import mxtensor as mx
from mxtensor.integrations.kv_cache import StaticKVLayer
from mxtensor.integrations.kv_storage import FIRST
from mxtensor.integrations.kv_tensor import TracedTokens
from tests.integrations.test_kv_cache import FORMATS, SIZES, Dequantizing, prompt

LIMIT = 48


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)


def static(model, format="mxfp8", kind=mx.KVCache):
    return kind(format, model.config, LIMIT, static=True)


def filled(format, counts=(30, 1, 2), dtype=torch.float32, batch=2):
    """A static layer and a growing one with the same tokens."""
    torch.manual_seed(0)
    layers = StaticKVLayer(mx.Cast.of(format), LIMIT), mx.KVCache(format)
    for count in counts:
        keys, values = (torch.randn(batch, 2, count, 64, dtype=dtype) + 1 for _ in range(2))
        for layer in layers:
            layer.update(keys, values, 0)
    return layers[0], layers[1].layers[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_the_growing_cache(format, dtype):
    still, growing = filled(format, dtype=dtype)
    for side in ("keys", "values"):
        found, wanted = getattr(still, side).dequantize(), getattr(growing, side).dequantize()
        assert found.shape == (2, 2, LIMIT, 64) and found.dtype is dtype and int(still.get_seq_length()) == 33
        assert torch.equal(found[:, :, :33], wanted) and found.isfinite().all()


def test_a_prompt_shorter_than_the_exact_tokens_and_one_after_another():
    still, _ = filled("mxfp8", (3, *(1,) * 20))
    torch.manual_seed(0)
    states = [torch.randn(2, 2, count, 64) + 1 for count in (3, *(1,) * 20) for _ in range(2)]
    keys = torch.cat(states[::2], 2)
    found = still.keys.dequantize()
    assert torch.allclose(found[:, :, :FIRST], keys[:, :, :FIRST], atol=1e-6)
    assert 0 < (found[:, :, FIRST:23] - keys[:, :, FIRST:]).abs().max() < 0.3


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
def test_generate_is_that_of_the_growing_cache(model, format):
    ids = prompt(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    wanted = model.generate(ids, past_key_values=mx.KVCache(format), **options)
    cache = static(model, format)
    assert cache.is_compileable and cache.get_max_length() == LIMIT
    for _ in range(2):
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
        cache.reset()
    assert torch.equal(model.generate(ids, past_key_values=static(model, format, Dequantizing), **options), wanted)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*TF32:UserWarning")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@torch.no_grad()
def test_steps_are_one_graph_that_is_compiled_once(model, format, attention):
    model.set_attn_implementation(attention)
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids, cache, other = prompt(2, 30), static(model, format), mx.KVCache(format)
    for forward, past in ((model, cache), (model, other)):
        forward(ids, past_key_values=past)
    for i in range(4):
        with mx.explain() as log:
            found = compiled(ids[:, i : i + 1], past_key_values=cache).logits
        wanted = model(ids[:, i : i + 1], past_key_values=other).logits
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and int(cache.get_seq_length()) == 34
    read = [entry.kernel for entry in log.entries if entry.spec.op == "attention"]
    assert len(read) == (2 if attention == "sdpa" else 0)  # codes, once in each layer
    model.set_attn_implementation("sdpa")
    torch.compiler.reset()


@pytest.mark.exhaustive
@torch.no_grad()
def test_a_compiled_prompt_and_steps(model):
    torch.compiler.reset()
    compiled, ids = torch.compile(model, fullgraph=True), prompt(1, 30)
    found, wanted = [], []
    for forward, out in ((compiled, found), (model, wanted)):
        cache = static(model)
        cache.early_initialization(1, 2, 32, torch.float32, torch.device("cpu"))
        out += [forward(part, past_key_values=cache).logits for part in (ids, ids[:, :1], ids[:, 1:2])]
    torch.compiler.reset()
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu
@torch.no_grad()
def test_generate_on_a_gpu_compiles_by_itself(model):
    model = copy.deepcopy(model).to("cuda", torch.bfloat16)
    ids = prompt(2, 30).cuda()
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    wanted = model.generate(ids, past_key_values=mx.KVCache("mxfp8", model.config), **options)
    found = model.generate(ids, past_key_values=static(model), **options)  # mode="reduce-overhead"
    assert (found == wanted).float().mean() > 0.9  # an argmax may fall the other way


def test_methods_keep_the_memory_where_it_is():
    still, _ = filled("nvfp4")
    addresses = [t.data_ptr() for side in (still._keys, still._values) for t in side.buffers]
    before, memory = still.keys.dequantize(), still.nbytes
    still.reorder_cache(torch.tensor([1, 1]))
    assert torch.equal(still.keys.dequantize(), before[[1, 1]])
    still.crop(-3)
    assert int(still.get_seq_length()) == 30 and still.get_mask_sizes(1) == (LIMIT, 0)
    still.crop(12)
    assert int(still.get_seq_length()) == 12
    still.reset()
    assert int(still.get_seq_length()) == 0 and still.nbytes == memory
    x = torch.randn(2, 2, 20, 64)
    still.update(x, x)
    fresh = StaticKVLayer(mx.Cast.of("nvfp4"), LIMIT)
    fresh.update(x, x)
    assert torch.equal(still.keys.dequantize(), fresh.keys.dequantize())
    assert addresses == [t.data_ptr() for side in (still._keys, still._values) for t in side.buffers]
    still.offload()
    still.prefetch()
    assert torch.equal(still.keys.dequantize(), fresh.keys.dequantize())


def test_attention_of_traced_tokens_is_that_of_their_values():
    still, _ = filled("mxfp8", (30,))
    side, values = still._keys, still._values
    k, v = TracedTokens(side.tokens(), side.center, torch.float32), TracedTokens(values.tokens(), None, torch.float32)
    q, mask = torch.randn(2, 6, 3, 64), (torch.arange(LIMIT) < 30).view(1, 1, 1, LIMIT)

    def repeated(x):
        return x[:, :, None, :, :].expand(2, 2, 3, LIMIT, 64).reshape(2, 6, LIMIT, 64)

    one, other = repeated(k), repeated(v)
    assert isinstance(one, TracedTokens) and one.shape == (2, 6, LIMIT, 64)
    assert torch.equal(one.dequantize(), repeated(k.dequantize())) and k[:, :, None, :, :].shape == (2, 2, 1, LIMIT, 64)
    wanted = F.scaled_dot_product_attention(q, one.dequantize(), other.dequantize(), mask)
    with mx.explain() as log:
        found = F.scaled_dot_product_attention(q, one, other, mask)
        grouped = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert [entry.spec.op for entry in log.entries if entry.spec.op == "attention"] == ["attention"] * 2
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(grouped, wanted, atol=2e-5, rtol=1e-4)
    q.requires_grad_()
    F.scaled_dot_product_attention(q, one, other, mask).sum().backward()
    assert q.grad.abs().max() > 0
    assert torch.equal(k[:, :, 3:5], k.dequantize()[:, :, 3:5]) and torch.equal(k.transpose(2, 3), k.dequantize().mT)
    assert torch.equal(torch.add(k, 1), k.dequantize() + 1) and k.reshape(-1).shape == (2 * 2 * LIMIT * 64,)


def test_wrong_arguments(model):
    for arguments in ({}, {"max_cache_len": 8}, {"config": model.config}):
        with pytest.raises(ValueError, match=r"static=True needs config=model\.config and max_cache_len"):
            mx.KVCache(static=True, **arguments)
    cache = static(model)
    with pytest.raises(ValueError, match="50 tokens do not fit max_cache_len=48"):
        model(prompt(1, 50), past_key_values=cache)
    x = torch.ones(1, 2, 4, 32)
    with pytest.raises(ValueError, match="are of different tokens"):
        cache.update(x, x[:, :, :3], 0)
    cache.update(x, x, 0)
    with pytest.raises(ValueError, match=r"those before them \(1, 2, 32\)"):
        cache.update(x.expand(2, 2, 4, 32), x.expand(2, 2, 4, 32), 0)
