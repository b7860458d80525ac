"""One product of few rows, for a profiler: ``ncu -k regex:resident python -m benchmarks.one_product mxfp4 1 64 64``.

By the kernel ``small_m``, with the plan that the table has, after nothing else that a pattern of its kernels' names
(``resident``, ``together``, ``activations``) would catch.
"""

from __future__ import annotations

import argparse

import torch

import mxtensor as mx


def main() -> None:
    """Multiply once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "format", help="of the weight, as quantize_ names it; with -weight-only, activations stay as they are"
    )
    parser.add_argument(
        "sizes", nargs=3, type=int, metavar=("M", "N", "K"), help="rows of activations, of the weight; columns"
    )
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "This command runs a CUDA kernel, and torch finds no CUDA device here; nothing was run.\n")
    m, n, k = args.sizes
    layer = mx.quantize_(torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16), args.format)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad(), mx.kernels("small_batch"):
        layer(x)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
