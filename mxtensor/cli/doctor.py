"""doctor: versions, devices, compilers, the cache, and which kernels run here, checked by a product of each."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ..convert.configs import recipe_of
from ..core.explain import explain
from ..core.shapes import readable_size
from ..kernels.runtime import disk_cache, native_build
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize import quantize
from ..tensor.quantize_as import quantize_as
from .output import DONE, FAILED, columns, progress, show

PACKAGES = (
    "mxtensor", "torch", "triton", "numpy", "safetensors", "transformers", "accelerate", "peft", "gguf",
    "compressed-tensors", "torchao", "tqdm", "matplotlib", "lm-eval",
)  # fmt: skip
FORMATS = ("mxfp8", "mxint8", "mxfp6_e2m3", "mxfp4", "nvfp4", "float8_row")
SIZE, ROWS = 256, (1, 256)
"""Of the weight, and of the activations: few rows as in decoding, and many."""
LARGEST_ERROR = 0.02
"""Relative error of a product beside that of the dequantized operands in float32; bfloat16 rounds by 0.004."""


@dataclass(frozen=True)
class Product:
    """One product that was run here."""

    device: str
    format: str
    rows: int
    kernel: str
    error: float
    """Relative error beside the product of the dequantized operands in float32."""
    refused: dict[str, str]
    """Kernel -> why it does not run this product."""
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and self.error < LARGEST_ERROR


def _product(device: str, format: str, rows: int) -> Product:
    recipe = recipe_of(format)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, SIZE, generator=generator).to(device, torch.bfloat16) for n in (rows, SIZE))
    try:
        weight = quantize_as(w, recipe)
        with explain() as log, torch.no_grad():
            found = torch.nn.functional.linear(x, weight)
        wanted = _cast(x, recipe.activation) @ weight.dequantize(torch.float32).t()
        error = float((found.float() - wanted).norm() / wanted.norm())
    except Exception as failure:  # whatever is wrong here is what the command is asked for
        return Product(device, format, rows, "-", float("nan"), {}, f"{type(failure).__name__}: {failure}")
    chosen = next(entry for entry in log.entries if entry.spec.op == "linear")
    return Product(device, format, rows, chosen.kernel, error, dict(chosen.refusals))


def _cast(x: Tensor, activation: Any) -> Tensor:
    """The activations as the product sees them."""
    if activation is None:
        return x.float()
    cast = quantize(x, activation)
    return cast.dequantize(torch.float32) if isinstance(cast, MXTensor) else x.float()


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, torch.__version__ if name == "torch" else metadata.version(name)  # with the name of its build
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _devices() -> list[dict[str, Any]]:
    sets = native_build.instruction_sets()
    notable = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd", "sve") if name in sets]
    found: list[dict[str, Any]] = [
        {"name": "cpu", "about": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {' '.join(notable)}"}
    ]
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        memory = readable_size(about.total_memory)
        found.append({"name": f"cuda:{i}", "about": f"{about.name}, sm{about.major}{about.minor}, {memory}"})
    return found


def doctor(arguments: argparse.Namespace) -> int:
    """``doctor``. The exit code is 1 if a product is wrong."""
    devices, versions = _devices(), dict(_versions())
    kinds = list(dict.fromkeys(str(device["name"]) for device in devices[:2]))
    cases = [
        (device, format + end, rows)
        for device in kinds for format in FORMATS for end in ("-weight-only", "") for rows in ROWS
    ]  # fmt: skip
    products = []
    with progress(len(cases), "running products", "product") as step:
        for case in cases:
            products.append(_product(*case))
            step()
    folder, files = disk_cache.contents()
    compiler = native_build.compiler()
    cache: dict[str, Any] = {"folder": None if folder is None else str(folder), "files": len(files),
             "bytes": sum(file.stat().st_size for file in files),
             "tuned": len([file for file in files if file.name.startswith("tuned-")])}  # fmt: skip
    fields = {
        "python": platform.python_version(), "machine": platform.machine(), "packages": versions, "devices": devices,
        "compiler": compiler, "cache": cache, "products": [asdict(p) | {"right": p.is_right} for p in products],
    }  # fmt: skip
    lines = [f"python {platform.python_version()} on {platform.machine()}"]
    lines += [f"{name} {version}" for name, version in versions.items()]
    lines += ["", *(f"{device['name']}: {device['about']}" for device in devices)]
    lines += [f"C++ compiler: {' '.join(compiler) if compiler else 'none: casts and products on the CPU are slow'}"]
    lines += [f"compiled kernels: {cache['files']} files, {readable_size(cache['bytes'])} in {cache['folder']}, "
              f"{cache['tuned']} GPUs tuned", "", _products(products), "", *_refusals(products)]  # fmt: skip
    wrong = [p for p in products if not p.is_right]
    lines += ["", f"{len(products) - len(wrong)} of {len(products)} products are right"]
    show(arguments, "\n".join(lines), fields)
    return FAILED if wrong else DONE


def _products(products: list[Product]) -> str:
    rows = [
        (p.format, p.device, f"{p.rows}", p.kernel, p.failure or f"{p.error:.1e}", "right" if p.is_right else "WRONG")
        for p in products
    ]
    return columns(("linear layer", "device", "rows", "kernel", "error", ""), rows)


def _refusals(products: list[Product]) -> list[str]:
    """A line for each kernel and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for p in products:
        for kernel, why in p.refused.items():
            found.setdefault((p.device, why, kernel), []).append(p.format)
    lines: dict[tuple[str, str], list[str]] = {}
    for device, why, kernel in found:
        lines.setdefault((device, why), []).append(kernel)
    return [f"{device}: {', '.join(kernels)}: {why}" for (device, why), kernels in lines.items()]
