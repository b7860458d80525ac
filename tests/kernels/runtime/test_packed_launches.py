"""Packed launches: which arguments move with the addresses of a call, tensor maps too."""

import struct

import pytest
import torch

from mxtensor.core import recording
from mxtensor.kernels.runtime import host_calls, nvrtc
from mxtensor.kernels.runtime.cuda_driver import ALIGNMENT, BYTES, TensorMap
from mxtensor.kernels.runtime.host_calls import launch_steps, moved_arguments, packed
from tests.kernels.runtime.test_host_calls import Driver

X, OUT = 1 << 61, 1 << 60
MAP = TensorMap(X + 32, (256, 7), 512, (64, 16))
LAYOUT = struct.Struct("128s3Q40x")


class Kernel:
    """A kernel of a map and three integers."""

    def step(self, x, y, memory, arguments):
        block = bytearray(LAYOUT.size)
        nvrtc.pack(LAYOUT, block, arguments)
        return host_calls.Step(5, x, y, 1, 128, memory, 0, 0, bytes(block), (BYTES, 0, BYTES + 8, BYTES + 16), ()), None

    def offset_of(self, argument):
        return nvrtc.offsets(LAYOUT)[argument]


@pytest.fixture
def driver(monkeypatch):
    """A driver that notes what it launches; a map is its address, its columns and zeros."""
    driver = Driver()
    functions = {"cuLaunchKernelEx": driver.launch, "cuCtxGetCurrent": driver.current}
    lib = type("Lib", (), functions | {"cuTensorMapReplaceAddress": driver.replace})
    monkeypatch.setattr(host_calls, "driver", lambda: lib)
    monkeypatch.setattr(TensorMap, "packed", lambda t: struct.pack("QQ112x", t.address, t.sizes[0]))
    return driver


def test_addresses_and_maps_that_are_relative_to_a_base_move():
    steps = [(None, (1, 1), 0, [MAP, 5, OUT + 8, 1.5]), (None, (1, 1), 0, [X])]
    assert moved_arguments(steps, (X, OUT)) == [(0, 0, 0, 32), (0, 2, 1, 8), (1, 0, 0, 0)]


def test_offsets_count_a_map_as_one_argument():
    assert nvrtc.offsets(LAYOUT)[:4] == (0, BYTES, BYTES + 8, BYTES + 16) and LAYOUT.size % ALIGNMENT == 0


def test_each_call_launches_with_its_own_addresses(driver):
    run = packed([(Kernel(), (3, 2), 64, [MAP, 9, OUT + 8, X])], (X, OUT))
    for x, out in ((1024, 4096), (1 << 46, 1 << 45)):
        driver.launched.clear(), driver.replaced.clear()
        run(77, x, out)
        [(shape, stream, *_, values)] = driver.launched
        assert shape == (3, 2, 1, 128, 1, 1, 64) and stream == 77
        assert values == [9, x + 32, out + 8, x]  # the second is the start of the map
        [(place, before, address)] = driver.replaced
        assert place == 0 and address == x + 32
        assert struct.unpack_from("QQ", before) == (0, 256)  # made at an address that the driver accepts


def test_recorded_steps_read_the_tensors_of_each_call(driver):
    """The lowest four bits of an address are those of the first call: other bits are another kind."""
    made = []

    class Noted(Kernel):
        def __call__(self, x, y, memory, arguments):
            made.append(arguments)

    def steps(x, none, out):
        assert none is None and x.stride() == (4, 1) and x.stride(0) == 4 and x.dim() == 2 and x.element_size() == 4
        tiles = TensorMap(x.data_ptr() + 16, tuple(x.shape), 512, (64, 16))
        return [(Noted(), (1, 1), 0, [tiles, x.shape[0], out.data_ptr() + 8, x.data_ptr() & 15])]

    tensors = [torch.randn(6, 4), None, torch.randn(17)[1:]]

    def work():
        launch_steps(steps, tensors)
        return tensors[0]

    _, program = recording.record(work, tensors, lambda out: [out])
    assert made[0][2] == tensors[2].data_ptr() + 8
    x, out = torch.randn(6, 4), torch.randn(17)[1:]
    program(x, None, out)
    [(*_, values)] = driver.launched
    assert values[:2] == [6, x.data_ptr() + 16] and values[2] == out.data_ptr() + 8
    assert values[3] == tensors[0].data_ptr() & 15
