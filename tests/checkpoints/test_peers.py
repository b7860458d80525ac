"""Files of other libraries: values equal those to which the library's own code dequantizes, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

import mxtensor as mx
from mxtensor.checkpoints.global_scale import _tables, decoded, divides, multiplies
from tests.helpers.checkpoint_files import CONFIG, checkpoint, scale_bytes
from tests.helpers.peers import special


def nibbles(codes):
    """float32 values of packed e2m1, by a table that is written down here."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    return torch.stack((values[(codes & 15).long()], values[(codes >> 4).long()]), -1).flatten(-2)


# ---------------------------------------------------------------------------------------------- compressed-tensors

SCHEMES = {
    "MXFP4": "mxfp4-pack-quantized", "MXFP4A16": "mxfp4-pack-quantized", "MXFP6A16": "mxfp6-pack-quantized",
    "MXFP8": "mxfp8-quantized", "MXFP8A16": "mxfp8-quantized", "NVFP4A16": "nvfp4-pack-quantized",
    "FP8_DYNAMIC": "float-quantized", "FP8_BLOCK": "float-quantized",
}  # fmt: skip


def _blocks(w, args):
    if args.strategy in ("group", "tensor_group"):
        return w.reshape(w.shape[0], -1, args.group_size)
    if args.strategy == "channel":
        return w[:, None, :]
    padded = torch.nn.functional.pad(w, (0, -w.shape[1] % 128, 0, -w.shape[0] % 128))
    return padded.reshape(padded.shape[0] // 128, 128, -1, 128).transpose(1, 2).flatten(-2)


@pytest.mark.exhaustive(quick=8)
@pytest.mark.parametrize("shape", [(96, 256), (1, 128), (33, 384), (200, 1024), (128, 128), (7, 640)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_tensors_both_ways(scheme, shape, tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    preset = preset_name_to_scheme(scheme, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme])
    w = special(shape, torch.bfloat16, largest=200.0)
    global_scale = generate_gparam(w.min(), w.max()) if "NVFP4" in scheme else None
    blocks = _blocks(w, preset.weights)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), preset.weights, global_scale=global_scale)
    state = {"weight": w, "weight_scale": scale}
    if global_scale is not None:
        state["weight_global_scale"] = global_scale.reshape(1)
    stored = {name: t.detach() for name, t in compressor.compress(state, preset).items()}
    wanted = compressor.decompress(dict(stored), preset)["weight"]
    groups = {"group_0": preset.model_dump(mode="json")}
    path = checkpoint(
        tmp_path / "a", {f"m.{name}": t for name, t in stored.items()},
        {"quant_method": "compressed-tensors", "format": SCHEMES[scheme], "config_groups": groups},
    )  # fmt: skip
    loaded = mx.checkpoints.load(path)
    assert loaded["m.weight"].shape == shape and torch.equal(loaded["m.weight"].dequantize(wanted.dtype), wanted)

    mx.checkpoints.save(
        loaded, tmp_path / "b", layout="compressed-tensors"
    )  # the same bytes, and a valid configuration
    written_back = load_file(tmp_path / "b" / "model.safetensors")
    assert {name: t.dtype for name, t in written_back.items()} == {f"m.{name}": t.dtype for name, t in stored.items()}
    assert all(
        torch.equal(written_back[f"m.{name}"].view(torch.uint8), t.view(torch.uint8)) for name, t in stored.items()
    )
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    written = QuantizationConfig.model_validate(config).config_groups["group_0"].model_dump(mode="json")
    assert {k: v for k, v in written.items() if k != "format"} == {k: v for k, v in groups["group_0"].items()
                                                                  if k != "format"}  # fmt: skip


# ---------------------------------------------------------------------------------------------- transformers


@pytest.mark.parametrize("low, high", [(100, 140), (0, 10), (240, 255)])
def test_gpt_oss_by_the_code_of_transformers(low, high, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8), scale_bytes(3, 64, 2, low=low, high=high)
    path = checkpoint(tmp_path / "a", {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales},
                      {"quant_method": "mxfp4"})  # fmt: skip
    loaded = mx.checkpoints.load(path)["e.gate_up_proj"]
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert loaded.shape == wanted.shape == (3, 64, 64) and torch.equal(loaded.dequantize(), wanted)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu, torch.uint8])
def test_tiles_of_128x128_with_tails(scale_dtype, tmp_path):
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3) if scale_dtype is torch.float32 else scale_bytes(2, 3, low=0, high=255)
    as_float = scale if scale_dtype is torch.float32 else torch.exp2(scale.double() - 127).float()
    stored = scale.view(scale_dtype) if scale_dtype is torch.float8_e8m0fnu else scale
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = checkpoint(tmp_path / "a", {"m.weight": codes, "m.weight_scale_inv": stored}, method)
    wanted = codes.float() * as_float.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(mx.checkpoints.load(path)["m.weight"].dequantize(), wanted.bfloat16())


def test_one_small_tile_is_written_as_a_tile(tmp_path):
    state = {"m.weight": torch.randn(64, 96).to(torch.float8_e4m3fn), "m.weight_scale_inv": torch.rand(1, 1)}
    path = checkpoint(tmp_path / "a", state, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert mx.checkpoints.load(path)["m.weight"].format.name == "float8_e4m3_128x128"


def test_fp4_experts_of_deepseek(tmp_path):
    codes, scales = torch.randint(0, 256, (32, 64), dtype=torch.uint8), scale_bytes(32, 4)
    state = {"m.weight": codes.view(torch.int8), "m.scale": scales.view(torch.float8_e8m0fnu)}
    loaded = mx.checkpoints.load(checkpoint(tmp_path / "a", state, {"quant_method": "fp8"}))["m.weight"]
    wanted = nibbles(codes) * torch.exp2(scales.double() - 127).repeat_interleave(32, 1)
    assert torch.equal(loaded.dequantize(), wanted.bfloat16())


# ---------------------------------------------------------------------------------------------- by their formulas


def test_modelopt_multiplies(tmp_path):
    codes = torch.randint(0, 256, (64, 64), dtype=torch.uint8)
    scale, second = (torch.rand(64, 8) * 448).to(torch.float8_e4m3fn), torch.rand(()) / 2688
    state = {"m.weight": codes, "m.weight_scale": scale, "m.weight_scale_2": second, "m.input_scale": torch.rand(())}
    loaded = mx.checkpoints.load(checkpoint(tmp_path / "a", state, {"quant_method": "modelopt"}))
    wanted = nibbles(codes) * (scale.float() * second).repeat_interleave(16, 1)
    assert torch.equal(loaded["m.weight"].dequantize(), wanted.bfloat16())
    assert torch.equal(loaded["m.input_scale"], state["m.input_scale"])


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_words_of_mlx(mode, bits, group, tmp_path):
    values = torch.randint(0, 2**bits, (32, 128))
    if bits == 8:
        values = torch.where(values & 127 == 127, 0, values)  # no NaN
    shifted = values.view(32, -1, 32 // bits) << (bits * torch.arange(32 // bits))
    words = shifted.sum(-1).to(torch.uint32)
    scale = scale_bytes(32, 128 // group, low=1 if group == 16 else 100, high=120)
    state = {"m.weight": words, "m.scales": scale}
    path = checkpoint(tmp_path / "a", state, quantization={"mode": mode, "bits": bits, "group_size": group})
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization": {"mode": mode, "bits": bits,
                                                                           "group_size": group}}))  # fmt: skip
    table = nibbles(torch.arange(16, dtype=torch.uint8))[::2]
    elements = table[values] if bits == 4 else values.to(torch.uint8).view(torch.float8_e4m3fn).float()
    scale_values = scale.view(torch.float8_e4m3fn).float() if group == 16 else torch.exp2(scale.double() - 127).float()
    wanted = elements * scale_values.repeat_interleave(group, 1)
    assert torch.equal(mx.checkpoints.load(path)["m.weight"].dequantize(), wanted.bfloat16())


def test_quark_by_the_element_of_its_configuration(tmp_path):
    codes, scales = torch.randint(0, 256, (32, 96), dtype=torch.uint8), scale_bytes(32, 4)
    config = {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp6_e3m2"}}}
    path = checkpoint(tmp_path / "a", {"m.weight": codes, "m.weight_scale": scales}, config)
    loaded = mx.checkpoints.load(path)["m.weight"]
    direct = mx.MXTensor.from_components(codes, scales, "mxfp6_e3m2")
    assert loaded.format.name == "mxfp6_e3m2" and torch.equal(loaded.dequantize(), direct.dequantize())


def test_every_type_of_gguf_that_its_package_quantizes(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer, wanted = gguf.GGUFWriter(tmp_path / "m.gguf", "llama"), {}
    for kind in ("MXFP4", "Q8_0", "Q4_0", "BF16"):
        quantized = gguf.quantize(torch.randn(64, 256).numpy(), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{kind}.weight", quantized, raw_dtype=gguf.GGMLQuantizationType[kind])
        wanted[f"{kind}.weight"] = torch.from_numpy(gguf.dequantize(quantized, gguf.GGMLQuantizationType[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = mx.checkpoints.load(tmp_path / "m.gguf")
    assert loaded.keys() == wanted.keys() and isinstance(loaded["MXFP4.weight"], mx.MXTensor)
    for name, t in loaded.items():
        values = t.dequantize(torch.float32) if isinstance(t, mx.MXTensor) else t.float()
        assert torch.equal(values, wanted[name]), name


@pytest.mark.parametrize("combine", [divides, multiplies])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_global_scale_gives_the_values_of_the_other_library(combine, dtype):
    elements, scales = _tables()
    for exponent in torch.linspace(-2, 2, 60):
        stored = (1e3 if combine is divides else 1e-3) * 10**exponent * (0.5 + torch.rand(()))
        here = decoded(stored, combine, dtype)
        assert torch.equal((elements * scales * here).to(dtype), (elements * combine(scales, stored)).to(dtype))
