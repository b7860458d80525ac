"""transformers' Trainer: a model whose weights are codes trains next to nothing, and a warning says so."""

import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mxtensor as mx

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}


def trained(model, path):
    """The values of the model's parameters that a step has changed, by name."""
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 96, (4, 16))]
    options = {"max_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    Trainer(model, TrainingArguments(str(path), **options), train_dataset=data).train()
    return {name for name, p in model.named_parameters() if not torch.equal(p.detach(), before[name])}


@pytest.mark.parametrize("format", ["mxfp8-weight-only", "nvfp4"])
def test_frozen_codes_are_named(format, tmp_path):
    model = mx.quantize_(LlamaForCausalLM(LlamaConfig(**SIZES)), format)
    with pytest.warns(UserWarning, match=r"Trainer: 7 weights, 7\d% of .*q_proj.weight; .*prepare.*LoRA") as seen:
        changed = trained(model, tmp_path)
    assert "model.embed_tokens.weight" in changed and not any("proj" in name for name in changed)
    assert any(one.filename == __file__ for one in seen if "Trainer: 7" in str(one.message))


def recipe():
    return mx.quantize_(LlamaForCausalLM(LlamaConfig(**SIZES)), mx.recipe.MXFP8BlockScaling())


def qat():
    return mx.quantize_(LlamaForCausalLM(LlamaConfig(**SIZES)), "nvfp4-weight-only", step="prepare")


def lora():
    peft = pytest.importorskip("peft")
    model = mx.quantize_(LlamaForCausalLM(LlamaConfig(**SIZES)), "mxfp8-weight-only")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


def chosen():
    model = mx.quantize_(LlamaForCausalLM(LlamaConfig(**SIZES)), "mxfp8-weight-only").requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


@pytest.mark.parametrize("make", [recipe, qat, lora, chosen])
def test_what_trains_on_purpose_is_not(make, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about peft
        warnings.filterwarnings("error", "Trainer: ")
        assert trained(make(), tmp_path)
