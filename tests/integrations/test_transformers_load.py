"""transformers: which parameters the codes of a checkpoint become, where its tensors are not those of the model."""

import pickle

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

import mxtensor as mx

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
IDS = torch.arange(24).view(2, 12)
EXPERTS = {
    "mixtral": lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**SIZES, num_local_experts=11)),
    "qwen3_next": lambda: tf.Qwen3NextForCausalLM(
        tf.Qwen3NextConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, head_dim=16,
            shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"],
        )
    ),
}  # fmt: skip


def quantized(model):
    return {name: p for name, p in model.named_parameters() if isinstance(p, mx.MXTensor)}


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def llama(**options):
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, **options)).eval()


@pytest.fixture
def experts(request, tmp_path):
    torch.manual_seed(0)
    EXPERTS[request.param]().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.mark.parametrize(
    ("experts", "format"),
    [("mixtral", "mxfp8"), ("mixtral", "float8_row"), ("mixtral", "nvfp4"), ("qwen3_next", "mxfp4-weight-only")],
    indirect=["experts"],
)
def test_experts_that_are_stored_one_by_one_are_stacked_in_codes(experts, format, tmp_path):
    wanted = mx.quantize_(tf.AutoModelForCausalLM.from_pretrained(experts), format)
    mx.checkpoints.convert(experts, tmp_path / "codes", format=format)
    found, info = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    found.save_pretrained(tmp_path / "saved")
    for model in (found, tf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")):
        weights, expected = quantized(model), quantized(wanted)
        assert weights.keys() == expected.keys() and any("experts.gate_up_proj" in name for name in weights)
        assert all(torch.equal(p.dequantize(), expected[name].dequantize()) for name, p in weights.items())
        assert not any(p.requires_grad for p in weights.values()) and torch.equal(logits(model), logits(wanted))
    found.dequantize()
    found.save_pretrained(tmp_path / "values")  # one by one again
    assert mx.checkpoints.load(tmp_path / "values").keys() == mx.checkpoints.load(experts).keys()


@pytest.mark.parametrize("experts", ["mixtral"], indirect=True)
@pytest.mark.parametrize("way", ["quantized while loaded", "loaded codes"])
def test_a_loaded_model_is_pickled(experts, way, tmp_path):
    """It has the quantizer that loaded it. Pools of processes and ``torch.save(model)`` pickle both."""
    model = tf.AutoModelForCausalLM.from_pretrained(experts, quantization_config=mx.TransformersConfig("mxfp8"))
    if way == "loaded codes":
        model.save_pretrained(tmp_path / "codes")
        model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "loaded")
    assert torch.equal(logits(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "loaded")), logits(model))


@pytest.mark.parametrize("experts", ["mixtral"], indirect=True)
@pytest.mark.parametrize("case", ["global scales", "formats", "some plain"])
def test_experts_without_a_common_format_are_not_dropped(experts, case, tmp_path):
    mx.checkpoints.convert(experts, tmp_path / "codes", format="nvfp4")
    config = (tmp_path / "codes" / "config.json").read_text()
    state, name = mx.checkpoints.load(tmp_path / "codes"), "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    values = state[name].dequantize()
    others = {"global scales": mx.quantize(values * 3, "nvfp4"), "formats": mx.quantize(values, "mxfp8")}
    mx.checkpoints.save(state | {name: others.get(case, values)}, tmp_path / "codes", overwrite=True)
    (tmp_path / "codes" / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"\.w\d\.weight and \d+ other quantized tensors of the .* cannot be stacked"):
        tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")


@pytest.mark.parametrize("experts", ["mixtral"], indirect=True)
def test_experts_of_another_layout_have_one_global_scale(experts, tmp_path):
    mx.checkpoints.convert(experts, tmp_path / "served", layout="compressed-tensors", format="nvfp4-weight-only")
    mx.checkpoints.convert(tmp_path / "served", tmp_path / "codes")
    found = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    wanted = mx.quantize_(tf.AutoModelForCausalLM.from_pretrained(experts), "nvfp4-weight-only")
    weights = quantized(wanted)
    assert quantized(found).keys() == weights.keys()
    for name, p in quantized(found).items():  # the layout stores the reciprocal of the global scale
        torch.testing.assert_close(p.dequantize(), weights[name].dequantize(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("experts", ["qwen3_next"], indirect=True)
def test_what_a_model_leaves_out_stays_in_high_precision(experts, tmp_path):
    """Layers for multi-token prediction, which transformers reads from the files when it needs them."""
    file = experts / "model.safetensors"
    state = load_file(file)
    more = {
        name.replace("model.layers.1", "mtp.layers.0"): t.clone() for name, t in state.items() if "layers.1." in name
    }
    save_file(state | more, file, metadata={"format": "pt"})
    report = mx.checkpoints.convert(experts, tmp_path / "codes", format="mxfp8-weight-only")
    assert set(more) <= set(report.exact)
    found = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    assert torch.equal(
        logits(found), logits(mx.quantize_(tf.AutoModelForCausalLM.from_pretrained(experts), "mxfp8-weight-only"))
    )


def test_codes_that_a_model_leaves_out_are_unexpected_keys(tmp_path):
    """Such as those of the head of a language model that becomes a classifier, and of layers that it lacks."""
    llama().save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "codes", format="mxfp8", include_head=True)
    found, info = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "codes", output_loading_info=True)
    assert info["missing_keys"] == {"score.weight"}
    assert {key.rpartition(".")[0] for key in info["unexpected_keys"]} == {"lm_head"}
    wanted = tf.AutoModel.from_pretrained(tmp_path / "codes").eval()
    with torch.no_grad():
        assert torch.equal(found.eval().model(IDS)[0], wanted(IDS)[0])
    config = tf.AutoConfig.from_pretrained(tmp_path / "codes", num_hidden_layers=1)
    shorter = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes", config=config)
    assert len(quantized(shorter)) == 8


def test_a_class_that_reads_none_of_the_codes_is_refused(tmp_path):
    """transformers would fill it with random values: its parameters have another prefix."""
    llama().save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "codes", format="mxfp8")
    with pytest.raises(ValueError, match="LlamaForQuestionAnswering has no parameter for any of the 14 quantized"):
        tf.AutoModelForQuestionAnswering.from_pretrained(tmp_path / "codes")


def test_the_config_of_a_loaded_model_loads_another(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    mx.checkpoints.convert(tmp_path / "plain", tmp_path / "codes", format="mxfp8")
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes")
    for found in (
        tf.AutoModelForCausalLM.from_pretrained(tmp_path / "codes", config=model.config),
        tf.LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict()),
    ):
        assert quantized(found).keys() == quantized(model).keys() and torch.equal(logits(found), logits(model))
    model.config.save_pretrained(tmp_path / "plain")
    with pytest.warns(UserWarning, match="no tensor is quantized: the model stays in high precision"):
        assert not quantized(tf.AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
