"""Every layout: what is written is detected, and loads with the same codes, scales and values."""

import json

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import LAYOUTS
from mxtensor.convert.configs import recipe_of
from mxtensor.tensor.quantize_as import quantize_as
from tests.helpers.compare import components_of

pytestmark = pytest.mark.filterwarnings("ignore:save. readers of the layout")
"""modelopt and deepseek have no weight-only MXFP8 and float8: tests/checkpoints/test_same_layout.py."""
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
    with pytest.raises(NotImplementedError, match="can only be read"):
        mx.checkpoints.save({}, "x", layout="pickle")


MATRICES = [
    ("compressed-tensors", "mxfp4-wo"), ("compressed-tensors", "float8_row-wo"), ("modelopt", "nvfp4-wo"),
    ("deepseek", "float8_128x128-wo"), ("quark", "mxfp4-wo"), ("mlx", "mxfp8-wo"),
]  # fmt: skip
"""Layouts that hold ``M.weight`` only, and take the dtype from config.json."""


@pytest.mark.parametrize(("layout", "format"), MATRICES)
def test_a_parameter_whose_name_only_ends_in_weight_is_refused(layout, format, tmp_path):
    """Readers look for ``M.weight``: they took codes of ``in_proj_weight`` for values."""
    model = mx.quantize_(torch.nn.MultiheadAttention(128, 4), format)
    with pytest.raises(NotImplementedError, match=r"in_proj_weight .* holds rowwise matrices called weight"):
        mx.checkpoints.save(model, tmp_path / "out", layout=layout)
    alone = {"weight": quantize_as(torch.randn(128, 128), recipe_of(format))}
    mx.checkpoints.save(alone, tmp_path / "out", layout=layout)
    assert isinstance(mx.checkpoints.load(tmp_path / "out")["weight"], mx.MXTensor)


def test_a_parameter_whose_name_only_ends_as_codes_or_scales_do_stays(tmp_path):
    before = state("float8_row") | {
        "pos_blocks": torch.ones(3),
        "block_scale": torch.ones(2),
        "a.input_scale": torch.ones(1),
    }
    mx.checkpoints.save({"pos_blocks": torch.ones(3)}, tmp_path / "plain", layout="plain")
    assert list(mx.checkpoints.load(tmp_path / "plain")) == ["pos_blocks"]
    mx.checkpoints.save(before, tmp_path / "a", layout="compressed-tensors")
    report = mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="native")
    assert report.dropped == ["a.input_scale"]
    assert mx.checkpoints.load(tmp_path / "b").keys() == before.keys() - {"a.input_scale"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("layout", "format"), [*MATRICES, ("native", "mxfp4-wo"), ("torchao", "mxfp4-wo")])
def test_the_configuration_names_the_dtype(layout, format, dtype, tmp_path):
    mx.checkpoints.save(state(format, dtype), tmp_path / "out", layout=layout)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert mx.checkpoints.load(tmp_path / "out")["a.weight"].dtype == dtype
    mx.checkpoints.convert(tmp_path / "out", tmp_path / "plain", layout="plain")
    assert mx.checkpoints.load(tmp_path / "plain")["a.weight"].dtype == dtype


def test_the_dtype_of_a_source_stays(tmp_path):
    mx.checkpoints.save({"a.weight": torch.randn(64, 64)}, tmp_path / "a", layout="plain")
    for text, wanted in (
        ({"torch_dtype": "float16"}, None),
        ({"text_config": {"dtype": "bfloat16"}}, None),
        ({}, "float32"),
    ):
        (tmp_path / "a" / "config.json").write_text(json.dumps(text))
        mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", "compressed-tensors", "mxfp8-wo", overwrite=True)
        found = json.loads((tmp_path / "b" / "config.json").read_text())
        assert found.get("dtype") == wanted and {name: found[name] for name in text} == text


def test_a_model_of_transformers_writes_the_dtype_that_it_has(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                      vocab_size=32, dtype="bfloat16")  # fmt: skip
    model = mx.quantize_(transformers.LlamaForCausalLM(config).to(torch.float16), "mxfp4-wo")
    mx.checkpoints.save(model, tmp_path / "out", layout="compressed-tensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
@pytest.mark.parametrize(
    ("layout", "format"), [*MATRICES, ("native", "mxfp4-wo"), ("torchao", "mxfp4-wo"), ("gguf", "mxfp4-wo")]
)
def test_matrices_without_values_stay_in_high_precision(layout, format, shape, tmp_path):
    recipe, end = recipe_of(format), ".gguf" if layout == "gguf" else ""
    made = quantize_as(torch.ones(shape), recipe)
    mx.checkpoints.save({"a.weight": made, "b.weight": torch.ones(3, 3)}, tmp_path / f"a{end}", layout=layout)
    after = mx.checkpoints.load(tmp_path / f"a{end}")["a.weight"]
    assert (
        after.shape == shape and after.dtype == torch.float32 and isinstance(after, mx.MXTensor) == (layout == "native")
    )
    mx.checkpoints.save(
        {"a.weight": torch.ones(shape), "b.weight": torch.ones(128, 128)}, tmp_path / "b", layout="plain"
    )
    report = mx.checkpoints.convert(tmp_path / "b", tmp_path / f"c{end}", layout, format)
    assert report.exact == ["a.weight"] and mx.checkpoints.load(tmp_path / f"c{end}")["a.weight"].shape == shape
