"""How far products by ``fp8_rows`` are from float64, and from their bound: ``python -m benchmarks.fp8_rows_errors``.

The operands are Gaussian, with outliers in channels, hostile (a row with an exponent range of 40, NaN, infinities,
zeros, tiny and huge rows), and those of two models: the weights of each linear layer and the inputs that it gets for
real text. On a CPU the products are those of the definition (``numerics/row_scaled.py``), added up in float64 and
rounded once to bfloat16, so that the errors are those of the path and not of the sums. On an H100 (``--where cuda``)
they are those of the kernel. Needs ``pip install 'mxtensor[demo]'`` and the weights of ``examples/smollm2.py``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mxtensor as mx
from mxtensor.kernels.gemm import fp8_rows
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import HOPPER_SUMS, exact_product, product_bound, row_scaled, row_values

from .harness import Progress, Section, parser, print_table, run

PAIRS = (("mxfp8", "mxfp8"), ("mxfp6", "mxfp6"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4"))
"""The formats of inputs and weight."""
ROWS = 256
"""Rows of inputs: tokens."""
HEADER = [
    "operands", "products", "inputs, weights", "worst row, `fp8_rows`", "worst row, exact", "share of the bound",
    "rows out of range",
]  # fmt: skip
Pairs = Iterator[tuple[Tensor, Tensor]]
"""(inputs (M, K), weight (N, K))."""


# ---------------------------------------------------------------------------------------------- operands


def gaussian(every: int = 1) -> Pairs:
    """Gaussian values."""
    yield torch.randn(ROWS, 1024), torch.randn(1024, 1024)


def outliers(every: int = 1) -> Pairs:
    """Channels of different magnitudes, in inputs and weight."""
    for x, w in gaussian():
        yield x * torch.exp(1.5 * torch.randn(x.shape[1])), w * torch.exp(0.5 * torch.randn(x.shape[1]))


def hostile(every: int = 1) -> Pairs:
    """Rows of inputs and of the weight with an exponent range of 40, infinities or NaN, or zero, tiny, huge ones."""
    for pair in outliers():
        for t in pair:
            t[8] *= 2.0 ** torch.randint(-20, 21, (t.shape[1] // 32,)).float().repeat_interleave(32)
            t[9, : t.shape[1] // 2] *= 2.0**-30
            t[10], t[11, 3], t[12, -1] = 0.0, float("nan"), float("inf")
            t[13], t[14] = t[13] * 2.0**-60, t[14] * 2.0**60
        yield pair


def of_model(model: nn.Module, run: Callable[[], Any], every: int) -> Pairs:
    """Inputs and weight of each linear layer of ``model`` (of every ``every``-th), as ``run`` calls it first."""
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    layers = [m for m in linear if not any(size % 16 for size in m.weight.shape)]  # what the kernel takes
    seen: dict[nn.Module, Tensor] = {}

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen.setdefault(module, args[0].detach().reshape(-1, args[0].shape[-1])[:ROWS].float())

    handles = [layer.register_forward_pre_hook(see) for layer in layers[::every]]
    with torch.no_grad():
        run()
    for handle in handles:
        handle.remove()
    for layer in layers[::every]:
        if layer in seen:
            yield seen[layer], layer.weight.detach().float()


def minilm(every: int = 1) -> Pairs:
    """all-MiniLM-L6-v2 on English sentences."""
    from examples.minilm import load_model, load_sentences

    model = load_model()
    return of_model(model, lambda: model.encode(load_sentences()[:32], show_progress_bar=False), every)


def smollm2(every: int = 1) -> Pairs:
    """SmolLM2-135M-Instruct on the same sentences, as one text."""
    from examples.minilm import load_sentences
    from examples.smollm2 import load_model

    model, tokenizer = load_model(torch.float32)
    ids = tokenizer(" ".join(load_sentences()), return_tensors="pt").input_ids[:, :ROWS]
    body = model.model  # the head, whose weight is that of the embedding, is large and quantized by no recipe
    return of_model(body, lambda: model(ids), every)


SOURCES: dict[str, Callable[[int], Pairs]] = {
    "Gaussian": gaussian, "channels with outliers": outliers,
    "rows with a range of 2^40, NaN, infinities, zeros": hostile, "MiniLM": minilm, "SmolLM2": smollm2,
}  # fmt: skip


# ---------------------------------------------------------------------------------------------- errors


def by_definition(a: Operand, b: Operand) -> Tensor:
    """a @ b^T (M, N) in bfloat16 as ``fp8_rows`` defines it, with sums in float64."""
    rows, columns = row_scaled(a), row_scaled(b)
    y = row_values(rows, a).double() @ row_values(columns, b).double().t()
    exact = rows.out_of_range.bool().unsqueeze(1) | columns.out_of_range.bool()
    return torch.where(exact, exact_product(a, b), y).to(torch.bfloat16)


@dataclass
class Errors:
    """Of several products, each the worst."""

    products: int = 0
    worst: float = 0.0
    """The error of a row of a product by norm, relative to the norm of the row."""
    exact: float = 0.0
    """The same of the exact product, rounded once."""
    share: float = 0.0
    """The error of a value, relative to its bound."""
    out_of_range: int = 0
    """Rows that are out of range: multiplied from their own codes."""

    def add(self, x: Tensor, w: Tensor, formats: tuple[str, str]) -> None:
        """One product of x (M, K) by w (N, K)^T; raises AssertionError if a NaN is not where it belongs."""
        a, b = (encode(t, mx.Cast.of(name)) for t, name in zip((x, w), formats, strict=True))
        device = x.is_cuda
        y = fp8_rows.run(a, b, GemmArgs(torch.bfloat16)) if device else by_definition(a, b)
        expected, allowed = exact_product(a, b), product_bound(a, b, torch.bfloat16, HOPPER_SUMS if device else 0.0)
        assert torch.equal(y.isnan(), expected.isnan()), "NaN in other places"
        fine = expected.isfinite() & (expected.abs() < torch.finfo(torch.bfloat16).max)
        error = torch.where(fine, y.double() - expected, 0.0).abs()
        rounded = torch.where(fine, expected.to(torch.bfloat16).double() - expected, 0.0)
        norm = torch.where(fine, expected, 0.0).norm(dim=1).clamp(min=1e-300)
        self.products += 1
        self.worst = max(self.worst, (error.norm(dim=1) / norm).max().item())
        self.exact = max(self.exact, (rounded.norm(dim=1) / norm).max().item())
        self.share = max(self.share, (error / torch.where(fine, allowed, 1.0)).max().item())
        self.out_of_range += int(row_scaled(a).out_of_range.sum() + row_scaled(b).out_of_range.sum())


def measured(name: str, device: str = "cpu", every: int = 1) -> dict[tuple[str, str], Errors]:
    """Formats -> the errors of all products of one source."""
    torch.manual_seed(0)
    found = {formats: Errors() for formats in PAIRS}
    for x, w in SOURCES[name](every):
        for formats, errors in found.items():
            errors.add(x.to(device), w.to(device), formats)
    return found


def cells(name: str, formats: tuple[str, str], errors: Errors) -> list[str]:
    """A row of the table."""
    numbers = [f"{errors.worst:.2e}", f"{errors.exact:.2e}", f"{errors.share:.2f}", str(errors.out_of_range)]
    return [name, str(errors.products), ", ".join(formats), *numbers]


def errors(args: argparse.Namespace) -> None:
    """The errors of all operands."""
    rows, names = [], args.only or list(SOURCES)
    progress = Progress(len(names), "operands")
    for name in names:
        found = measured(name, args.where, args.every)
        rows += [cells(name, formats, each) for formats, each in found.items()]
        progress.step(name)
    progress.close()
    print_table(HEADER, rows)


SECTIONS = {"errors": Section("how far are products by fp8_rows from float64 and their bound?", errors)}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    options = parser(__doc__ or "", SECTIONS)
    options.add_argument("--where", default="cpu", metavar="DEVICE", help="cpu: the definition; cuda: the kernel")
    options.add_argument("--only", choices=SOURCES, action="append", help="one kind of operands")
    options.add_argument("--every", type=int, default=1, metavar="N", help="every N-th layer of the models")
    run(options, SECTIONS, argv)


if __name__ == "__main__":
    main()
