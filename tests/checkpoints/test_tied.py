"""Heads that share a weight with an embedding: stored by one name, and listed as layers that are not quantized.

A reader takes a linear layer that is not listed for a quantized one, and makes scales of its own for it.
"""

import json

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints.names import USUAL_HEADS, model_of, usual_heads

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "state_size": 8, "num_mel_bins": 16,
    "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
MODELS = {
    # model: its configuration, what it sets, and its head
    "LlamaForCausalLM": ("LlamaConfig", {"tie_word_embeddings": True}, "lm_head"),
    "MambaForCausalLM": ("MambaConfig", {}, "lm_head"),
    "BartForConditionalGeneration": ("BartConfig", {}, "lm_head"),
    "T5ForConditionalGeneration": ("T5Config", {"tie_word_embeddings": True}, "lm_head"),
    "WhisperForConditionalGeneration": ("WhisperConfig", {}, "proj_out"),
    "BertForMaskedLM": ("BertConfig", {}, "cls.predictions.decoder"),
    "RobertaForMaskedLM": ("RobertaConfig", {}, "lm_head.decoder"),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"dim": 64, "hidden_dim": 64, "n_heads": 2, "n_layers": 1},
        "vocab_projector",
    ),
}
FORMAT, LAYOUT = "float8_row", "compressed-tensors"


def built(name):
    config, own, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**{**SIZES, **own})).eval()


def listed(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_is_not_stored_is_listed(name, tmp_path):
    model, head = built(name), MODELS[name][2]
    model.save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "converted", layout=LAYOUT, format=FORMAT, progress=False)
    mx.checkpoints.save(mx.quantize_(model, FORMAT), tmp_path / "saved", layout=LAYOUT)
    layers = []
    for folder in (tmp_path / "saved", tmp_path / "converted"):
        stored = mx.checkpoints.load(folder)
        assert f"{head}.weight" not in stored and listed(folder).count(head) == 1
        quantized = {key.removesuffix(".weight") for key, value in stored.items() if isinstance(value, mx.MXTensor)}
        assert quantized and not quantized & set(listed(folder))
        layers.append(quantized)
    assert layers[0] == layers[1]  # convert quantizes what quantize_ does


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of compressed-tensors
@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "BertForMaskedLM", "WhisperForConditionalGeneration"])
def test_transformers_reads_the_same_model(name, tmp_path):
    pytest.importorskip("compressed_tensors")
    model = mx.quantize_(built(name), FORMAT)
    mx.checkpoints.save(model, tmp_path / "saved", layout=LAYOUT)
    read = type(model).from_pretrained(tmp_path / "saved").eval()
    ids = torch.arange(3, 13)[None]
    inputs = {"input_features": torch.randn(1, 16, 64)} if "Whisper" in name else {"input_ids": ids}
    inputs |= {} if "Bert" in name else {"decoder_input_ids": ids}
    with torch.no_grad():
        expected, found = model(**inputs).logits, read(**inputs).logits
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_a_head_with_a_weight_of_its_own_is_stored(tmp_path):
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    model = mx.quantize_(transformers.LlamaForCausalLM(config), FORMAT)
    mx.checkpoints.save(model, tmp_path / "saved", layout=LAYOUT)
    assert "lm_head.weight" in mx.checkpoints.load(tmp_path / "saved")
    assert listed(tmp_path / "saved").count("lm_head") == 1


def test_without_a_model_the_usual_heads_are_listed():
    embedding, every = "model.embed_tokens.weight", [f"{head}.weight" for head in USUAL_HEADS]
    assert usual_heads({}, ["a.weight"], [embedding]) == every
    assert usual_heads({"tie_word_embeddings": False}, [], [embedding]) == []
    assert usual_heads({}, [], [embedding, "lm_head.weight"]) == [] == usual_heads({}, ["lm_head.weight"], [embedding])
    assert usual_heads({}, [], ["a.weight"]) == [] == usual_heads({}, [embedding], [])


@pytest.mark.parametrize(
    "config",
    [{}, {"architectures": ["Unknown"], "model_type": "unknown"}, {"model_type": "llama"},
     {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": "many"}],
)  # fmt: skip
def test_a_configuration_that_transformers_does_not_know_is_that_of_no_model(config):
    assert model_of(config) is None
    known = model_of({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES})
    assert {p.device.type for p in known.parameters()} == {"meta"}


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao", "quark", "modelopt"])
def test_a_quantized_embedding_is_refused_where_no_reader_decodes_it(layout, tmp_path):
    formats = {"quark": "mxfp4", "modelopt": "nvfp4"}
    model = mx.quantize_(built("LlamaForCausalLM"), formats.get(layout, FORMAT), include_head=True)
    for given in (model, model.state_dict()):
        with pytest.raises(
            NotImplementedError, match=f"embed_tokens.weight is a quantized embedding.* {layout} decodes"
        ):
            mx.checkpoints.save(given, tmp_path / "saved", layout=layout)
        assert not (tmp_path / "saved").exists()
    mx.checkpoints.save(model, tmp_path / "native")
    assert isinstance(mx.checkpoints.load(tmp_path / "native")["model.embed_tokens.weight"], mx.MXTensor)
