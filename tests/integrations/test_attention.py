"""``attn_implementation="mxtensor"``: decoding by an op of the package, everything else by transformers' sdpa."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import mxtensor as mx
from mxtensor.integrations import attention
from mxtensor.kernels.runtime import native_build

pytestmark = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=200, attn_implementation="mxtensor", pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@contextmanager
def ops():
    """The sizes of the queries that ops of the package got inside the block, as torch's profiler shows them."""
    found = []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True
    ) as profile:
        yield found
    events = [event for event in profile.events() if event.name.startswith("mxtensor::") and "attention" in event.name]
    found += [tuple(event.input_shapes[0]) for event in events]


PROMPT = torch.tensor([[0, 0, 5, 6, 7, 8, 9, 10, 11, 12, 13], list(range(20, 31))])


@torch.no_grad()
def generated(model, **options):
    return model.generate(
        PROMPT, attention_mask=(PROMPT != 0).long(), max_new_tokens=9, do_sample=False, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_are_those_of_sdpa(model, cache):
    """The prompt goes through sdpa; the first sequence is padded."""
    with ops() as calls:
        found = generated(model, cache_implementation=cache)
    assert calls == [(2, 6, 1, 16)] * 2 * 8
    model.set_attn_implementation("sdpa")
    with ops() as calls:
        want = generated(model, cache_implementation=cache)
    assert torch.equal(found.sequences, want.sequences) and not calls
    for a, b in zip(found.scores, want.scores, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_cache_of_codes_is_read_by_its_own_attention(model):
    with ops() as calls:
        found = generated(model, past_key_values=mx.KVCache("mxfp8", config=model.config))
    model.set_attn_implementation("sdpa")
    want = generated(model, past_key_values=mx.KVCache("mxfp8", config=model.config))
    assert torch.equal(found.sequences, want.sequences) and not calls


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, on itself
def test_a_graph_has_the_attention_of_torch_which_the_pass_of_the_compiler_replaces(model):
    torch._dynamo.reset()
    token = PROMPT[1:, :1]
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    compiled(token, use_cache=False)
    export = torch.export.export(model, (token,), {"use_cache": False}).module()
    with ops() as calls:
        found, exported = compiled(token, use_cache=False).logits, export(token, use_cache=False).logits
    assert not calls
    want = model(token, use_cache=False).logits
    for logits in (found, exported):
        torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)


def test_training_and_prompts_take_sdpa(model):
    with ops() as calls:
        model(PROMPT[:, :1]).logits.square().mean().backward()
        with torch.no_grad():
            model(PROMPT[:, :5])  # causal without a mask
    assert not calls and all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with ops() as calls, torch.no_grad():
        model(PROMPT[:, :1])
    assert len(calls) == 2


def test_arguments_of_sdpa_only_take_sdpa(model):
    layer, (q, k, v) = model.model.layers[0].self_attn, (torch.randn(1, n, 1, 16) for n in (6, 2, 2))
    with ops() as calls, torch.no_grad():
        want = attention.sdpa_attention_forward(layer, q, k, v, None)[0]
        torch.testing.assert_close(attention.attention_forward(layer, q, k, v, None)[0], want)
        bias = torch.zeros(1, 6, 1, 1)
        torch.testing.assert_close(attention.attention_forward(layer, q, k, v, None, position_bias=bias)[0], want)
        attention.attention_forward(layer, q, k, v, None, dropout=0.5)
    assert len(calls) == 1


def test_sinks_are_refused_and_not_left_out(model):
    layer, (q, k, v) = model.model.layers[0].self_attn, (torch.randn(1, n, 1, 16) for n in (6, 2, 2))
    with pytest.raises(NotImplementedError, match=r'LlamaAttention has sinks \(s_aux of 6 heads\).*"eager"'):
        attention.attention_forward(layer, q, k, v, None, s_aux=torch.ones(6))


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_a_choice_of_keys_is_refused_and_not_left_out(model, name):
    """DeepSeek-V3.2 puts it into the masks of "sdpa" and "eager" only."""
    layer, (q, k, v) = model.model.layers[0].self_attn, (torch.randn(1, n, 1, 16) for n in (6, 2, 2))
    with pytest.raises(NotImplementedError, match=rf'reads chosen keys \({name} of the shape \(1, 1, 4\)\).*"sdpa"'):
        attention.attention_forward(layer, q, k, v, None, **{name: torch.ones(1, 1, 4)})


MODELS = {
    "Bloom": {"n_layer": 1, "n_head": 4},
    "CodeGen": {"n_layer": 1, "n_head": 4, "n_embd": 64, "rotary_dim": 8},
    "Mpt": {"n_layers": 1, "n_heads": 4, "d_model": 64},
}


@pytest.mark.parametrize("family", MODELS)
def test_models_with_their_own_attention_are_refused(family):
    """They would add a mask of bools to their scores."""
    make = getattr(transformers, f"{family}Config")
    configs = [make(vocab_size=200, hidden_size=64, **MODELS[family]) for _ in range(2)]
    model = transformers.AutoModelForCausalLM.from_config(configs[0], attn_implementation="mxtensor").eval()
    with pytest.raises(NotImplementedError, match=f'{family}Model computes attention itself.*"eager"'):
        model(PROMPT)
    model = transformers.AutoModelForCausalLM.from_config(configs[1]).eval()
    model.set_attn_implementation("mxtensor")  # which transformers ignores
    assert model(PROMPT).logits.isfinite().all()


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_gpu_has_an_op_too(model, cache):
    model.cuda()
    given = {"attention_mask": (PROMPT != 0).long().cuda(), "max_new_tokens": 9, "do_sample": False}
    with ops() as found:
        tokens = model.generate(PROMPT.cuda(), cache_implementation=cache, disable_compile=True, **given)
    assert found[-1] == (2, 6, 1, 16) and len(found) >= 16
    model.set_attn_implementation("sdpa")
    want = model.generate(PROMPT.cuda(), cache_implementation=cache, disable_compile=True, **given)
    assert torch.equal(tokens, want)
