"""Direct configs: wgmma kernels that read bfloat16 activations as they are, so that no kernel prepares them.

``can_be_direct`` says for which activations, ``direct_twin`` gives the direct config with the division of work of
another one, and ``direct_time`` what it takes, until direct configs are measured themselves (``costs_sm90.json``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ...numerics.cast import Cast
from ...numerics.formats import E4M3, E5M2, UE4M3, Format
from .config import LaunchConfig, registers
from .costs import Cost, predict
from .shared_memory import Gpu

PREPARATION_START = 1.7
"""Microseconds of a product until the kernel that prepares activations has started and its results are visible."""
PREPARATION_VALUES = 0.8
"""Microseconds of that kernel per million activations."""
DECODING = 1.05
"""How many times as long the rest takes, because codes are decoded to bfloat16 by more instructions."""
LEAST_SHARE = 0.4
"""The expected time is at least this share of that of the config with prepared activations."""
OTHER_REGISTERS = 72
"""Registers of a thread that multiplies, beside its sums and the codes that it loads ahead: with fewer some spill."""


def can_be_direct(format: Format, x: torch.dtype, x_copy: int, cast: Cast | None) -> bool:
    """Whether a wgmma kernel can read these activations as they are: bfloat16 without a cast, rows of whole pieces of
    16 bytes at multiples of 16 bytes (``x_copy``: the most bytes that one copy can move).

    NaNs among codes are looked for only where scales can be applied to sums, which NVFP4's are not.
    """
    special = format.element in (E4M3, E5M2) and format.scale is UE4M3
    return x is torch.bfloat16 and x_copy == 16 and cast is None and not special


def has_registers(format: Format, config: LaunchConfig) -> bool:
    """Whether the threads of a direct config have enough registers."""
    used = 4 * config.nt + 2 * config.ahead * format.element.bits
    return used + OTHER_REGISTERS <= registers(config).compute


def direct_twin(format: Format, config: LaunchConfig) -> LaunchConfig | None:
    """The direct config with this division of work; None if there is none. The counters of ``reduce_global`` are set to
    zero by the kernel that prepares activations."""
    twin = config._replace(direct=True)
    if not config.wgmma or config.direct or config.reduce_global or not has_registers(format, twin):
        return None
    return twin


def direct_time(us: float, m: int, k: int) -> float:
    """The expected microseconds of a direct config whose twin takes ``us`` for (m, k) activations."""
    preparation = PREPARATION_START + PREPARATION_VALUES * 1e-6 * m * k
    return max(LEAST_SHARE * us, DECODING * (us - preparation))


def expected_times(
    costs: Iterable[Cost], format: Format, m: int, n: int, k: int, gpu: Gpu
) -> Iterator[tuple[float, LaunchConfig]]:
    """Microseconds of each config by the cost model, and of the direct twins unless the model has direct configs."""
    costs = tuple(costs)
    measured = any(cost.config.direct for cost in costs)
    for cost in costs:
        us = predict(cost, m, n, k, format, gpu)
        yield us, cost.config
        twin = None if measured else direct_twin(format, cost.config)
        if twin is not None:
            yield direct_time(us, m, k), twin
