"""Values are read, not mapped: a file that becomes shorter is an error and no signal, and memory is used again."""

import os

import pytest
import torch

import mxtensor as mx
from mxtensor.checkpoints import reading
from mxtensor.checkpoints.reading import LEAST_REUSED, MOST_IDLE, Buffers
from tests.helpers.checkpoint_files import checkpoint


def test_read_values_are_not_those_of_the_file(tmp_path):
    path = checkpoint(tmp_path / "a", {"m.weight": torch.randn(512, 1024)})
    file = path / "model.safetensors"
    before = file.read_bytes()
    with mx.checkpoints.store.opened(path) as opened:
        opened.streams = True
        values = opened.tensor("m.weight")
        saved = values.clone()
        file.write_bytes(before[:-10])
        assert torch.equal(values, saved)  # mapped pages beyond the end would end the process
        values.zero_()
        assert file.read_bytes() == before[:-10]
        with pytest.raises(ValueError, match=r"model\.safetensors, tensor m\.weight: the file ends 10 bytes too early"):
            opened.tensor("m.weight")


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_source_that_becomes_shorter_while_it_is_converted_leaves_nothing(name, tmp_path, monkeypatch):
    path = checkpoint(tmp_path / "a", {f"layers.{i}.q_proj.weight": torch.randn(512, 1024) for i in range(4)})
    file, original = path / "model.safetensors", reading.read_bytes

    def read(*arguments):
        found = original(*arguments)
        os.truncate(file, LEAST_REUSED)
        return found

    monkeypatch.setattr(reading, "read_bytes", read)
    with pytest.raises(
        ValueError, match=r"model\.safetensors, tensor layers\.\d\.q_proj\.weight: the file ends .* early"
    ):
        mx.checkpoints.convert(path, tmp_path / name, format="mxfp4-weight-only")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_file_of_torch_save_that_becomes_shorter_is_an_error(tmp_path):
    torch.save({"m.weight": torch.randn(512, 1024)}, tmp_path / "x.pt")
    with mx.checkpoints.store.opened(tmp_path / "x.pt") as opened:
        os.truncate(tmp_path / "x.pt", 5000)
        with pytest.raises(ValueError, match=r"x\.pt, tensor m\.weight: the file has changed since it was opened"):
            opened.load("m.weight", mx.checkpoints.store.layout_of(opened).entries(opened)["m.weight"])


def test_memory_is_used_again_only_after_its_tensor():
    buffers = Buffers()
    first, second = buffers.empty(2 * LEAST_REUSED), buffers.empty(2 * LEAST_REUSED)
    address, view = first.data_ptr(), first[8:12].view(torch.int32)
    assert second.data_ptr() != address
    del first
    third = buffers.empty(2 * LEAST_REUSED)
    assert third.data_ptr() != address and view.numel() == 1  # a view holds it, too
    del view
    assert buffers.empty(LEAST_REUSED // 2).data_ptr() != address  # it would waste most of it
    assert (reused := buffers.empty(LEAST_REUSED + 5)).data_ptr() == address and len(reused) == LEAST_REUSED + 5
    buffers.close()
    address = third.data_ptr()
    third.fill_(7)
    del third
    assert not buffers._idle and second.fill_(1).sum() == len(second)


def test_idle_memory_is_bounded():
    """Pages that nothing writes to take no memory."""
    buffers = Buffers()
    size = MOST_IDLE // 3
    tensors = [buffers.empty(size) for _ in range(5)]
    tensors.clear()
    assert sum(map(len, buffers._idle)) == 3 * size
