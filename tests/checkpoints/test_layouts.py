"""Every layout: what is written is detected, and loads with the same codes, scales and values."""

import json

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import LAYOUTS
from mxtensor.convert.configs import recipe_of
from mxtensor.tensor.quantize_as import quantize_as
from tests.helpers.compare import components_of

CASES = [
    ("native", "mxfp8"), ("native", "mxfp6_e3m2"), ("native", "mxint8"), ("native", "nvfp4"), ("native", "mxfp4-wo"),
    ("native", "float8_e5m2_row"), ("native", "float8_e4m3_tensor_pow2"), ("native", "mxfp8[32x32]"),
    ("compressed-tensors", "mxfp4"), ("compressed-tensors", "mxfp4-wo"), ("compressed-tensors", "mxfp6-wo"),
    ("compressed-tensors", "mxfp8"), ("compressed-tensors", "mxfp8-wo"), ("compressed-tensors", "nvfp4-wo"),
    ("compressed-tensors", "float8_row"), ("compressed-tensors", "float8_128x128-wo"),
    ("modelopt", "nvfp4-wo"), ("modelopt", "mxfp8-wo"), ("deepseek", "float8_128x128-wo"),
    ("deepseek", "float8_128x128_pow2-wo"), ("quark", "mxfp4-wo"), ("quark", "mxfp6_e2m3-wo"),
    ("quark", "mxfp6_e3m2-wo"), ("mlx", "mxfp4-wo"), ("mlx", "mxfp8-wo"), ("mlx", "nvfp4_single_level-wo"),
]  # fmt: skip


def state(format, dtype=torch.bfloat16):
    """Two quantized matrices, and what stays in high precision."""
    recipe = recipe_of(format)
    shapes = {"a.weight": (160, 256), "layers.0.b.weight": (96, 128)}
    quantized = {name: quantize_as(torch.randn(shape, dtype=dtype), recipe) for name, shape in shapes.items()}
    return quantized | {"bias": torch.randn(7), "lm_head.weight": torch.randn(8, 32), "count": torch.arange(3)}


@pytest.mark.parametrize(("layout", "format"), CASES)
def test_what_is_saved_loads_with_equal_values(layout, format, tmp_path):
    before = state(format)
    mx.checkpoints.save(before, tmp_path / "out", layout=layout, max_shard_bytes=20_000)
    assert mx.checkpoints.info(tmp_path / "out").layout == layout
    after = mx.checkpoints.load(tmp_path / "out")
    assert after.keys() == before.keys()
    for name, t in before.items():
        if not isinstance(t, mx.MXTensor):
            assert torch.equal(after[name], t)
            continue
        assert torch.equal(after[name].dequantize(), t.dequantize()), name
        same = [torch.equal(a, b) for a, b in zip(components_of(after[name]), components_of(t), strict=True)]
        assert all(same[:2])  # the global scale may differ by float32 steps that change no value
        if layout in ("native", "mlx", "quark"):
            assert all(same)
        if layout == "native":
            assert after[name].recipe == t.recipe and after[name].dtype == t.dtype


@pytest.mark.parametrize(("layout", "format"), [case for case in CASES if case[0] not in ("native",)])
def test_what_was_loaded_is_written_as_it_was(layout, format, tmp_path):
    from safetensors.torch import load_file

    mx.checkpoints.save(state(format), tmp_path / "a", layout=layout)
    mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout=layout)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    for name, t in a.items():
        assert t.dtype == b[name].dtype and torch.equal(
            t.reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8)
        )


def test_every_orientation_and_attribute_of_the_native_layout(tmp_path):
    x = torch.randn(64, 96)
    before = {
        "both": mx.quantize(x, "mxfp8", orientation="both"),
        "columns": mx.quantize(x, "nvfp4", orientation="columnwise"),
        "transposed": mx.quantize(x, "mxfp4").t(),
        "experts": mx.quantize(torch.randn(3, 64, 32), "mxfp4", orientation="columnwise"),
    }
    mx.checkpoints.save(before, tmp_path / "x.safetensors")
    after = mx.checkpoints.load(tmp_path / "x.safetensors")
    for name, t in before.items():
        assert after[name].copies == t.copies and after[name].stride() == t.stride()
        assert torch.equal(after[name].dequantize(), t.dequantize())


def test_stacked_experts_of_gpt_oss(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    before = {name: mx.quantize(torch.randn(3, 64, 96).bfloat16(), "mxfp4", orientation="columnwise")}
    mx.checkpoints.save(before, tmp_path / "out", layout="gpt-oss")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    after = mx.checkpoints.load(tmp_path / "out")[name]
    assert after.shape == (3, 64, 96) and torch.equal(after.dequantize(), before[name].dequantize())


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.write and name != "plain"])
def test_a_layout_refuses_what_it_cannot_store(layout, tmp_path):
    tensor = mx.quantize(torch.randn(32, 32), "mxint8")
    tensor = mx.quantize(torch.randn(32, 32), "mxfp8") if layout == "gguf" else tensor
    if layout == "native":
        mx.checkpoints.save({"a.weight": tensor}, tmp_path / "out", layout=layout)
        return
    path = tmp_path / ("out.gguf" if layout == "gguf" else "out")
    with pytest.raises(NotImplementedError, match=r"a\.weight is mx"):
        mx.checkpoints.save({"a.weight": tensor}, path, layout=layout)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_model_and_its_tied_weight(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model[1].weight = model[0].weight
    mx.quantize_(model, "mxfp8")
    mx.checkpoints.save(model, tmp_path / "out")
    after = mx.checkpoints.load(tmp_path / "out")
    assert torch.equal(after["0.weight"].dequantize(), after["1.weight"].dequantize())
    fresh = mx.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), "mxfp8")
    fresh.load_state_dict(after)
    x = torch.randn(3, 64)
    assert torch.equal(fresh(x), model(x))


def test_names_of_layouts_forgive_spelling():
    assert mx.checkpoints.get_layout("Compressed_Tensors") is LAYOUTS["compressed-tensors"]
    with pytest.raises(ValueError, match="unknown layout 'awq'"):
        mx.checkpoints.get_layout("awq")
    with pytest.raises(NotImplementedError, match="only read"):
        mx.checkpoints.save({}, "x", layout="pickle")
