"""doctor and tune: what runs on this machine, and how fast.

``doctor`` shows versions, devices, compilers, the cache, and which kernels run here, checked by a product of each.
``tune`` measures the products of a checkpoint on this GPU. No model is run: one weight of each shape is enough.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoints.names import stays
from ..checkpoints.store import layout_of, opened
from ..convert.configs import recipe_of
from ..core.explain import explain
from ..core.shapes import readable_size
from ..kernels.runtime import disk_cache, native_build
from ..report.tune import tune as tune_model
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize import quantize
from ..tensor.quantize_as import quantize_as
from .output import DONE, FAILED, columns, note, progress, show

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
        cast: Any = x if recipe.activation is None else quantize(x, recipe.activation)  # type: ignore[arg-type]
        values = cast.dequantize(torch.float32) if isinstance(cast, MXTensor) else x.float()
        wanted = values @ weight.dequantize(torch.float32).t()
        error = float((found.float() - wanted).norm() / wanted.norm())
    except Exception as failure:  # whatever is wrong here is what the command is asked for
        return Product(device, format, rows, "-", float("nan"), {}, f"{type(failure).__name__}: {failure}")
    chosen = next(entry for entry in log.entries if entry.spec.op == "linear")
    return Product(device, format, rows, chosen.kernel, error, dict(chosen.refusals))


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
    devices, versions = _devices(), {}
    for name in PACKAGES:
        try:
            versions[name] = torch.__version__ if name == "torch" else metadata.version(name)  # with its build
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
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
    rows = [
        (p.format, p.device, f"{p.rows}", p.kernel, p.failure or f"{p.error:.1e}", "right" if p.is_right else "WRONG")
        for p in products
    ]
    lines += [f"compiled kernels: {cache['files']} files, {readable_size(cache['bytes'])} in {cache['folder']}, "
              f"{cache['tuned']} GPUs tuned", ""]  # fmt: skip
    lines += [columns(("linear layer", "device", "rows", "kernel", "error", ""), rows), "", *_refusals(products)]
    wrong = [p for p in products if not p.is_right]
    lines += ["", f"{len(products) - len(wrong)} of {len(products)} products are right"]
    show(arguments, "\n".join(lines), fields)
    return FAILED if wrong else DONE


def _refusals(products: list[Product]) -> list[str]:
    """A line for each kernel and reason."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for p in products:
        for kernel, why in p.refused.items():
            found.setdefault((p.device, why), {})[kernel] = None
    return [f"{device}: {', '.join(kernels)}: {why}" for (device, why), kernels in found.items()]


# ---------------------------------------------------------------------------------------------- tune


class Weights(NamedTuple):
    """The weights of a checkpoint that have one shape and one format."""

    format: str
    casts: bool
    """Whether activations are quantized too."""
    n: int
    k: int
    names: list[str]


def products_of(path: str, format: str | None) -> list[Weights]:
    """The products of the quantized matrices of a checkpoint, or of what ``quantize --format`` would quantize.

    Raises ValueError if there is none.
    """
    recipe = None if format is None else recipe_of(format)
    found: dict[tuple[str, bool, int, int], list[str]] = {}
    with opened(path) as checkpoint:
        for name, entry in layout_of(checkpoint).entries(checkpoint).items():
            value, (module, _, leaf) = checkpoint.load(name, entry), name.rpartition(".")
            used = None
            if isinstance(value, MXTensor):
                used = value.recipe
            elif leaf == "weight" and value.is_floating_point() and not stays(module):
                used = recipe
            if used is not None and value.dim() == 2:
                n, k = value.shape
                stored, casts = used.stored.format.name, used.activation is not None
                found.setdefault((stored, casts, n, k), []).append(name)
    if not found:
        raise ValueError(f"{path} has no quantized matrix; pass --format with the format to quantize it to")
    return [Weights(*key, names) for key, names in found.items()]


def _model(path: str, products: Iterable[Weights], format: str | None, device: str) -> nn.Module:
    """A module with one layer for each product."""
    layers = nn.ModuleList()
    with opened(path) as checkpoint:
        entries = layout_of(checkpoint).entries(checkpoint)
        for product in products:
            value = checkpoint.load(product.names[0], entries[product.names[0]]).to(device)
            if not isinstance(value, MXTensor):
                value = quantize_as(value, recipe_of(format))
            layer = nn.Linear(product.k, product.n, bias=False, device="meta")
            layer.weight = nn.Parameter(value, requires_grad=False)
            layers.append(layer)
    return layers


def tune(arguments: argparse.Namespace) -> int:
    """``tune``. Without a CUDA device it lists the products, and the exit code is 1 (with ``--dry-run`` 0)."""
    products = products_of(arguments.path, arguments.format)
    rows = tuple(arguments.rows)
    dry = arguments.dry_run or not torch.cuda.is_available()
    kernels: dict[tuple[int, int, int], str] = {}
    if not dry:
        kernels = tune_model(
            _model(arguments.path, products, arguments.format, arguments.device), rows, arguments.seconds
        )
    lines = []
    for p in products:
        kinds = [f"{m}: {kernels[m, p.n, p.k]}" for m in rows if (m, p.n, p.k) in kernels]
        lines.append((p.format + (", activations too" if p.casts else ""), f"{p.n}", f"{p.k}", f"{len(p.names)}",
                      ", ".join(kinds) or "not measured"))  # fmt: skip
    text = columns(("format", "N", "K", "layers", "fastest kernel by rows"), lines)
    what = f"{len(products)} products with {', '.join(map(str, rows))} rows each"
    if dry:
        text += f"\nwould measure {what}, for about {arguments.seconds:g} seconds at most"
    else:
        text += f"\nmeasured {len(kernels)} of {len(products) * len(rows)}: {what}"
    fields = {
        "tuned": not dry, "rows": rows,
        "products": [
            p._asdict() | {"kernels": {m: kernels[m, p.n, p.k] for m in rows if (m, p.n, p.k) in kernels}}
            for p in products
        ],
    }  # fmt: skip
    show(arguments, text, fields)
    if dry and not arguments.dry_run:
        note("error: nothing was measured: torch finds no CUDA device here, and only its kernels have launch configs")
        return FAILED
    return DONE
