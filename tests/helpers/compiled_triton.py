"""Layers that are recorded on the CPU: with Triton's casts, launched by addresses as on a device and interpreted
(``launches``); or with the casts in C++, which take a thousandth of the time (``native``)."""

import ctypes

import pytest
import torch

from mxtensor.core import recording
from mxtensor.core.kernel import Kernel
from mxtensor.kernels.gemm import dequant, scaled_mm
from mxtensor.kernels.gemm import select as gemm_select
from mxtensor.kernels.gemm.scaled_mm_contract import SCALINGS
from mxtensor.kernels.gemm.spec import needs_codes
from mxtensor.kernels.operands import format_of
from mxtensor.kernels.quantize import choose_cast, choose_pair, cpu_casts, definition, triton_ops
from mxtensor.kernels.runtime import triton_launch
from mxtensor.numerics.formats import FP32, FULL, Format
from mxtensor.numerics.operand import Operand
from tests.kernels.quantize.conftest import set_tiles

TUPLES = [
    (choose_cast, "QUANTIZE", triton_ops.QUANTIZE),
    (choose_cast, "DEQUANTIZE", triton_ops.DEQUANTIZE),
    (choose_cast, "FAKE_QUANTIZE", triton_ops.FAKE_QUANTIZE),
    (choose_pair, "QUANTIZE_BOTH", triton_ops.QUANTIZE_BOTH),
    (choose_pair, "PAIR", triton_ops.PAIR),
]


class Compiled:
    """What Triton made of a launch: it runs for other addresses, of tensors like those of the first call."""

    packed_metadata, error = "metadata", None

    def __init__(self, interpret, arguments, options, launches):
        self.interpret, self.options, self.launches, self.function = interpret, options, launches, self
        self.like = [(a.dtype, tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else None for a in arguments]

    def run(self, x, y, z, stream, function, metadata, *rest):
        if self.error is not None:
            raise self.error
        assert (y, z, function, metadata, rest[:3]) == (1, 1, self, "metadata", (None, None, None))
        addresses = any(like and type(a) is int for a, like in zip(rest[3:], self.like, strict=True))
        self.launches.append((stream, addresses))
        given = [a if like is None else at(a, *like) for a, like in zip(rest[3:], self.like, strict=True)]
        self.interpret((x,))(*given, **self.options)


def at(address, dtype, shape, stride):
    """The tensor of this geometry at an address; a tensor itself."""
    if isinstance(address, torch.Tensor):
        return address
    count = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def chosen(a, b):
    """The scaling of two float8 operands with one scale each, or why there is none."""
    formats = format_of(a), format_of(b)
    one_scale = all(isinstance(f, Format) and f.block == (FULL, FULL) and f.scale is FP32 for f in formats)
    return SCALINGS[0] if one_scale and needs_codes(a, b) is None else "not here"


@pytest.fixture
def torchs_products(recorded_on_a_cpu, monkeypatch):
    """Products are torch's, since kernels of the CPU write memory without saying so: ``torch._scaled_mm`` for float8
    with one scale per tensor."""
    per_tensor = Kernel("scaled_mm", scaled_mm.refuses, scaled_mm.run)
    others = tuple(kernel for kernel in gemm_select.GEMM[1:] if kernel.name != "cpu_codes")
    for owner, name, value in (
        (dequant, "_can_slice", lambda spec, b: False),
        (gemm_select, "GEMM", (per_tensor, *others)),
        (scaled_mm, "chosen", lambda table, spec, a, b: chosen(a, b)),
        (scaled_mm, "plan_here", lambda *rest: SCALINGS[0]),
    ):
        monkeypatch.setattr(owner, name, value)


def _as_step(quantize):
    """``quantize(x, cast, amax)``, which gives an operand, as one step of a program."""

    def run(x, cast, *amax):
        like = []

        def components(x, *amax):
            operand = quantize(x, cast, *amax)
            like[:] = [operand]
            return tuple(operand.tensors)  # not those of ``like``, which another thread may have replaced

        return Operand.from_tensors(list(recording.call(components, x, *amax)), like[0].format, like[0].shape)

    return run


def _dequantize(operand, dtype):
    def run(*tensors):
        return cpu_casts.DEQUANTIZE.run(Operand.from_tensors(list(tensors), operand.format, operand.shape), dtype)

    return recording.call(run, *operand.tensors)


@pytest.fixture
def native(torchs_products, monkeypatch):
    """Layers are recorded on the CPU, with its casts in C++ and in plain torch."""
    steps = [Kernel(k.name, k.refuses, _as_step(k.run)) for k in (cpu_casts.QUANTIZE, definition.QUANTIZE)]
    decode = Kernel("cpu", cpu_casts.DEQUANTIZE.refuses, _dequantize)
    for owner, name, value in (
        (choose_cast, "QUANTIZE", tuple(steps)),
        (choose_cast, "DEQUANTIZE", (decode, *choose_cast.DEQUANTIZE)),
        (definition, "encode_with_amax", _as_step(definition.encode_with_amax)),
    ):
        monkeypatch.setattr(owner, name, value)


@pytest.fixture
def interpreted_launches(torchs_products, triton_anywhere, one_rounding, whole_reductions, monkeypatch):
    """Layers are recorded on the CPU, with Triton's casts, launched in the way of the interpreter."""
    set_tiles(monkeypatch, rows=64, cols=128, full=64, groups=2, wide=64)
    for module, name, kernel in TUPLES:
        here = Kernel(kernel.name, kernel.refuses, kernel.run, None, kernel.run_traced)
        monkeypatch.setattr(module, name, (here, *getattr(module, name)[1:]))


@pytest.fixture
def launches(interpreted_launches, monkeypatch):
    """Layers are recorded on the CPU, with Triton's casts, launched by addresses: (stream, whether by addresses) of
    each launch."""
    from triton.runtime.interpreter import InterpretedFunction

    made = []
    original = InterpretedFunction.__getitem__

    def getitem(self, grid):
        def call(*arguments, **options):
            original(self, grid)(*arguments, **options)
            return Compiled(lambda grid: original(self, grid), arguments, options, made)

        return call

    for owner, name, value in (
        (InterpretedFunction, "__getitem__", getitem),
        (triton_launch, "interpreted", lambda: False),
        (triton_launch, "_compiled", {}),
        (triton_launch.compat, "current_cuda_device", lambda: 0),
        (triton_launch.compat, "current_cuda_stream", lambda index: 0),
    ):
        monkeypatch.setattr(owner, name, value)
    return made
