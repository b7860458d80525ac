"""Kernels that are compiled ahead are those that the products launch."""

import torch

import mxtensor as mx
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.kernels.small_m.launch import kernels_of

PIPELINED = LaunchConfig(1, 1, 1, 2, 4, 3, 1, 1, False)
WGMMA = LaunchConfig(1, 2, 4, 1, 4, 4, 1, 1, False, True, 2)
CPU = torch.device("cpu")


def test_the_kernels_are_those_that_a_product_launches(kernels_launched):
    for name, k in (("mxfp8", 640), ("mxfp4", 352), ("nvfp4", 640)):
        w, x = mx.quantize(torch.randn(48, k), name).rowwise, torch.randn(3, k).bfloat16()
        weights = [launch.Weight(w.data, w.scale, w.global_scale, None)]
        for config in (PIPELINED, WGMMA):
            kernels_launched.clear()
            launch.launch(x, weights, w.format, k, None, None, 1.0, 1.0, torch.bfloat16, None, config)
            product = {kernel for kernel in kernels_launched if kernel[0] == config.kind}
            assert kernels_of(CPU, w.format, [(3, 48, k, config, None)]) == product and len(product) == 1


def test_products_of_one_kernel_compile_it_once_and_those_that_do_not_fit_none():
    format = mx.get_format("mxfp8")
    many = [(m, n, 640, PIPELINED, None) for m in (1, 2, 5) for n in (48, 96)]
    assert len(kernels_of(CPU, format, many)) == 1
    huge = PIPELINED._replace(stages=64, slabs=16)
    assert kernels_of(CPU, format, [(1, 48, 640, huge, None)]) == set()
