"""The cases of two ranks for ``test_meshes.py``: FSDP2 over one dimension of a mesh, split layers over the other."""

import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx
from mxtensor.recipe import MXFP8BlockScaling
from tests.distributed.parallel_cases import IN, TOKENS, error, mlp
from tests.helpers.ranks import DEVICE, case

SHAPES = ((1, 2), (2, 1))
"""(ranks that shard, ranks that split each layer)."""
CONFIGS = {
    "one copy": MXFP8BlockScaling(single_weight_copy=True),
    "tiles": MXFP8BlockScaling(two_dimensional_weights=True),
    "frozen": "mxfp8",
    "frozen, packed": "mxfp4-weight-only",
}


def on_mesh(shape, config):
    """The model of ``parallel_cases``, split and sharded."""
    grid = init_device_mesh(DEVICE, shape, mesh_dim_names=("shard", "parallel"))
    model = mlp(config)
    plan = {"0": mx.parallel.ColwiseParallel(), "2": mx.parallel.RowwiseParallel()}
    parallelize_module(model, grid["parallel"], plan)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=grid["shard"])
    return fully_shard(model, mesh=grid["shard"])


@case
def weights_gathered_twice_on_a_mesh(rank, folder):
    """(shape, config) -> the error of the results before and after a write that changes codes and scales."""
    warnings.filterwarnings("ignore", ".* returned a view tensor", UserWarning)  # to_local, of torch's styles
    told = {}
    for shape in SHAPES:
        for name, config in CONFIGS.items():
            one, two = mlp(config), on_mesh(shape, config)
            x, errors = torch.randn(TOKENS, IN), []
            for times in (1.0, -4.0, 0.125):
                with torch.no_grad():
                    for model in (one, two):
                        for layer in (model[0], model[2]):
                            layer.weight.mul_(times)
                    errors.append(error(two(x), one(x)))
            told[shape, name] = errors
    return told
