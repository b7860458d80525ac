"""Random programs: views, slices, reads, products and writes, on an MXTensor and on the dense tensor it stands for.

A dense twin lives beside each quantized tensor. Reads must agree with the twin's; after a write the twin becomes what
quantizing it again gives, written in place so that the twin's own views see it too.
"""

import random

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.tensor.dequantized_view import DequantizedView
from tests.helpers.compare import components_of, relative_error

PROGRAMS, LENGTH = 250, 16
FORMATS = ["mxfp8", "mxfp4", "mxfp6_e3m2", "nvfp4"]
SHAPES = [(8, 64), (33, 40), (3, 16, 32), (5, 1, 96), (2, 32, 48)]


class Pair:
    """A quantized tensor, its twin, and views taken from both."""

    def __init__(self, rng, generator, format):
        self.rng, self.generator, self.format = rng, generator, format
        shape = rng.choice(SHAPES)
        self.w = mx.quantize(self.values(shape), format)
        self.dense = self.w.dequantize()
        self.place = [t.data_ptr() for t in components_of(self.w)]
        self.views = [(self.w, self.dense)]

    def values(self, shape):
        return torch.randn(shape, generator=self.generator)

    # ------------------------------------------------------------------------------ steps

    def view(self):
        w, d = self.rng.choice(self.views)
        op = self.structural(d)
        got, expected = op(w), op(d)
        same(got, expected)
        if isinstance(got, mx.MXTensor) and got.numel() and expected._is_view():
            self.views.append((got, expected))

    def structural(self, d):
        rng, dim = self.rng, self.rng.randrange(d.dim())
        n = d.shape[dim]
        i, j, step = rng.randrange(n), rng.randrange(n + 1), rng.choice([1, 1, 2, 3])
        other = rng.randrange(d.dim())
        return rng.choice([
            lambda t: t.narrow(dim, min(i, j), abs(i - j)),
            lambda t: t[(slice(None),) * dim + (slice(i, j, step),)],
            lambda t: t.select(dim, i) if t.dim() > 1 else t,
            lambda t: t.transpose(dim, other),
            lambda t: t.unsqueeze(dim),
            lambda t: t.flatten(),
            lambda t: t.reshape(-1, t.shape[-1]),
            lambda t: t.squeeze(),
            lambda t: t.chunk(2, dim)[0],
            lambda t: t.detach(),
        ])  # fmt: skip

    def copy(self):
        w, d = self.rng.choice(self.views)
        rng, dim = self.rng, self.rng.randrange(d.dim())
        index = torch.randint(0, d.shape[dim], (3,), generator=self.generator)
        op = rng.choice([
            lambda t: torch.cat([t, t], dim),
            lambda t: torch.stack([t, t], dim),
            lambda t: t.index_select(dim, index),
            lambda t: t[(slice(None),) * dim + (index,)],
            lambda t: t.flip(dim),
            lambda t: t.roll(2, dim),
            lambda t: t.repeat(*[2] * t.dim()),
            lambda t: F.pad(t, (0, 3)),
            lambda t: t.contiguous(),
            lambda t: t.clone(),
        ])  # fmt: skip
        same(op(w), op(d))

    def read(self):
        w, d = self.rng.choice(self.views)
        dim = self.rng.randrange(d.dim())
        op = self.rng.choice(READS)
        same(op(w, dim), op(d, dim))

    def product(self):
        w, d = self.rng.choice(self.views)
        if d.dim() < 2 or not d.numel():
            return
        x = self.values((3, d.shape[-1]))
        y = self.values((d.shape[-2], 4))
        close(torch.matmul(x, w.mT), torch.matmul(x, d.mT))
        close(torch.matmul(w.mT, y), torch.matmul(d.mT, y))
        if d.dim() == 2:
            close(F.linear(x, w), F.linear(x, d))

    def write(self):
        target = self.rng.randrange(len(self.views))
        w, d = self.views[target]
        op, values = self.rng.choice(WRITES), self.values(d.shape)
        result = op(w, values)
        op(d, values)
        assert result is w
        self.init_state()

    def assign(self):
        dims = [self.rng.randrange(n) for n in self.dense.shape[: self.rng.choice([1, 2])]]
        index = tuple(self.rng.choice([i, slice(i, None), slice(None, i + 1, 2)]) for i in dims)
        value = self.rng.uniform(-3, 3)
        self.w[index] = value
        self.dense[index] = value
        self.init_state()

    def init_state(self):
        """The twin takes the rounding that the write did; memory and every view follow."""
        self.dense.copy_(mx.quantize(self.dense, self.format).dequantize())
        assert [t.data_ptr() for t in components_of(self.w)] == self.place
        for w, d in self.views:
            same(w, d)


READS = [
    lambda t, dim: t + 1.5,
    lambda t, dim: t * t,
    lambda t, dim: t.abs().sum(dim),
    lambda t, dim: t.exp().cumsum(dim),
    lambda t, dim: t > 0,
    lambda t, dim: t.sort(dim).values,
    lambda t, dim: t.to(torch.bfloat16),
    lambda t, dim: torch.where(t > 0, t, 0.0),
    lambda t, dim: t.softmax(dim),
    lambda t, dim: t.unfold(dim, min(2, t.shape[dim]), 1),
    lambda t, dim: torch.dstack([t, t]),
]
WRITES = [
    lambda t, v: t.add_(v, alpha=0.5),
    lambda t, v: t.mul_(v),
    lambda t, v: t.copy_(v),
    lambda t, v: t.lerp_(v, 0.25),
    lambda t, v: t.addcmul_(v, v),
    lambda t, v: t.clamp_(-0.5, 1.0),
    lambda t, v: t.masked_fill_(v > 0, 0.75),
    lambda t, v: t.fill_(1.25),
    lambda t, v: t.zero_(),
]


def same(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    values = got.dequantize() if isinstance(got, mx.MXTensor) else got
    assert type(values) in (torch.Tensor, DequantizedView) and torch.equal(values, expected)


def close(got, expected):
    assert type(got) is torch.Tensor and got.shape == expected.shape
    if expected.norm() > 0:
        assert relative_error(got, expected) < 1e-5
    else:
        assert not got.any()


def steps_of(pair):
    return [pair.view, pair.view, pair.view, pair.copy, pair.read, pair.product, pair.write, pair.assign]


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("format", FORMATS)
def test_a_random_program_is_the_program_on_dense_values(format):
    for number in range(PROGRAMS):
        rng = random.Random(f"{format} {number}")
        pair = Pair(rng, torch.Generator().manual_seed(number), format)
        done = []
        for _ in range(LENGTH):
            step = rng.choice(steps_of(pair))
            done.append(step.__name__)
            try:
                step()
            except Exception as error:
                raise AssertionError(f"program {number} of {format} on {tuple(pair.w.shape)}: {done}") from error
