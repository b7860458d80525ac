"""The state of a calibration is that of its model and its data, and of no other."""

import copy
import zipfile

import pytest
import torch
from torch import nn

import mxtensor as mx
from tests.helpers.calibration_model import Model, batches, model


class Loaded(nn.Module):
    """A model with a persistent buffer and one that is not, a tied weight and a layer that is quantized already."""

    def __init__(self):
        super().__init__()
        self.m, self.extra = model(), mx.quantize_(nn.Linear(32, 32), "mxfp8-weight-only")
        self.m.lm_head.weight = self.m.embed.weight
        self.register_buffer("shift", torch.zeros(32))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, ids):
        self.calls += 1
        return self.m(ids)


def embedding(m):
    m.m.embed.weight.data[49] += 1e-4


def norm(m):
    m.m.layers[2].norm.bias.data[0] = 1e-3


def buffer(m):
    m.shift[3] = 1


def quantized(m):
    m.extra.weight = mx.quantize_(nn.Linear(32, 32), "mxfp8-weight-only").weight


@pytest.mark.parametrize("change", [embedding, norm, buffer, quantized])
def test_a_state_is_that_of_all_parameters_and_buffers(change, tmp_path):
    torch.manual_seed(0)
    m = Loaded()
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", "mse", state=tmp_path)
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", "mse", state=tmp_path)
    change(m)
    with pytest.raises(ValueError, match=r"with other weights; pass another folder"):
        mx.calibrate(m, batches(), "mxfp4-weight-only", "mse", state=tmp_path)


@pytest.mark.parametrize("name", ["calibration.json", "block_00001.pt"])
@pytest.mark.parametrize("content", [b"", b"xx", b"[1]"])
def test_a_damaged_state_is_named(name, content, tmp_path):
    m = model()
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", "mse", state=tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"calibrate: {tmp_path / name} is damaged \(\w+\); remove {tmp_path}, or"):
        mx.calibrate(m, batches(), "mxfp4-weight-only", "mse", state=tmp_path)


def test_a_state_sees_values_between_those_of_its_sample(tmp_path):
    m = model()
    m.embed = nn.Embedding(5000, 32).requires_grad_(False)
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp4-weight-only", "mse", state=tmp_path)
    m.embed.weight[4321, 7] += 1e-3
    with pytest.raises(ValueError, match=r"with other weights"):
        mx.calibrate(m, batches(), "mxfp4-weight-only", "mse", state=tmp_path)


def renamed(m):
    """A copy that takes its input by another name, too."""
    m = copy.deepcopy(m)
    m.forward = lambda x=None, ids=None: Model.forward(m, ids if x is None else x)
    return m


def test_a_state_is_that_of_the_names_of_arguments(tmp_path):
    m, given = model(), {"ids": batches()[0]}
    mx.calibrate(copy.deepcopy(m), [given], "mxfp4-weight-only", "mse", state=tmp_path)
    mx.calibrate(renamed(m), [given], "mxfp4-weight-only", "mse", state=tmp_path)
    with pytest.raises(ValueError, match=r"with other data"):
        mx.calibrate(renamed(m), [{"x": given["ids"]}], "mxfp4-weight-only", "mse", state=tmp_path)


def of_infinity(weight):
    values = weight.dequantize()
    values[3, 4] = torch.inf
    return mx.quantize(values, "mxfp8")


CHANGES = {
    "is not quantized": lambda state, name: state | {name: state[name].dequantize()},
    r"is mxfp6_e2m3, not mxfp8_e4m3": lambda state, name: (
        state | {name: mx.quantize(state[name].dequantize(), "mxfp6_e2m3")}
    ),
    r"is .*, and the parameter has the shape \(64, 32\)": lambda state, name: (
        state | {name: mx.quantize(state[name].dequantize().repeat(2, 1), "mxfp8")}
    ),
    "has values that are not finite": lambda state, name: state | {name: of_infinity(state[name])},
    "it lacks layers": lambda state, name: {key: value for key, value in state.items() if key != name},
    "the model has no parameter 'layers.0.other'": lambda state, name: state | {"layers.0.other": torch.ones(3)},
    "the model has no parameter 'a.b'": lambda state, name: state | {"a.b": torch.ones(3)},
    r"it holds .* as 3": lambda state, name: state | {3: torch.ones(3)},
    r"it holds .* as 'x'": lambda state, name: state | {"x": [1]},
}


@pytest.mark.parametrize("why", CHANGES)
def test_tensors_that_are_not_those_of_the_model_are_named(why, tmp_path):
    m, file = model(), tmp_path / "block_00001.pt"
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp8-weight-only", "mse", state=tmp_path)
    state = torch.load(file)
    name = next(name for name in state if name.endswith("up.weight"))
    torch.save(CHANGES[why](state, name), file)
    with pytest.raises(ValueError, match=rf"calibrate: {file} is damaged: .*{why}.*; remove {tmp_path}, or pass"):
        mx.calibrate(m, batches(), "mxfp8-weight-only", "mse", state=tmp_path)
    assert not any(isinstance(p, mx.MXTensor) for p in m.parameters())


def test_a_file_that_could_grow_in_memory_is_damaged(tmp_path):
    m, file = model(), tmp_path / "block_00001.pt"
    mx.calibrate(copy.deepcopy(m), batches(), "mxfp8-weight-only", "mse", state=tmp_path)
    with zipfile.ZipFile(file) as old:
        records = {entry.filename: old.read(entry) for entry in old.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name, data in records.items():
            new.writestr(name, data)
    with pytest.raises(ValueError, match=rf"calibrate: {file} is damaged \(ValueError\)"):
        mx.calibrate(m, batches(), "mxfp8-weight-only", "mse", state=tmp_path)
