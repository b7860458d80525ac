"""``mx.tune(model)``: measures the products of a model's quantized layers on its GPU and keeps what is fastest.

The result serves all later processes on this kind of GPU, in the folder of compiled kernels. Without it the cost model
of ``kernels/small_m/costs.py`` chooses; a model never measures anything by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..core.progress import with_progress
from ..core.select import forget_decisions
from ..kernels.small_m import launch
from ..kernels.small_m.compile_ahead import compile_all
from ..kernels.small_m.config import LaunchConfig, can_use_wgmma
from ..kernels.small_m.costs import by_expected_time, costs_of, rows_key
from ..kernels.small_m.heuristics import FEW, Measured, gpu_of, stand_in, store_tuned
from ..kernels.small_m.shared_memory import layout_of
from ..numerics.cast import Cast
from ..numerics.formats import Format, get_format
from ..tensor.mxtensor import MXTensor
from .tune import call, graph_time, weights

TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTENDERS = 6
"""Configs that are timed for one product: those that the cost model expects to be fastest."""


def _products(model: nn.Module) -> dict[tuple[str, bool, int, int], torch.device]:
    """(format, cast of activations, N, K) -> device, of the quantized layers on CUDA devices."""
    found = {}
    for layer in model.modules():
        w = getattr(layer, "weight", None)
        if isinstance(w, MXTensor) and w.dim() == 2 and w.device.type == "cuda":
            n, k = w.shape
            found[stand_in(w.format), w.recipe.activation is not None, n, k] = w.device
    return found


def _contenders(format: Format, casts: bool, m: int, n: int, k: int, gpu: Any) -> list[LaunchConfig]:
    """The configs to time for one product, the one that is expected to be fastest first; ``casts``: of activations that
    are cast, which no direct config reads."""
    model, rows = costs_of(gpu.capability), rows_key(m)
    costs = (casts and m <= FEW and model.get((format.name, True, rows))) or model.get((format.name, False, rows), ())
    wgmma = can_use_wgmma(format, k, 0, (0, 0))
    order = [config for _, config in by_expected_time(costs, m, n, k, format, gpu)]
    known = [c for c in order if (wgmma or not c.wgmma) and not (casts and c.direct)]
    return [c for c in known if layout_of(format, c, m, n, k, gpu)][:CONTENDERS]


def tune(model: nn.Module, rows: Sequence[int] = TUNED_ROWS, seconds: float = 60.0) -> dict[tuple[int, int, int], str]:
    """Measure the products of ``model``'s quantized layers with these numbers of activation rows.

    Ends after about ``seconds``; what was not measured by then stays with the cost model. Returns the kind of kernel of
    each (rows, N, K). Compiled graphs keep the kernels they were captured with. Raises ValueError if the model has no
    quantized layer on a CUDA device, or for a GPU without a cost model.
    """
    products = _products(model)
    if not products:
        raise ValueError(
            "tune needs a model with quantized layers on a CUDA device: mx.quantize_(model.cuda(), 'mxfp8')"
        )

    end, found = time.monotonic() + seconds, []
    for (name, casts, n, k), device in with_progress(products.items(), "tuning", "shape"):
        format, gpu, cast = get_format(name), gpu_of(device), Cast(get_format(name)) if casts else None
        if not costs_of(gpu.capability):
            raise ValueError(f"there is no cost model of {gpu.name}; write one with python -m mxtensor.report.costs")
        if time.monotonic() > end:
            continue
        cases = {m: _contenders(format, casts, m, n, k, gpu) for m in rows}
        with torch.cuda.device(device), torch.no_grad():
            compile_all(format, [(m, n, k, config, cast) for m in rows for config in cases[m]])
            copies = weights(format, n, k)
            for m, configs in cases.items():
                x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
                for config in configs if time.monotonic() <= end else ():
                    us = graph_time([partial(call, x, w, config, cast) for w in copies], 3)
                    found.append(Measured(name, casts, m, n, k, us, config))
    best: dict[tuple[Any, ...], Measured] = {}
    for line in sorted(found, key=lambda line: -line.us):
        best[line[:5]] = line
    names = {torch.cuda.get_device_name(device) for device in products.values()}
    for gpu_name in names:
        store_tuned(gpu_name, list(best.values()))
    launch.resolve.cache_clear()
    forget_decisions()
    return {(line.m, line.n, line.k): line.config.kind for line in best.values()}
