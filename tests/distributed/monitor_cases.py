"""The case of two ranks for ``test_monitor_ranks.py``: which layers the monitor of training sees."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx
import mxtensor.te as te
from mxtensor.recipe import MXFP8BlockScaling
from tests.helpers.ranks import DEVICE, case

MXFP8 = MXFP8BlockScaling()


def names(model, x):
    with mx.monitor(model) as monitor, mx.autocast(recipe=MXFP8):
        model(x).sum().backward()
    return list(dict.fromkeys(row.fqn for row in monitor.rows()))


@case
def monitored_layers(rank, folder):
    mesh = init_device_mesh(DEVICE, (2,))
    x, found = torch.randn(32, 2, 64, device=DEVICE), {}

    def split(model, tokens=None):
        columns = mx.parallel.ColwiseParallel(input_layouts=tokens)
        plan = {"0": columns, "2": mx.parallel.RowwiseParallel(output_layouts=tokens)}
        return parallelize_module(model.to(DEVICE), mesh, plan)

    for sequence in (False, True):
        options = {"tp_group": dist.group.WORLD, "set_parallel_mode": True, "sequence_parallel": sequence}
        layer = te.TransformerLayer(64, 128, 4, device=DEVICE, **options)
        found["layer", sequence] = names(layer, x)
        ours = nn.Sequential(te.Linear(64, 128), nn.GELU(), te.Linear(128, 64))
        found["ours", sequence] = names(split(ours, Shard(0) if sequence else None), x)
        theirs = mx.quantize_(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), MXFP8)
        found["theirs", sequence] = names(split(theirs, Shard(0) if sequence else None), x)
    found["sharded", None] = names(fully_shard(te.TransformerLayer(64, 128, 4, device=DEVICE)), x)
    return found
