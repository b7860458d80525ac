"""What may be a destination: only a checkpoint that does not hold the source is replaced, and links are followed."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mxtensor as mx
from mxtensor.checkpoints import destination, store
from mxtensor.checkpoints.layout import Written
from tests.helpers.checkpoint_files import checkpoint

OVERLAPS = [
    ("hub/model", "is"), ("link", "is"), ("blobs/1", "is"), ("link/model.safetensors", "is"), ("hub", "contains"),
    ("hub/..", "contains"), ("blobs", "contains"), ("hub/model/new", "is inside"),
    ("link/new.safetensors", "is inside"),
]  # fmt: skip
"""(destination, how it and the source overlap)."""


@pytest.mark.parametrize(("name", "how"), OVERLAPS)
def test_a_destination_that_overlaps_with_the_source_is_refused(name, how, tmp_path):
    """hub/model/model.safetensors is a link to blobs/1, as in the cache of Hugging Face, and link one to hub/model."""
    (tmp_path / "hub").mkdir()
    path = checkpoint(tmp_path / "hub" / "model", {"m.weight": torch.randn(32, 32)})
    (tmp_path / "blobs").mkdir()
    (path / "model.safetensors").rename(tmp_path / "blobs" / "1")
    (path / "model.safetensors").symlink_to("../../blobs/1")
    (tmp_path / "link").symlink_to(path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=f"{name} {how} the source .*; choose another"):
        mx.checkpoints.convert(path, tmp_path / name, format="mxfp8", overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    mx.checkpoints.convert(path, tmp_path / "hub" / "model-2", format="mxfp8")


def test_a_file_becomes_one_beside_it_but_not_its_folder(tmp_path):
    file = checkpoint(tmp_path / "a", {"m.weight": torch.randn(32, 32)}) / "model.safetensors"
    with pytest.raises(ValueError, match=r"a contains the source .*model\.safetensors"):
        mx.checkpoints.convert(file, tmp_path / "a", format="mxfp8", overwrite=True)
    mx.checkpoints.convert(file, tmp_path / "a" / "b.safetensors", format="mxfp8")
    assert isinstance(mx.checkpoints.load(tmp_path / "a" / "b.safetensors")["m.weight"], mx.MXTensor)


@pytest.mark.parametrize("name", ["link", "dangling", "link.safetensors"])
def test_links_are_followed(name, tmp_path):
    target = tmp_path / "disk" / name
    (tmp_path / name).symlink_to(target)
    if name == "link":
        target.mkdir(parents=True)
    for values in (torch.zeros(3), torch.ones(3)):
        mx.checkpoints.save({"a": values}, tmp_path / name, layout="plain", overwrite=True)
        assert (tmp_path / name).is_symlink() and {p.name for p in tmp_path.iterdir()} == {"disk", name}
        assert torch.equal(mx.checkpoints.load(target)["a"], values)


def test_an_empty_folder_is_filled_also_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path / "out")
    mx.checkpoints.save({"a": torch.ones(3)}, ".", layout="plain")
    assert [p.name for p in Path().iterdir()] == ["model.safetensors"] and Path().stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError, match=r"\. is the working directory or a mount point"):
        mx.checkpoints.save({"a": torch.zeros(3)}, ".", layout="plain", overwrite=True)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(mx.checkpoints.load("out")["a"], torch.ones(3))


def test_subfolders_that_belong_to_the_model_are_copied_and_replaced(tmp_path):
    """Those that sentence-transformers lists, and chat templates; no names that leave the folder."""
    path = checkpoint(tmp_path / "a", {"m.weight": torch.randn(32, 32)})
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "../b"}, {"path": ".."}, {"path": "none"}, {"path": 3}]
    (path / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling/config.json", "additional_chat_templates/rag.jinja", "onnx/model.onnx", "../b/other"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    (tmp_path / "empty").mkdir()
    wanted = {"1_Pooling", "additional_chat_templates", "config.json", "model.safetensors", "modules.json"}
    for name, count in (("out", 2), ("empty", 1)):
        for _ in range(count):
            mx.checkpoints.convert(path, tmp_path / name, format="mxfp8", overwrite=True)
            assert {p.name for p in (tmp_path / name).iterdir()} == wanted
            assert (tmp_path / name / "1_Pooling" / "config.json").read_text() == "1_Pooling/config.json"
    (tmp_path / "out" / "1_Pooling" / "deep").mkdir()
    with pytest.raises(FileExistsError, match="holds the folder 1_Pooling, and"):
        mx.checkpoints.convert(path, tmp_path / "out", format="mxfp8", overwrite=True)


@pytest.mark.parametrize("step", [1, 2])
def test_an_empty_folder_stays_empty_if_a_file_cannot_be_moved(step, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    original, calls = destination.os.replace, []

    def replace(source, target):
        calls.extend([target] if target.parent == tmp_path / "out" else [])
        if len(calls) == step:
            raise OSError(28, "No space left on device")
        original(source, target)

    monkeypatch.setattr(destination.os, "replace", replace)
    with pytest.raises(OSError, match="out cannot be written: No space left"):
        mx.checkpoints.save({"a.weight": mx.quantize(torch.ones(32, 32), "mxfp8")}, tmp_path / "out")
    assert calls and list((tmp_path / "out").iterdir()) == []


def test_folders_that_are_not_a_checkpoint_are_not_replaced(tmp_path):
    (tmp_path / "all").mkdir()
    checkpoint(tmp_path / "all" / "a", {"m.weight": torch.randn(32, 32)})
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "thesis.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    for name, message in (("all", "holds the folder a"), ("text", r"holds thesis\.txt and no checkpoint")):
        with pytest.raises(FileExistsError, match=message):
            mx.checkpoints.save({"a": torch.ones(3)}, tmp_path / name, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["pipe", "pipe.safetensors", "link"])
def test_pipes_devices_and_files_that_are_not_a_checkpoint_are_not_replaced(name, tmp_path):
    """A pipe stands for /dev/null, in whose place a folder was put."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe.safetensors").symlink_to("pipe")
    (tmp_path / "thesis.txt").write_text("text")
    (tmp_path / "link").symlink_to("thesis.txt")
    message = "is a file and no checkpoint" if name == "link" else "is a device, a pipe or a socket"
    with pytest.raises(FileExistsError, match=message):
        mx.checkpoints.save({"a": torch.ones(3)}, tmp_path / name, layout="plain", overwrite=True)
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "thesis.txt").read_text() == "text"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe", "pipe.safetensors", "thesis.txt"]


@pytest.mark.parametrize("name", ["out", "out.safetensors", "out.gguf", "empty"])
def test_what_appears_at_the_destination_meanwhile_stays(name, tmp_path):
    layout = mx.checkpoints.get_layout("gguf" if name.endswith("gguf") else "plain")
    (tmp_path / "empty").mkdir()
    with (
        pytest.raises(OSError, match=r"exists; choose another|was empty, and holds other now"),
        layout.sink(tmp_path / name, 1 << 20) as sink,
    ):
        store.store_tensor(sink, layout, Written(), "a", torch.ones(3))
        other = tmp_path / name / "other" if "." not in name else tmp_path / name
        other.parent.mkdir(exist_ok=True)
        other.write_text("other")
        sink.finish({})
    assert [p.read_text() for p in tmp_path.rglob("*") if p.is_file()] == ["other"]


def test_tensors_that_are_mapped_from_the_destination_survive(tmp_path):
    state = {"a.weight": torch.randn(1024, 512)}
    mx.checkpoints.save(state, tmp_path / "a", layout="plain")
    (tmp_path / "b").mkdir()
    torch.save({"a.weight": mx.quantize(state["a.weight"], "mxfp8")}, tmp_path / "b" / "pytorch_model.bin")
    mapped = load_file(tmp_path / "a" / "model.safetensors"), mx.checkpoints.load(tmp_path / "b")
    for name, found in zip("ab", mapped, strict=True):
        before = found["a.weight"].clone()
        mx.checkpoints.save(found, tmp_path / name, overwrite=True)
        for after in (found["a.weight"], mx.checkpoints.load(tmp_path / name)["a.weight"]):
            assert torch.equal(after.float(), before.float())
