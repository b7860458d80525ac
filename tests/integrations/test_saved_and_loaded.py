"""Saved and loaded is the same model: kinds of models, formats, and ways to save and load.

Outputs are equal bit for bit, or what saves or loads says why not: an error, a warning, or keys that do not fit.
"""

import copy
import io
import pickle
import warnings

import pytest
import torch
import transformers as tf

import mxtensor as mx
from mxtensor.training.prepared_linear import StaticInputLinear
from tests.helpers.renamed_models import as_trained

TEXT = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
EXPERTS = {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 64}  # fmt: skip
T5 = {"vocab_size": 96, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 1, "num_heads": 4, "pad_token_id": 0,
      "decoder_start_token_id": 0}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT)),
    "llama, tied": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**TEXT, tie_word_embeddings=True)),
    "experts": lambda: tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**TEXT, **EXPERTS)),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**T5)),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**TEXT)),
    "gpt2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2)),
}
IDS = torch.arange(24).view(2, 12)


def static(model):
    """NVFP4 with static scales of inputs, twice those that the data gives: nothing but the file says so."""
    mx.quantize_(model, "nvfp4", step="observe")
    output(model)
    mx.quantize_(model, "nvfp4", step="convert")
    for module in model.modules():
        if isinstance(module, StaticInputLinear):
            module.input_scale.mul_(2)
    return model


QUERIES, OUTPUTS = r"re:.*\.(q_proj|query|q|c_attn)", r"re:.*\.(o_proj|output\.dense|o|c_proj)"


def of_format(format, head=False):
    return lambda model: mx.quantize_(model, format, include_head=head)


FORMATS = {
    "mxfp8": of_format("mxfp8"),
    "mxfp8_e5m2, heads": of_format("mxfp8_e5m2", head=True),
    "mxfp6": of_format("mxfp6"),
    "mxfp4 over mxfp8": of_format("mxfp4-weight-mxfp8-activation"),
    "mxint8": of_format("mxint8"),
    "nvfp4": of_format("nvfp4"),
    "nvfp4, heads": of_format("nvfp4-weight-only", head=True),
    "nvfp4, static": static,
    "float8 rows": of_format("float8_e4m3_row"),
    "float8 tiles": of_format("float8_128x128-weight-float8_1x128-activation"),
    "by name": of_format({QUERIES: "nvfp4", OUTPUTS: None, "_default": "mxfp8"}),
    "trains": of_format(mx.recipe.MXFP8BlockScaling()),
}


def built(name):
    torch.manual_seed(0)
    return as_trained(MODELS[name]())


def output(model):
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=IDS, **more).logits


def recipes_and_scales(model):
    """What an MXTensor or a layer has beside its values, by name."""
    named = model.named_parameters(remove_duplicate=False)
    recipes = {name: (p.recipe, p.orientation) for name, p in named if isinstance(p, mx.MXTensor)}
    scales = {name: float(m.input_scale) for name, m in model.named_modules() if isinstance(m, StaticInputLinear)}
    return recipes, scales


# ---------------------------------------------------------------------------------------------- ways to save and load


def pretrained(model, fresh, path):
    model.save_pretrained(path, max_shard_size="50KB")
    found, loading = type(model).from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    return found


def twice(model, fresh, path):
    return pretrained(pretrained(model, fresh, path / "once"), fresh, path / "again")


def state_dict(model, fresh, path):
    torch.save(model.state_dict(), path / "state.pt")
    fresh.load_state_dict(torch.load(path / "state.pt", weights_only=True))
    return fresh


def assigned(model, fresh, path):
    torch.save(model.state_dict(), path / "state.pt")
    fresh.load_state_dict(torch.load(path / "state.pt", weights_only=True, mmap=True), assign=True)
    fresh.tie_weights()
    return fresh


def native(model, fresh, path):
    mx.checkpoints.save(model, path / "native")
    found, loading = type(model).from_pretrained(path / "native", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    return found


def native_state(model, fresh, path):
    mx.checkpoints.save(model, path / "native")
    loading = fresh.load_state_dict(mx.checkpoints.load(path / "native"), strict=False)
    assert set(loading.missing_keys) <= set(fresh.all_tied_weights_keys) and not loading.unexpected_keys
    return fresh


def whole(model, fresh, path):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "save_pretrained": pretrained, "save_pretrained, twice": twice, "state dict": state_dict,
    "state dict, assigned": assigned, "checkpoints.save, from_pretrained": native, "checkpoints.load": native_state,
    "torch.save": whole, "pickle": lambda model, fresh, path: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, fresh, path: copy.deepcopy(model),
}  # fmt: skip


def prepared(name, format):
    """A model in a format, and a new one for a state dict: quantized in the same way, but for values and scales."""
    if format == "nvfp4, static" and name == "gpt2":
        pytest.skip("static scales belong to nn.Linear, and GPT-2 has Conv1D only")
    model, fresh = FORMATS[format](built(name)), MODELS[name]().eval()
    if format == "nvfp4, static":
        layers = {name for name, module in model.named_modules() if isinstance(module, StaticInputLinear)}
        return model, mx.quantize_(fresh, "nvfp4", lambda module, name: name in layers)
    return model, FORMATS[format](fresh)


CASES = {
    (name, format, way): (i + j) % len(MODELS) == k
    for i, format in enumerate(FORMATS) for j, way in enumerate(WAYS) for k, name in enumerate(MODELS)
}  # fmt: skip
"""Every case -> whether it is in a set that has each pair of a model, a format and a way."""


def test_the_quick_cases_have_every_pair():
    for one in range(3):
        pairs = [{case[:one] + case[one + 1 :] for case in CASES if CASES[case] or every} for every in (True, False)]
        assert pairs[0] == pairs[1]


@pytest.mark.parametrize(("name", "format", "way"), [case for case, quick in CASES.items() if quick])
def test_outputs_are_the_same(name, format, way, tmp_path):
    check_outputs(name, format, way, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "format", "way"), [case for case, quick in CASES.items() if not quick])
def test_outputs_are_the_same_in_every_case(name, format, way, tmp_path):
    check_outputs(name, format, way, tmp_path)


def check_outputs(name, format, way, tmp_path):
    model, fresh = prepared(name, format)
    before = output(model)
    assert not torch.equal(before, output(built(name))) or format == "trains"
    found = WAYS[way](model, fresh, tmp_path).eval()
    assert torch.equal(output(model), before)
    if format != "trains":
        assert recipes_and_scales(found) == recipes_and_scales(model)
    elif "pretrained" in way:  # which stores the values, and leaves the recipe to the program
        mx.quantize_(found, mx.recipe.MXFP8BlockScaling())
    found = copy.deepcopy(found)  # in aligned memory, as the first: sums of MKL depend on that
    assert torch.equal(output(found), before)


@pytest.mark.exhaustive(quick=12)
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "torchao", "plain"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.pairs
def test_other_layouts_have_the_same_values_or_refuse(name, format, layout, tmp_path):
    model, _ = prepared(name, format)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            mx.checkpoints.save(model, tmp_path / "saved", layout=layout)
    except NotImplementedError as error:
        assert layout != "plain" and str(error) and not (tmp_path / "saved").exists()
        return
    assert all("The layout native stores" in str(warning.message) for warning in said), [str(w.message) for w in said]
    found = mx.checkpoints.load(tmp_path / "saved")
    for key, value in model.state_dict().items():
        if key not in found:
            assert key in model.all_tied_weights_keys
            continue
        a, b = (t.dequantize() if isinstance(t, mx.MXTensor) else t for t in (value, found[key]))
        error = 2.0**-22 if layout == "compressed-tensors" else 0  # which stores the reciprocal of the global scale
        torch.testing.assert_close(a.float(), b.float(), rtol=error, atol=0, msg=key)
