"""``quantize_`` of a model that has modules of ``te``: it leaves them as they are, and says so."""

import warnings

import pytest
import torch
from torch import nn

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import MXFP8BlockScaling


@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", MXFP8BlockScaling()], ids=str)
def test_a_warning_names_the_modules(config):
    model = nn.Sequential(te.TransformerLayer(64, 96, 4), nn.Linear(64, 32))
    before = {name: p.detach().clone() for name, p in model[0].named_parameters()}
    with pytest.warns(
        UserWarning, match=r"^quantize_: modules of mxtensor.te .* \(3, such as 0\.self_attention\.layer"
    ):
        mx.quantize_(model, config)
    assert type(model[1].weight) is not nn.Parameter
    assert all(torch.equal(p, before[name]) for name, p in model[0].named_parameters())
    with pytest.warns(
        UserWarning, match=r"^quantize_ changed nothing: modules of mxtensor.te .* \(1, such as Linear\)"
    ):
        mx.quantize_(te.Linear(64, 96), config)


def test_not_of_quantized_weights_nor_of_layers_that_a_filter_has_chosen():
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        ours = te.LayerNormMLP(64, 96)
    model = nn.Sequential(ours, nn.Linear(64, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mx.quantize_(model, "mxfp8")
        model = nn.Sequential(te.Linear(64, 64), nn.Linear(64, 32))
        mx.quantize_(model, "mxfp8", filter_fn=lambda module, fqn: fqn == "1")
    assert isinstance(model[1].weight, mx.MXTensor)
