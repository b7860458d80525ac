"""Static scales of NVFP4 inputs are saved and loaded with the model, or refused."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mxtensor as mx
from mxtensor.training.prepared_linear import StaticInputLinear
from tests.helpers.renamed_models import MODELS, built, output

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4}  # fmt: skip


def static(model, run, filter_fn=None):
    """``model`` with static scales of the inputs that ``run`` shows it."""
    mx.quantize_(model, "nvfp4", filter_fn, step="observe")
    with torch.no_grad():
        run(model)
    mx.quantize_(model, "nvfp4", filter_fn, step="convert")
    for module in model.modules():
        if isinstance(module, StaticInputLinear):
            module.input_scale.mul_(2)  # no scale that anything but the file would give
    return model


def llama(**options):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **options)).eval()


def logits(model):
    with torch.no_grad():
        return model(torch.arange(96).view(4, 24)).logits


def layers(model):
    return {name: float(m.input_scale) for name, m in model.named_modules() if isinstance(m, StaticInputLinear)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("only", ["", "mlp"])
def test_from_pretrained_restores_them(only, dtype, tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=dtype)
    model = static(plain, logits, (lambda m, n: only in n) if only else None)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    found, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert layers(found) == layers(model) and len(layers(model)) == (6 if only else 14)
    assert torch.equal(logits(found), logits(model))
    found.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


def test_the_scale_is_used(tmp_path):
    model = static(llama(), logits)
    before = logits(model)
    for module in model.modules():
        if isinstance(module, StaticInputLinear):
            module.input_scale.mul_(2.0**-8)
    assert not torch.equal(logits(model), before)


@pytest.mark.exhaustive(quick=4)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])  # which has no nn.Linear
def test_in_models_whose_tensors_are_renamed(name, tmp_path):
    model, run = built(name), []
    hooks = [m.register_forward_pre_hook(lambda m, x: run.append(m)) for m in model.modules()]
    output(model)
    for hook in hooks:
        hook.remove()
    static(model, output, lambda module, name: module in run and name != "lm_head")
    model.save_pretrained(tmp_path)
    found = copy.deepcopy(type(model).from_pretrained(tmp_path).eval())  # in aligned memory: MKL's sums depend on that
    assert layers(found) == layers(model) and torch.equal(output(found), output(model))


def test_the_base_model_and_the_head_of_another_class(tmp_path):
    model = static(llama(), logits)
    model.save_pretrained(tmp_path)
    found = AutoModel.from_pretrained(tmp_path)
    assert layers(found) == {name.removeprefix("model."): scale for name, scale in layers(model).items()}


def test_a_format_without_a_global_scale_is_not_a_static_scale(tmp_path):
    model = mx.quantize_(llama(), "nvfp4-weight-nvfp4_single_level-activation")
    model.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not layers(found) and torch.equal(logits(found), logits(model))


def test_a_layer_that_is_not_there_for_a_scale_is_an_error(tmp_path):
    model = static(llama(), logits)
    model.save_pretrained(tmp_path)

    class Other(nn.Linear):
        pass

    class Model(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[0].mlp.up_proj.__class__ = Other

    with pytest.raises(ValueError, match=r"up_proj\.input_scale and 0 other static scales of inputs are in the check"):
        Model.from_pretrained(tmp_path)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_brings_them_into_a_quantized_model(assign, tmp_path):
    model = static(llama(), logits)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    found = mx.quantize_(llama(), "nvfp4")
    found.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True), assign=assign)
    assert layers(found) == layers(model) and torch.equal(logits(found), logits(model))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*input_scale"):
        mx.quantize_(llama(), "mxfp8").load_state_dict(model.state_dict())


def test_layouts_keep_them_or_refuse(tmp_path):
    model = static(llama(), logits)
    mx.checkpoints.save(model, tmp_path / "native")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    assert layers(found) == layers(model) and torch.equal(logits(found), logits(model))
    mx.checkpoints.save(model, tmp_path / "modelopt", layout="modelopt")
    state = mx.checkpoints.load(tmp_path / "modelopt")
    assert {n.removesuffix(".input_scale"): float(t) for n, t in state.items() if n.endswith("input_scale")} == layers(
        model
    )
    for layout in ("torchao", "compressed-tensors"):
        with pytest.raises(NotImplementedError, match=r"static scales of inputs.*native, modelopt"):
            mx.checkpoints.save(model, tmp_path / layout, layout=layout)
        assert not (tmp_path / layout).exists()


def test_copies_have_them(tmp_path):
    model = static(llama(), logits)
    torch.save(model, tmp_path / "model.pt")
    for twin in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert layers(twin) == layers(model) and torch.equal(logits(twin), logits(model))
