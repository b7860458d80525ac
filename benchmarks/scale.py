"""Training on many GPUs, calculated: bytes on the wire and in memory of a GPU. ``python -m benchmarks.scale``.

All bytes are those that one GPU receives in one step (all-gather, reduce-scatter, all-to-all, send), or stores. What
each kind sends is what mxtensor sends. The formulas are compared with the record of ``benchmarks.fsdp`` (two GPUs):
bytes of all-gathers, which must be equal, and the peak of memory. Times follow from the links and from the measured
time of a linear layer (the record of ``benchmarks.training``); nothing here ran on more than two GPUs.

``sharding``: when the computation of one layer of a Llama 3 70B hides the communication of FSDP2. Its parameters are
gathered for the forward pass and again for the backward pass, and its gradients are reduced in bfloat16.

    collective   time = bytes / bandwidth of the slower link + latency of a hop x (nodes of the ring - 1)
    hidden if    forward:  gather <= 2 x parameters x tokens / speed
                 backward: gather + reduce <= 4 x parameters x tokens / speed
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from . import fsdp, training
from .harness import RESULTS, Section, parser, print_table, read_json, run

# ---------------------------------------------------------------------------------------------- models and formats

VALUE, MASTER, MOMENTS, GRADIENT = 2.0, 4.0, 8.0, 4.0
"""Bytes of a bfloat16 value, of a float32 parameter, of both moments of AdamW, and of a float32 gradient."""


@dataclass(frozen=True)
class Model:
    """The shape of a Llama-like model; with ``experts``, every layer has so many of them, ``chosen`` for each token."""

    name: str
    layers: int
    hidden: int
    inner: int
    """Width of the feed-forward block, or of one expert."""
    heads: int
    kv_heads: int
    head: int
    vocab: int
    experts: int = 1
    chosen: int = 1

    @property
    def attention(self) -> int:
        """Parameters of the four projections of a layer."""
        return 2 * self.hidden * self.head * (self.heads + self.kv_heads)

    @property
    def expert(self) -> int:
        """Parameters of one feed-forward block."""
        return 3 * self.hidden * self.inner

    @property
    def unquantized(self) -> int:
        """Parameters of a layer that no recipe casts: two norms, and the router."""
        return 2 * self.hidden + (self.experts * self.hidden if self.experts > 1 else 0)

    @property
    def layer(self) -> int:
        return self.attention + self.experts * self.expert + self.unquantized

    @property
    def rest(self) -> int:
        """Embedding, head and last norm."""
        return 2 * self.vocab * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.rest

    @property
    def active(self) -> int:
        """Parameters that multiply one token, without the embedding."""
        layer = self.attention + self.chosen * self.expert + self.unquantized
        return self.layers * layer + self.vocab * self.hidden


MODELS = (
    Model("Llama 3 8B", 32, 4096, 14336, 32, 8, 128, 128256),
    Model("Llama 3 70B", 80, 8192, 28672, 64, 8, 128, 128256),
    Model("Qwen3 235B-A22B", 94, 4096, 1536, 64, 4, 128, 151936, experts=128, chosen=8),
)
MEASURED = Model("Llama of 1B", 16, 2048, 8192, 32, 8, 64, 32768)
"""The model of ``benchmarks.fsdp``."""


@dataclass(frozen=True)
class Wire:
    """Bytes of one value in a format."""

    name: str
    weight: float = VALUE
    """Gathered by FSDP2."""
    token: float = VALUE
    """Of an input that tensor parallelism gathers, and of a token on its way to an expert."""
    token_grad: float = VALUE
    """Of the gradient of what an expert returns."""
    saved: float = VALUE
    """Of the copy of an input that waits for wgrad."""

    @property
    def codes_travel(self) -> bool:
        """Whether tensor parallelism gathers codes: then it gathers them again for wgrad and saves no others' rows."""
        return self.token < VALUE

    @property
    def quantized(self) -> bool:
        """Whether a layer saves a copy of its own."""
        return self.saved < VALUE


TILE, BLOCK = 1 / 1024, 1 / 32
"""Bytes of scales for one value: 32x32 tiles, and blocks of 32."""
BF16 = Wire("bf16")
MXFP8 = Wire("mxfp8", 1 + TILE, 1 + BLOCK, 1 + BLOCK, 1 + BLOCK)
NVFP4 = Wire("nvfp4", saved=0.5 + 1 / 16)  # its scales depend on the whole tensor: values are sent
MXFP4 = Wire("mxfp4", 0.5 + TILE, 0.5 + BLOCK, 0.5 + BLOCK, 0.5 + BLOCK)
WIRES = (BF16, MXFP8, NVFP4, MXFP4)


@dataclass(frozen=True)
class Layout:
    """How GPUs share a model: gpus = tensor * pipeline * shard * replicate. Experts are spread over ``expert`` of the
    ``shard`` ranks."""

    tensor: int = 1
    """GPUs that share each layer, with sequence parallelism between layers."""
    pipeline: int = 1
    shard: int = 1
    """Ranks over which FSDP2 shards."""
    replicate: int = 1
    """Copies of these ranks (HSDP)."""
    expert: int = 1

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.shard * self.replicate

    @property
    def microbatches(self) -> int:
        """Of a step: four for each stage of a pipeline."""
        return 4 * self.pipeline if self.pipeline > 1 else 1

    def __str__(self) -> str:
        names = {"TP": self.tensor, "EP": self.expert, "PP": self.pipeline, "FSDP": self.shard, "DP": self.replicate}
        return " ".join(f"{name}{n}" for name, n in names.items() if n > 1) or "one GPU"


def others(ranks: float) -> float:
    """The part of a whole that a rank receives from the others."""
    return 1 - 1 / ranks


# ---------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class Share:
    """The parameters of a GPU's part of the model, before FSDP2 shards them."""

    layers: float
    """Layers of its stage."""
    matrices: float
    """Quantized parameters of a layer, without stacked experts."""
    experts: float
    """Parameters of a layer's experts on this GPU."""
    unquantized: float
    """Norms and router of a layer."""
    rest: float
    """Embedding, head and last norm; a stage has its share of them."""

    @classmethod
    def of(cls, model: Model, layout: Layout) -> Share:
        is_moe = model.experts > 1
        matrices = model.attention + (0 if is_moe else model.expert)
        experts = model.experts * model.expert / layout.expert if is_moe else 0
        rest = model.rest / layout.tensor / layout.pipeline
        return cls(model.layers / layout.pipeline, matrices / layout.tensor, experts, model.unquantized, rest)

    def bytes_of_layer(self, wire: Wire) -> tuple[float, float]:
        """Gathered bytes of a layer: all but the experts, and the experts, whose stacks are gathered as values."""
        return self.matrices * wire.weight + self.unquantized * VALUE, self.experts * VALUE

    def sharded(self, layout: Layout) -> float:
        """Parameters that the GPU stores."""
        dense = self.layers * (self.matrices + self.unquantized) + self.rest
        return dense / layout.shard + self.layers * self.experts * layout.expert / layout.shard


def gathered(model: Model, wire: Wire, layout: Layout) -> tuple[float, float]:
    """Output bytes of the all-gathers of FSDP2 in a step, those of experts apart: each layer before its forward and
    before its backward pass, embedding and head once. A stage of a pipeline gathers once, and keeps the weights for all
    microbatches."""
    part, times = Share.of(model, layout), 1 if layout.pipeline > 1 else 2
    dense, experts = part.bytes_of_layer(wire)
    return times * part.layers * dense + part.rest * VALUE, times * part.layers * experts


# ---------------------------------------------------------------------------------------------- the wire

KINDS = ("FSDP gather", "FSDP reduce", "DP reduce", "TP", "EP", "PP")


def wire_bytes(model: Model, wire: Wire, layout: Layout, tokens: int, recompute: bool) -> dict[str, float]:
    """What a GPU receives in a step, by kind. ``tokens``: rows of a GPU in a microbatch; ``recompute``: as in
    ``memory``."""
    part, rows = Share.of(model, layout), tokens * layout.microbatches
    dense, experts = gathered(model, wire, layout)
    dense_ranks, expert_ranks = others(layout.shard), others(layout.shard / layout.expert)
    own = part.layers * (part.matrices + part.unquantized) + part.rest, part.layers * part.experts
    blocks = 1 if model.experts > 1 else 2  # attention and feed-forward block; experts are not split
    whole = rows * layout.tensor * model.hidden * others(layout.tensor)
    # Gathered: the input, the gradient of the result, and codes once more for wgrad. Scattered: the result, and the
    # gradient of the input.
    split = blocks * whole * (wire.token * (2 if wire.codes_travel else 1) + 3 * VALUE)
    sent = rows * model.chosen * model.hidden * others(layout.expert)
    exchanged = wire.token + wire.token_grad + 2 * VALUE
    if recompute:  # forward again, but for the result of a layer, which nothing saves, if it is scattered
        split += whole * (blocks * wire.token + VALUE)
        exchanged += wire.token + VALUE
    return {
        "FSDP gather": dense * dense_ranks + experts * expert_ranks,
        "FSDP reduce": GRADIENT * (own[0] * dense_ranks + own[1] * expert_ranks),
        "DP reduce": 2 * GRADIENT * part.sharded(layout) * others(layout.replicate),
        "TP": part.layers * split,
        "EP": part.layers * sent * exchanged,
        "PP": 2 * rows * model.hidden * VALUE if layout.pipeline > 1 else 0.0,
    }


# ---------------------------------------------------------------------------------------------- memory


def saved_by_layer(model: Model, wire: Wire, layout: Layout) -> float:
    """Bytes for each token that a layer of transformers saves for its backward pass, in eager code."""
    h, wide, narrow = model.hidden, model.heads * model.head, model.kv_heads * model.head
    rows = model.chosen
    norms = 2 * (4 + VALUE) * h  # float32 input, and the normalized values
    attention = VALUE * (2 * wide + 2 * narrow)  # q, k, v and the result
    inner = 3 * VALUE * model.inner * rows  # gate, up, and the activated gate
    if wire.quantized:  # each layer has a copy of its own
        apart = layout.tensor if not wire.codes_travel else 1
        inputs = wire.saved * (3 * h * apart + wide + (2 if rows == 1 else rows) * h * apart + model.inner * rows)
    else:  # layers share their input; tensor parallelism saves the rows of all ranks
        inputs = VALUE * (h * layout.tensor + wide + rows * h * layout.tensor + model.inner * rows)
    return norms + attention + inner + inputs


MEMORY = ("parameters and moments", "gradients", "gathered weights", "activations", "logits")


def memory(model: Model, wire: Wire, layout: Layout, tokens: int, recompute: bool) -> dict[str, float]:
    """Bytes of a GPU at the peak of a step, by kind; of a pipeline, those of the first stage. ``recompute``: each layer
    saves its input only, and runs again before its backward pass."""
    part = Share.of(model, layout)
    stored = part.sharded(layout)
    layer = sum(part.bytes_of_layer(wire))
    weights = part.layers * layer if layout.pipeline > 1 else 2 * layer  # this layer, and the next one
    each = saved_by_layer(model, wire, layout)
    saved = (
        model.layers * VALUE * model.hidden + each if recompute else model.layers * each
    )  # of a pipeline's first stage
    logits = tokens * model.vocab * (VALUE + 4 + 4)  # bfloat16, float32, and log-probabilities
    gradients = GRADIENT * stored
    if layout.microbatches == 1:  # they appear while activations go
        gradients = max(gradients - tokens * saved - logits, 0.0)
    return {
        "parameters and moments": (MASTER + MOMENTS) * stored,
        "gradients": gradients,
        "gathered weights": weights + part.rest * VALUE,
        "activations": tokens * saved,
        "logits": logits if layout.pipeline == 1 else 0.0,
    }


# ---------------------------------------------------------------------------------------------- when one layer hides it

HIDDEN, INNER, KV = 8192, 28672, 1024
LAYER = 2 * HIDDEN * HIDDEN + 2 * KV * HIDDEN + 3 * HIDDEN * INNER
"""Parameters of the layer: queries and output, keys and values, the three matrices of the feed-forward block."""
NODE = 8
"""GPUs of a node, which NVLink connects."""
NETWORK = 50e9
"""Bandwidth of the network port of one GPU, in one direction, in bytes/s (400 Gbit/s)."""
EFFICIENCY = 0.8
"""Assumed fraction of a link's bandwidth that a collective reaches."""
HOP = 5e-6
"""Latency from one node of the ring to the next, in seconds."""
SHARDED = (8, 64, 512, 4096, 10000)
TOKENS = 8192
"""Tokens per GPU and step, for the forward time in the table."""
REDUCED = 2.0
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


CODE = 1025 / 1024
"""Bytes of an MXFP8 value in 32x32 blocks, including its fraction of the scale."""
SETUPS = (
    Setup("H200, bf16", 0.79e15, 450e9, 2.0),  # bfloat16, 4096x4096x4096: results/layers-h200.json
    Setup("H200, mxfp8", 0.79e15, 450e9, CODE),  # dequantized, and multiplied in bfloat16
    Setup("B200, bf16", 0.75 * 2.25e15, 900e9, 2.0),
    Setup("B200, mxfp8", 0.75 * 4.5e15, 900e9, CODE),
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


def gather_time(setup: Setup, gpus: int) -> float:
    """Seconds to gather the parameters of a layer."""
    return collective(LAYER * setup.gathered, gpus, setup.link)


def forward_time(setup: Setup, tokens: float) -> float:
    """Seconds of the products of a layer in the forward pass. The backward pass takes twice as long."""
    return 2 * LAYER * tokens / setup.flops


def tokens_to_hide(setup: Setup, gpus: int) -> float:
    """The least tokens per GPU and step at which the products take as long as the communication beside them."""
    gathered = gather_time(setup, gpus)
    reduced = collective(LAYER * REDUCED, gpus, setup.link)
    return max(gathered / forward_time(setup, 1), (gathered + reduced) / (2 * forward_time(setup, 1)))


SHARDING_HEADER = [
    "GPUs",
    "setup",
    "gather ms",
    "reduce ms",
    f"forward ms at {TOKENS} tokens",
    "tokens per GPU to hide both",
]


def sharding_lines() -> list[list[str]]:
    """The lines of the table, one for each number of GPUs and setup."""
    return [
        [
            str(gpus), setup.name, f"{gather_time(setup, gpus) * 1e3:.1f}",
            f"{collective(LAYER * REDUCED, gpus, setup.link) * 1e3:.1f}",
            f"{forward_time(setup, TOKENS) * 1e3:.1f}", f"{tokens_to_hide(setup, gpus):,.0f}",
        ]
        for gpus in SHARDED
        for setup in SETUPS
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- layouts of many GPUs

NVLINK = 450e9
"""Bandwidth of NVLink on Hopper in one direction, in bytes/s."""
CAPACITY = 80e9
"""Bytes of memory of an H100."""


@dataclass(frozen=True)
class Study:
    """A model and its layouts."""

    model: Model
    tokens: int
    """Of a GPU in a microbatch."""
    recompute: bool
    layouts: tuple[Layout, ...]


STUDIES = (
    Study(MODELS[0], 4096, False, (
        Layout(shard=8), Layout(shard=64), Layout(shard=64, replicate=8), Layout(shard=64, replicate=64),
        Layout(shard=80, replicate=125),
    )),
    Study(MODELS[1], 8192, True, (
        Layout(shard=8), Layout(shard=64), Layout(tensor=8, shard=64),
        Layout(tensor=8, pipeline=4, shard=64, replicate=2), Layout(tensor=8, pipeline=5, shard=50, replicate=5),
    )),
    Study(MODELS[2], 8192, True, (
        Layout(shard=8, expert=8), Layout(shard=64, expert=8), Layout(shard=512, expert=32),
        Layout(pipeline=2, shard=256, replicate=8, expert=32), Layout(pipeline=2, shard=200, replicate=25, expert=8),
    )),
)  # fmt: skip

# ---------------------------------------------------------------------------------------------- rates

CONTENDERS = {MXFP8.name: "mxfp8, 32x32 weights", NVFP4.name: "nvfp4", MXFP4.name: "mxfp4"}
"""Format -> its name in the record of ``benchmarks.training``; tiles, since FSDP2 gathers their codes."""
SHAPE = "8192x8192x8192"


def speeds() -> dict[str, float]:
    """Format -> floating-point operations per second of forward and backward of a linear layer, measured."""
    _, rows = read_json(RESULTS / "training-h200.json", training.TrainRow, "layer")
    rows = [row for row in rows if row.shape == SHAPE]
    work = 6 * 8192**3 * 1e3
    found = {BF16.name: work / statistics.median(row.times[training.BASE] for row in rows)}
    for name, contender in CONTENDERS.items():
        row = next(row for row in rows if row.contender == contender)
        found[name] = work / row.times[training.EAGER]
    return found


def computation(study: Study, layout: Layout, speed: float) -> float:
    """Seconds of a GPU's products in a step: three for each layer, four if layers run again."""
    passes = 8 if study.recompute else 6
    tokens = study.tokens * layout.microbatches
    return passes * study.model.active * tokens / layout.pipeline / speed


def over_nodes(received: float, ranks: int, in_node: int) -> float:
    """Seconds of collectives over ``ranks`` GPUs, ``in_node`` of them in each node, of which each receives so much.

    The bytes of other nodes enter a node through the network ports of these GPUs, each through one of them, and are
    passed on over NVLink. Both overlap, so that the slower one counts.
    """
    nodes = max(ranks / in_node, 1)
    if ranks <= 1:
        return 0.0
    between = received / (1 - 1 / ranks) * (1 - 1 / nodes) / (in_node * NETWORK)
    return max(received / NVLINK, between) / EFFICIENCY


def communication(study: Study, wire: Wire, layout: Layout) -> dict[str, float]:
    """Seconds of each kind in a step, as if nothing ran beside it."""
    sent = wire_bytes(study.model, wire, layout, study.tokens, study.recompute)
    in_node = NODE // layout.tensor
    stage = study.model.layers / layout.pipeline
    hops = HOP * (max(layout.shard / in_node, 1) - 1) * stage
    gathers = 1 if layout.pipeline > 1 else 2
    out = {
        "FSDP gather": over_nodes(sent["FSDP gather"], layout.shard, min(in_node, layout.shard)) + gathers * hops,
        "FSDP reduce": over_nodes(sent["FSDP reduce"], layout.shard, min(in_node, layout.shard)) + hops,
        "DP reduce": sent["DP reduce"] / (NETWORK * EFFICIENCY),
        "TP": sent["TP"] / (NVLINK * EFFICIENCY),
        "PP": sent["PP"] / (NETWORK * EFFICIENCY),
    }
    away = 1 - NODE / layout.expert if layout.expert > NODE else 0.0  # tokens for experts of other nodes
    out["EP"] = sent["EP"] * max(away / NETWORK, (1 - away) / NVLINK) / EFFICIENCY
    return {kind: out[kind] for kind in KINDS}


# ---------------------------------------------------------------------------------------------- tables

CHECK_HEADER = ["config", "gathered bytes", "measured", "peak GB", "measured GB"]
HEADER = [
    "model", "GPUs", "layout", "tokens a GPU", "format", *(f"{kind} GB" for kind in KINDS), "received GB", "memory GB",
    "fits", "communication ms", "products ms",
]  # fmt: skip
FORMAT_HEADER = ["model", "GPUs", "format", "received GB", "over bf16", "memory GB", "products over bf16"]


def check_lines() -> list[list[str]]:
    """The formulas beside the record of two GPUs."""
    _, rows = read_json(RESULTS / "fsdp-h200.json", fsdp.FsdpRow, "train")
    found = []
    for row in rows:
        gather = MXFP8 if row.work == fsdp.CODES else BF16
        saved = BF16 if row.work == fsdp.BASE else MXFP8
        layout, tokens = Layout(shard=row.ranks), fsdp.BATCH * fsdp.LENGTH
        whole = sum(memory(MEASURED, saved, layout, tokens, recompute=False).values())
        received = sum(gathered(MEASURED, gather, layout))
        found.append([
            row.work, f"{received:,.0f}", f"{row.gathered_bytes:,}", f"{whole / 1e9:.2f}", f"{row.peak_bytes / 1e9:.2f}"
        ])  # fmt: skip
    return found


def line(study: Study, layout: Layout, wire: Wire, speed: float) -> list[str]:
    """One line of the table."""
    sent = wire_bytes(study.model, wire, layout, study.tokens, study.recompute)
    whole = sum(memory(study.model, wire, layout, study.tokens, study.recompute).values())
    cells = [f"{sent[kind] / 1e9:.2f}" if sent[kind] else "" for kind in KINDS]
    return [
        study.model.name, str(layout.gpus), str(layout), str(study.tokens * layout.microbatches), wire.name, *cells,
        f"{sum(sent.values()) / 1e9:.1f}", f"{whole / 1e9:.0f}", "yes" if whole < CAPACITY else "no",
        f"{sum(communication(study, wire, layout).values()) * 1e3:,.0f}",
        f"{computation(study, layout, speed) * 1e3:,.0f}",
    ]  # fmt: skip


def lines() -> list[list[str]]:
    """A line for each model, number of GPUs, and of bf16 and mxfp8."""
    rate = speeds()
    return [
        line(study, layout, wire, rate[wire.name])
        for study in STUDIES
        for layout in study.layouts
        for wire in (BF16, MXFP8)
    ]


def format_lines(index: int = 2) -> list[list[str]]:
    """Every format, for one of the layouts of each model."""
    rate, found = speeds(), []
    for study in STUDIES:
        layout = study.layouts[index]
        base = sum(wire_bytes(study.model, BF16, layout, study.tokens, study.recompute).values())
        for wire in WIRES:
            sent = sum(wire_bytes(study.model, wire, layout, study.tokens, study.recompute).values())
            whole = sum(memory(study.model, wire, layout, study.tokens, study.recompute).values())
            found.append([
                study.model.name, str(layout.gpus), wire.name, f"{sent / 1e9:.1f}", f"{sent / base:.2f}",
                f"{whole / 1e9:.1f}", f"{rate[BF16.name] / rate[wire.name]:.2f}",
            ])  # fmt: skip
    return found


def scale(args: argparse.Namespace) -> None:
    """Print the tables of all layouts and formats."""
    for header, found in ((CHECK_HEADER, check_lines()), (HEADER, lines()), (FORMAT_HEADER, format_lines())):
        print_table(header, found)
        print()


def sharding(args: argparse.Namespace) -> None:
    """Print when a layer hides its communication."""
    print_table(SHARDING_HEADER, sharding_lines())


SECTIONS = {
    "scale": Section("how many bytes does a GPU of 8 to 10,000 receive and store? Calculated, not measured", scale),
    "sharding": Section("when does computation hide the communication of FSDP2? Calculated, not measured", sharding),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    run(parser(__doc__ or "", SECTIONS), SECTIONS, argv)


if __name__ == "__main__":
    main()
