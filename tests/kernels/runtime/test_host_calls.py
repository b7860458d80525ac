"""Host calls: what reaches the driver and cuBLASLt, compiled and in Python, from threads, and after errors."""

import ctypes
import threading

import pytest

from mxtensor.kernels.runtime import host_calls
from mxtensor.kernels.runtime.host_calls import MOST_ADDRESSES, MOST_ARGUMENTS, MOST_BYTES, PythonLaunches, Step

POINTER = ctypes.c_void_p
BLOCK = b"".join(n.to_bytes(8, "little") for n in (1, 22, 333, 4444))
STEP = Step(99, 5, 6, 7, 128, 1024, 4096, 2, BLOCK, (0, 8, 16, 24), ((8, 0, 0), (24, 1, 16)))
OTHER = STEP._replace(kernel=98, x=1, moved=((0, 1, 1),))
MAPPED = STEP._replace(block=bytes(range(128)) + BLOCK, offsets=(128, 0, 8, 152), moved=(), maps=((0, 1, 16),))
"""A step with a tensor map, which begins the block."""


def compiled():
    module = host_calls.module()
    return module if not isinstance(module, str) else pytest.skip(module)


class Driver:
    """Notes launches: the settings, the kernel and four arguments of 64 bits."""

    def __init__(self):
        self.launched, self.status, self.context, self.used = [], 0, 1, 0
        self.launch = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, POINTER, POINTER)(self._launch)
        self.current = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(POINTER))(self._current)
        self.replaced, self.map_status = [], 0
        self.replace = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)(self._replace)

    def _launch(self, settings, kernel, pointers, extra):
        s = host_calls.LaunchSettings.from_address(settings)
        values = [ctypes.c_uint64.from_address(p).value for p in (POINTER * 4).from_address(pointers)]
        attributes = ctypes.c_uint64.from_address(settings + host_calls.LaunchSettings.attributes.offset).value
        shape = s.x, s.y, s.z, s.threads, s.ty, s.tz, s.memory
        self.launched.append((shape, s.stream, attributes, s.count, kernel, values))
        return self.status

    def _current(self, context):
        context[0] = self.context
        return 0

    def _replace(self, tensor_map, address):
        self.replaced.append((tensor_map % 64, ctypes.string_at(tensor_map, 128), address))
        ctypes.c_uint64.from_address(tensor_map).value = address
        return self.map_status

    def use_context(self):
        self.used += 1

    def error(self, status):
        raise RuntimeError(f"error {status}")

    def launches(self, kind, addresses, steps):
        given = [host_calls.address_of(f) for f in (self.launch, self.current, self.replace)]
        make = PythonLaunches if kind == "python" else compiled().Launches
        return make(*given, self.use_context, self.error, addresses, tuple(map(Step._make, steps)), None)


@pytest.fixture(params=["compiled", "python"])
def kind(request):
    return request.param


def test_all_launches_get_the_stream_and_the_addresses(kind):
    driver = Driver()
    run = driver.launches(kind, 2, (STEP, OTHER))
    for stream, addresses in ((0, (10, 20)), (1 << 47, ((1 << 48) + 8, 40))):
        driver.launched.clear()
        run(stream, *addresses)
        first, second = addresses
        shape = 5, 6, 7, 128, 1, 1, 1024
        assert driver.launched == [
            (shape, stream or None, 4096, 2, 99, [1, first, 333, second + 16]),
            ((1, *shape[1:]), stream or None, 4096, 2, 98, [second + 1, 22, 333, 4444]),
        ]
    assert driver.used == 0


def test_the_driver_moves_tensor_maps_to_the_addresses(kind):
    driver = Driver()
    run = driver.launches(kind, 2, (MAPPED,))
    for address in (640, 1 << 47):
        driver.replaced.clear(), driver.launched.clear()
        run(0, 5, address)
        assert [(place, moved) for place, _, moved in driver.replaced] == [(0, address + 16)]
        assert driver.replaced[0][1][8:] == bytes(range(8, 128))
        [(*_, values)] = driver.launched
        assert values == [1, address + 16, int.from_bytes(bytes(range(8, 16)), "little"), 4444]


def test_an_error_of_a_tensor_map_ends_the_launches_and_is_raised(kind):
    driver = Driver()
    driver.map_status = 1
    run = driver.launches(kind, 2, (STEP, MAPPED, OTHER))
    with pytest.raises(RuntimeError, match="error 1"):
        run(0, 1, 2)
    assert len(driver.launched) == 1


def test_a_thread_without_a_context_gets_torch_s(kind):
    driver = Driver()
    driver.context = None
    driver.launches(kind, 2, (STEP,))(0, 1, 2)
    assert driver.used == 1 and len(driver.launched) == 1


def test_an_error_ends_the_launches_and_is_raised(kind):
    driver = Driver()
    driver.status = 701
    run = driver.launches(kind, 2, (STEP, OTHER))
    with pytest.raises(RuntimeError, match="error 701"):
        run(0, 1, 2)
    assert len(driver.launched) == 1


def test_another_number_of_addresses_is_refused(kind):
    run = Driver().launches(kind, 2, (STEP,))
    for given in ((), (0,), (0, 1), (0, 1, 2, 3)):
        with pytest.raises(TypeError, match="takes a stream and 2 addresses"):
            run(*given)


def test_threads_do_not_mix_their_arguments(kind):
    driver = Driver()
    run = driver.launches(kind, 2, (STEP,))

    def work(base):
        for i in range(200):
            run(base, base + i, base + i)

    threads = [threading.Thread(target=work, args=(n << 32,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launched) == 600
    assert all(values == [1, v, 333, v + 16] and v >> 32 == s >> 32 for _, s, _, _, _, values in driver.launched
               for v in (values[1],))  # fmt: skip


@pytest.mark.parametrize(
    ("step", "addresses"),
    [
        (STEP._replace(moved=((32, 0, 0),)), 2), (STEP._replace(moved=((25, 0, 0),)), 2), (STEP, 1),
        (MAPPED._replace(maps=((64, 0, 0),)), 2), (MAPPED, 1), (STEP._replace(maps=(1,)), 2),
        (STEP._replace(offsets=(99,)), 2), (STEP, MOST_ADDRESSES + 1), (STEP._replace(block=bytes(MOST_BYTES + 8)), 2),
        (STEP._replace(offsets=(0,) * (MOST_ARGUMENTS + 1)), 2), (STEP._replace(block="text"), 2),
    ],
)  # fmt: skip
def test_a_step_outside_of_its_block_is_refused(step, addresses):
    with pytest.raises((ValueError, TypeError)):
        Driver().launches("compiled", addresses, (step,))


def test_launches_that_are_too_large_are_left_to_others():
    assert host_calls.launches(MOST_ADDRESSES + 1, [STEP]) is None
    assert host_calls.launches(2, [STEP._replace(block=bytes(MOST_BYTES + 8))]) is None
    assert host_calls.launches(2, [STEP._replace(offsets=(0,) * (MOST_ARGUMENTS + 1))]) is None


@pytest.mark.parametrize("missing", ["headers", "compiler"])
def test_without_the_module_python_launches(monkeypatch, missing, capfd):
    driver = Driver()
    lib = type("Lib", (), {"cuLaunchKernelEx": driver.launch, "cuCtxGetCurrent": driver.current})
    monkeypatch.setattr(host_calls, "driver", lambda: lib)
    if missing == "headers":
        monkeypatch.setattr(host_calls.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    else:
        monkeypatch.setattr(host_calls, "load", lambda *args, **named: "there is no C++ compiler")
    monkeypatch.setattr(host_calls, "module", host_calls.module.__wrapped__)
    run = host_calls.launches(2, [STEP])
    assert type(run) is PythonLaunches
    run(3, 10, 20)
    assert driver.launched[0][-1] == [1, 10, 333, 36]


class Blas:
    """Notes products and the attributes of their description at that time."""

    def __init__(self):
        self.attributes, self.products, self.status = {}, [], 0
        self.set = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, ctypes.c_int, POINTER, ctypes.c_size_t)(self._set)
        kinds = [POINTER] * 14 + [ctypes.c_size_t, POINTER]
        self.matmul = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._matmul)

    def _set(self, description, attribute, value, size):
        assert size == 8
        self.attributes[description, attribute] = ctypes.c_uint64.from_address(value).value
        return 0

    def _matmul(
        self, handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algo, *rest
    ):
        multipliers = [ctypes.c_float.from_address(p).value for p in (alpha, beta)]
        layouts = a_layout, b_layout, c_layout, d_layout
        self.products.append(
            (handle, description, multipliers, (a, b, c, d), layouts, ctypes.string_at(algo, 64), tuple(rest))
        )
        return self.status


def product(blas, attributes=(17, 18)):
    functions = [host_calls.address_of(f) for f in (blas.matmul, blas.set)]
    return compiled().Product(*functions, 1, 2, 3, 4, 5, 6, bytes(range(64)), 4096, attributes, Driver().error, None)


def test_a_product_gets_its_layouts_and_the_addresses_of_the_call():
    blas = Blas()
    product(blas)(7, 100, 200, 300, 400, 500, 600)
    assert blas.attributes == {(2, 17): 500, (2, 18): 600}
    assert blas.products == [(1, 2, [1.0, 0.0], (100, 200, 300, 300), (3, 4, 5, 6), bytes(range(64)), (400, 4096, 7))]


def test_a_product_with_a_bias_and_an_error():
    blas = Blas()
    run = product(blas, (17, 18, 8))
    run(0, 100, 200, 300, 0, 500, 600, 700)
    assert blas.attributes[2, 8] == 700
    blas.status = 15
    with pytest.raises(RuntimeError, match="error 15"):
        run(0, 100, 200, 300, 0, 500, 600, 700)
    with pytest.raises(TypeError, match="takes a stream and 7 addresses, got 3 values"):
        run(0, 1, 2)
