"""print(model) shows formats, and get_memory_footprint() counts codes, though no module changes its class."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import mxtensor as mx

RECIPE = mx.recipe.MXFP8BlockScaling()


def test_print_shows_formats_and_recipes():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))
    plain = repr(model)
    mx.quantize_(model, "mxfp8", lambda module, fqn: fqn == "0")
    assert repr(model[0]) == (
        "Linear(in_features=64, out_features=32, bias=True, weight=mxfp8_e4m3, activation=mxfp8_e4m3)"
    )
    mx.quantize_(model, "nvfp4-weight-only", lambda module, fqn: fqn == "2")
    assert repr(model[2]) == "Linear(in_features=32, out_features=8, bias=False, weight=nvfp4)"
    model[0].weight = nn.Parameter(torch.randn(32, 64))
    model[2].weight = nn.Parameter(torch.randn(8, 32))
    assert repr(model) == plain  # it is read from the weights
    mx.quantize_(model, RECIPE)
    assert "bias=True, weight=MXFP8BlockScaling (mxfp8_e4m3))" in repr(model)
    assert "in_proj_weight=mxfp4_e2m1" in repr(mx.quantize_(nn.MultiheadAttention(64, 4), "mxfp4-weight-only"))


def doubled(model):
    """Copies by every way that torch has."""
    return {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model)), "copy": copy.copy(model)}


@pytest.mark.parametrize("config", ["mxfp8", RECIPE], ids=str)
def test_copies_show_their_own_weights(config):
    model = mx.quantize_(nn.Linear(64, 32), config)
    text = repr(model)
    for name, twin in doubled(model).items():
        assert repr(twin) == text and "weight=" in text
        if name != "copy":
            twin.weight = nn.Parameter(torch.randn(32, 64))
            assert "weight=" not in repr(twin) and repr(model) == text


def test_a_module_is_freed_without_the_garbage_collector():
    model = mx.quantize_(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
    alive = weakref.ref(model[0])
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


def test_a_shallow_copy_that_outlives_the_module_says_so():
    model = mx.quantize_(nn.Linear(64, 32), "mxfp8")
    twin = copy.copy(model)
    del model
    with pytest.raises(RuntimeError, match=r"copy modules by copy\.deepcopy"):
        repr(twin)


def test_neither_state_dicts_nor_compiled_graphs_see_it():
    model, x = mx.quantize_(nn.Sequential(nn.Linear(64, 32)), "mxfp8"), torch.randn(4, 64)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x)) and "weight=mxfp8_e4m3" in repr(compiled)
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), model(x))
    torch._dynamo.reset()


# ---------------------------------------------------------------------------------------------- transformers


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, vocab_size=128, **sizes))


def stored(model):
    return sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp6"])
def test_the_memory_footprint_counts_codes(llama, format):
    before = llama.get_memory_footprint()
    mx.quantize_(llama, format)
    after = llama.get_memory_footprint()
    assert after == stored(llama) < before / 2
    buffers = sum(b.nbytes for b in llama.buffers())
    assert llama.get_memory_footprint(return_buffers=False) == after - buffers
    assert llama.model.get_memory_footprint() == stored(llama.model)
    for name, twin in doubled(llama).items():
        assert twin.get_memory_footprint() == after, name
        if name != "copy":
            twin.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.randn(128, 64))
            assert twin.get_memory_footprint() > llama.get_memory_footprint() == after


def test_a_model_for_training_takes_what_it_took(llama):
    before = llama.get_memory_footprint()
    assert mx.quantize_(llama, RECIPE).get_memory_footprint() == before
    weight = llama.model.layers[0].mlp.up_proj.weight
    assert weight.numel() * weight.element_size() == 128 * 64 * 4


def test_sizes_of_a_quantized_weight_stay_those_of_the_outer_tensor():
    weight = mx.quantize_(nn.Linear(64, 32), "mxfp4").weight
    assert (weight.numel(), weight.nelement(), weight.element_size(), weight.itemsize) == (2048, 2048, 4, 4)


@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_footprint_of_a_model_that_was_loaded_quantized(llama, tied, tmp_path):
    llama.config.tie_word_embeddings = tied
    llama.tie_weights()
    llama.save_pretrained(tmp_path / "plain")
    config = mx.TransformersConfig("nvfp4", include_head=tied)
    model = type(llama).from_pretrained(tmp_path / "plain", quantization_config=config)
    model.save_pretrained(tmp_path / "codes")
    for found in (model, type(llama).from_pretrained(tmp_path / "codes")):
        assert found.get_memory_footprint() == stored(found) < llama.get_memory_footprint() / 1.8
        assert found.model.get_memory_footprint() == stored(found.model)
