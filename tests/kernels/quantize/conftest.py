"""Fixtures of the cast tests: memory that shows stray writes, Triton's interpreter, small and large tiles."""

import functools
import math

import pytest
import torch

from mxtensor.kernels.quantize import triton_columns, triton_common, triton_rows
from mxtensor.kernels.quantize import triton_common as tiles


@pytest.fixture
def interpreted():
    """The ops run on the CPU, in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("where there is a device, nothing is interpreted; test_gpu.py has compiled casts")


class Torch:
    """``torch`` whose ``empty`` is inside a buffer of 0xAA, which shows missing and stray writes."""

    MARGIN, BYTE = 4096, 0xAA

    def __init__(self):
        self.buffers = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, shape, dtype, device):
        size = math.prod(torch.empty(shape, device="meta").shape) * dtype.itemsize
        buffer = torch.full((size + 2 * self.MARGIN,), self.BYTE, dtype=torch.uint8)
        self.buffers.append(buffer)
        return buffer[self.MARGIN : self.MARGIN + size].view(dtype).view(shape)

    def intact(self):
        edges = [torch.cat([b[: self.MARGIN], b[-self.MARGIN :]]) for b in self.buffers]
        return all((e == self.BYTE).all() for e in edges)


@pytest.fixture
def guarded_memory(monkeypatch):
    """Memory that the host code allocates is full of 0xAA, and nothing around it is written."""
    memory = Torch()
    for module in (triton_common, triton_rows, triton_columns):
        monkeypatch.setattr(module, "torch", memory)
    yield memory
    assert memory.intact()


@pytest.fixture
def one_rounding(monkeypatch):
    """float32 to bfloat16 to nearest, as devices do; the interpreter of Triton 3.7 truncates, and loses subnormals."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def cast(builder, source, kind):
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return others(builder, source, kind)
        rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    others = InterpreterBuilder.cast_impl
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast)


@pytest.fixture
def whole_reductions(monkeypatch):
    """``tl.reduce`` with a function of ours, one slice at a time; the interpreter does one element at a time."""
    from triton.runtime.interpreter import ReduceOps

    def reduce_slices(self, inputs):
        ((data, dtype),) = [(x.handle.data, x.dtype) for x in inputs]
        slices = [self.to_tensor(data.take(i, self.axis), dtype) for i in range(data.shape[self.axis])]
        return [functools.reduce(self.combine_fn.fn, slices)]

    monkeypatch.setattr(ReduceOps, "generic_reduce", reduce_slices)


def set_tiles(monkeypatch, rows, cols, full, groups, wide):
    """Programs of ``rows`` x ``cols`` values; along columns of ``groups`` x ``wide``."""

    def sized(table, *tile):
        return {key: (*tile, *old[len(tile) :]) for key, old in table.items()}

    for name, value in {
        "ROW_TILES": sized(tiles.ROW_TILES, rows, cols),
        "DECODE_TILES": sized(tiles.DECODE_TILES, rows, cols),
        "PAIR_TILE": (rows, cols // 2, *tiles.PAIR_TILE[2:]),
        "FULL_ROW_TILE": (full, *tiles.FULL_ROW_TILE[1:]),
        "COLUMN_TILES": sized(tiles.COLUMN_TILES, groups, wide),
        "WORD_TILES": sized(tiles.WORD_TILES, groups, wide // 2),
        "ROUND_TILES": {False: (rows, cols // 2, 2), True: (groups * 16, wide // 2, 4)},
        "TRANSPOSE_TILE": (groups * 8, wide, *tiles.TRANSPOSE_TILE[2:]),
    }.items():
        monkeypatch.setattr(tiles, name, value)


@pytest.fixture
def small_tiles(monkeypatch):
    """Several programs to a small matrix, so that it has inner tiles and every kind of edge."""
    set_tiles(monkeypatch, rows=16, cols=128, full=64, groups=2, wide=128)


@pytest.fixture
def large_tiles(monkeypatch):
    """One or a few programs to all values of a dtype."""
    set_tiles(monkeypatch, rows=512, cols=2048, full=2048, groups=4, wide=2048)
