"""Codes without the scales that belong to them are never values: each layout reads its scales, and refuses others."""

import pytest
import torch
from safetensors.torch import save_file

import mxtensor as mx
from tests.helpers.checkpoint_files import checkpoint, scale_bytes

FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
ROWS, COLUMNS = 64, 160


def float8(scale, element=torch.float8_e4m3fn):
    """(codes, values) of a random matrix divided by a scale that multiplies."""
    codes = (torch.randn(ROWS, COLUMNS) / scale).to(element)
    return codes, codes.float() * scale


def scale_of(kind):
    shape = {"one": (), "one of one dimension": (1,), "rows": (ROWS,), "rows as a column": (ROWS, 1)}[kind]
    return torch.rand(shape) / 100 + 0.005


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("kind", ["one", "one of one dimension", "rows", "rows as a column"])
def test_float8_with_a_scale_for_the_tensor_or_for_rows(kind, element, tmp_path):
    """As AutoFP8 and vLLM write it."""
    scale = scale_of(kind)
    codes, wanted = float8(scale.reshape(-1, 1), element)
    state = {"m.weight": codes, "m.weight_scale": scale, "m.input_scale": torch.rand(()), "n.weight": torch.randn(8, 8)}
    path = checkpoint(tmp_path / "a", state, FP8)
    loaded = mx.checkpoints.load(path)
    assert loaded["m.weight"].format.name.endswith("_tensor" if "one" in kind else "_row")
    assert torch.equal(loaded["m.weight"].dequantize(), wanted.bfloat16())
    assert torch.equal(loaded["m.input_scale"], state["m.input_scale"])
    for layout in ("plain", "native"):
        report = mx.checkpoints.convert(path, tmp_path / layout, layout=layout)
        assert report.dropped[0] == "m.input_scale"
        after = mx.checkpoints.load(tmp_path / layout)["m.weight"]
        after = after.dequantize() if isinstance(after, mx.MXTensor) else after
        assert torch.equal(after, wanted.bfloat16())
    requantized = mx.checkpoints.convert(path, tmp_path / "c", format="mxfp8-wo")
    assert requantized.errors["m.weight"] < 0.04


def test_blocks_by_the_configuration_also_under_the_other_name(tmp_path):
    codes, scale = torch.randn(200, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    state = {"m.weight": codes, "m.weight_scale": scale}
    path = checkpoint(tmp_path / "a", state, FP8 | {"weight_block_size": [128, 128]})
    wanted = codes.float() * scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(mx.checkpoints.load(path)["m.weight"].dequantize(), wanted.bfloat16())


BYTES = torch.randint(0, 256, (64, 32), dtype=torch.uint8)
CODES = torch.randn(64, 64).to(torch.float8_e4m3fn)
E4M3 = (torch.rand(64, 4) * 448).to(torch.float8_e4m3fn)
METHODS = {
    "deepseek": FP8, "compressed-tensors": {"quant_method": "compressed-tensors"},
    "modelopt": {"quant_method": "modelopt"}, "gpt-oss": {"quant_method": "mxfp4"}, "plain": None,
    "quark": {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}},
}  # fmt: skip
REFUSED = {
    "another name": (("deepseek", "gpt-oss", "plain"), {"weight": CODES, "scale_weight": torch.rand(())}),
    "no scale": (("deepseek", "compressed-tensors", "modelopt", "quark"), {"weight": CODES}),
    "the scale of inputs only": (tuple(METHODS), {"weight": CODES, "input_scale": torch.rand(())}),
    "a scale for the tensor": (("plain", "gpt-oss"), {"weight": CODES, "weight_scale": torch.rand(())}),
    "a second scale": (
        ("deepseek", "compressed-tensors", "quark"),
        {"weight": CODES, "weight_scale": torch.rand(64, 1), "weight_scale_2": torch.rand(())},
    ),
    "a zero point": (
        ("deepseek", "compressed-tensors", "modelopt"),
        {"weight": CODES, "weight_scale": torch.rand(64, 1), "weight_zero_point": torch.ones(64, 1)},
    ),
    "an outer scale": (
        ("modelopt",),
        {"weight": BYTES, "weight_scale": E4M3, "weight_scale_2": torch.rand(()) / 2688, "scale": torch.rand(())},
    ),
    "packed codes": (("plain",), {"weight_packed": BYTES, "weight_scale": scale_bytes(64, 2)}),
    "bytes and absmax": (("plain",), {"weight": BYTES, "weight.absmax": torch.rand(64)}),
    "int8 and SCB": (("plain",), {"weight": torch.ones(64, 64, dtype=torch.int8), "SCB": torch.rand(64)}),
    "words of GPTQ": (("plain",), {"qweight": torch.ones(8, 64, dtype=torch.int32), "scales": torch.rand(2, 64)}),
    "stacked experts": (
        ("plain", "compressed-tensors"),
        {"gate_up_proj": torch.randn(2, 64, 64).to(torch.float8_e4m3fn), "gate_up_proj_scale": torch.rand(2, 1, 64)},
    ),
}  # fmt: skip
"""What is stored -> (the layouts that do not know it, tensors)."""


@pytest.mark.parametrize(("why", "layout"), [(why, layout) for why, (names, _) in REFUSED.items() for layout in names])
def test_codes_beside_a_scale_that_the_layout_does_not_read_are_refused(why, layout, tmp_path):
    state = {f"m.{name}": t for name, t in REFUSED[why][1].items()}
    path = checkpoint(tmp_path / "a", state, METHODS[layout])
    message = rf"model\.safetensors, tensor m\.{next(iter(REFUSED[why][1]))}: .*layout {layout} does not know them"
    for act in (
        lambda: mx.checkpoints.load(path),
        lambda: mx.checkpoints.info(path),
        lambda: mx.checkpoints.convert(path, tmp_path / "b", layout="plain"),
        lambda: mx.checkpoints.convert(path, tmp_path / "b", format="mxfp8"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            act()
    assert not (tmp_path / "b").exists()


def test_codes_of_a_file_without_a_configuration_and_in_torch_save(tmp_path):
    state = {"m.weight": CODES, "m.weight_scale": torch.rand(())}
    save_file(state, tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    for name in ("m.safetensors", "m.pt"):
        with pytest.raises(NotImplementedError, match=r"tensor m\.weight: codes in .* with m\.weight_scale"):
            mx.checkpoints.load(tmp_path / name)
    for layout in ("native", "plain"):
        with pytest.raises(NotImplementedError, match=r"save: m\.weight: codes in float8_e4m3fn with m\.weight_scale"):
            mx.checkpoints.save(state, tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


def test_other_tensors_beside_names_of_scales_are_values(tmp_path):
    state = {
        "m.weight": CODES, "m.bias": torch.randn(64), "norm.scale": torch.randn(64), "norm.mask": BYTES,
        "logit_scale": torch.tensor(2.0), "a.position_ids": torch.arange(64)[None].int(), "a.scale": torch.rand(1),
        "a.in_proj_weight": torch.randn(8, 8), "b.scales": scale_bytes(4, 4),
    }  # fmt: skip
    for layout in ("native", "plain"):
        mx.checkpoints.save(state, tmp_path / layout, layout=layout)
        loaded = mx.checkpoints.load(tmp_path / layout)
        assert all(torch.equal(loaded[name].float(), t.float()) for name, t in state.items())


@pytest.mark.parametrize("layout", ["deepseek", "compressed-tensors", "modelopt", "mlx"])
def test_float8_without_a_scale_is_not_written_where_readers_take_it_for_codes(layout, tmp_path):
    with pytest.raises(NotImplementedError, match=r"m\.weight is float8_e4m3fn without scales, which readers of the"):
        mx.checkpoints.save({"m.weight": CODES}, tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()


def test_a_scale_of_llama_cpp_beside_codes_is_refused(tmp_path):
    pytest.importorskip("gguf")
    codes = mx.quantize(torch.randn(64, 64), "nvfp4_single_level")
    state = {"blk.0.attn_q.weight": codes, "blk.0.attn_q.scale": torch.rand(1)}
    mx.checkpoints.save(state, tmp_path / "m.gguf", layout="gguf")
    with pytest.raises(NotImplementedError, match=r"blk\.0\.attn_q\.weight: codes in NVFP4 with blk\.0\.attn_q\.scale"):
        mx.checkpoints.load(tmp_path / "m.gguf")
