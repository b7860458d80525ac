"""transformers: quantizing while loading, saving, and loading reloaded by name alone."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5EncoderModel,
)

import mxtensor as mx

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
MODELS = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "Llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "Mixtral, experts": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)),
    "GPT-2, Conv1D": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    ),
}
FORMATS = ["mxfp4-weight-only", "nvfp4", "float8_row"]
IDS = torch.arange(24).view(2, 12)


def quantized(model):
    return {name: p.format.name for name, p in model.named_parameters() if isinstance(p, mx.MXTensor)}


@pytest.fixture(params=MODELS)
def path(request, tmp_path):
    MODELS[request.param]().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_is_quantized_saved_and_loaded_by_name(path, format):
    config = mx.TransformersConfig(format, skip=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.bfloat16)
    wanted = mx.quantize_(AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16), format)
    assert quantized(model) == quantized(wanted) != {}
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, wanted(IDS).logits)
        model.save_pretrained(path.parent / "saved", max_shard_size="40KB")
        reloaded = AutoModelForCausalLM.from_pretrained(path.parent / "saved")
        assert quantized(reloaded) == quantized(model) and reloaded.dtype == torch.bfloat16
        assert torch.equal(reloaded(IDS).logits, model(IDS).logits)
    tied = model.config.tie_word_embeddings
    assert (reloaded.get_output_embeddings().weight is reloaded.get_input_embeddings().weight) is tied
    assert {p.requires_grad for p in reloaded.parameters() if isinstance(p, mx.MXTensor)} == {False}

    loaded = mx.checkpoints.load(path.parent / "saved")
    assert sum(isinstance(t, mx.MXTensor) for t in loaded.values()) == len(quantized(model))
    reloaded.dequantize()
    assert quantized(reloaded) == {}


def test_a_checkpoint_without_its_metadata_is_refused(tmp_path):
    """Another program that writes the file leaves it out: all weights were random."""
    path = tmp_path / "a"
    mx.checkpoints.save(mx.quantize_(MODELS["Llama"](), "mxfp8-weight-only"), path)
    save_file(load_file(path / "model.safetensors"), path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError, match=r"_rowwise_\w+: its file has no metadata that says its format: another program"
    ):
        AutoModelForCausalLM.from_pretrained(path)
    for call in (mx.checkpoints.load, mx.checkpoints.info):
        with pytest.raises(ValueError, match=r"weight_rowwise_data: the file has no metadata that says its format"):
            call(path)


def test_layers_that_are_skipped_stay_as_they_are(tmp_path):
    MODELS["Llama"]().save_pretrained(tmp_path)
    config = mx.TransformersConfig("mxfp8", skip=["o_proj", "layers.0.mlp.up_proj"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    names = {name.removeprefix("model.").removesuffix(".weight") for name in quantized(model)}
    assert len(names) == 14 - 3 and not any("o_proj" in name or name == "layers.0.mlp.up_proj" for name in names)


@pytest.mark.parametrize("layout", ["native"])
def test_what_convert_writes_is_loaded(layout, tmp_path):
    model = MODELS["Llama, tied"]().bfloat16()
    model.save_pretrained(tmp_path / "a")
    mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout=layout, format="mxfp8-weight-only")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    wanted = mx.quantize_(AutoModelForCausalLM.from_pretrained(tmp_path / "a"), "mxfp8-weight-only")
    assert quantized(loaded) == quantized(wanted)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, wanted(IDS).logits)


def test_a_saved_model_is_that_of_from_pretrained(tmp_path):
    model = mx.quantize_(MODELS["Llama, tied"](), "mxfp4-weight-only")
    mx.checkpoints.save(model, tmp_path / "b")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        assert quantized(loaded) == quantized(model) and torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (("mxfp9",), ValueError, "unknown format 'mxfp9'"), ((8,), TypeError, "takes the name of a format"),
        (("mxfp8", "lm_head"), TypeError, "skip must be names of modules"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, kind, message):
    with pytest.raises(kind, match=message):
        mx.TransformersConfig(*arguments)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "order", ["import mxtensor, transformers.quantizers.auto", "import transformers.quantizers.auto, mxtensor"]
)
def test_it_is_registered_in_any_order_of_imports_and_imports_nothing_itself(order):
    code = (
        "import sys, mxtensor; assert 'transformers' not in sys.modules; "
        if order.startswith("import mxtensor")
        else ""
    )
    code += f"{order}; from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as m; print('mxtensor' in m)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("name", "format"),
    [("Llama", "mxfp4"), ("Llama", "mxfp6-weight-only"), ("Llama", "mxfp8-weight-only"), ("Llama", "nvfp4-weight-only"),
     ("Llama, tied", "nvfp4-weight-only")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_layout_of_compressed_tensors(name, format, tmp_path):
    pytest.importorskip("compressed_tensors")
    MODELS[name]().bfloat16().save_pretrained(tmp_path / "a")
    mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="compressed-tensors", format=format)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        model(IDS)  # decompresses the weights
    state, wanted = model.state_dict(), mx.checkpoints.load(tmp_path / "b")
    weights = {name: t.dequantize() for name, t in wanted.items() if isinstance(t, mx.MXTensor)}
    assert len(weights) == 14 and all(torch.equal(state[name], values) for name, values in weights.items())


@pytest.mark.parametrize(
    ("layout", "key"),
    [("compressed-tensors", "ignore"), ("modelopt", "ignore"), ("deepseek", "modules_to_not_convert")],
)
def test_a_tied_head_is_listed_with_the_layers_in_high_precision(layout, key, tmp_path):
    format = "float8_128x128-weight-only" if layout == "deepseek" else "nvfp4-weight-only"
    for name in ("Llama", "Llama, tied"):
        MODELS[name]().bfloat16().save_pretrained(tmp_path / "a")
        mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout=layout, format=format, overwrite=True)
        config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
        assert sorted(config[key]) == ["lm_head", "model.embed_tokens"], name


def test_transformers_dequantizes_the_layout_of_deepseek_to_the_same_values(tmp_path):
    from transformers import FineGrainedFP8Config

    sizes = SIZES | {"hidden_size": 128, "intermediate_size": 256}
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "a")
    mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="deepseek", format="float8_128x128-weight-only")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "b", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    state, wanted = model.state_dict(), mx.checkpoints.load(tmp_path / "b")
    weights = {name: t.dequantize() for name, t in wanted.items() if isinstance(t, mx.MXTensor)}
    assert len(weights) == 14 and all(torch.equal(state[name], values) for name, values in weights.items())


@pytest.mark.filterwarnings("ignore")
def test_experts_of_gpt_oss_go_both_ways(tmp_path):
    """transformers dequantizes what is written to the same values; what it would dequantize stays in codes here."""
    from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

    model = GptOssForCausalLM(GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)).bfloat16()
    mx.quantize_(model, "mxfp4-weight-only", filter_fn=lambda module, name: name.endswith("experts"))
    mx.checkpoints.save(model, tmp_path / "a", layout="gpt-oss")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a", quantization_config=Mxfp4Config(dequantize=True))
    state = loaded.state_dict()
    assert len(quantized(model)) == 4 and quantized(loaded) == {}
    assert all(torch.equal(state[name], t.dequantize()) for name, t in model.state_dict().items()
               if isinstance(t, mx.MXTensor))  # fmt: skip
    mx.checkpoints.convert(tmp_path / "a", tmp_path / "b")
    codes = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert quantized(codes) == quantized(model)
    stored = model.state_dict()
    for name, t in codes.state_dict().items():
        both = [v.dequantize() if isinstance(v, mx.MXTensor) else v for v in (t, stored[name])]
        assert torch.equal(*both), name
    with torch.no_grad():
        assert torch.equal(codes(IDS).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "b")(IDS).logits)
        torch.testing.assert_close(codes(IDS).logits, loaded(IDS).logits, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_that_transformers_keeps_in_float32_have_that_dtype(dtype, tmp_path):
    """The output layers of T5's MLPs, which overflow in float16."""
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    T5EncoderModel(T5Config(**sizes)).save_pretrained(tmp_path / "model")
    wanted = mx.quantize_(T5EncoderModel.from_pretrained(tmp_path / "model", dtype=dtype), "mxfp8")
    config = mx.TransformersConfig("mxfp8")
    found = T5EncoderModel.from_pretrained(tmp_path / "model", quantization_config=config, dtype=dtype)
    found.save_pretrained(tmp_path / "saved")
    for model in (found, T5EncoderModel.from_pretrained(tmp_path / "saved", dtype=dtype)):
        assert quantized(model) == quantized(wanted) != {}
        for name, parameter in wanted.named_parameters():
            expected = torch.float32 if ".wo." in name and dtype == torch.float16 else dtype
            assert model.get_parameter(name).dtype == parameter.dtype == expected
            assert torch.equal(model.get_parameter(name) + 0, parameter + 0)
