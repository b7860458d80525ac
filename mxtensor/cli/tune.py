"""tune: measures the products of a checkpoint on this GPU. No model is run: one weight of each shape is enough."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..checkpoints.conversion import SKIPPED
from ..checkpoints.recipes import stays
from ..checkpoints.registry import layout_of, opened
from ..convert.configs import recipe_of
from ..recipe.linear_recipe import LinearRecipe
from ..report.tune_model import tune as tune_model
from ..tensor.mxtensor import MXTensor
from ..tensor.quantize_as import quantize_as
from .output import DONE, FAILED, columns, note, show


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
        for name, entry in layout_of(checkpoint).read(checkpoint).items():
            used = _recipe(name, checkpoint.load(name, entry), recipe)
            if used is not None:
                (n, k), (stored, casts) = used[1], (used[0].stored.format.name, used[0].activation is not None)
                found.setdefault((stored, casts, n, k), []).append(name)
    if not found:
        raise ValueError(f"{path} has no quantized matrix; pass --format with the format to quantize it to")
    return [Weights(*key, names) for key, names in found.items()]


def _recipe(name: str, value: Any, recipe: LinearRecipe | None) -> tuple[LinearRecipe, tuple[int, ...]] | None:
    """The recipe of a matrix and its shape; None for what no quantized product has."""
    if value.dim() != 2:
        return None
    if isinstance(value, MXTensor):
        return value.recipe, tuple(value.shape)
    module, _, leaf = name.rpartition(".")
    if recipe is None or leaf != "weight" or not value.is_floating_point() or stays(module, SKIPPED):
        return None
    return recipe, tuple(value.shape)


def _model(path: str, products: Iterable[Weights], format: str | None, device: str) -> nn.Module:
    """A module with one layer for each product."""
    layers = nn.ModuleList()
    with opened(path) as checkpoint:
        entries = layout_of(checkpoint).read(checkpoint)
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
