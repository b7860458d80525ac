"""Bytes on the wire and in memory of a GPU that trains a transformer, calculated: shapes, layouts, formats, formulas.

All bytes are those that one GPU receives in one step (all-gather, reduce-scatter, all-to-all, send), or stores. What
each kind sends is what mxtensor sends; ``benchmarks.scale`` compares the formulas with a measurement on two GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class Part:
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
    def of(cls, model: Model, layout: Layout) -> Part:
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
    part, times = Part.of(model, layout), 1 if layout.pipeline > 1 else 2
    dense, experts = part.bytes_of_layer(wire)
    return times * part.layers * dense + part.rest * VALUE, times * part.layers * experts


# ---------------------------------------------------------------------------------------------- the wire

KINDS = ("FSDP gather", "FSDP reduce", "DP reduce", "TP", "EP", "PP")


def wire_bytes(model: Model, wire: Wire, layout: Layout, tokens: int, recompute: bool) -> dict[str, float]:
    """What a GPU receives in a step, by kind. ``tokens``: rows of a GPU in a microbatch; ``recompute``: as in
    ``memory``."""
    part, rows = Part.of(model, layout), tokens * layout.microbatches
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
    part = Part.of(model, layout)
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
