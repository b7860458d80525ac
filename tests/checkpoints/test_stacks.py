"""Stacked experts: which tensors of three dimensions convert quantizes, and files of float8 stacks."""

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints.names import matrix_orientation
from mxtensor.numerics.formats import Orientation
from tests.helpers.checkpoint_files import checkpoint, scale_bytes

ROWS, COLUMNS = Orientation.ROWWISE, Orientation.COLUMNWISE
OSS = {"model_type": "gpt_oss"}


@pytest.mark.parametrize(
    ("name", "shape", "config", "wanted"),
    [
        ("layers.0.q_proj.weight", (4, 4), {}, ROWS),
        ("weight", (4, 4), {}, ROWS),
        ("layers.0.q_proj.bias", (4,), {}, None),
        ("scores", (4, 4), {}, None),
        ("attention.in_proj_weight", (12, 4), {}, ROWS),
        ("layers.0.mlp.experts.gate_up_proj", (2, 4, 4), {"model_type": "qwen3_moe"}, ROWS),
        ("layers.0.mlp.experts.gate_up_proj", (2, 4, 4), OSS, COLUMNS),
        ("layers.0.mlp.experts.down_proj", (2, 4, 4), {"text_config": {"model_type": "llama4_text"}}, COLUMNS),
        ("layers.0.mlp.experts.gate_up_proj_bias", (2, 4), OSS, None),
        ("blk.0.ffn_gate_exps.weight", (2, 4, 4), {}, ROWS),
        ("layers.0.mlp.switch_mlp.up_proj.weight", (2, 4, 4), {}, ROWS),
        ("layers.0.mlp.experts.up_proj.weight", (2, 4, 4), OSS, ROWS),
        ("layers.0.block_sparse_moe.input_linear.weight", (2, 4, 4), {}, ROWS),
        ("mixer.conv1d.weight", (8, 1, 4), {"model_type": "mamba"}, None),
        ("patch_embed.weight", (8, 3, 4, 4), {}, None),
    ],
)
def test_names_and_shapes_that_are_products(name, shape, config, wanted):
    assert matrix_orientation(name, shape, config) is wanted


STATE = {
    "layers.0.mlp.experts.gate_up_proj": torch.randn(3, 64, 96).bfloat16(),
    "layers.0.mlp.experts.down_proj": torch.randn(3, 64, 64).bfloat16(),
    "layers.0.mlp.experts.down_proj_bias": torch.randn(3, 64).bfloat16(),
    "layers.0.self_attn.q_proj.weight": torch.randn(64, 64).bfloat16(),
    "layers.0.mlp.router.weight": torch.randn(3, 64).bfloat16(),
}
STACKS = ["layers.0.mlp.experts.down_proj", "layers.0.mlp.experts.gate_up_proj"]
MATRIX = "layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("layout", "rounded", "left"),
    [("native", [*STACKS, MATRIX], []), ("gpt-oss", STACKS, []), ("compressed-tensors", [MATRIX], STACKS)],
)
def test_each_layout_quantizes_what_it_holds_and_says_what_it_leaves(layout, rounded, left, tmp_path):
    path = checkpoint(tmp_path / "a", STATE, model_type="gpt_oss")
    report = mx.checkpoints.convert(path, tmp_path / "b", layout=layout, format="mxfp4-weight-only")
    assert sorted(report.errors) == rounded and report.stacks == left
    assert ("tensors of experts stay as they were" in str(report)) == bool(left)
    assert all(0.05 < error < 0.2 for error in report.errors.values())
    for name, t in mx.checkpoints.load(tmp_path / "b").items():
        wanted = STATE[name]
        if name in rounded:
            side = "rowwise" if name == MATRIX else "columnwise"
            wanted, t = mx.quantize(wanted, "mxfp4", orientation=side).dequantize(), t.dequantize()
        assert torch.equal(t, wanted), name


def test_the_error_of_a_large_stack_is_measured(tmp_path):
    path = checkpoint(tmp_path / "a", {"experts.down_proj": torch.randn(2, 768, 1024).bfloat16()})
    report = mx.checkpoints.convert(path, tmp_path / "b", format="mxfp8-weight-only")
    assert 0.02 < report.errors["experts.down_proj"] < 0.03


def test_experts_of_gguf_are_quantized(tmp_path):
    pytest.importorskip("gguf")
    state = {"blk.0.ffn_up_exps.weight": torch.randn(3, 32, 64), "blk.0.ssm_conv1d.weight": torch.randn(8, 1, 64)}
    mx.checkpoints.save(state, tmp_path / "a.gguf", layout="gguf")
    report = mx.checkpoints.convert(tmp_path / "a.gguf", tmp_path / "b.gguf", "gguf", "mxfp4-weight-only")
    assert list(report.errors) == ["blk.0.ffn_up_exps.weight"]
    loaded = mx.checkpoints.load(tmp_path / "b.gguf")["blk.0.ffn_up_exps.weight"]
    wanted = mx.quantize(state["blk.0.ffn_up_exps.weight"], "mxfp4").dequantize()
    assert loaded.format.name == "mxfp4_e2m1" and torch.equal(loaded.dequantize(torch.float32), wanted)


def test_transformers_loads_converted_experts(tmp_path):
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16,
             "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}  # fmt: skip
    GptOssForCausalLM(GptOssConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "a")
    for layout in ("native", "gpt-oss"):
        mx.checkpoints.convert(tmp_path / "a", tmp_path / layout, layout=layout, format="mxfp4-weight-only")
    wanted = AutoModelForCausalLM.from_pretrained(
        tmp_path / "a", quantization_config=mx.TransformersConfig("mxfp4-weight-only")
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "gpt-oss", quantization_config=Mxfp4Config(dequantize=True)
    )
    for name in ("gate_up_proj", "down_proj"):
        a, b, c = (getattr(m.model.layers[0].mlp.experts, name) for m in (wanted, loaded, theirs))
        assert isinstance(b, mx.MXTensor) and torch.equal(a.dequantize(), b.dequantize())
        assert torch.equal(b.dequantize(), c)


# ---------------------------------------------------------------------------------------------- float8 stacks


@pytest.mark.parametrize(
    ("shape", "scale", "format"),
    [
        ((2, 96, 160), (2, 96, 1), "float8_e4m3_row"),
        ((2, 96, 160), (2, 96), "float8_e4m3_row"),
        ((2, 96, 160), (), "float8_e4m3_tensor"),
        ((2, 160, 300), (2, 2, 3), "float8_e4m3_128x128"),
    ],
)
def test_stacks_with_float_scales(shape, scale, format, tmp_path):
    codes, scales = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(scale)
    path = checkpoint(tmp_path / "a", {"m.weight": codes, "m.weight_scale": scales}, {"quant_method": "modelopt"})
    loaded = mx.checkpoints.load(path)["m.weight"]
    tiles = scales
    if len(scale) == 3 and scale[-1] > 1:
        tiles = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : shape[1], : shape[2]]
    elif len(scale) == 2:
        tiles = scales[..., None]
    assert loaded.format.name == format and torch.equal(loaded.dequantize(), (codes.float() * tiles).bfloat16())


def test_a_stack_with_mx_scales(tmp_path):
    codes, scales = torch.randn(2, 4, 64).to(torch.float8_e4m3fn), scale_bytes(2, 4, 2)
    path = checkpoint(tmp_path / "a", {"m.weight": codes, "m.weight_scale": scales}, {"quant_method": "modelopt"})
    wanted = codes.float() * torch.exp2(scales.double() - 127).float().repeat_interleave(32, -1)
    assert torch.equal(mx.checkpoints.load(path)["m.weight"].dequantize(), wanted.bfloat16())


def test_stacked_experts_of_deepseek_have_their_scales(tmp_path):
    codes, scales = torch.randn(2, 130, 128).to(torch.float8_e4m3fn), torch.rand(2, 2, 1)
    state = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scales}
    path = checkpoint(tmp_path / "a", state, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    (name, loaded), = mx.checkpoints.load(path).items()  # fmt: skip
    wanted = codes.float() * scales.repeat_interleave(128, 1)[:, :130]
    assert name == "experts.gate_up_proj" and torch.equal(loaded.dequantize(), wanted.bfloat16())


@pytest.mark.parametrize(
    ("state", "config"),
    [
        ({"weight_packed": torch.zeros(4, 16, dtype=torch.uint8), "weight_scale": scale_bytes(4, 1)},
         {"quantization": {"quant_method": "compressed-tensors"}}),
        ({"weight": torch.zeros(4, 16, dtype=torch.uint8), "weight_scale": scale_bytes(4, 1)},
         {"quantization": {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}}),
    ],
)  # fmt: skip
def test_a_model_that_is_one_module_has_names_without_a_dot(state, config, tmp_path):
    assert list(mx.checkpoints.load(checkpoint(tmp_path / "a", state, **config))) == ["weight"]
