"""Models whose tensors transformers renames, splits or stacks: quantized while loaded, saved, and loaded reloaded."""

import pytest
import torch
import transformers as tf

import mxtensor as mx
from tests.helpers.renamed_models import MODELS, built, output

FORMAT = "mxfp8-weight-only"
SPLIT = ["nomic_bert", "gte", "dinov2"]


def quantized(model):
    return {name for name, value in model.state_dict().items() if isinstance(value, mx.MXTensor)}


def loaded(model, folder, **options):
    return type(model).from_pretrained(folder, quantization_config=mx.TransformersConfig(FORMAT, **options)).eval()


@pytest.mark.exhaustive(quick=9)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_quantized_saved_and_loaded_again_and_again(name, tmp_path):
    model = built(name)
    model.save_pretrained(tmp_path / "plain")
    found, wanted = loaded(model, tmp_path / "plain"), mx.quantize_(model, FORMAT)
    assert quantized(found) == quantized(wanted) != set()
    values = {key: value.dequantize() for key, value in wanted.state_dict().items() if isinstance(value, mx.MXTensor)}
    expected = output(wanted)
    assert torch.equal(output(found), expected)
    for folder in (tmp_path / "saved", tmp_path / "again"):
        found.save_pretrained(folder)
        stored = [value for value in mx.checkpoints.load(folder).values() if isinstance(value, mx.MXTensor)]
        assert len(stored) == len(set(values) - set(model.all_tied_weights_keys or {}))
        found, loading = type(model).from_pretrained(folder, output_loading_info=True)
        assert not loading["missing_keys"] and not loading["unexpected_keys"]
        assert quantized(found) == set(values) and torch.equal(output(found.eval()), expected)
        state = found.state_dict()
        assert all(torch.equal(state[key].dequantize(), value) for key, value in values.items())
        assert not any(p.requires_grad for p in found.parameters() if isinstance(p, mx.MXTensor))


@pytest.mark.parametrize("name", SPLIT)
def test_each_layer_of_a_fused_one_is_quantized_or_skipped_by_itself(name, tmp_path):
    model = built(name)
    if not any(".q_proj." in key for key in model.state_dict()):
        pytest.skip(f"transformers {tf.__version__} loads the projections of {name} as one")
    model.save_pretrained(tmp_path)
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    every = quantized(loaded(model, tmp_path))
    for skipped in (("q_proj", "gate_proj"), ("v_proj", "up_proj")):
        found = loaded(model, tmp_path, skip=skipped)
        left = {key for key in every if key.endswith(tuple(f"{layer}.weight" for layer in skipped))}
        assert left and quantized(found) == every - left
        state = found.state_dict()
        assert all(torch.equal(state[key], plain[key]) for key in left)


@pytest.mark.parametrize("format", ["mxfp4-weight-only", "nvfp4-weight-only", "float8_tensor-weight-only"])
@pytest.mark.parametrize("name", SPLIT)
def test_fused_codes_are_split_by_rows(name, format, tmp_path):
    """What convert has quantized before the split has the values that it has afterwards."""
    model = built(name)
    model.save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "out", format=format, progress=False)
    mx.checkpoints.convert(tmp_path / "out", tmp_path / "decoded", layout="plain", progress=False)
    found = type(model).from_pretrained(tmp_path / "out").eval()
    wanted = type(model).from_pretrained(tmp_path / "decoded").state_dict()
    assert quantized(found) == quantized(mx.quantize_(model, format))
    for key, value in found.state_dict().items():
        assert torch.equal(value.dequantize() if isinstance(value, mx.MXTensor) else value, wanted[key]), key
    found.save_pretrained(tmp_path / "saved")
    reloaded = type(model).from_pretrained(tmp_path / "saved").eval()
    assert quantized(reloaded) == quantized(found) and torch.equal(output(reloaded), output(found))


@pytest.mark.parametrize("name", ["llava", "nomic_bert", "phimoe", "granite_moe"])
def test_a_model_that_was_saved_in_codes_is_dequantized_and_saved_in_high_precision(name, tmp_path):
    model = built(name)
    model.save_pretrained(tmp_path / "plain")
    found = loaded(model, tmp_path / "plain")
    expected = output(mx.quantize_(model, FORMAT))
    found.save_pretrained(tmp_path / "codes")
    found.dequantize()
    found.save_pretrained(tmp_path / "values")
    reloaded, loading = type(model).from_pretrained(tmp_path / "values", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and quantized(reloaded) == set()
    torch.testing.assert_close(output(reloaded.eval()), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llava", "vit", "granite_moe"])
def test_a_model_that_was_quantized_after_loading_is_saved_under_names_of_parameters(name, tmp_path):
    model = mx.quantize_(built(name), FORMAT)
    mx.checkpoints.save(model, tmp_path / "saved")
    found = type(model).from_pretrained(tmp_path / "saved").eval()
    assert quantized(found) == quantized(model) and torch.equal(output(found), output(model))


def test_other_names_of_a_checkpoint_are_given_by_key_mapping(tmp_path):
    """The renamings of this call of from_pretrained count, not only those that transformers knows."""
    model = built("neox")
    state = {key.replace("gpt_neox.layers", "other.blocks"): value for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "plain")
    state = {key: value.contiguous() for key, value in state.items()}
    mx.checkpoints.save(state, tmp_path / "plain", layout="plain", overwrite=True)
    model.config.save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "out", format=FORMAT, progress=False)
    found = type(model).from_pretrained(tmp_path / "out", key_mapping={r"^other\.blocks": "gpt_neox.layers"}).eval()
    assert quantized(found) == quantized(mx.quantize_(model, FORMAT))
    assert torch.equal(output(found), output(model))


def test_names_of_the_model_stay_where_a_renaming_matches_them(tmp_path):
    """As of parameters in high precision: in Laguna, ``shared_expert.`` also matches ``shared_experts``."""
    model = mx.quantize_(built("neox"), FORMAT)
    mx.checkpoints.save(model, tmp_path)
    names = {"attention.dens.": "attention.dense."}
    found, loading = type(model).from_pretrained(tmp_path, key_mapping=names, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert quantized(found) == quantized(model) and torch.equal(output(found.eval()), output(model))
    found.save_pretrained(tmp_path / "saved")
    found = type(model).from_pretrained(tmp_path / "saved", key_mapping=names).eval()
    assert quantized(found) == quantized(model) and torch.equal(output(found), output(model))
