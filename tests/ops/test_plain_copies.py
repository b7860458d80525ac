"""Wrappers of torch that copy parameters to plain tensors refuse quantized ones, and take others as before."""

import importlib

import pytest
from torch import nn

import mxtensor as mx

KINDS = {"inference": "mxfp8", "training": mx.recipe.MXFP8BlockScaling()}
FLAT = importlib.import_module("torch.distributed.fsdp._flat_param").FlatParamHandle


@pytest.fixture(params=KINDS)
def model(request):
    return mx.quantize_(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), KINDS[request.param])


def test_fsdp1_says_which_parameters_it_would_flatten(model):
    kind = type(model[0].weight).__name__
    with pytest.raises(
        NotImplementedError, match=rf"FSDP1\) .* class \w*{kind}\w*, such as one \(64, 64\), .*fully_shard"
    ):
        FLAT([*model.parameters()], model, None)
    with pytest.raises(TypeError):  # torch's own, for the arguments that are missing
        FLAT([*model[1].parameters()], model, None)


def test_data_parallel_says_how_to_use_several_gpus(model):
    with pytest.raises(NotImplementedError, match=r"nn.DataParallel .* such as one \(64, 64\), .*torchrun"):
        nn.parallel.replicate(model, [0, 1])
    with pytest.raises(AssertionError, match="not implemented for CPU"):  # torch's own
        nn.parallel.replicate(model[1], [0, 1])
