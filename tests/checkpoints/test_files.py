"""Files from outside are not trusted: each message names file and tensor."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import mxtensor as mx
from tests.helpers.checkpoint_files import checkpoint, scale_bytes

NVFP4 = {
    "m.weight_packed": torch.randint(0, 256, (64, 32), dtype=torch.uint8),
    "m.weight_scale": (torch.rand(64, 4) * 448).to(torch.float8_e4m3fn),
    "m.weight_global_scale": torch.tensor([1200.0]),
}
MXFP4 = {"m.weight_packed": NVFP4["m.weight_packed"], "m.weight_scale": scale_bytes(64, 2)}
FLOAT8 = {"m.weight": torch.randn(64, 64).to(torch.float8_e4m3fn), "m.weight_scale": torch.rand(64, 1)}
METHOD = {"quant_method": "compressed-tensors"}


def changed(state, **changes):
    """A state with other tensors; None removes one."""
    new = state | {f"m.{name}": t for name, t in changes.items()}
    return {name: t for name, t in new.items() if t is not None}


BAD = {
    "a scale is missing": (changed(MXFP4, weight_scale=None), ValueError, "lacks m.weight_scale"),
    "a weight is missing": (changed(MXFP4, weight_packed=None), ValueError, "lacks the weight of this scale"),
    "a scale has another shape": (
        changed(MXFP4, weight_scale=scale_bytes(63, 2)), ValueError, r"must have shape \(64, 2\)",
    ),
    "a scale has too few columns": (changed(MXFP4, weight_scale=scale_bytes(64, 3)), ValueError, "neither MXFP4 nor"),
    "a scale is a vector": (changed(MXFP4, weight_scale=scale_bytes(2)), ValueError, "must have shape"),
    "a scale is a float": (changed(MXFP4, weight_scale=torch.rand(64, 2)), ValueError, "scale must be uint8"),
    "codes are integers": (
        changed(MXFP4, weight_packed=torch.ones(64, 8, dtype=torch.int32)), NotImplementedError, "packed integers",
    ),
    "a zero point": (
        changed(MXFP4, weight_scale=None, weight_zero_point=torch.ones(64, 2)), ValueError, "lacks m.weight_scale",
    ),
    "no global scale": (changed(NVFP4, weight_global_scale=None), ValueError, "NVFP4 needs weight_global_scale"),
    "two global scales": (changed(NVFP4, weight_global_scale=torch.ones(2)), ValueError, "one float32; got"),
    "a global scale of zero": (changed(NVFP4, weight_global_scale=torch.zeros(1)), ValueError, "positive and finite"),
    "a negative global scale": (
        changed(NVFP4, weight_global_scale=-torch.ones(1)), ValueError, "positive and finite",
    ),
    "a global scale that is NaN": (
        changed(NVFP4, weight_global_scale=torch.tensor([torch.nan])), ValueError, "positive and finite",
    ),
    "an inverted global scale": (
        changed(NVFP4, weight_global_scale=1 / NVFP4["m.weight_global_scale"]), ValueError, "probably inverted",
    ),
    "scales of another float8": (
        changed(FLOAT8, weight_scale=torch.rand(5, 5)), ValueError, r"\(5, 5\) of a weight \(64, 64\)",
    ),
    "integer scales": (
        changed(FLOAT8, weight_scale=torch.ones(64, 1, dtype=torch.int32)), ValueError, "must be a float dtype",
    ),
    "an int8 weight": (
        changed(FLOAT8, weight=torch.ones(64, 64, dtype=torch.int8)), NotImplementedError, "only float8",
    ),
    "a weight that is a vector": (
        changed(FLOAT8, weight=torch.ones(64).to(torch.float8_e4m3fn)), ValueError, "needs two dimensions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", BAD)
def test_tensors_that_do_not_fit_name_file_and_tensor(why, tmp_path):
    state, kind, message = BAD[why]
    path = checkpoint(tmp_path / "a", state, METHOD)
    with pytest.raises(kind, match=message) as error:
        mx.checkpoints.load(path)
    assert "model.safetensors, tensor m." in str(error.value)
    with pytest.raises(kind, match=message):
        mx.checkpoints.convert(path, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_folders_that_are_not_a_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        mx.checkpoints.load(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint: no file ends in .*; it holds nothing"):
        mx.checkpoints.load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model\.bin cannot be read by torch\.load"):
        mx.checkpoints.load(tmp_path / "model.bin")
    (tmp_path / "model.txt").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"model\.txt is not a checkpoint; pass a folder, or a file that ends in "):
        mx.checkpoints.load(tmp_path / "model.txt")
    (tmp_path / "model.safetensors").mkdir()  # a folder for a file
    with pytest.raises((ValueError, FileNotFoundError), match=r"model\.safetensors"):
        mx.checkpoints.load(tmp_path)


@pytest.mark.parametrize("method", ["awq", "gptq", 8, ["fp8"]])
def test_an_unknown_method_is_named(method, tmp_path):
    path = checkpoint(tmp_path / "a", {"m.weight": torch.ones(2, 2)}, {"quant_method": method})
    with pytest.raises((NotImplementedError, ValueError), match="quant_method"):
        mx.checkpoints.load(path)


@pytest.mark.parametrize("text", ["[]", "{", "nul", '{"quantization_config": 3}', '{"a": ' * 100_000])
def test_a_configuration_that_is_not_valid(text, tmp_path):
    path = checkpoint(tmp_path / "a", {"m.weight": torch.ones(2, 2)})
    (path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config"):
        mx.checkpoints.load(path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "none.safetensors", "", 3, None, "a\0b"])
def test_an_index_cannot_leave_its_folder(file, tmp_path):
    save_file({"m.weight": torch.ones(2)}, tmp_path / "secret.safetensors")
    path = checkpoint(tmp_path / "a", {"m.weight": torch.ones(2, 2)})
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"m.weight": file}}))
    with pytest.raises(ValueError, match=r"index\.json"):
        mx.checkpoints.load(path)


def test_an_index_and_its_files_agree(tmp_path):
    path = checkpoint(tmp_path / "a", {"m.weight": torch.ones(2, 2)})
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"m.bias": "model.safetensors"}}))
    with pytest.raises(ValueError, match=r"tensor m\.bias is not in model\.safetensors"):
        mx.checkpoints.load(path)
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(ValueError, match="needs a weight_map"):
        mx.checkpoints.load(path)
    index.unlink()
    save_file({"m.weight": torch.ones(2, 2)}, path / "other.safetensors")
    (path / "model.safetensors").rename(path / "some.safetensors")
    with pytest.raises(ValueError, match=r"tensor m\.weight is in two files"):
        mx.checkpoints.load(path)


def _native(tmp_path):
    mx.checkpoints.save({"a.weight": mx.quantize(torch.randn(64, 64), "nvfp4")}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m | {"copies": {}}, lambda m: m | {"copies": {"_rowwise": 2}}, lambda m: m | {"copies": {"data": 3}},
        lambda m: m | {"recipe": {}}, lambda m: m | {"recipe": m["recipe"] | {"weight": "mxfp9"}}, lambda m: [],
        lambda m: m | {"recipe": m["recipe"] | {"weight": "mxfp8"}}, lambda m: m | {"dtype": "int8"},
        lambda m: m | {"shape": [64, 65]}, lambda m: m | {"shape": [-1]}, lambda m: m | {"shape": [1 << 70, 1]},
        lambda m: m | {"stride": [0, 0]}, lambda m: m | {"stride": [1 << 62, 1]}, lambda m: {},
        lambda m: m | {"shape": 3},
        lambda m: m | {"copies": {"_rowwise": "x"}}, lambda m: m | {"shape": ["a", 64]},
    ],
)  # fmt: skip
def test_metadata_of_the_native_layout_is_checked(change, tmp_path):
    from safetensors import safe_open

    path = _native(tmp_path)
    with safe_open(path, framework="pt") as f:
        metadata = f.metadata()
    metadata["mxtensor.a.weight"] = json.dumps(change(json.loads(metadata["mxtensor.a.weight"])))
    save_file(load_file(path), tmp_path / "y.safetensors", metadata)
    with pytest.raises(ValueError, match=r"tensor a\.weight"):
        mx.checkpoints.load(tmp_path / "y.safetensors")


@pytest.mark.parametrize("target", ["re:(m+)+$", "re:(m|m)*x", "re:.*.*.*.*x", "re:(m{1,9}){1,9}x", "re:" + "m" * 1000])
def test_a_pattern_that_could_take_for_ever_is_refused(target, tmp_path):
    groups = {"group_0": {"targets": [target], "weights": {}}}
    path = checkpoint(tmp_path / "a", MXFP4, METHOD | {"config_groups": groups})
    with pytest.raises(ValueError, match="is too complex a pattern"):
        mx.checkpoints.load(path)
