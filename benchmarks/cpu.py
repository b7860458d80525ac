"""Casts and linear layers on CPU beside plain torch and torchao: ``python -m benchmarks.cpu --json F``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import mxtensor as mx

from .harness import Prepare, Row, Work, arguments, machine, print_table, side_by_side, write_json

SIZE = 4096
ROWS = 512
CASTS = {"mxfp8": torch.float8_e4m3fn, "mxfp6_e2m3": "fp6_e2m3", "mxfp4": torch.float4_e2m1fn_x2, "nvfp4": "nvfp4"}
"""Our format -> torchao's element dtype (NVFP4 is a class of its own there)."""

HEADER = ["work", "contender", "ms", "ratio", "GB/s"]


def values(*shape: int) -> torch.Tensor:
    """Fresh Gaussian bfloat16 values."""
    return torch.randn(*shape, dtype=torch.bfloat16)


def torchao_cast(x: torch.Tensor, elem: Any) -> Any:
    """torchao's own cast of ``x``; importing it is left to the contender, which may fail alone."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if elem == "nvfp4":
        scale = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    return MXTensor.to_mx(x, elem, 32)


def torchao_linear(weight: torch.Tensor, elem: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """torchao's emulated linear with weight and activation in one MX format."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor, QuantizeTensorToMXKwargs
    from torchao.quantization.quantize_.common import KernelPreference

    kwargs = QuantizeTensorToMXKwargs(elem_dtype=elem, block_size=32, kernel_preference=KernelPreference.EMULATED)
    w = MXTensor.to_mx(weight, elem, 32, kernel_preference=KernelPreference.EMULATED, act_quant_kwargs=kwargs)
    return lambda x: F.linear(x, w)


def compiled(fn: Callable[..., Any], *args: Any) -> Prepare:
    """The work of ``torch.compile(fn, fullgraph=True)`` on ``args``."""

    def prepare() -> Work:
        torch._dynamo.reset()
        graph = torch.compile(fn, fullgraph=True)
        graph(*args)
        return lambda: graph(*args)

    return prepare


def eager(fn: Callable[..., Any], *args: Any) -> Prepare:
    """The work of ``fn`` on ``args``."""
    return lambda: lambda: fn(*args)


def cast_row(format: str, repeats: int) -> Row:
    x, elem = values(SIZE, SIZE), CASTS[format]
    ours = lambda x: mx.quantize(x, format)  # noqa: E731
    nbytes = x.nbytes + ours(x).nbytes
    contenders = {
        "torchao": eager(torchao_cast, x, elem),
        "torchao compiled": compiled(lambda x: torchao_cast(x, elem), x),
        "mxtensor": eager(ours, x),
        "mxtensor compiled": compiled(ours, x),
    }
    return side_by_side(f"cast {SIZE}x{SIZE} -> {format}", contenders, nbytes, repeats)


def dequantize_row(format: str, repeats: int) -> Row:
    x, elem = values(SIZE, SIZE), CASTS[format]
    w = mx.quantize(x, format)

    def torchao() -> Work:
        other = torchao_cast(x, elem)
        return lambda: other.dequantize(torch.bfloat16)

    contenders = {
        "torchao": torchao,
        "mxtensor": eager(lambda w: w.dequantize(), w),
        "mxtensor compiled": compiled(lambda w: w.dequantize(), w),
    }
    return side_by_side(f"dequantize {SIZE}x{SIZE} {format}", contenders, x.nbytes + w.nbytes, repeats)


def linear_row(format: str, repeats: int) -> Row:
    x, weight, elem = values(ROWS, SIZE), values(SIZE, SIZE) * 0.02, CASTS[format]
    ours = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16)
    ours.weight = torch.nn.Parameter(weight.clone())
    mx.quantize_(ours, format)

    def torchao() -> Work:
        layer = torchao_linear(weight, elem)
        return lambda: layer(x)

    def torchao_compiled() -> Work:
        return compiled(torchao_linear(weight, elem), x)()

    contenders = {
        "bfloat16": eager(F.linear, x, weight),
        "bfloat16 compiled": compiled(F.linear, x, weight),
        "mxtensor": eager(ours, x),
        "mxtensor compiled": compiled(ours, x),
    }
    if elem != "nvfp4":
        contenders |= {"torchao": torchao, "torchao compiled": torchao_compiled}
    nbytes = x.nbytes + ours.weight.nbytes + ROWS * SIZE * 2
    return side_by_side(f"linear {ROWS}x{SIZE}x{SIZE} {format}", contenders, nbytes, repeats)


def cells(row: Row) -> list[list[str]]:
    """A line of the table for every contender: casts against torchao eager, linears against bfloat16."""
    base = "bfloat16" if "bfloat16" in row.times else "torchao"
    lines = []
    for name in [*row.times, *row.failed]:
        if name in row.failed:
            lines.append([row.work, name, "fails", "", ""])
            continue
        ratio = 1 / row.ratio(name, base) if base == "bfloat16" else row.ratio(name, base)
        text = f"{ratio:.2f}x {'time of bf16' if base == 'bfloat16' else 'as fast'}"
        lines.append([row.work, name, f"{row.times[name]:.1f}", text, f"{row.gbps(name):.1f}"])
    return lines


def main() -> None:
    """Run every row and print times, ratios and effective bandwidth."""
    args = arguments(__doc__ or "")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = []
    with torch.no_grad():
        for kind in (cast_row, dequantize_row, linear_row):
            for format in CASTS:
                row = kind(format, args.repeats)
                rows.append(row)
                print(f"{row.work}: " + ", ".join(f"{n} {t:.1f} ms" for n, t in row.times.items()), flush=True)
    here = machine()
    print(f"\n{here['cpu']}, {here['threads']} threads, " + ", ".join(f"{k} {v}" for k, v in here["versions"].items()))
    print("ratios: casts against torchao eager (higher is faster), linears against bfloat16 (lower is faster)\n")
    print_table(HEADER, [line for row in rows for line in cells(row)])
    for row in rows:
        for name, why in row.failed.items():
            print(f"{row.work}, {name}: {why}")
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
