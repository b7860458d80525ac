"""transformers: ``include_head`` of ``TransformersConfig`` quantizes heads while loading, as ``quantize_`` does."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import mxtensor as mx

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS = {
    "a head of its own": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "tied, Conv1D": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    ),
    "tied, two embeddings": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=96, d_model=64, d_ff=96, d_kv=16, num_layers=1, num_heads=4, decoder_start_token_id=0)
    ),
}
IDS = torch.arange(24).view(2, 12)


def quantized(model):
    """Every name of every quantized weight, with its recipe."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: p.recipe for name, p in named if isinstance(p, mx.MXTensor)}


def logits(model):
    with torch.no_grad():
        more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
        return model(input_ids=IDS, **more).logits


@pytest.fixture(params=MODELS)
def path(request, tmp_path):
    MODELS[request.param]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(path, **options):
    kind = AutoModelForSeq2SeqLM if "t5" in (path / "config.json").read_text() else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("format", ["mxfp8", "mxfp4-weight-only", "nvfp4"])
def test_heads_are_those_of_quantize(path, format):
    config = mx.TransformersConfig(format, include_head=True)
    model, wanted = load(path, quantization_config=config), mx.quantize_(load(path), format, include_head=True)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert isinstance(head.weight, mx.MXTensor) and quantized(model) == quantized(wanted)
    assert (head.weight is embedding.weight) is (
        wanted.get_output_embeddings().weight is wanted.get_input_embeddings().weight
    )
    assert torch.equal(logits(model), logits(wanted))

    saved = path.parent / "saved"
    model.save_pretrained(saved)
    fields = json.loads((saved / "config.json").read_text())["quantization_config"]
    assert fields == {"quant_method": "mxtensor", "format": format, "skip": [], "include_head": True}
    assert AutoConfig.from_pretrained(saved).quantization_config["include_head"] is True
    reloaded = load(saved)
    assert reloaded.config.quantization_config.include_head is True
    assert quantized(reloaded) == quantized(model) and torch.equal(logits(reloaded), logits(model))


def test_high_precision_values_that_are_loaded_into_a_tied_head_are_quantized(path):
    plain = load(path)
    model = load(path, quantization_config=mx.TransformersConfig("mxfp8", include_head=True))
    before, head = logits(model), model.get_output_embeddings()
    model.load_state_dict(plain.state_dict(), assign=True)  # which replaces parameters that no hook quantizes
    assert isinstance(head.weight, mx.MXTensor) and "weight=mxfp8" in repr(head)
    assert torch.equal(logits(model), before)


def test_a_head_that_is_skipped_by_any_of_its_names_stays(path):
    for name in ("lm_head", "embed_tokens", "wte", "shared"):
        config = mx.TransformersConfig("mxfp8", include_head=True, skip=[name])
        model = None
        if any(part.endswith(name) for part, _ in load(path).named_modules()):
            model = load(path, quantization_config=config)
            tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
            left = not isinstance(model.get_output_embeddings().weight, mx.MXTensor)
            assert left is (tied or name == "lm_head") and quantized(model)


def test_without_a_head_a_warning_says_so(tmp_path):
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    config = mx.TransformersConfig("mxfp8", include_head=True)
    with pytest.warns(UserWarning, match="TransformersConfig: include_head=True found no head in BertModel"):
        model = AutoModel.from_pretrained(tmp_path, quantization_config=config)
    assert quantized(model)


def test_a_config_of_before_has_no_head_and_a_wrong_one_is_refused():
    kind = type(mx.TransformersConfig("mxfp8"))
    assert kind.from_dict({"quant_method": "mxtensor", "format": "mxfp8", "skip": []}).include_head is False
    with pytest.raises(TypeError, match="TransformersConfig: include_head"):
        mx.TransformersConfig("mxfp8", include_head="lm_head")


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", ["tied", "tied, Conv1D", "tied, two embeddings"])
def test_an_embedding_that_the_files_untie_stays_as_with_quantize(name, safe, tmp_path):
    """Fine-tuned heads are stored so, with a configuration that ties them."""
    MODELS[name]().save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    shared = next(key for key in state if key.endswith(("embed_tokens.weight", "wte.weight", "shared.weight")))
    for add, untied in ((0.01, True), (0, False)):
        state["lm_head.weight"] = state[shared] + add
        if safe:
            save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
        else:
            (tmp_path / "model.safetensors").unlink(missing_ok=True)
            torch.save(state, tmp_path / "pytorch_model.bin")
        model = load(tmp_path, quantization_config=mx.TransformersConfig("mxfp8", include_head=True))
        wanted = mx.quantize_(load(tmp_path), "mxfp8", include_head=True)
        assert quantized(model) == quantized(wanted) and "lm_head.weight" in quantized(model)
        assert (model.lm_head.weight is model.get_input_embeddings().weight) is not untied
        assert torch.equal(logits(model), logits(wanted))
