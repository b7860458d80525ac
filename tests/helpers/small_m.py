"""Small-M products by the CUDA sources: launch configs of every kind, weights, and calls with a given config."""

from dataclasses import replace

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.runtime.nvrtc import ELEMENTS
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import SCALES, LaunchConfig
from mxtensor.numerics.elements import ElementFormat
from mxtensor.numerics.formats import E8M0, FORMATS, Format
from mxtensor.numerics.reference import decode
from tests.helpers import cuda_on_cpu

needs_compiler = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
on_the_cpu = [needs_compiler, pytest.mark.usefixtures("cuda_sources_on_the_cpu")]
"""Marks of tests that run the CUDA sources on the CPU."""
PIPELINED = LaunchConfig(1, 1, 1, 2, 4, 3, 1, 1, False)
"""Activations in float16 from a previous kernel, copied stage by stage."""
WHOLE = PIPELINED._replace(whole_x=True)
"""All activations at once, cast in the product kernel."""
WIDE = LaunchConfig(2, 2, 2, 1, 8, 2, 1, 2, False)
"""Two tiles of rows and of columns per warp, and two blocks that split K."""
WGMMA = LaunchConfig(1, 1, 4, 1, 4, 4, 1, 1, False, True, 2)
"""One warpgroup of four warps."""
WGMMA_SPLIT = WGMMA._replace(split=2)
"""Two blocks that split K, as a cluster; each reads the sums of the other."""
WGMMA_REDUCE_GLOBAL = WGMMA._replace(wr=8, nt=2, stages=6, ahead=3, split=3, reduce_global=True)
"""Three blocks that split K and reduce through global memory, longer rounds, and two warpgroups along the rows."""
WGMMA_REDUCE_DSMEM = WGMMA._replace(nt=2, split=2, reduce_dsmem=True)
"""Two blocks that send each other their sums through distributed shared memory."""
FOUR_REDUCE_DSMEM = WGMMA_REDUCE_DSMEM._replace(split=4, wr=8)
"""Four such blocks of twice the rows."""
GROUPS = WGMMA._replace(wk=3, nt=2)
"""Three warpgroups that divide the columns of a block."""
GROUPS_REDUCE_DSMEM = GROUPS._replace(wk=2, split=2, reduce_dsmem=True)
"""Two such warpgroups, and two blocks that send each other their sums."""
GROUPS_REDUCE_GLOBAL = GROUPS._replace(wr=8, wk=2, split=2, reduce_global=True)
"""Two groups of eight warps, and two blocks that reduce through global memory."""
WGMMAS = (
    WGMMA,
    WGMMA_SPLIT,
    WGMMA_REDUCE_GLOBAL,
    WGMMA_REDUCE_DSMEM,
    GROUPS,
    GROUPS_REDUCE_DSMEM,
    GROUPS_REDUCE_GLOBAL,
)
DIRECTS = tuple(config._replace(direct=True) for config in WGMMAS if not config.reduce_global)
"""One warpgroup; clusters that read sums; clusters that send them; groups of warps; both."""
PERSISTENT = LaunchConfig(1, 1, 1, 4, 4, 2, 1, 1, False, persistent=1)
"""Activations stay in shared memory; each warp copies its own stages."""
PERSISTENT_CAST = PERSISTENT._replace(whole_x=True, stages=3)
"""The same, cast in the product kernel."""
PERSISTENT_WIDE = LaunchConfig(2, 2, 1, 2, 8, 3, 1, 1, False, persistent=1)
"""The same with two tiles of rows and of columns per warp."""
PERSISTENTS = (
    PERSISTENT, PERSISTENT._replace(stages=4, ahead=1), PERSISTENT_CAST,
    PERSISTENT_CAST._replace(ahead=1, slabs=8), PERSISTENT._replace(wr=2), PERSISTENT_CAST._replace(split=2),
)  # fmt: skip
TOLERANCE = 2e-7
"""Relative error of a float32 result, by norm."""
E3M0 = Format("mxfp4_e3m0", ElementFormat("e3m0", 3, 0, 3, 16.0, torch.uint8, (2, 1)), E8M0, (1, 32))
"""A format without a decoder."""
DECODED = {name: f for name, f in FORMATS.items() if f.element in ELEMENTS and (f.scale, f.block[1]) in SCALES}
"""The formats that the CUDA sources decode; ``refuses`` has a sentence for every other one."""
KINDS = sorted(name for name in DECODED if not name.endswith("_pow2"))


def weight(format, n, k, octaves=3):
    return mx.quantize(torch.randn(n, k) * 2.0 ** torch.randint(-octaves, octaves, (n, 1)).float(), format).rowwise


def values(x):
    return decode(x, torch.float32).double()


def product(x, w, config, cast=None, bias=None, out=torch.float32, alpha=1.0, beta=1.0, ends=None):
    return products(x, [w], config, cast, [bias], out, alpha, beta, ends)[0]


def products(x, weights, config, cast=None, biases=None, out=torch.float32, alpha=1.0, beta=1.0, ends=None):
    given = [
        launch.Weight(w.data, w.scale, w.global_scale, bias)
        for w, bias in zip(weights, biases or [None] * len(weights), strict=True)
    ]
    f, k = weights[0].format, weights[0].shape[-1]
    return launch.launch(x, given, f, k, None, ends, alpha, beta, out, cast, config)


def error(y, reference):
    return ((y.double() - reference).norm() / reference.norm()).item()


def guarded(w):
    """``w`` with codes and scales at the end of their memory, before bytes that would be NaN: reading on shows."""

    def at_the_end(t):
        t8 = t.view(torch.uint8)
        memory = torch.full((t8.numel() + 256,), 0xFF, dtype=torch.uint8)
        return memory[: t8.numel()].view(t8.shape).copy_(t8).view(t.dtype)

    return replace(w, data=at_the_end(w.data), scale=at_the_end(w.scale))
