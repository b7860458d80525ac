"""Distributed checkpoints of quantized models: training continues bitwise, on the same number of ranks or on fewer.

The cases of two ranks are in ``dcp_cases.py``.
"""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import mxtensor as mx
from mxtensor.distributed.checkpoint import CHECKSUMS, Reader, Writer, latest
from tests.distributed.dcp_cases import FEATURES, RECIPES, STEPS, batches, in_one_process, load, losses, made
from tests.distributed.fsdp_cases import message, net, operands, same_as, values
from tests.helpers.ranks import cases

TELLS_LESS = torch.__version__ < "2.13"
"""Whether torch only logs why it cannot read a checkpoint, and raises a general error."""


def test_every_case_of_two_ranks_has_a_test():
    text = Path(__file__).read_text()
    assert [
        n for n, f in cases().items() if f.__module__ == "tests.distributed.dcp_cases" and f'ranks("{n}")' not in text
    ] == []


def test_saved_tensors_are_plain_and_training_continues(ranks):
    for results in ranks("saved_and_continued"):
        assert results.keys() == RECIPES.keys()
        for without_stop, continued, saved, stays, _ in results.values():
            assert without_stop == continued and len(without_stop) == STEPS
            assert saved == {"DTensor Tensor"} and stays == {"TrainingWeight"}


@pytest.mark.usefixtures("on_their_device")
@pytest.mark.parametrize("name", RECIPES)
def test_two_ranks_to_one_process(name, ranks):
    first, second = (results[name] for results in ranks("saved_and_continued"))
    fresh = made(RECIPES[name], sharded=False)
    load(*fresh, first[-1], alone=True)
    both = [[*a, *b] for a, b in zip(first[0], second[0], strict=True)]
    assert same_as(torch.tensor(losses(*fresh, batches(2 * STEPS)[2 * STEPS :])), torch.tensor(both))


def test_one_process_to_two_ranks(ranks):
    for without_stop, continued in ranks("of_one_process"):
        assert same_as(torch.tensor(without_stop), torch.tensor(continued)) and len(without_stop) == STEPS


@pytest.mark.usefixtures("on_their_device")
def test_into_high_precision_and_back(ranks, tmp_path):
    """The file has the values of an ordinary model: one loads and saves it, and the quantized model continues."""
    first, second = (results["one copy"] for results in ranks("saved_and_continued"))
    quantized = made(RECIPES["one copy"], sharded=False)
    load(*quantized, first[-1], alone=True)
    torch.manual_seed(9)
    ordinary = nn.Sequential(nn.Linear(64, FEATURES), nn.GELU(), nn.Linear(FEATURES, 64, bias=False))
    saved = {"model": ordinary.state_dict()}
    in_one_process(dcp.load, saved, first[-1])
    ordinary.load_state_dict(saved["model"])
    pairs = zip(ordinary.parameters(), quantized[0].parameters(), strict=True)
    assert all(torch.equal(a, values(b)) for a, b in pairs)
    in_one_process(dcp.save, {"model": ordinary.state_dict()}, tmp_path / "ordinary")
    model, optimizer = quantized
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    saved = {"model": model.state_dict()}
    in_one_process(dcp.load, saved, tmp_path / "ordinary")
    model.load_state_dict(saved["model"])
    both = [[*a, *b] for a, b in zip(first[0], second[0], strict=True)]
    assert same_as(torch.tensor(losses(model, optimizer, batches(2 * STEPS)[2 * STEPS :])), torch.tensor(both))


def test_async_save_saves_the_state_at_its_call(ranks):
    for without_stop, continued in ranks("saved_while_training_goes_on"):
        assert without_stop == continued and len(without_stop) == STEPS


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4-weight-only", mx.recipe.MXFP8BlockScaling()], ids=str)
def test_async_save_copies_wrappers_as_they_are_at_its_call(kind):
    """By torch's stager: what is written to the weights after the call is not saved."""
    model = mx.quantize_(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)), kind)
    model[1].weight = nn.Parameter(model[0].weight.t(), requires_grad=False)  # the same memory
    state = dict(model.named_parameters())
    before = [p.detach().clone() for p in model.parameters()]
    copied = StateDictStager(pin_memory=False, share_memory=False).stage(state)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    assert [type(copied[name]) for name in state] == [type(p.detach()) for p in model.parameters()]
    for one, other in zip(before, copied.values(), strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and torch.equal(values(one), values(other))
    assert not torch.equal(values(before[0]), values(model[0].weight))


def test_whole_state_dicts(ranks):
    first, second = ranks("whole_state_dicts")
    assert (first[0], second[0]) == ({"Tensor"}, set())  # rank 0 has it
    for _, same, assigned, answers in (first, second):
        assert all(same) and assigned and answers


def test_codes_are_saved_as_codes(ranks):
    for same, before, kinds, _ in ranks("codes_saved"):
        assert same and not before and kinds == {"MXTensor"}


@pytest.mark.usefixtures("on_their_device")
def test_codes_of_two_ranks_in_one_process(ranks):
    path = ranks("codes_saved")[0][-1]
    expected, model = (operands(128, "mxfp8[32x32]", "rowwise", False) for _ in range(2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    saved = {"model": model.state_dict()}
    in_one_process(dcp.load, saved, path)
    model.load_state_dict(saved["model"])
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert type(mine) is type(its) and torch.equal(mine, its)
    ordinary = net(128, mx.recipe.MXFP8BlockScaling())
    saved = {"model": ordinary.state_dict()}
    in_one_process(dcp.load, saved, path)
    assert torch.equal(saved["model"]["0.weight"], expected[0].weight.dequantize())


def test_damage_raises_on_every_rank_and_the_checkpoint_before_it_loads(ranks):
    for name, told, same, loaded, twice in ranks("damaged"):
        assert name == "step-2" and len(told) == 12 and all(same) and loaded is None
        for (file, what), said in told.items():
            assert said is not None, (file, what)
            kind, text = said
            assert kind == "CheckpointException" and "Error" in text, (file, what, text)
            assert "step-2" in text or (TELLS_LESS and "metadata is None" in text), (file, what, text)
            if file in ("data", "other rank's data"):
                assert "is damaged: the checksum of '" in text
        assert TELLS_LESS or "mx.checkpoint.latest(folder) gives the last complete one" in told["checksums", "gone"][1]
        assert twice is not None and "already exists; give each checkpoint a folder of its own" in twice[1]


def test_an_interrupted_attempt_is_not_a_checkpoint_and_is_overwritten(ranks):
    for nothing, names, folders, same in ranks("saved_over_an_interrupted_attempt"):
        assert nothing[0] == "FileNotFoundError" and "has no complete checkpoint" in nothing[1]
        assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "checksums.json"]
        assert folders == ["step-1"] and same


# ---------------------------------------------------------------------------------------------- one process


def save(path, writer=Writer, **options):
    """The error of saving two tensors; None without one."""
    state = {"a": torch.ones(4), "b": torch.zeros(1000)}
    told = message(lambda: in_one_process(dcp.save, state, path, storage_writer=writer(path, **options)))
    return None if told is None else told[1]


def test_items_that_torch_does_not_write_leave_no_checkpoint(tmp_path):
    """torch only prints the errors of its threads, a full disk for one, and continues without their items."""
    assert save(tmp_path / "step-1", thread_count=2) is None
    with mock.patch.object(FileSystemWriter, "write_data", lambda *arguments: mock.Mock(wait=list)):
        said = save(tmp_path / "step-2")
    assert "2 of 2 items were not written to" in said and latest(tmp_path).name == "step-1"


def test_a_folder_that_ranks_do_not_share_is_not_a_checkpoint(tmp_path):
    class Elsewhere(Writer):
        def finish(self, metadata, results):
            for file in self._part.iterdir():
                file.unlink()
            super().finish(metadata, results)

    said = save(tmp_path / "step-1", Elsewhere)
    assert "has no __0_0.distcp, which another rank has written; give all ranks a folder" in said
    with pytest.raises(FileNotFoundError):
        latest(tmp_path)


def test_the_latest_checkpoint_is_the_one_that_was_finished_last_even_after_copies(tmp_path):
    for step in (1, 2, 3):
        assert save(tmp_path / f"step-{step}") is None
    for step in (3, 1, 2):
        shutil.copytree(tmp_path / f"step-{step}", tmp_path / "copies" / f"step-{step}")
    assert latest(tmp_path / "copies").name == "step-3"
    (tmp_path / "step-3" / CHECKSUMS).write_text(json.dumps({".metadata": 1}))
    with pytest.raises(ValueError, match=r"is damaged \(KeyError\('tensors'\)\)"):
        Reader(tmp_path / "step-3").read_metadata()


def test_an_interrupted_attempt_may_contain_folders(tmp_path):
    (tmp_path / "step-1.part" / "folder").mkdir(parents=True)
    assert save(tmp_path / "step-1") is None and not (tmp_path / "step-1" / "folder").exists()
