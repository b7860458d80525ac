"""``quantize_`` converts nn.EmbeddingBag as it converts nn.Embedding: weight-only, and only if a filter accepts it."""

import copy
import io

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.checkpoints import load, save


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(60, 64, mode="sum", padding_idx=0, include_last_offset=True)
        self.top = nn.Linear(64, 32)

    def forward(self, indices, offsets):
        return self.top(self.table(indices, offsets))


def everything(module, fqn):
    return True


INPUTS = (torch.tensor([3, 0, 59, 3, 17, 8, 8]), torch.tensor([0, 2, 2, 7]))


def dense_copy(model):
    """The same model with the dequantized weights."""
    out = copy.deepcopy(model)
    for module in (out.table, out.top):
        module.weight = nn.Parameter(module.weight.dequantize(), requires_grad=False)
    return out


@pytest.mark.parametrize("config", ["mxfp8-weight-only", "mxfp8", "nvfp4-weight-only", "float8_e4m3_row"])
def test_a_bag_that_is_asked_for_is_weight_only(config):
    model = mx.quantize_(Recommender(), config, everything)
    assert isinstance(model.table.weight, mx.MXTensor) and not model.table.weight.requires_grad
    assert model.table.weight.recipe.activation is None
    assert "weight=" in repr(model.table)
    with mx.strict():
        got = model.table(*INPUTS)
    assert torch.equal(got, dense_copy(model).table(*INPUTS))


def test_by_default_a_bag_stays_and_so_does_its_head():
    class Tied(Recommender):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(64, 60, bias=False)
            self.out.weight = self.table.weight

    model = mx.quantize_(Tied(), "mxfp8-weight-only")
    assert isinstance(model.top.weight, mx.MXTensor) and not isinstance(model.table.weight, mx.MXTensor)
    mx.quantize_(model, "mxfp8-weight-only", include_head=True)
    assert isinstance(model.table.weight, mx.MXTensor) and model.out.weight is model.table.weight
    sizes = {group.names: group.use for group in mx.model_size(model).groups}
    assert sizes["table.weight = out.weight",] == "head and embedding"


def test_a_name_of_an_fqn_config_finds_the_bag():
    model = mx.quantize_(Recommender(), {"table": "mxfp4-weight-only"})
    assert model.table.weight.format.name == "mxfp4_e2m1" and type(model.top.weight) is nn.Parameter


def test_bags_do_not_train_quantized():
    model = Recommender()
    weight = model.table.weight
    mx.quantize_(model, mx.recipe.MXFP8BlockScaling(), everything)
    assert model.table.weight is weight


def test_state_dicts_and_files(tmp_path):
    model = mx.quantize_(Recommender(), "mxfp6_e2m3-weight-only", everything)
    expected = model(*INPUTS)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other = mx.quantize_(Recommender(), "mxfp6_e2m3-weight-only", everything)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert isinstance(other.table.weight, mx.MXTensor) and torch.equal(other(*INPUTS), expected)
    plain = Recommender()
    other.load_state_dict(plain.state_dict())  # high-precision values are quantized
    assert torch.equal(
        other.table.weight.dequantize(), mx.quantize(plain.table.weight.detach(), "mxfp6_e2m3").dequantize()
    )
    save(model, tmp_path / "model")
    other.load_state_dict(load(tmp_path / "model"))
    assert torch.equal(other(*INPUTS), expected)
    assert torch.equal(copy.deepcopy(model)(*INPUTS), expected)


def test_reports_of_outputs_are_those_of_linear_layers():
    from mxtensor.report.model_report import output_errors

    reference = Recommender()
    model = mx.quantize_(copy.deepcopy(reference), "mxfp8-weight-only", everything)
    rows = output_errors(model, reference, [{"indices": INPUTS[0], "offsets": INPUTS[1]}])
    assert [row.fqn for row in rows] == ["top.weight"]


def test_a_bag_compiles_and_exports():
    model = mx.quantize_(Recommender(), "mxfp8-weight-only", everything)
    dense, compiled = dense_copy(model), torch.compile(model.table, fullgraph=True, dynamic=True)
    with torch.no_grad():
        assert torch.allclose(compiled(*INPUTS), dense.table(*INPUTS), rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()
    program = torch.export.export(model.table, INPUTS)
    assert torch.equal(program.module()(*INPUTS), dense.table(*INPUTS))
