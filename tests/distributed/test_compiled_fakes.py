"""Layers that are split over ranks compile for a GPU: on fake tensors of one, whose collectives and kernels do not run.

The results are those of ``parallel_cases.py``; here torch's compiler sees the choice of kernels that a GPU has.
"""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.distributed import split_linear as layers
from mxtensor.distributed.collectives import Ranks
from mxtensor.distributed.split_linear import gathered_linear, split_linear
from mxtensor.numerics.operand import Operand
from mxtensor.recipe import Float8CurrentScaling, MXFP4BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from tests.helpers.stand_in import BF16

pytest.importorskip("triton")


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
@pytest.mark.parametrize(
    ("layer", "recipe", "arguments"),
    [
        (gathered_linear, MXFP8BlockScaling, ()), (gathered_linear, MXFP4BlockScaling, ()),
        (split_linear, NVFP4BlockScaling, (False,)), (split_linear, Float8CurrentScaling, (True,)),
    ],
)  # fmt: skip
def test_a_layer_of_ranks_is_one_graph(device, monkeypatch, capability, layer, recipe, arguments):
    device(capability)
    monkeypatch.setattr(Ranks, "of", lambda group: Ranks(group, 2))
    empty = lambda x, cast, amax: Operand.empty(cast.format, tuple(x.shape), x.device)  # noqa: E731
    monkeypatch.setattr(layers, "_cast", empty)  # torch without CUDA copies no fake tensor of a GPU
    linear_recipe, targets = recipe().linear_recipe(), []

    def run(x, weight, bias):
        return layer(x, weight, bias, linear_recipe, "ranks", *arguments, BF16)

    def seen(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    shapes = (4096, 2048), (1024, 2048), (1024,)
    with FakeTensorMode(allow_non_fake_inputs=True), mx.explain() as log:
        x, weight, bias = (torch.randn(shape, device="cuda", dtype=BF16) for shape in shapes)
        y = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=seen))(x, weight, bias)
    assert tuple(y.shape) == ((8192, 1024) if layer is gathered_linear else (4096, 1024))
    assert y.dtype is BF16 and y.device.type == "cuda"
    kernels = {entry.kernel for entry in log.entries if entry.spec.op == "fprop"}
    assert len(kernels) == 1
    collective, count = ("all_gather_into_tensor", 2) if layer is gathered_linear else ("all_reduce", 1)
    found = [target.split(".")[1] for target in targets if target.startswith("_c10d_functional.")]
    assert found == [collective, "wait_tensor"] * count
