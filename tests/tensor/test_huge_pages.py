"""Weights on a CPU in pages of 2 MB: which memory Linux is asked for, and that no value changes."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.core import devices
from mxtensor.core.devices import PAGE, request_huge_pages
from mxtensor.tensor.huge_pages import use_huge_pages


@pytest.fixture
def asked(monkeypatch):
    """(page, advice) of each call to Linux, which does what it is asked for."""
    calls = []

    def advise(first, count, advice):
        calls.extend((page, advice) for page in range(first, first + count))
        return True

    monkeypatch.setattr(devices, "_advise", lambda: advise)
    monkeypatch.setattr(devices, "LEAST", 1 << 20)
    monkeypatch.delenv(devices.VARIABLE, raising=False)
    return calls


def test_every_page_with_codes_or_scales_is_asked_for_once(asked):
    weights = [mx.quantize(torch.randn(1024, 2048), name) for name in ("mxfp8", "nvfp4", "mxfp8")]
    asked.clear()
    made = use_huge_pages([weights[0], torch.randn(4096, 1024), *weights, None])
    wanted = {
        byte // PAGE for weight in weights for part in weight.components
        for byte in (*range(part.data_ptr(), part.data_ptr() + part.nbytes, 4096), part.data_ptr() + part.nbytes - 1)
    }  # fmt: skip
    assert made == len(wanted)
    for advice in (devices._HUGEPAGE, devices._COLLAPSE):
        assert sorted(page for page, of in asked if of == advice) == sorted(wanted)


def test_new_memory_is_requested_for_the_pages_that_it_has_whole(asked):
    memory = torch.empty(5 * PAGE, dtype=torch.uint8)
    for first, size in ((0, 4 * PAGE), (4096, 4 * PAGE + 8192), (1, 5 * PAGE - 1)):
        asked.clear()
        part = memory[first : first + size]
        request_huge_pages(part)
        start, end = part.data_ptr(), part.data_ptr() + size
        wanted = [page for page in range(start // PAGE, end // PAGE + 1) if start <= page * PAGE <= end - PAGE]
        assert asked == [(page, devices._HUGEPAGE) for page in wanted] and wanted
    asked.clear()
    request_huge_pages(memory[: 2 * PAGE - 1])
    request_huge_pages(torch.empty(5 * PAGE, dtype=torch.uint8, device="meta"))
    assert asked == []
    codes = mx.quantize(torch.randn(2048, 4096), "mxfp8").components[0]
    assert (codes.data_ptr() // PAGE + 1, devices._HUGEPAGE) in asked


def test_small_models_other_devices_and_plain_tensors_are_left_alone(asked, monkeypatch):
    large = mx.quantize(torch.randn(1024, 2048), "mxfp8")
    asked.clear()
    assert use_huge_pages([mx.quantize(torch.randn(512, 512), "mxfp8"), torch.randn(4096, 1024)]) == 0
    assert use_huge_pages([large.to("meta")]) == 0
    monkeypatch.setenv(devices.VARIABLE, "0")
    assert use_huge_pages([large]) == 0 and asked == []


def test_it_stops_after_some_seconds_and_leaves_the_rest_to_linux(asked, monkeypatch):
    monkeypatch.setattr(devices, "SECONDS", -1.0)
    weight = mx.quantize(torch.randn(1024, 2048), "mxfp8")
    asked.clear()
    assert use_huge_pages([weight]) == 0
    assert asked and {advice for _, advice in asked} == {devices._HUGEPAGE}


@pytest.mark.parametrize("load", ["quantize_", "checkpoint"])
def test_weights_of_a_model_are_asked_for(asked, load, tmp_path):
    model = nn.Sequential(nn.Linear(2048, 1024, bias=False))
    mx.quantize_(model, "mxfp8-weight-only")
    if load == "checkpoint":
        mx.checkpoints.save(model, tmp_path / "model.safetensors")
        asked.clear()
        found = mx.checkpoints.load(tmp_path / "model.safetensors")["0.weight"]
    else:
        found = model[0].weight
    assert found.components[0].data_ptr() // PAGE in {page for page, _ in asked}


def test_linux_changes_no_value(monkeypatch):
    monkeypatch.setattr(devices, "LEAST", 1 << 20)
    weight = mx.quantize(torch.randn(2048, 4096), "mxfp8")
    before, places = [part.clone() for part in weight.components], [part.data_ptr() for part in weight.components]
    assert 0 <= use_huge_pages([weight]) <= weight.nbytes // PAGE + 2 * len(places)
    assert [part.data_ptr() for part in weight.components] == places
    assert all(map(torch.equal, weight.components, before))
