"""What a conversion keeps of the casts of activations and of the cache, what it names as dropped, and NaN."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mxtensor as mx
from tests.helpers.checkpoint_files import checkpoint, scale_bytes

FLOAT = {"type": "float", "symmetric": True}
CACHE = FLOAT | {"num_bits": 8, "strategy": "tensor", "dynamic": False}
FP4 = FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False}
BYTES = torch.randint(0, 256, (64, 32), dtype=torch.uint8)
E4M3 = (torch.rand(64, 4) * 447 + 1).to(torch.float8_e4m3fn)
CODES = torch.randn(64, 64).to(torch.float8_e4m3fn)
QUANTIZATION = "config.json: quantization_config."
INPUTS = f"{QUANTIZATION}config_groups.group_0.input_activations"
STATIC = {"m.input_scale": torch.rand(()), "m.k_scale": torch.rand(())}


def compressed(weights, inputs, **more):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "ignore": [], "config_groups": {"group_0": group}} | more


SOURCES = {
    "compressed-tensors, NVFP4 W4A4": (
        "compressed-tensors",
        {"m.weight_packed": BYTES, "m.weight_scale": E4M3, "m.weight_global_scale": torch.tensor([1200.0]),
         "m.input_global_scale": torch.tensor([300.0]), "m.k_scale": torch.rand(1)},
        compressed(FP4, FP4 | {"dynamic": "local"}, kv_cache_scheme=CACHE),
        ["m.input_global_scale", "m.k_scale", INPUTS,
         QUANTIZATION + "kv_cache_scheme"],
    ),
    "compressed-tensors, float8 with one scale": (
        "compressed-tensors", {"m.weight": CODES, "m.weight_scale": torch.rand(1)} | STATIC,
        compressed(CACHE, CACHE),
        [*STATIC, INPUTS],
    ),
    "compressed-tensors, float8 with rows": (
        "compressed-tensors", {"m.weight": CODES, "m.weight_scale": torch.rand(64, 1).bfloat16()},
        compressed(CACHE | {"strategy": "channel"}, CACHE | {"strategy": "token", "dynamic": True}), [],
    ),
    "modelopt": (
        "modelopt",
        {"m.weight": BYTES, "m.weight_scale": E4M3, "m.weight_scale_2": torch.rand(()) / 2688} | STATIC,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "ignore": ["lm_head"]},
        [*STATIC, QUANTIZATION + "quant_algo", QUANTIZATION + "kv_cache_quant_algo",
         "hf_quant_config.json: quantization.kv_cache_quant_algo"],
    ),
    "AutoFP8": (
        "deepseek", {"m.weight": CODES, "m.weight_scale": torch.rand(())} | STATIC,
        {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"},
        [*STATIC, QUANTIZATION + "activation_scheme",
         QUANTIZATION + "kv_cache_scheme"],
    ),
    "DeepSeek": (
        "deepseek", {"m.weight": CODES, "m.weight_scale_inv": torch.rand(1, 1)},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        [QUANTIZATION + "activation_scheme"],
    ),
    "quark": (
        "quark", {"m.weight": BYTES, "m.weight_scale": scale_bytes(64, 2)},
        {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]},
         "global_quant_config": {"weight": {"dtype": "fp4"}, "input_tensors": {"dtype": "fp4"}}},
        [QUANTIZATION + "global_quant_config.input_tensors",
         QUANTIZATION + "export.kv_cache_group"],
    ),
}  # fmt: skip
"""What wrote it -> layout, tensors, configuration, what another layout drops."""


def made(folder, source):
    layout, state, quantization, _ = SOURCES[source]
    path = checkpoint(folder, state | {"n.weight": torch.randn(8, 32)}, quantization, vocab_size=8)
    if layout == "modelopt":
        side = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8", "group_size": 16}}
        (path / "hf_quant_config.json").write_text(json.dumps(side))
    return path


def as_bytes(t):
    return t.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_layout_keeps_every_tensor_and_the_configuration(source, tmp_path):
    path = made(tmp_path / "a", source)
    report = mx.checkpoints.convert(path, tmp_path / "b", layout=SOURCES[source][0])
    assert report.dropped == [] and report.errors == {} and report.unquantized == []
    a, b = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "b"))
    assert a.keys() == b.keys() and all(t.dtype == b[name].dtype for name, t in a.items())
    assert all(torch.equal(as_bytes(t), as_bytes(b[name])) for name, t in a.items())
    for file in path.glob("*.json"):
        assert json.loads((tmp_path / "b" / file.name).read_text()) == json.loads(file.read_text())


@pytest.mark.parametrize("source", SOURCES)
def test_another_layout_names_what_it_drops(source, tmp_path):
    path = made(tmp_path / "a", source)
    report = mx.checkpoints.convert(path, tmp_path / "b", layout="native")
    assert sorted(report.dropped) == sorted(SOURCES[source][3])
    assert not report.dropped or "scales and settings of activations and of the cache were left out" in str(report)
    before, after = (mx.checkpoints.load(folder) for folder in (path, tmp_path / "b"))
    assert before["m.weight"].recipe == after["m.weight"].recipe
    assert torch.equal(before["m.weight"].dequantize(), after["m.weight"].dequantize())


@pytest.mark.parametrize("source", [name for name in SOURCES if SOURCES[name][0] != "deepseek"])
def test_what_is_quantized_again_names_what_it_drops(source, tmp_path):
    layout, format = SOURCES[source][0], "mxfp4-wo"
    report = mx.checkpoints.convert(made(tmp_path / "a", source), tmp_path / "b", layout=layout, format=format)
    assert sorted(report.dropped) == sorted(SOURCES[source][3])


UNQUANTIZED = [
    ("compressed-tensors", "nvfp4"), ("compressed-tensors", "mxfp6_e2m3"), ("mlx", "mxfp8"), ("gguf", "mxfp4"),
]  # fmt: skip
CAST = [
    ("compressed-tensors", "mxfp4"), ("compressed-tensors", "float8_row"), ("compressed-tensors", "nvfp4-wo"),
    ("modelopt", "nvfp4"), ("modelopt", "mxfp8"), ("quark", "mxfp4"), ("torchao", "nvfp4"), ("native", "nvfp4"),
    ("modelopt", "nvfp4-wo"), ("quark", "mxfp4-wo"), ("mlx", "mxfp8-wo"),
    ("deepseek", "float8_128x128-weight-float8_1x128-activation"),
]  # fmt: skip
OTHER_CASTS = [
    ("deepseek", "float8_128x128-wo", "float8_e4m3_1x128"), ("modelopt", "mxfp8-wo", "mxfp8_e4m3"),
    ("modelopt", "mxfp4-wo", "mxfp4_e2m1"),
    ("deepseek", "float8_128x128-weight-mxfp8-activation", "float8_e4m3_1x128"),
    ("deepseek", "float8_128x128", "float8_e4m3_1x128"),
]  # fmt: skip
"""Layouts without a word for the casts of these formats, and to what their readers cast activations."""


@pytest.mark.parametrize(("layout", "format"), UNQUANTIZED)
def test_a_cast_of_activations_that_a_layout_does_not_store_is_named(layout, format, tmp_path):
    model = mx.quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128)), format)
    end = ".gguf" if layout == "gguf" else ""
    with pytest.warns(UserWarning, match=rf"the layout {layout} does not store how activations are cast, of 1 weights, "
                                         r"such as 0\.weight"):  # fmt: skip
        mx.checkpoints.save(model, tmp_path / f"a{end}", layout=layout)
    mx.checkpoints.save(model, tmp_path / "b")
    report = mx.checkpoints.convert(tmp_path / "b", tmp_path / f"c{end}", layout=layout)
    assert report.unquantized == ["0.weight"] and "1 weights, such as 0.weight, are weight-only now" in str(report)


@pytest.mark.parametrize(("layout", "format"), CAST)
def test_a_cast_that_is_stored_is_not_named(layout, format, tmp_path):
    model = mx.quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128)), format)
    mx.checkpoints.save(model, tmp_path / "a", layout=layout)
    mx.checkpoints.save(model, tmp_path / "b")
    report = mx.checkpoints.convert(tmp_path / "b", tmp_path / "c", layout=layout)
    assert report.unquantized == [] and report.cast == {}
    assert sorted(report.exact + report.stepped) == ["0.bias", "0.weight"]


@pytest.mark.parametrize(("layout", "format", "activation"), OTHER_CASTS)
def test_another_cast_that_readers_make_is_named(layout, format, activation, tmp_path):
    model = mx.quantize_(torch.nn.Sequential(torch.nn.Linear(128, 128)), format)
    text = rf"readers of the layout {layout} cast the activations of 1 weights, such as 0\.weight, to {activation}, "
    with pytest.warns(UserWarning, match=f"save: {text}unlike this model"):
        mx.checkpoints.save(model, tmp_path / "a", layout=layout)
    mx.checkpoints.save(model, tmp_path / "b")
    report = mx.checkpoints.convert(tmp_path / "b", tmp_path / "c", layout=layout)
    assert report.cast == {"0.weight": activation} and report.unquantized == []
    assert text.replace("\\", "") in str(report)
    second = mx.checkpoints.convert(tmp_path / "c", tmp_path / "d", layout=layout)
    assert second.cast == {} and second.dropped == []


def test_modelopt_names_one_cast_for_all_weights(tmp_path):
    """A checkpoint of two casts gets the one that is named as the format."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    for i, format in enumerate(("nvfp4-wo", "nvfp4", "nvfp4-weight-float8_tensor-activation")):
        mx.quantize_(model[i], format)
    with pytest.warns(UserWarning, match="readers of the layout modelopt cast the activations of 2 weights"):
        mx.checkpoints.save(model, tmp_path / "a", layout="modelopt")
    mx.checkpoints.save(model, tmp_path / "b")
    report = mx.checkpoints.convert(tmp_path / "b", tmp_path / "c", layout="modelopt")
    assert report.cast == {"0.weight": "nvfp4", "2.weight": "nvfp4"} and report.unquantized == []


# ---------------------------------------------------------------------------------------------- not finite


def spoiled(format):
    """A matrix whose second block of row 5 has a NaN scale, or, if a scale belongs to more, a NaN code."""
    t = mx.quantize(torch.randn(64, 128).bfloat16(), format)
    operand = t.rowwise
    if operand.scale.dtype is torch.uint8:
        operand.scale.view(torch.uint8)[5, 1] = 0x7F if "nvfp4" in format else 0xFF
    else:
        operand.data.view(torch.uint8)[5, 40] = 0x7F
    return t


@pytest.mark.parametrize(
    ("format", "layout"),
    [("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors"), ("mxfp8", "mlx"), ("float8_row", "compressed-tensors"),
     ("float8_128x128", "deepseek")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:save. readers of the layout deepseek")
def test_nan_in_codes_or_scales_is_named(format, layout, tmp_path):
    mx.checkpoints.save({"m.weight": spoiled(format), "n.weight": torch.randn(8, 32)}, tmp_path / "a", layout=layout)
    for name, options in (
        ("same", {"layout": layout}),
        ("plain", {"layout": "plain"}),
        ("again", {"format": "mxint8"}),
    ):
        with pytest.warns(UserWarning, match=r"1 tensors hold NaN or Inf, such as m\.weight"):
            report = mx.checkpoints.convert(tmp_path / "a", tmp_path / name, **options)
        assert report.not_finite == ["m.weight"] and "1 tensors hold NaN or Inf, such as m.weight" in str(report)
    before, after = mx.checkpoints.load(tmp_path / "a")["m.weight"], mx.checkpoints.load(tmp_path / "plain")["m.weight"]
    assert 0 < after.isnan().sum() <= 32 and torch.equal(after.isnan(), before.dequantize().isnan())
