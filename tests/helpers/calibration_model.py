"""A small model of blocks for the tests of calibration, its data, and what is compared of quantized ones."""

import dataclasses

import torch
from torch import nn

import mxtensor as mx


class Block(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, shift=None):
        out = x + self.drop(self.down(torch.relu(self.up(self.norm(x) + (0 if shift is None else shift)))))
        return (out, None) if self.form == "tuple" else out


class Model(nn.Module):
    """Blocks in a list; ``form`` is how they are called and what they return."""

    def __init__(self, form="plain", blocks=3):
        super().__init__()
        self.form = form
        self.embed, self.layers = nn.Embedding(50, 32), nn.ModuleList(Block(form) for _ in range(blocks))
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, ids, scale=1.0):
        x = self.embed(ids) * scale
        for i, block in enumerate(self.layers):
            if self.form == "named":
                x = block(x=x, shift=torch.full((32,), 0.1 * i))
            elif self.form == "between":
                x = block(x) * 1.5
            else:
                x = block(x, 0.1)
            x = x[0] if self.form == "tuple" else x
        return self.lm_head(x)


FORMS = ["plain", "named", "tuple", "between"]


def model(form="plain"):
    torch.manual_seed(0)
    m = Model(form).requires_grad_(False)
    for layer in (layer for block in m.layers for layer in (block.up, block.down)):
        layer.weight.mul_(3)
    return m.eval()


def batches(seed=1):
    torch.manual_seed(seed)
    ids = torch.randint(0, 50, (1, 256)).expand(4, 256).cumsum(0) % 12  # few tokens: their inputs are correlated
    return list(ids.split(2))


def weights(m):
    return {name: p for name, p in m.named_parameters() if isinstance(p, mx.MXTensor)}


def error(m, reference):
    ids = torch.cat(batches(2))
    return ((m(ids) - reference(ids)).norm() / reference(ids).norm()).item()


def same(a, b):
    a, b = weights(a), weights(b)
    return a.keys() == b.keys() and all(
        torch.equal(p, q) for name in a for p, q in zip(a[name].rowwise.tensors, b[name].rowwise.tensors, strict=True)
    )


class Stopped(BaseException):
    pass


def stopping(method, name, call):
    """``method`` as a subclass that raises Stopped in this call of ``name``; a state takes it for ``method``."""
    calls = []

    def counted(self, *args):
        calls.append(args)
        if len(calls) == call:
            raise Stopped
        return getattr(type(method), name)(self, *args)

    made = type("Stopping", (type(method),), {name: counted, "__qualname__": type(method).__qualname__})
    made.calls = calls
    return made(*dataclasses.astuple(method))
