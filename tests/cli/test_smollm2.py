"""The way of the README from a GGUF file to generated text, word for word, with SmolLM2."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import mxtensor as mx
from examples import smollm2
from mxtensor.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
NEEDS = (smollm2.PACKAGE, "gguf", "transformers", "accelerate")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not all(map(find_spec, NEEDS)), reason="the weights of SmolLM2 are not installed"),
]


def words():
    """The lines of the README's block, without those that install."""
    text = (ROOT / "README.md").read_text().split("### From a checkpoint to generated text")[1]
    lines = re.search(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1].splitlines(keepends=True)
    assert lines[0].startswith("pip install") and not any(line.startswith("pip") for line in lines[1:])
    return "".join(lines[1:])


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """(the folder, what the commands printed)."""
    folder = tmp_path_factory.mktemp("smollm2")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "bin").mkdir()
    for name, command in (("mxtensor", "-m mxtensor"), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        script.chmod(0o755)
    env = os.environ | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-e", "-c", words()], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout


def test_every_step_prints_its_numbers(walked):
    folder, out = walked
    assert "SmolLM2-mxfp8: layout native" in out and re.search(r"mxfp8_e4m3 +210 +106,168,320 .* 8.25", out)
    lowest = re.search(r"^62 of 272 tensors are equal; B has .*; lowest SQNR: (\S+) dB", out, re.MULTILINE)[1]
    shown = _ratios(out)
    assert len(shown) == 10 and shown == sorted(shown) and shown[0] == float(lowest)
    bits, perplexity, kl = re.search(r"^SmolLM2-mxfp8 +(\S+) +\S+ +1020 +(\S+) +(\S+) ", out, re.MULTILINE).groups()
    assert float(bits) == pytest.approx(9.88, abs=0.01) and 20 < float(perplexity) < 40 and 0 < float(kl) < 0.05
    assert "\nThe capital of France is Paris" in out
    assert {p.name for p in folder.iterdir()} >= {"SmolLM2", "SmolLM2-mxfp8"}
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]  # what was temporary is gone


def test_compare_with_all_prints_each_tensor(walked, capsys):
    folder, out = walked
    assert main(["compare", str(folder / "SmolLM2"), str(folder / "SmolLM2-mxfp8"), "--all"]) == 0
    ratios = _ratios(capsys.readouterr().out)
    assert len(ratios) == 210 and 31 < min(ratios) <= max(ratios) < 32 and ratios[:10] == _ratios(out)


def _ratios(out):
    return [float(found) for found in re.findall(r"mxfp8_e4m3 +(\d+\.\d+) ", out)]


def test_names_and_values_are_those_of_transformers(walked):
    folder, _ = walked
    model, _ = smollm2.load_model()
    state = model.state_dict()
    loaded = mx.checkpoints.load(folder / "SmolLM2")
    assert set(state) - set(loaded) == {"lm_head.weight"}
    assert all(loaded[name].equal(state[name]) for name in loaded)


def test_transformers_alone_loads_what_servers_read(walked):
    pytest.importorskip("compressed_tensors")
    folder, _ = walked
    mx.checkpoints.convert(
        folder / "SmolLM2", folder / "out", layout="compressed-tensors", format="nvfp4-weight-only", overwrite=True
    )
    code = (
        "import sys, torch; sys.modules['mxtensor'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('out')\n"
        "model(torch.tensor([[1, 2, 3]]))\n"
        "torch.save(model.model.layers[3].mlp.up_proj.weight.detach(), 'w.pt')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    wanted = mx.checkpoints.load(folder / "out")["model.layers.3.mlp.up_proj.weight"].dequantize()
    assert torch.equal(torch.load(folder / "w.pt"), wanted)
