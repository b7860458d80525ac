"""When the gathers of FSDP2 hide behind the products of a layer, on paper: ``python -m benchmarks.estimate``.

One layer of a Llama 3 70B, sharded over all GPUs, its parameters gathered for the forward pass and again for the
backward pass, its gradients reduced in bfloat16. Nothing here is measured but what a row says; the rest is what vendors
state, times a share that is assumed to be reached.

    all-gather, reduce-scatter   bytes over the slower of both links, and a hop's latency for each node of the ring
    hidden                       forward:  gather <= 2 x parameters x tokens / speed
                                 backward: gather + reduce <= 4 x parameters x tokens / speed
"""

from __future__ import annotations

from dataclasses import dataclass

from .harness import print_table

HIDDEN, INNER, KV = 8192, 28672, 1024
PARAMETERS = 2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * HIDDEN * INNER
"""Of a layer: queries and output, keys and values, the three matrices of the feed-forward block."""
NODE = 8
"""GPUs that NVLink connects."""
NETWORK = 50e9
"""Bytes a second of a GPU's own port, one way (400 Gbit/s)."""
SHARE = 0.8
"""Of a link's bytes that a collective reaches."""
HOP = 5e-6
"""Seconds from one node of the ring to the next."""
GPUS = (8, 64, 512, 4096, 10000)
TOKENS = 8192
"""Of a GPU and step, for the times of the table."""
GRADIENT = 2.0
"""Bytes of a gradient that is reduced."""


@dataclass(frozen=True)
class Setup:
    """A GPU and how it trains."""

    name: str
    flops: float
    """a second, reached by the products of a layer"""
    link: float
    """bytes a second of NVLink, one way"""
    gathered: float
    """bytes of a parameter"""


CODES = 1025 / 1024
"""Bytes of a value of MXFP8 in 32x32 tiles, with its share of a scale."""
SETUPS = (
    Setup("H200, bf16", 0.79e15, 450e9, 2.0),  # docs/benchmarks.md
    Setup("H200, mxfp8", 0.79e15, 450e9, CODES),  # decoded, and multiplied as bfloat16
    Setup("B200, bf16", 0.75 * 2.25e15, 900e9, 2.0),
    Setup("B200, mxfp8", 0.75 * 4.5e15, 900e9, CODES),
)


def collective(nbytes: float, gpus: int, link: float) -> float:
    """Seconds of an all-gather that makes ``nbytes`` on every GPU, or of the reduce-scatter of as many.

    All but its own share reaches a GPU over NVLink; what other nodes hold comes in through the ports of all GPUs of the
    node together. Both at the same time.
    """
    inside = nbytes * (1 - 1 / gpus) / (link * SHARE)
    nodes = max(gpus // NODE, 1)
    between = nbytes * (1 - 1 / nodes) / (NODE * NETWORK * SHARE)
    return max(inside, between) + HOP * (nodes - 1)


def gather(setup: Setup, gpus: int) -> float:
    """Seconds to gather a layer's parameters."""
    return collective(PARAMETERS * setup.gathered, gpus, setup.link)


def forward(setup: Setup, tokens: float) -> float:
    """Seconds of a layer's products of the forward pass; the backward pass has twice as many."""
    return 2 * PARAMETERS * tokens / setup.flops


def tokens_to_hide(setup: Setup, gpus: int) -> float:
    """The tokens a GPU needs in a step for its products to last as long as what is sent meanwhile."""
    sent = gather(setup, gpus)
    reduced = collective(PARAMETERS * GRADIENT, gpus, setup.link)
    return max(sent / forward(setup, 1), (sent + reduced) / (2 * forward(setup, 1)))


HEADER = ["GPUs", "setup", "gather ms", "reduce ms", f"forward ms at {TOKENS} tokens", "tokens a GPU that hide both"]


def lines() -> list[list[str]]:
    """A line for each number of GPUs and setup."""
    return [
        [
            str(gpus), setup.name, f"{gather(setup, gpus) * 1e3:.1f}",
            f"{collective(PARAMETERS * GRADIENT, gpus, setup.link) * 1e3:.1f}",
            f"{forward(setup, TOKENS) * 1e3:.1f}", f"{tokens_to_hide(setup, gpus):,.0f}",
        ]
        for gpus in GPUS
        for setup in SETUPS
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    print_table(HEADER, lines())


if __name__ == "__main__":
    main()
