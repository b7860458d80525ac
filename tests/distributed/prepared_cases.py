"""The cases of two ranks for ``test_prepared_layers.py``: layers quantized for inference after they were split."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import parallel as plain
from torch.distributed.tensor.parallel import parallelize_module

import mxtensor as mx
from tests.distributed.fsdp_cases import message
from tests.distributed.parallel_cases import CONFIGS, IN, TOKENS, error, full, mesh, mlp, split, steps
from tests.helpers.ranks import DEVICE, case


def prepared_and_converted(name, styles, late):
    """The losses of three steps of layers prepared for quantization-aware training and split by ``styles``, and of the
    same on one rank; the largest errors of the gradients, and of the result after the conversion; the local weight.
    ``late``: they are prepared after they were split."""
    one = mx.quantize_(mlp(), name, step="prepare")
    if late:
        two = mx.quantize_(split(mlp(), styles, mesh()), name, step="prepare")
    else:
        two = split(mx.quantize_(mlp(), name, step="prepare"), styles, mesh())
    torch.manual_seed(2)
    x = torch.randn(TOKENS, IN)
    losses, grads = steps(two, x, clip=1.0)
    alone, reference = steps(one, x, clip=1.0)
    with torch.no_grad():
        for a, b in zip(two.parameters(), one.parameters(), strict=True):
            b.copy_(full(a))  # sums in another order have rounded other values to other codes
    for model in (one, two):
        mx.quantize_(model, name, step="convert")
    kinds = {type(m) for m in two}, type(two[0].weight.to_local())
    with torch.no_grad():
        errors = max(error(a, b) for a, b in zip(grads, reference, strict=True)), error(two(x), one(x))
    return losses, alone, errors, kinds


@case
def prepared_layers_of_any_style(rank, folder):
    """(format, styles, late) -> ``prepared_and_converted``."""
    rows = (("mxfp4", plain, False), ("mxfp4", plain, True), ("mxfp8[32x32]-weight-only", plain, False))
    rows += (("nvfp4_single_level", mx.parallel, False), ("mxfp8-weight-only", mx.parallel, True))
    return {(name, styles.__name__, late): prepared_and_converted(name, styles, late) for name, styles, late in rows}


@case
def layers_quantized_after_they_were_split(rank, folder):
    """Styles -> the error of layers quantized for inference after they were split, plain ones and trained ones, against
    one rank; the local weights after another call. The errors of what cannot be quantized then."""
    x, found = torch.randn(4, IN), {}
    dist.broadcast(x, 0)
    for styles, before in ((plain, None), (mx.parallel, None), (mx.parallel, CONFIGS["mxfp8"])):
        one = mx.quantize_(mlp(before), "mxfp8")
        two = mx.quantize_(split(mlp(before), styles, mesh()), "mxfp8")
        codes = two[0].weight
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            mx.quantize_(two, "mxfp4")
        with torch.no_grad():
            codes_left = two[0].weight is codes and type(codes.to_local()).__name__, len(warned)
            found[styles.__name__, before is None] = error(two(x), one(x)), codes_left
    grid = init_device_mesh(DEVICE, (1, 2), mesh_dim_names=("shard", "parallel"))
    both = fully_shard(split(mlp(), plain, grid["parallel"]), mesh=grid["shard"])
    gathered = fully_shard(mx.quantize_(mlp(), "mxfp4", step="prepare"))
    gathered(x)  # FSDP2 keeps the whole weights of the outermost module
    odd = parallelize_module(nn.Sequential(nn.Linear(96, 64)), mesh(), {"0": plain.RowwiseParallel()})
    return found, [
        message(lambda: mx.quantize_(split(mlp(), plain, mesh()), CONFIGS["mxfp8"])),
        message(lambda: mx.quantize_(both, "mxfp8")),
        message(lambda: mx.quantize_(gathered, "mxfp4", step="convert")),
        message(lambda: mx.quantize_(odd, "mxfp8")),
        message(lambda: split(mx.quantize_(mlp(), "nvfp4", step="prepare"), plain, mesh())(x)),
    ]
