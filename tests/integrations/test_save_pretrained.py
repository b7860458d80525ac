"""transformers: save_pretrained of models that were quantized after loading."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mxtensor as mx
from tests.helpers.renamed_models import MODELS, built, output

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


def quantized(model):
    return {name: value for name, value in model.state_dict().items() if isinstance(value, mx.MXTensor)}


@pytest.mark.exhaustive(quick=6)
@pytest.mark.parametrize("name", MODELS)
def test_codes_are_saved_and_the_model_is_as_before(name, tmp_path):
    model = built(name)
    model.save_pretrained(tmp_path / "plain")
    model = type(model).from_pretrained(tmp_path / "plain").eval()
    conversions = model._weight_conversions
    mx.quantize_(model, "nvfp4-weight-only")
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert model._weight_conversions is conversions and getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")
    found, loading = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert quantized(found).keys() == quantized(model).keys() and torch.equal(output(found.eval()), output(model))


@pytest.mark.parametrize("tied", [False, True])
def test_heads_are_saved_too(tied, tmp_path):
    model = mx.quantize_(llama(tie_word_embeddings=tied), "mxfp4", include_head=True)
    model.save_pretrained(tmp_path)
    found, ids = LlamaForCausalLM.from_pretrained(tmp_path), torch.arange(12)[None]
    assert (found.lm_head.weight is found.get_input_embeddings().weight) is tied
    assert isinstance(found.lm_head.weight, mx.MXTensor)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


def test_what_is_plain_is_saved_as_before(tmp_path):
    model = mx.quantize_(llama(), "mxfp8")
    values = {n: t.dequantize() if isinstance(t, mx.MXTensor) else t for n, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "values", state_dict=dict(values))
    found = LlamaForCausalLM.from_pretrained(tmp_path / "values")
    assert not quantized(found) and all(torch.equal(t, values[n]) for n, t in found.state_dict().items())
    model.save_pretrained(tmp_path / "codes", state_dict=model.state_dict())
    assert quantized(LlamaForCausalLM.from_pretrained(tmp_path / "codes")).keys() == quantized(model).keys()
    trains = mx.quantize_(llama(), mx.recipe.MXFP8BlockScaling())
    trains.save_pretrained(tmp_path / "trains")
    assert not quantized(LlamaForCausalLM.from_pretrained(tmp_path / "trains"))


def test_after_an_error_the_model_is_as_before(tmp_path):
    model = mx.quantize_(llama(), "mxfp8")
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, ValueError)):
        model.save_pretrained(tmp_path / "file" / "folder")
    assert not hasattr(model.config, "quantization_config") and not hasattr(model, "hf_quantizer")


def logits(model):
    with torch.no_grad():
        return model(torch.arange(12)[None]).logits


def loaded(model, path):
    model.save_pretrained(path)
    found, loading = LlamaForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert quantized(found).keys() == quantized(model).keys() and torch.equal(logits(found), logits(model))
    state = path / "state"
    mx.checkpoints.save(model, state)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(state)), logits(model))
    return found


def apart(path):
    """A model whose files have a head of its own, though its configuration ties it to the embedding."""
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(torch.randn(96, 64))
    model.save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path).eval()


def everything(module, name):
    return True


@pytest.mark.parametrize("how", ["resize", "tie", "by hand"])
@pytest.mark.parametrize("reloaded", [False, True])
def test_a_head_that_is_tied_again(how, reloaded, tmp_path):
    model = mx.quantize_(apart(tmp_path / "plain"), "mxfp8-weight-only", everything)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    if reloaded:
        model = loaded(model, tmp_path / "once")
    if how == "resize":
        model.resize_token_embeddings(104)
    elif how == "tie":
        model.tie_weights()
    else:
        model.lm_head.weight = model.model.embed_tokens.weight
    found = loaded(model, tmp_path / "saved")
    assert found.lm_head.weight is found.model.embed_tokens.weight and isinstance(found.lm_head.weight, mx.MXTensor)


@pytest.mark.parametrize("reloaded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_a_user_ties_or_unties(tied, reloaded, tmp_path):
    model = mx.quantize_(llama(tie_word_embeddings=not tied), "mxfp8-weight-only", everything)
    if reloaded:
        model = loaded(model, tmp_path / "once")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        model.lm_head.weight = torch.nn.Parameter(mx.quantize(torch.randn(96, 64), "mxfp8"), False)
    loaded(model, tmp_path / "saved")
