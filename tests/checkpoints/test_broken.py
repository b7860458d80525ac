"""What the command says of a broken file: one line with file and tensor, exit code 1, nothing written or changed."""

import json
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from mxtensor.cli.main import main
from tests.checkpoints.test_files import METHOD, MXFP4, NVFP4, changed
from tests.helpers.checkpoint_files import checkpoint


def header(raw):
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def joined(tree, values):
    text = json.dumps(tree).encode()
    return len(text).to_bytes(8, "little") + text + values


def with_offsets(raw, name, offsets):
    tree, values = header(raw)
    tree[name]["data_offsets"] = offsets
    return joined(tree, values)


def with_shape(raw, name, shape):
    tree, values = header(raw)
    tree[name]["shape"] = shape
    return joined(tree, values)


FILES = {
    "empty": lambda raw: b"", "seven bytes": lambda raw: raw[:7], "cut in the header": lambda raw: raw[:50],
    "cut in the values": lambda raw: raw[:-9], "one byte more": lambda raw: raw + b"\0",
    "a header of no length": lambda raw: bytes(8) + raw[8:],
    "a header longer than the file": lambda raw: len(raw).to_bytes(8, "little") + raw[8:],
    "a header of 2^63 bytes": lambda raw: (1 << 63).to_bytes(8, "little") + raw[8:],
    "a header one byte too short": lambda raw: (int.from_bytes(raw[:8], "little") - 1).to_bytes(8, "little") + raw[8:],
    "values that overlap": lambda raw: with_offsets(raw, "m.weight_scale", [0, 128]),
    "values outside": lambda raw: with_offsets(raw, "m.weight_scale", [1 << 40, (1 << 40) + 128]),
    "values that end before they begin": lambda raw: with_offsets(raw, "m.weight_scale", [128, 0]),
    "a shape of another size": lambda raw: with_shape(raw, "m.weight_packed", [1 << 31, 1 << 31]),
    "a negative shape": lambda raw: with_shape(raw, "m.weight_packed", [-64, -32]),
    "no JSON": lambda raw: raw[:8] + b"x" + raw[9:],
}  # fmt: skip
STATES = {
    "a scale is missing": (changed(MXFP4, weight_scale=None), METHOD, "tensor m.weight_packed"),
    "a scale has another shape": (changed(MXFP4, weight_scale=MXFP4["m.weight_scale"][1:]), METHOD, "tensor m.weight"),
    "a global scale is inverted": (
        changed(NVFP4, weight_global_scale=1 / NVFP4["m.weight_global_scale"]), METHOD, "tensor m.weight_packed",
    ),
    "an unknown method": (MXFP4, {"quant_method": "awq"}, "quant_method 'awq'"),
}  # fmt: skip


def refused(path, destination, capsys):
    """The line that the command prints; the source is as it was and there is no destination."""
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    code = main(["convert", str(path), "-o", str(destination)])
    out, err = capsys.readouterr()
    assert code == 1 and out == "" and err.startswith("mxtensor: error: ") and err.count("\n") == 1
    assert sorted(p.name for p in destination.parent.iterdir()) == [path.name]
    assert before == {p: p.read_bytes() for p in path.rglob("*") if p.is_file()}
    return err


@pytest.mark.parametrize("why", FILES)
def test_a_broken_file(why, tmp_path, capsys):
    path = checkpoint(tmp_path / "a", MXFP4, METHOD)
    file = path / "model.safetensors"
    file.write_bytes(FILES[why](file.read_bytes()))
    assert "model.safetensors" in refused(path, tmp_path / "out", capsys)


@pytest.mark.parametrize("why", STATES)
def test_tensors_that_do_not_fit(why, tmp_path, capsys):
    state, method, message = STATES[why]
    path = checkpoint(tmp_path / "a", state, method)
    line = refused(path, tmp_path / "out", capsys)
    assert message in line and ("model.safetensors" in line or why == "an unknown method")


def test_a_folder_for_a_file(tmp_path, capsys):
    path = checkpoint(tmp_path / "a", MXFP4, METHOD)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()
    assert "model.safetensors" in refused(path, tmp_path / "out", capsys)


@pytest.mark.parametrize("name", ["out.safetensors", "out.gguf"])
def test_a_folder_where_a_file_is_to_be(name, tmp_path, capsys):
    path = checkpoint(tmp_path / "a", {"m.weight": torch.ones(32, 32)})
    (tmp_path / name).mkdir()
    layout = "gguf" if name.endswith("gguf") else "plain"
    code = main(["convert", str(path), "-o", str(tmp_path / name), "--layout", layout, "--overwrite"])
    err = capsys.readouterr().err
    assert code == 1 and f"{name} is a folder; pass the name of a file" in err
    assert (tmp_path / name).is_dir()


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal of Unix")
def test_an_interrupt_while_files_are_written(tmp_path):
    path = checkpoint(tmp_path / "a", {f"m{i}.weight": torch.randn(2048, 2048) for i in range(40)})
    command = [sys.executable, "-m", "mxtensor", "quantize", path, "-o", tmp_path / "out", "--format", "mxfp8",
               "--max-shard-bytes", "5000000"]  # fmt: skip
    for _ in range(8):  # on a busy machine the command may end before the signal comes
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's job may ignore it
        )  # fmt: skip
        while process.poll() is None and not list(tmp_path.glob(".out*/2.safetensors")):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        if process.returncode:
            break
        shutil.rmtree(tmp_path / "out")
    assert process.returncode == 130 and out == "" and "interrupted" in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
