"""transformers: heads of another size stay quantized."""

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

import mxtensor as mx
from mxtensor.training.training_weight import TrainingWeight

SIZES = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1,
         "num_attention_heads": 4}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}


def made(name, config):
    torch.manual_seed(0)
    return mx.quantize_(MODELS[name](), config, include_head=True)


@pytest.mark.parametrize("size", [70, 96, 100])
@pytest.mark.parametrize(
    ("name", "format"),
    [("llama", "mxfp8"), ("llama", "nvfp4-weight-only"), ("llama", "float8_128x128"), ("neox", "mxfp4-weight-only"),
     ("tied", "mxint8")],
)  # fmt: skip
def test_a_head_of_another_size_is_quantized(name, format, size):
    model = made(name, format)
    before = model.lm_head.weight
    recipe, values, count = before.recipe, before.dequantize(), min(size, 96)
    model.resize_token_embeddings(size)
    weight = model.lm_head.weight
    assert isinstance(weight, mx.MXTensor) and weight.recipe == recipe and not weight.requires_grad
    assert weight.shape == (size, 128) and f"weight={weight.format}" in repr(model.lm_head)
    assert (weight is model.get_input_embeddings().weight) == (name == "tied")
    assert torch.equal(weight[:count].dequantize(), values[:count])
    x = torch.randn(3, 128)
    assert torch.equal(model.lm_head(x), torch.nn.functional.linear(x, weight))


def test_it_is_saved_in_codes(tmp_path):
    MODELS["llama"]().save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "codes", format="mxfp8-weight-only", include_head=True)
    model = LlamaForCausalLM.from_pretrained(tmp_path / "codes")
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "saved")
    found, ids = LlamaForCausalLM.from_pretrained(tmp_path / "saved"), torch.arange(88, 100)[None]
    assert isinstance(found.lm_head.weight, mx.MXTensor)
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)


def test_a_head_that_trains_keeps_its_recipe():
    recipe = mx.recipe.MXFP8BlockScaling()
    model = made("llama", recipe)
    before = model.lm_head.weight.detach().clone()
    model.resize_token_embeddings(100)
    weight = model.lm_head.weight
    assert isinstance(weight, TrainingWeight) and weight.requires_grad and torch.equal(weight.detach()[:96], before)
    twin = made("llama", recipe)
    assert weight.linear_recipe == twin.lm_head.weight.linear_recipe
    with torch.no_grad():
        twin.lm_head.weight = torch.nn.Parameter(weight.detach().clone())
    mx.quantize_(twin, recipe, include_head=True)
    x = torch.randn(32, 128)
    assert torch.equal(model.lm_head(x), twin.lm_head(x))


def test_heads_in_high_precision_are_those_of_transformers():
    model = mx.quantize_(MODELS["llama"](), "mxfp8")
    head = model.lm_head
    model.resize_token_embeddings(96)
    assert model.lm_head is head
    model.resize_token_embeddings(100)
    assert type(model.lm_head.weight) is torch.nn.Parameter
