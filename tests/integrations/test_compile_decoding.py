"""``mx.compile_decoding``: compiled steps of ``generate`` on a CPU have the tokens of eager ones; each model has graphs
of its own."""

import copy
import pickle

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.integrations import decoding

transformers = pytest.importorskip("transformers", minversion="5")
STATIC = dict(cache_implementation="static", max_cache_len=64, do_sample=False, max_new_tokens=6, min_new_tokens=6)


def llama(width=64, config="mxfp4-weight-mxint8-activation", seed=0):
    torch.manual_seed(seed)
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_attention_heads=2, num_key_value_heads=1)
    made = transformers.LlamaConfig(**sizes, vocab_size=97, num_hidden_layers=1, max_position_embeddings=128)
    model = transformers.LlamaForCausalLM(made).eval()
    return mx.quantize_(model, config) if config else model


def prompt(*shape):
    return torch.randint(5, 97, shape, generator=torch.Generator().manual_seed(1))


def tokens(model, ids, **options):
    return model.generate(ids, attention_mask=torch.ones_like(ids), **STATIC | options)


def graphs():
    """How many graphs torch has compiled."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_compiled_steps_have_the_tokens_of_eager_ones_and_other_prompts_share_their_graph():
    model, before = llama(), graphs()
    expected = [tokens(model, prompt(1, length)) for length in (7, 3)]
    assert graphs() == before
    assert mx.compile_decoding(model) is model
    assert torch.equal(tokens(model, prompt(1, 7)), expected[0])
    assert graphs() == before + 1
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(tokens(model, prompt(1, 3)), expected[1])


@pytest.mark.exhaustive
def test_models_of_one_class_do_not_take_each_others_graphs():
    """Guards on modules are skipped: two models with one code would share a graph."""
    models = [llama(), llama(128, "mxfp8"), llama(64, None, 1), llama(64, "mxfp4-weight-only", 2)]
    expected = [tokens(model, prompt(2, 5)) for model in models]
    for model in models:
        mx.compile_decoding(model)
    for _ in range(2):
        for model, want in zip(models, expected, strict=True):
            assert torch.equal(tokens(model, prompt(2, 5)), want)


@pytest.mark.exhaustive
def test_copies_compute_with_their_own_weights():
    model = mx.compile_decoding(llama())
    want = tokens(model, prompt(1, 5))
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.copy_(torch.randn_like(module.weight))
    assert not torch.equal(tokens(model, prompt(1, 5)), want)
    for other in copies:
        assert other.forward.model is other
        assert torch.equal(tokens(other, prompt(1, 5)), want)


@pytest.mark.exhaustive
def test_steps_are_compiled_again_after_another_quantization_and_for_another_module():
    model = mx.compile_decoding(llama(config=None))
    tokens(model, prompt(1, 5))
    mx.quantize_(model, "mxfp8-weight-only")
    for seed in (None, 3):
        if seed is not None:
            model.model.layers[0].mlp = llama(seed=seed).model.layers[0].mlp
        want, before = tokens(copy.deepcopy(model), prompt(1, 5)), graphs()
        for _ in range(2):
            assert torch.equal(tokens(model, prompt(1, 5)), want)
        assert graphs() == before + 1


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.exhaustive
def test_steps_are_compiled_again_for_a_parameter_with_another_name():
    """A parametrization moves the weight of a module that stays where it is."""
    model = mx.compile_decoding(llama(config=None))
    tokens(model, prompt(1, 5))
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Doubled())
    plain = llama(config=None)
    plain.model.layers[0].mlp.up_proj.weight.data *= 2
    before = graphs()
    for _ in range(2):
        assert torch.equal(tokens(model, prompt(1, 5)), tokens(plain, prompt(1, 5)))
    assert graphs() == before + 1


@pytest.mark.exhaustive
def test_weights_of_the_same_kind_need_no_other_graph():
    model, other = mx.compile_decoding(llama()), llama(seed=5)
    tokens(model, prompt(1, 5))
    before, want = graphs(), tokens(other, prompt(1, 5))
    model.load_state_dict(other.state_dict(), assign=True)
    for _ in range(2):
        assert torch.equal(tokens(model, prompt(1, 5)), want)
    assert graphs() == before


def test_a_model_may_be_prepared_twice():
    model = mx.compile_decoding(mx.compile_decoding(llama()))
    assert not isinstance(model.forward.own, type(model.forward))


def test_steps_are_recorded_once_for_each_cache():
    """After the first two steps of a model, which learn what moves, each ``generate`` records one step."""
    model = mx.compile_decoding(llama())
    for count in range(1, 4):
        tokens(model, prompt(1, 5))
        (graph,) = model.forward.graphs
        assert graph.refusal is None and graph.recordings <= count + 1
    assert graph.runs >= 3 * 5 - graph.recordings


def sliding():
    """A model whose sliding layers count the tokens in Python."""
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    made = transformers.Gemma3TextConfig(**sizes, vocab_size=97, num_hidden_layers=2, sliding_window=8)
    return mx.quantize_(transformers.Gemma3ForCausalLM(made).eval(), "mxfp8-weight-only")


def encoder_and_decoder():
    sizes = dict(d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    made = transformers.BartConfig(**sizes, vocab_size=97, encoder_ffn_dim=64, decoder_ffn_dim=64)
    return mx.quantize_(transformers.BartForConditionalGeneration(made).eval(), "mxfp8-weight-only")


@pytest.mark.exhaustive
@pytest.mark.parametrize("make", [sliding, encoder_and_decoder])
def test_a_step_is_not_compiled_again_for_each_token(make):
    model, before = make(), graphs()
    expected = [tokens(model, prompt(1, length), max_new_tokens=20, min_new_tokens=20) for length in (7, 11)]
    mx.compile_decoding(model)
    for want, length in zip(expected, (7, 11), strict=True):
        assert torch.equal(tokens(model, prompt(1, length), max_new_tokens=20, min_new_tokens=20), want)
    assert before < graphs() <= before + 4


def uncompiled(model):
    """A copy without compiled steps."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        vars(module).pop("forward", None)
    return copied


def of_transformers(peft, config):
    """A model with two adapters, and how to use one of them or none."""
    model = llama()
    model.add_adapter(config, "one"), model.add_adapter(config, "two")
    return model, lambda name: (model.enable_adapters(), model.set_adapter(name)) if name else model.disable_adapters()


def of_peft(peft, config):
    model = peft.get_peft_model(llama(), config, "one").eval()
    model.add_adapter("two", config)
    layers = model.base_model

    def use(name):
        (layers.enable_adapter_layers if name else layers.disable_adapter_layers)()
        model.set_adapter(name or "one")

    return model, use


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")  # of peft, for a second adapter of transformers
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("make", [of_transformers, of_peft])
def test_other_adapters_take_effect_and_have_graphs_of_their_own(make):
    peft = pytest.importorskip("peft")
    model, use = make(peft, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    assert mx.compile_decoding(model) is model
    given = dict(input_ids=prompt(1, 5), attention_mask=torch.ones(1, 5), **STATIC)
    before, wanted = graphs(), {}
    for name in ("one", "two", None) * 2:
        use(name)
        if name not in wanted:
            wanted[name] = uncompiled(model).generate(**given)
        assert torch.equal(model.generate(**given), wanted[name])
    assert len({tuple(found[0].tolist()) for found in wanted.values()}) == 3
    assert graphs() == before + 3


def with_another_epsilon(model):
    model.model.norm.variance_epsilon = 30.0


def with_a_hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, given, result: 2 * result)


def with_eager_attention(model):
    model.set_attn_implementation("eager")


def with_another_dtype(model):
    """The parameter stays the same object."""
    model.model.embed_tokens.bfloat16()


def with_other_strides(model):
    weight = model.model.embed_tokens.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize(
    "change", [with_another_dtype, with_other_strides, with_another_epsilon, with_a_hook, with_eager_attention]
)
def test_changed_attributes_take_effect_at_the_next_prompt(change):
    model = mx.compile_decoding(llama(config=None))
    tokens(model, prompt(1, 5))
    change(model)
    want, before = tokens(uncompiled(model), prompt(1, 5)), graphs()
    for _ in range(2):
        assert torch.equal(tokens(model, prompt(1, 5)), want)
    assert graphs() == before + 1


@pytest.mark.exhaustive
def test_a_model_may_be_converted_after_its_steps_were_compiled():
    model = mx.compile_decoding(llama())
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        assert torch.equal(tokens(model, prompt(1, 5)), tokens(uncompiled(model), prompt(1, 5)))


@pytest.mark.exhaustive
def test_of_many_states_some_are_forgotten(monkeypatch):
    monkeypatch.setattr(decoding, "MOST_STATES", 2)
    model, before = mx.compile_decoding(llama(config=None)), graphs()
    for number in (1.0, 2.0, 1.0, 3.0, 1.0):
        model.model.norm.variance_epsilon = number
        assert torch.equal(tokens(model, prompt(1, 5)), tokens(uncompiled(model), prompt(1, 5)))
    assert graphs() == before + 4


def test_other_caches_training_and_prompts_stay_eager():
    model, before = mx.compile_decoding(llama(config=None)), graphs()
    tokens(model, prompt(1, 5), cache_implementation="dynamic", max_cache_len=None)
    model(input_ids=prompt(1, 1)).logits.square().mean().backward()
    model(prompt(1, 9))
    assert graphs() == before and model.lm_head.weight.grad is not None


def test_a_forward_of_the_instance_stays_in_use():
    model, calls = llama(config=None), []
    own = model.forward

    def counted(input_ids=None, **given):
        calls.append(input_ids.shape[1])
        return own(input_ids=input_ids, **given)

    model.forward = counted
    mx.compile_decoding(mx.compile_decoding(model))
    model(input_ids=prompt(1, 9))
    assert calls == [9]


def test_a_model_that_cannot_generate_is_refused():
    with pytest.raises(TypeError, match=r"compile_decoding: .*Linear.* has no generate; pass a model of transformers"):
        mx.compile_decoding(nn.Linear(4, 4))
