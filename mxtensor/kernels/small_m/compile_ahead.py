"""Compiles the kernels of many products at once, in one thread per processor: NVRTC takes seconds for each."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from ...numerics.cast import Cast
from ...numerics.formats import Format
from ..runtime import nvrtc
from .config import LaunchConfig
from .launch import KERNEL_SOURCES, choose

Product = tuple[int, int, int, LaunchConfig, Cast | None]
"""(M, N, K), the config, and the cast of the activations."""


def kernels_of(device: torch.device, format: Format, products: Iterable[Product]) -> set[tuple[str, nvrtc.Constants]]:
    """(kind, constants) of the kernels of these bfloat16 products, each once; none for a config that does not fit."""
    half, found = (torch.bfloat16,) * 3, set()
    for m, n, k, config, cast in products:
        alignment = (k * format.element.bits // 8) & 15, (k // format.block[1]) & 15, 2 * k & 15
        try:
            chosen = choose(device, format, half, (m, k, 0), (n,), alignment, cast, config)
        except RuntimeError:  # it does not fit, and will not be launched either
            continue
        found.add((config.kind, chosen.constants))
    return found


def compile_all(format: Format, products: Iterable[Product]) -> int:
    """Compile the kernels of these products for the current CUDA device; how many there are."""
    kernels = kernels_of(torch.device("cuda", torch.cuda.current_device()), format, products)
    capability = torch.cuda.get_device_capability()

    def one(kernel: tuple[str, nvrtc.Constants]) -> None:
        nvrtc.compiled(KERNEL_SOURCES[kernel[0]], kernel[1], capability)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, kernels))
    return len(kernels)
