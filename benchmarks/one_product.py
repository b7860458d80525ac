"""One small-M product for a profiler: ``ncu -k regex:persistent python -m benchmarks.one_product mxfp4 1 64 64``.

The kernel ``small_m`` runs once, with the config of the table. No other kernel in the process matches the names of its
kernels: ``persistent``, ``pipelined``, ``wgmma``, ``activations`` and ``maxima``.
"""

from __future__ import annotations

import argparse

import torch

import mxtensor as mx


def main() -> None:
    """Run one product."""
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
    with torch.no_grad(), mx.kernels("small_m"):
        layer(x)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
