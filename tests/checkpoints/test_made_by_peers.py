"""Files that torchao, MLX, ModelOpt and Quark made: every value is the one to which their own code dequantizes it.

The fixtures are such files, which ``python -m tests.helpers.peers`` wrote: the tests of them need no other library.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

import mxtensor as mx
from tests.helpers.compare import components_of
from tests.helpers.peers import FIXTURES, PEERS, SHAPES, is_installed, peer

LAYOUTS = {"torchao_files": "torchao", "mlx_files": "mlx", "modelopt_files": "modelopt", "quark_files": "quark"}


def check(loaded, wanted, steps=0):
    """``steps``: how many steps of its dtype a value of NVFP4 may be away: global_scale.py says why."""
    assert loaded.keys() >= wanted.keys()
    for name, values in wanted.items():
        t = loaded[name]
        assert isinstance(t, mx.MXTensor) or name == "norm.weight"
        found = t.dequantize() if isinstance(t, mx.MXTensor) else t
        assert found.dtype == values.dtype and found.shape == values.shape, name
        if steps and isinstance(t, mx.MXTensor) and t.format.name == "nvfp4":
            torch.testing.assert_close(found, values, rtol=steps * torch.finfo(t.dtype).eps, atol=0)
            continue
        assert torch.equal(found.isnan(), values.isnan()), name
        assert torch.equal(found.nan_to_num(), values.nan_to_num()), name


@pytest.mark.filterwarnings("ignore:convert. [0-9]+ tensors hold NaN")  # every code, and every scale
@pytest.mark.parametrize("name", PEERS)
def test_fixtures(name, tmp_path):
    wanted = load_file(FIXTURES / f"{name}.safetensors")
    loaded = mx.checkpoints.load(FIXTURES / name)
    check(loaded, wanted)
    assert mx.checkpoints.info(FIXTURES / name).layout == LAYOUTS[name]
    mx.checkpoints.convert(FIXTURES / name, tmp_path / "native")
    check(mx.checkpoints.load(tmp_path / "native"), wanted)


def test_the_pickle_of_torchao_needs_no_torchao():
    wanted = load_file(FIXTURES / "torchao_files.safetensors")
    pickled = mx.checkpoints.load(FIXTURES / "torchao_files" / "state.pt")
    stored = mx.checkpoints.load(FIXTURES / "torchao_files")
    check(pickled, wanted)
    assert pickled.keys() == stored.keys()
    for name, t in stored.items():
        if isinstance(t, mx.MXTensor):
            assert pickled[name].recipe == t.recipe
            assert all(torch.equal(a, b) for a, b in zip(components_of(pickled[name]), components_of(t), strict=True))


@pytest.mark.filterwarnings("ignore:convert. [0-9]+ tensors hold NaN")  # every code, and every scale
@pytest.mark.parametrize("name", ["torchao_files", "mlx_files", "quark_files"])
def test_fixtures_are_written_as_they_were(name, tmp_path):
    mx.checkpoints.convert(FIXTURES / name, tmp_path / "out", layout=LAYOUTS[name]) if name != "quark_files" else None
    if name == "quark_files":  # which is written with one format a file
        state = {k: t for k, t in mx.checkpoints.load(FIXTURES / name).items() if ".fp4" in k}
        mx.checkpoints.save(state, tmp_path / "out", layout="quark")
    before, after = load_file(FIXTURES / name / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    compared = 0
    for key in after:
        if name == "torchao_files" and "swizzled" in key and "scale" in key and "per_tensor" not in key:
            continue  # scales are written row by row
        same = (t.contiguous().reshape(-1).view(torch.uint8) for t in (before[key], after[key]))
        assert before[key].dtype == after[key].dtype and torch.equal(*same), key
        compared += 1
    assert compared > 3


def test_activations_of_torchao_are_read_and_written(tmp_path):
    loaded = mx.checkpoints.load(FIXTURES / "torchao_files")
    assert loaded["mx.e4m3.0.rows.weight"].recipe.activation == mx.Cast.of("mxfp8", "rceil")
    assert loaded["mx.e2m1.0.rows.weight"].recipe.activation == mx.Cast.of("mxfp4", "rceil")
    assert loaded["nv.0.rows.weight"].recipe.activation == mx.Cast.of("nvfp4")
    assert loaded["nv1.0.rows.weight"].recipe.activation is None
    assert loaded["float8.0.PerTensor.e4m3.weight"].recipe.activation == mx.Cast.of("float8_tensor")
    mx.checkpoints.save(loaded, tmp_path / "out", layout="torchao")
    reloaded = mx.checkpoints.load(tmp_path / "out")
    assert {name: t.recipe for name, t in reloaded.items() if isinstance(t, mx.MXTensor)} == {
        name: t.recipe for name, t in loaded.items() if isinstance(t, mx.MXTensor)
    }


# ---------------------------------------------------------------------------------------------- with the libraries


@pytest.mark.exhaustive(quick=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", PEERS)
def test_many_shapes_by_the_library_itself(name, dtype, tmp_path):
    if not is_installed(name):
        pytest.skip(f"{name} needs {', '.join(peer(name).NEEDS)}")
    if name == "torchao_files" and dtype is torch.float16:
        pytest.skip("torchao's MXTensor takes bfloat16 and float32")
    wanted = peer(name).make(tmp_path / "a", SHAPES, dtype)
    steps = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}[dtype]
    check(mx.checkpoints.load(tmp_path / "a"), wanted, steps)
    if name == "torchao_files":
        check(mx.checkpoints.load(tmp_path / "a" / "state.pt"), wanted, steps)


@pytest.mark.filterwarnings("ignore")
def test_torchao_reads_what_is_written(tmp_path):
    pytest.importorskip("torchao")
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    peer("torchao_files").make(tmp_path / "a", SHAPES, torch.bfloat16)
    loaded = {k: t for k, t in mx.checkpoints.load(tmp_path / "a").items() if k != "block16.weight"}
    mx.checkpoints.save(loaded, tmp_path / "b", layout="torchao", max_shard_bytes=200_000)
    rest, found = {}, {}
    files = sorted((tmp_path / "b").glob("*.safetensors"))
    for file in files:  # as vLLM does
        with safe_open(file, framework="pt") as f:
            metadata = f.metadata()
        new, rest = unflatten_tensor_state_dict(rest | load_file(file), metadata)
        found |= new
    assert len(files) > 3 and rest == {}
    wanted = {k: t.dequantize() if type(t) is not torch.Tensor else t for k, t in found.items()}
    check(loaded, wanted)
    assert loaded.keys() == wanted.keys()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp6_e3m2", "nvfp4-weight-only", "float8_row"])
def test_transformers_loads_the_layout_of_torchao(format, tmp_path):
    pytest.importorskip("torchao")
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(tmp_path / "a")
    mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="torchao", format=format, max_shard_bytes=40_000)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    loaded = mx.checkpoints.load(tmp_path / "b")
    weights = {name: t for name, t in loaded.items() if isinstance(t, mx.MXTensor)}
    assert len(weights) == 14
    for name in weights:
        assert type(state[name]).__module__.startswith("torchao")
    check(weights, {name: state[name].dequantize() for name in weights}, steps=1)
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao" and "lm_head" in config["modules_to_not_convert"]


@pytest.mark.filterwarnings("ignore")
def test_mlx_reads_what_is_written(tmp_path):
    mlx = pytest.importorskip("mlx.core")
    from tests.helpers.peers.mlx_files import MODES, _torch

    formats = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "nvfp4": "nvfp4_single_level"}
    for mode in MODES:
        state = {f"m{i}.weight": mx.quantize(torch.randn(n, k).bfloat16(), formats[mode]) for i, (n, k) in
                 enumerate(SHAPES)}  # fmt: skip
        state["experts.weight"] = mx.quantize(torch.randn(3, 32, 128).bfloat16(), formats[mode])
        mx.checkpoints.save(state, tmp_path / mode, layout="mlx")
        arrays = mlx.load(str(tmp_path / mode / "model.safetensors"))
        cast = json.loads((tmp_path / mode / "config.json").read_text())["quantization"]
        with mlx.stream(mlx.cpu):
            for name, t in state.items():
                values = mlx.dequantize(
                    arrays[name], arrays[name.replace("weight", "scales")], mode=cast["mode"], bits=cast["bits"],
                    group_size=cast["group_size"], dtype=mlx.bfloat16,
                )  # fmt: skip
                assert torch.equal(_torch(values), t.dequantize())
