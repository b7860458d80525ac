"""When the computation of a layer hides the communication of FSDP2, calculated: ``python -m benchmarks.estimate``.

The model is one layer of a Llama 3 70B, sharded over all GPUs. Its parameters are gathered for the forward pass and
again for the backward pass, and its gradients are reduced in bfloat16. Only the speed of the H200 is measured; the
other speeds are the vendors' figures times an assumed efficiency.

    collective   time = bytes / bandwidth of the slower link + latency of a hop x (nodes of the ring - 1)
    hidden if    forward:  gather <= 2 x parameters x tokens / speed
                 backward: gather + reduce <= 4 x parameters x tokens / speed
"""

from __future__ import annotations

from dataclasses import dataclass

from .harness import print_table

HIDDEN, INNER, KV = 8192, 28672, 1024
PARAMETERS = 2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * HIDDEN * INNER
"""Parameters of a layer: queries and output, keys and values, the three matrices of the feed-forward block."""
NODE = 8
"""GPUs of a node, which NVLink connects."""
NETWORK = 50e9
"""Bandwidth of the network port of one GPU, in one direction, in bytes/s (400 Gbit/s)."""
EFFICIENCY = 0.8
"""Assumed fraction of a link's bandwidth that a collective reaches."""
HOP = 5e-6
"""Latency from one node of the ring to the next, in seconds."""
GPUS = (8, 64, 512, 4096, 10000)
TOKENS = 8192
"""Tokens per GPU and step, for the forward time in the table."""
GRADIENT = 2.0
"""Bytes of one reduced gradient value."""


@dataclass(frozen=True)
class Setup:
    """A GPU and the format in which it trains."""

    name: str
    flops: float
    """Floating-point operations per second that the products of a layer reach."""
    link: float
    """Bandwidth of NVLink in one direction, in bytes/s."""
    gathered: float
    """Bytes that are gathered for one parameter."""


CODES = 1025 / 1024
"""Bytes of an MXFP8 value in 32x32 blocks, including its fraction of the scale."""
SETUPS = (
    Setup("H200, bf16", 0.79e15, 450e9, 2.0),  # bfloat16, 4096x4096x4096: results/linear.json
    Setup("H200, mxfp8", 0.79e15, 450e9, CODES),  # dequantized, and multiplied in bfloat16
    Setup("B200, bf16", 0.75 * 2.25e15, 900e9, 2.0),
    Setup("B200, mxfp8", 0.75 * 4.5e15, 900e9, CODES),
)


def collective(nbytes: float, gpus: int, link: float) -> float:
    """Seconds of an all-gather whose output is ``nbytes`` on every GPU, or of the reduce-scatter of ``nbytes``.

    A GPU receives everything but its own shard over NVLink. The shards of other nodes enter a node through the network
    ports of all its GPUs. Both transfers overlap, so the slower one counts.
    """
    inside = nbytes * (1 - 1 / gpus) / (link * EFFICIENCY)
    nodes = max(gpus // NODE, 1)
    between = nbytes * (1 - 1 / nodes) / (NODE * NETWORK * EFFICIENCY)
    return max(inside, between) + HOP * (nodes - 1)


def gather(setup: Setup, gpus: int) -> float:
    """Seconds to gather the parameters of a layer."""
    return collective(PARAMETERS * setup.gathered, gpus, setup.link)


def forward(setup: Setup, tokens: float) -> float:
    """Seconds of the products of a layer in the forward pass. The backward pass takes twice as long."""
    return 2 * PARAMETERS * tokens / setup.flops


def tokens_to_hide(setup: Setup, gpus: int) -> float:
    """The least tokens per GPU and step at which the products take as long as the communication beside them."""
    gathered = gather(setup, gpus)
    reduced = collective(PARAMETERS * GRADIENT, gpus, setup.link)
    return max(gathered / forward(setup, 1), (gathered + reduced) / (2 * forward(setup, 1)))


HEADER = ["GPUs", "setup", "gather ms", "reduce ms", f"forward ms at {TOKENS} tokens", "tokens per GPU to hide both"]


def lines() -> list[list[str]]:
    """The lines of the table, one for each number of GPUs and setup."""
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
