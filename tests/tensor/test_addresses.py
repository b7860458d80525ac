"""Addresses: libraries tell parameters apart by ``data_ptr()``, and exchange those of an optimizer by it.

accelerate does so when it shards a model with FSDP2: with one address for all quantized weights, its optimizer would
train one of them.
"""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.training.training_weight import values_of

KINDS = {
    "inference": "mxfp8",
    "weight-only": "nvfp4-weight-only",
    "training": mx.recipe.MXFP8BlockScaling(),
    "delayed": mx.recipe.DelayedScaling(),
}


@pytest.fixture(params=KINDS)
def model(request):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return mx.quantize_(net, KINDS[request.param])


def test_every_parameter_has_an_address_of_its_own(model):
    addresses = [p.data_ptr() for p in model.parameters()]
    assert 0 not in addresses and len(set(addresses)) == len(addresses) == 6


def test_a_tied_parameter_has_one_address_and_a_copy_another(model):
    model[1].weight = model[0].weight
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr() != model[0].weight.clone().data_ptr()


def test_a_view_has_the_address_of_its_first_value(model):
    weight = model[0].weight
    rows = weight[32:]
    assert weight.detach().data_ptr() == weight.t().data_ptr() == weight.data_ptr()
    assert weight.data_ptr() < rows.data_ptr() <= weight.data_ptr() + 32 * 64 * weight.element_size()


def test_a_training_weight_has_the_address_of_its_values():
    net = mx.quantize_(nn.Linear(64, 64), mx.recipe.MXFP8BlockScaling())
    assert net.weight.data_ptr() == values_of(net.weight).data_ptr()
    net.weight.data = torch.ones(64, 64)
    assert net.weight.data_ptr() == values_of(net.weight).data_ptr()


def test_an_mxtensor_has_the_address_of_its_first_component():
    for orientation in ("rowwise", "columnwise", "both"):
        w = mx.quantize(torch.randn(64, 64), "mxfp8_e4m3", orientation=orientation)
        assert w.data_ptr() == w.components[0].data_ptr()


def test_parameters_are_exchanged_by_their_addresses(model):
    """What accelerate does to an optimizer when it shards its model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names = {p.data_ptr(): name for name, p in model.named_parameters()}
    given = [p for group in optimizer.param_groups for p in group["params"]]
    assert [names[p.data_ptr()] for p in given] == [name for name, _ in model.named_parameters()]
