"""What is not a checkpoint although it has the name of one: pipes, JSON nested too deeply, values of other types."""

import json
import os
import random

import pytest
import torch

from tests.helpers.checkpoint_files import checkpoint
from tests.helpers.cli import run
from tests.helpers.mutations import replanted

STATE = {"model.layers.0.q_proj.weight": torch.randn(64, 64)}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name")
@pytest.mark.parametrize(
    "name",
    ["x.safetensors", "x.gguf", "x.pt", "a/model.safetensors", "a/pytorch_model.bin", "a/x.gguf", "a/config.json"],
)
def test_a_pipe_is_named_and_not_waited_for(name, tmp_path, capsys):
    if name.endswith("config.json"):
        checkpoint(tmp_path / "a", STATE)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    path = tmp_path / name if "/" not in name else tmp_path / "a"
    code, _, err = run(capsys, "inspect", path)
    if name.endswith("config.json"):  # a folder without a configuration
        assert code == 0
        return
    assert code == 1 and err.count("\n") == 1 and str(path) in err
    assert "is a pipe, a socket or a device" in err or "holds no checkpoint" in err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name")
def test_a_plan_that_is_a_pipe_is_named(tmp_path, capsys):
    path = checkpoint(tmp_path / "a", STATE)
    os.mkfifo(tmp_path / "plan.json")
    code, _, err = run(capsys, "quantize", path, "-o", tmp_path / "q", "--plan", tmp_path / "plan.json")
    assert code == 1 and "plan.json is a pipe or a device; pass a file" in err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "modules.json", "plan.json"])
def test_json_that_is_nested_too_deeply_is_named(name, tmp_path, capsys):
    path = checkpoint(tmp_path / "a", STATE)
    (path / name).write_text("[" * 200_000)
    more = ("--plan", path / name) if name == "plan.json" else ("--format", "mxfp8")
    code, _, err = run(capsys, "quantize", path, "-o", tmp_path / "q", *more)
    if name == "modules.json":  # of other models, which it may not be
        assert code == 0
        return
    assert code == 1 and f"{path / name} " in err and "nested too deeply" in err and err.count("\n") == 1
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", 5), ("architectures", "LlamaForCausalLM"), ("architectures", [1]), ("text_config", []),
        ("tie_word_embeddings", "yes"), ("auto_map", [1]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_a_value_of_another_type_is_named(key, value, nested, tmp_path, capsys):
    path = checkpoint(tmp_path / "a", STATE)
    fields = {"model_type": "llama", key: value}
    (path / "config.json").write_text(json.dumps({"text_config": fields} if nested else fields))
    for command in (("inspect", path), ("quantize", path, "-o", tmp_path / "q", "--format", "mxfp8")):
        code, _, err = run(capsys, *command)
        if not (nested and key == "text_config"):
            assert code == 1 and f"config.json: {key} must be " in err and err.count("\n") == 1
    (path / "config.json").write_text(json.dumps({"model_type": "llama", key: None}))
    assert run(capsys, "inspect", path)[0] == 0


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "rope_theta": 1e4, "tie_word_embeddings": False, "torch_dtype": "float32", "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [8, pytest.param(100, marks=pytest.mark.exhaustive(quick=0))])
def test_every_change_of_a_configuration_is_read_or_raises_a_sentence(count, tmp_path, capsys):
    path, rng = checkpoint(tmp_path / "a", STATE), random.Random(count)
    for _ in range(count):
        (path / "config.json").write_text(json.dumps(changed := replanted(CONFIG, rng)))
        code, _, err = run(capsys, "quantize", path, "-o", tmp_path / "q", "--format", "mxfp8", "--overwrite")
        assert code == 0 or (code == 1 and "error: " in err and "Traceback" not in err), changed
        assert (tmp_path / "q").exists() or code == 1
