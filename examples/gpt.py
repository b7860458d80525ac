"""A small GPT over bytes in plain torch, and the text that ``examples.train_lm`` trains it on."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """Sizes of a model, of its batches and of its default run."""

    layers: int
    width: int
    heads: int
    context: int
    """Bytes of a window."""
    batch: int
    """Windows of a step."""
    steps: int
    rate: float
    """The peak learning rate."""
    warm_up: int
    """Steps until the peak; after it the rate falls with the square root of the step, whatever the run's length."""
    every: int
    """Steps between two evaluations on the held-out text."""
    evaluated: int = 4
    """Batches of an evaluation."""


SIZES = {
    "tiny": Size(layers=1, width=32, heads=2, context=32, batch=8, steps=60, rate=1e-2, warm_up=10, every=20),
    "small": Size(layers=4, width=128, heads=4, context=64, batch=16, steps=1000, rate=3e-3, warm_up=100, every=100),
    "base": Size(layers=12, width=768, heads=12, context=1024, batch=16, steps=2000, rate=1e-3, warm_up=200, every=100),
    "medium": Size(2, 1024, 8, context=512, batch=32, steps=2000, rate=1e-3, warm_up=200, every=100, evaluated=16),
    "large": Size(10, 1024, 16, context=1024, batch=32, steps=9200, rate=8e-4, warm_up=300, every=200, evaluated=8),
}
"""``small`` takes two minutes on a CPU. For GPUs: ``base`` (86 million parameters), and those of ``benchmarks.parity``,
``medium`` (26) and ``large`` (127)."""


def narrow(x: Tensor) -> Tensor:
    """``x`` in the dtype of torch.autocast, in which a norm gives float32: half the bytes for the cast that follows."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class Block(nn.Module):
    """A transformer layer with pre-norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same shape."""
        batch, time, width = x.shape
        each = (batch, time, -1, 3, width // self.heads)  # all heads, or those of this rank
        q, k, v = self.qkv(narrow(self.norm1(x))).view(each).permute(3, 0, 2, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(heads.transpose(1, 2).flatten(2))
        out: Tensor = x + self.down(F.gelu(self.up(narrow(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Bytes (batch, time) to logits of the next bytes (batch, time, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (batch, time <= context) to float (batch, time, 256)."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]

    def loss(self, windows: Tensor) -> Tensor:
        """Nats per byte of ``windows``, (batch, context + 1): each byte is predicted from the bytes before it."""
        tokens = windows.long()
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


PAPER_LAYERS = ("qkv", "projection", "up", "down")
"""Names of the layers in every block that "Recipes for Pre-training LLMs with MXFP8" quantizes."""


def paper_layers(module: nn.Module, fqn: str) -> bool:
    """Whether the paper quantizes this module."""
    return fqn.rpartition(".")[2] in PAPER_LAYERS


def is_linear(module: nn.Module, fqn: str) -> bool:
    """Whether this is a linear layer, the head included."""
    return isinstance(module, nn.Linear)


# ---------------------------------------------------------------------------------------------- the text


def load_text(path: Path | None) -> Tensor:
    """uint8 (bytes,): the file, or all top-level modules of Python's standard library in alphabetical order."""
    paths = [path] if path is not None else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """The first nine tenths for training, and the last tenth, held out."""
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """The windows that start at ``starts``: (starts, length) bytes."""
    return text[starts[:, None] + torch.arange(length)]
