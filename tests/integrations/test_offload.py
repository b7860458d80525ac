"""accelerate: weights on the CPU and on the disk stay in codes, and a quantized model has the logits it had."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import mxtensor as mx
from tests.integrations.test_transformers import IDS, MODELS, quantized

accelerate = pytest.importorskip("accelerate")
FORMATS = ["mxfp4-weight-only", "nvfp4", "mxfp6", "float8_row"]


@pytest.fixture(params=["Llama", "Llama, tied", "GPT-2, Conv1D", "Mixtral, experts"])
def path(request, tmp_path):
    MODELS[request.param]().bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def saved(path, format):
    """A quantized model, and the folder where it was saved."""
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=mx.TransformersConfig(format))
    model.save_pretrained(path.parent / "saved")
    return model, path.parent / "saved"


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@pytest.mark.exhaustive(quick=6)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_on_the_cpu_are_moved_when_their_layer_runs(path, format):
    model, folder = saved(path, format)
    wanted, formats = logits(model), quantized(model)
    for loaded in (model, AutoModelForCausalLM.from_pretrained(folder)):
        offloaded = accelerate.cpu_offload(loaded, execution_device="cpu")
        assert {p.device.type for p in offloaded.parameters()} == {"meta"} and quantized(offloaded) == formats
        assert torch.equal(logits(offloaded), wanted)
        assert {p.device.type for p in offloaded.parameters()} == {"meta"}  # and away
        accelerate.hooks.remove_hook_from_submodules(offloaded)
        assert quantized(offloaded) == formats and torch.equal(logits(offloaded), wanted)


def file_of(t):
    """The file whose pages a tensor is; None for memory of the process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split()
        first, last = (int(n, 16) for n in place.split("-"))
        if first <= t.data_ptr() < last:
            return Path(name) if name.startswith("/") else None
    return None


@pytest.mark.parametrize("format", ["mxfp4-weight-only"])
def test_weights_on_the_disk_are_pages_of_the_checkpoint(path, format):
    model, folder = saved(path, format)
    wanted, formats = logits(model), quantized(model)
    base = model.base_model_prefix
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map={base: "disk", "lm_head": "cpu"})
    assert quantized(loaded) == formats and torch.equal(logits(loaded), wanted)
    if sys.platform == "linux":
        for parameter in loaded.parameters():
            if isinstance(parameter, mx.MXTensor):
                operand = parameter.rowwise or parameter.columnwise
                assert file_of(operand.data) == folder / "model.safetensors"
    offloaded = accelerate.cpu_offload(loaded, execution_device="cpu")
    assert torch.equal(logits(offloaded), wanted)


def test_a_map_that_accelerate_chooses(tmp_path):
    MODELS["Llama"]().bfloat16().save_pretrained(tmp_path / "model")
    model, folder = saved(tmp_path / "model", "mxfp8")
    loaded = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", max_memory={"cpu": 20_000})
    assert quantized(loaded) == quantized(model) and torch.equal(logits(loaded), logits(model))


def test_weights_that_are_quantized_while_they_are_loaded_are_in_no_file(tmp_path):
    MODELS["Llama"]().save_pretrained(tmp_path)
    with pytest.raises(NotImplementedError, match="are in no file"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=mx.TransformersConfig("mxfp8"), device_map={"model": "cpu", "lm_head": "disk"}
        )


def test_offload_by_accelerate_alone_is_refused(tmp_path):
    MODELS["Llama"]().bfloat16().save_pretrained(tmp_path / "model")
    model, _ = saved(tmp_path / "model", "mxfp8")
    with pytest.raises(NotImplementedError, match="its bytes are codes and scales"):
        accelerate.disk_offload(model, tmp_path / "offload", execution_device="cpu")
