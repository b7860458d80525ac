"""Which layers the monitor of training sees by which name."""

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import MXFP8BlockScaling
from mxtensor.report.model_report import sqnr_db

MXFP8 = MXFP8BlockScaling()
ATTENTION = "self_attention.layernorm_qkv.query_weight+key_weight+value_weight"
COPIES = {(operand, side) for operand in ("input", "weight", "grad") for side in ("rowwise", "columnwise")}


def measured(module, *args, **kwargs):
    with mx.monitor(module) as monitor, mx.autocast(recipe=MXFP8):
        module(*args, **kwargs).sum().backward()
    return monitor.rows()


def test_a_weight_of_several_parameters_has_their_names():
    layer = te.TransformerLayer(64, 96, 4, layer_type="decoder")
    x = torch.randn(8, 2, 64)
    rows = measured(layer, x, encoder_output=x)
    assert list(dict.fromkeys(row.fqn for row in rows)) == [
        ATTENTION, "self_attention.proj.weight", "inter_attention.layernorm_query.query_weight",
        "inter_attention.key_value.key_weight+value_weight", "inter_attention.proj.weight",
        "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight",
    ]  # fmt: skip
    assert {(row.operand, row.side) for row in rows if row.fqn == ATTENTION} == COPIES


def test_its_figures_are_those_of_the_whole_weight():
    layer = te.Linear(64, 96, parameters_split={"a": 16, "b": 80})
    whole = torch.cat([layer.a_weight, layer.b_weight]).detach()
    found = {(row.operand, row.side): row for row in measured(layer, torch.randn(32, 64))}
    assert {row.fqn for row in found.values()} == {"a_weight+b_weight"}
    for side, values in (("rowwise", whole), ("columnwise", whole.t().contiguous())):
        expected = sqnr_db(values, mx.quantize(values, "mxfp8").dequantize())
        assert found["weight", side].sqnr_db == pytest.approx(expected, abs=1e-3)


def test_a_split_weight_of_another_model_is_not_measured():
    other = te.Linear(64, 96, parameters_split=("a", "b"))
    with mx.monitor(te.Linear(64, 96)) as monitor, mx.autocast(recipe=MXFP8):
        other(torch.randn(32, 64)).sum().backward()
    assert monitor.rows() == []
