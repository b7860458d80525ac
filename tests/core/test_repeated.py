"""Repeated calls: later calls have the bits of the first, for other data, weights and threads, and hold no tensor.

Products of few rows run the CUDA sources on the CPU (``helpers/cuda_on_cpu.py``), which takes addresses as a GPU does.
"""

import copy
import gc
import pickle
import threading
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import mxtensor as mx
from mxtensor.core.repeated import KINDS
from mxtensor.kernels.gemm import select
from mxtensor.kernels.runtime import host_calls
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.numerics.operand import Operand
from mxtensor.tensor.mxtensor import MXTensor
from tests.helpers import cuda_on_cpu

needs_compiler = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
ONE_LAUNCH = LaunchConfig(1, 1, 1, 4, 4, 3, 1, 1, True, persistent=1)
OF_GROUPS = ONE_LAUNCH._replace(persistent=0)


class Launches(list):
    """The addresses of each launch that a program made. ``config``: the launch config of products."""

    config = ONE_LAUNCH


@pytest.fixture
def launches(device, cuda_sources_on_the_cpu, monkeypatch):
    """Products of few rows run on the CPU."""
    device((9, 0))
    calls = Launches()
    monkeypatch.setattr(launch, "choose_config", lambda *args: calls.config)
    launch.resolve.cache_clear()
    for name in ("GEMM", "GROUPED"):
        here = (replace(k, device=None) if k.name == "small_m" else k for k in getattr(select, name))
        monkeypatch.setattr(select, name, tuple(here))

    def packed(steps, bases):
        run = cuda_on_cpu.packed_steps(steps, bases)
        return lambda stream, *addresses: calls.append(addresses) or run(stream, *addresses)

    monkeypatch.setattr(host_calls, "packed", packed)
    yield calls
    launch.resolve.cache_clear()


@pytest.fixture
def launched(launches):
    """How many launches of programs a call takes."""

    def count(module, *args):
        before = len(launches)
        with torch.no_grad():
            module(*args)
        return len(launches) - before

    return count


def layer(config, bias=True, out=48):
    return mx.quantize_(torch.nn.Linear(320, out, bias=bias, dtype=torch.bfloat16), config)


def in_general(module, *args):
    """The result of a call that no program makes: ``explain()`` sees all of it."""
    with mx.explain(), torch.no_grad():
        return module(*args)


# ---------------------------------------------------------------------------------------------- F.linear


@pytest.mark.exhaustive(quick=2)
@needs_compiler
@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", "nvfp4", "nvfp4-weight-only", "mxfp6"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_later_calls_have_the_bits_of_the_first(config, bias, mode, launches):
    linear, inputs = layer(config, bias), [torch.randn(*shape, 320).bfloat16() for shape in ((1,), (3,), (1, 2), ())]
    with mode():
        first, second = ([linear(x) for x in inputs] for _ in range(2))
        assert not launches
        third = [linear(x) for x in inputs]
        assert len(launches) == len(inputs)
        others = [linear(x + 1) for x in inputs]
    for one, two, three, other in zip(first, second, third, others, strict=True):
        assert one.shape == three.shape and one.dtype == three.dtype
        assert torch.equal(one, two) and torch.equal(one, three) and not torch.equal(one, other)


@needs_compiler
def test_a_kind_serves_other_weights_and_biases_of_its_layout(launched):
    """No address is stored: a program reads the tensors of its call."""
    layers, x = [layer("mxfp8") for _ in range(3)], torch.randn(2, 320).bfloat16()
    assert [launched(linear, x) for linear in layers] == [0, 0, 1]
    for linear in layers:
        assert launched(linear, x) == 1
        with torch.no_grad():
            assert torch.equal(linear(x), in_general(linear, x))
    linear = layers[0]
    linear.bias = torch.nn.Parameter(linear.bias + 1)
    linear.load_state_dict(layers[1].state_dict())  # into the same memory
    with torch.no_grad():
        assert torch.equal(linear(x), layers[1](x))
        linear.weight.mul_(2)
        assert torch.equal(linear(x), in_general(linear, x))
        linear.weight.data = layers[2].weight.detach() * 3  # other memory
        assert torch.equal(linear(x), in_general(linear, x))


def with_components(weight, **changes):
    """An MXTensor over the same codes and scales, seen otherwise."""
    operand = Operand(**{"data": weight.rowwise.data, "scale": weight.rowwise.scale, "global_scale": None} | changes)
    return MXTensor(operand, None, mx.LinearRecipe.inference(mx.Cast.of(operand.format)), torch.bfloat16)


@needs_compiler
def test_the_same_memory_seen_otherwise_is_another_kind(launches):
    whole = mx.quantize(torch.randn(64, 640).bfloat16(), "mxfp8")
    e4m3, e5m2 = mx.get_format("mxfp8"), mx.get_format("mxfp8_e5m2")
    data, scale = whole.rowwise.data, whole.rowwise.scale
    seen = [
        with_components(whole, format=e4m3, shape=(64, 640)),
        with_components(whole, data=data.view(128, 320), scale=scale.view(128, 10), format=e4m3, shape=(128, 320)),
        with_components(whole, data=data[:32], scale=scale[:32], format=e4m3, shape=(32, 640)),
        with_components(
            whole, data=data[:1].expand(64, -1), scale=scale[:1].expand(64, -1), format=e4m3, shape=(64, 640)
        ),
        with_components(whole, data=data.view(e5m2.element.dtype), format=e5m2, shape=(64, 640)),
    ]
    with torch.no_grad():
        for _ in range(3):
            for w in seen:
                x = torch.ones(2, w.shape[1], dtype=torch.bfloat16)
                expected = F.linear(x, w.clone())  # in memory of its own
                torch.testing.assert_close(F.linear(x, w), expected, rtol=0, atol=0, equal_nan=True)
    assert launches


@needs_compiler
def test_another_recipe_of_the_same_codes_is_another_kind(launched):
    weight, x = layer("mxfp8-weight-only").weight, torch.randn(2, 320).bfloat16()
    cast, operand = mx.Cast.of("mxfp8"), weight.rowwise
    recipes = [mx.LinearRecipe.inference(cast), mx.LinearRecipe.inference(cast, cast)]
    plain, both = (MXTensor(operand, None, recipe, torch.bfloat16) for recipe in recipes)
    assert [launched(F.linear, x, w) for w in (plain, both) * 3] == [0, 0, 0, 0, 1, 1]
    asks = MXTensor(operand, None, mx.LinearRecipe.inference(cast, None, "emulated"), torch.bfloat16)
    assert [launched(F.linear, x, asks) for _ in range(3)] == [0, 0, 0]


@needs_compiler
def test_an_input_of_another_dtype_layout_or_alignment_is_another_kind(launched):
    weight, x = layer("mxfp8-weight-only").weight, torch.randn(4, 320).bfloat16()
    shifted = torch.empty(4 * 320 + 1, dtype=torch.bfloat16)[1:].view(4, 320).copy_(x)
    strided = torch.randn(320, 4).bfloat16().t()
    for other in (x, x[:2], x.view(2, 2, 320), shifted, strided):
        assert [launched(F.linear, other, weight) for _ in range(3)] == [0, 0, 1]
        with torch.no_grad():
            assert torch.equal(F.linear(other, weight), in_general(F.linear, other, weight))
    for given, w in ((x.half(), weight), (x, MXTensor(weight.rowwise, None, weight.recipe, torch.float16))):
        with pytest.raises(RuntimeError, match="one dtype"), torch.no_grad():
            F.linear(given, w)


@needs_compiler
def test_a_bias_for_each_row_is_read_from_its_own_memory(launched):
    weight, x = layer("mxfp8-weight-only").weight, torch.randn(2, 320).bfloat16()
    for _ in range(4):
        bias = torch.randn(2, 48).bfloat16()
        with torch.no_grad():
            assert torch.equal(F.linear(x, weight, bias), in_general(F.linear, x, weight, bias))


@needs_compiler
def test_a_program_keeps_no_tensor_alive(launches):
    linear, x = layer("mxfp8"), torch.randn(2, 320).bfloat16()
    gone = [weakref.ref(t) for t in (linear.weight.rowwise.data, linear.weight, linear.bias, x)]
    with torch.no_grad():
        for _ in range(3):
            linear(x)
    assert launches
    del linear, x
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


@needs_compiler
def test_explain_and_kernels_see_a_whole_call_and_leave_the_kind_as_it_is(launched):
    linear, x = layer("mxfp8"), torch.randn(2, 320).bfloat16()
    with mx.explain() as log, mx.kernels("emulated"):
        assert [launched(linear, x) for _ in range(3)] == [0, 0, 0]
    assert [entry.kernel for entry in log.entries if entry.spec.op == "linear"] == ["emulated"] * 3
    assert [launched(linear, x) for _ in range(3)] == [0, 0, 1]
    with mx.explain() as log:
        assert launched(linear, x) == 0
    assert [entry.kernel for entry in log.entries] == ["small_m"]
    with mx.kernels("emulated"):
        assert launched(linear, x) == 0
    with mx.strict():
        assert launched(linear, x) == 1
    assert launched(linear, x) == 1


@needs_compiler
def test_gradients_traces_and_modes_run_no_program(launches):
    linear, x = layer("mxfp8-weight-only"), torch.randn(2, 320).bfloat16()
    with torch.no_grad():
        for _ in range(3):
            linear(x)
        before = len(launches)
        with torch.autocast("cpu", torch.bfloat16):
            linear(x)
        torch.func.vmap(linear)(x.view(2, 1, 320))
        torch.compile(linear, backend="aot_eager")(x)
    assert linear(x.requires_grad_()).requires_grad
    assert before == len(launches) == 1


SEVERAL_LAUNCHES = {
    "activations first": (ONE_LAUNCH._replace(whole_x=False, stages=2), 2, 320),
    "wgmma": (LaunchConfig(1, 4, 4, 1, 4, 8, 1, 1, False, True, 2), 40, 256),
    "wgmma with counters": (LaunchConfig(1, 4, 4, 1, 4, 8, 1, 2, False, True, 2, 0, True), 150, 256),
    "maxima first": (LaunchConfig(1, 4, 4, 1, 4, 8, 1, 1, False, True, 2), 70, 256),
}
"""Launch config, rows and columns of the activations."""


@pytest.mark.exhaustive(quick=1)
@needs_compiler
@pytest.mark.parametrize("kind", SEVERAL_LAUNCHES)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-weight-only", "nvfp4"])
def test_a_product_of_several_kernels_is_one_launch_of_a_program(name, kind, launches):
    launches.config, rows, k = SEVERAL_LAUNCHES[kind]
    linear = mx.quantize_(torch.nn.Linear(k, 64, bias=False, dtype=torch.bfloat16), name)
    xs = [torch.randn(rows, k).bfloat16() * scale for scale in (1, 100, 1)]
    with torch.no_grad():
        found = [linear(x) for x in (xs[0], xs[0], *xs)][2:]
        assert len(launches) == 3
    assert all(map(torch.equal, found, [in_general(linear, x) for x in xs]))


@needs_compiler
def test_copies_and_other_layers_share_a_kind(launched):
    linear, x = layer("mxfp4"), torch.randn(1, 320).bfloat16()
    with torch.no_grad():
        y = linear(x)
        linear(x)
        for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
            assert torch.equal(twin(x), y)
            assert twin.weight.__dict__.keys() == layer("mxfp4").weight.__dict__.keys()
            assert launched(twin, x) == 1


@pytest.mark.parametrize("config", ["mxfp8-weight-only", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_later_products_on_a_cpu_have_the_bits_of_the_first(config, dtype):
    linear = mx.quantize_(torch.nn.Linear(96, 40).to(dtype), config)
    with torch.no_grad():
        for x in (torch.randn(2, 3, 96, dtype=dtype), torch.randn(96, dtype=dtype), torch.randn(40, 96, dtype=dtype)):
            first = linear(x)
            assert all(torch.equal(linear(x), first) for _ in range(3))
            other = torch.randn_like(x)
            assert torch.equal(linear(other), in_general(linear, other))
    assert any(kind.program is not None for kind in KINDS.values())


@needs_compiler
def test_threads_decode_through_one_program(launches):
    linear, x = layer("mxfp8-weight-only"), torch.randn(2, 320).bfloat16()
    with torch.no_grad():
        expected, found = [linear(x), linear(x)][0], []

    def decode():
        with torch.no_grad():
            found.extend(linear(x) for _ in range(20))

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(launches) == 80 and all(torch.equal(y, expected) for y in found)


def test_an_error_of_a_program_comes_from_the_general_way():
    linear, x = mx.quantize_(torch.nn.Linear(64, 32), "mxfp8"), torch.randn(2, 64)
    with torch.no_grad():
        expected = linear(x)
        linear(x)
        for kind in KINDS.values():
            kind.program = lambda *inputs: 1 / 0
        assert torch.equal(linear(x), expected)


# ---------------------------------------------------------------------------------------------- groups


def ends_of(*counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def stack_of(name, activation=None):
    operand = mx.quantize(torch.randn(3, 48, 320).bfloat16(), name).rowwise
    return MXTensor(operand, None, mx.LinearRecipe.inference(name, activation), torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("formats", [("mxfp8", "mxfp8"), ("mxfp4",), ("nvfp4_single_level",)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_groups_have_the_ends_of_their_call(formats, mode, launches):
    launches.config = OF_GROUPS
    stack = stack_of(*formats)
    x, choices = torch.randn(5, 320).bfloat16(), [ends_of(2, 0, 3), ends_of(0, 4, 0), ends_of(5, 0, 0)]
    with mode():
        first = [F.grouped_mm(x, stack.mT, offs=ends) for ends in choices]
        assert len(launches) == 1  # one kind of call: the second was recorded
        second = [F.grouped_mm(x, stack.mT, offs=ends) for ends in choices]
        assert len(launches) == 4
        alone = [F.linear(x[:2], stack[0]), F.linear(x[2:], stack[2])]
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert torch.equal(first[0], torch.cat(alone)) and not first[1][4:].any()


@needs_compiler
def test_other_rows_and_strides_of_ends_are_other_kinds(launches, launched):
    launches.config = OF_GROUPS

    def grouped(x, stack, ends):
        return F.grouped_mm(x, stack.mT, offs=ends)

    stacks = [stack_of("mxfp8") for _ in range(2)]
    x, ends = torch.randn(5, 320).bfloat16(), ends_of(2, 0, 3)
    strided = torch.stack([ends, ends], 1)[:, 0]
    for given in ((x, stacks[0], ends), (x[:4], stacks[0], ends_of(1, 1, 2)), (x, stacks[0], strided)):
        assert [launched(grouped, *given) for _ in range(3)] == [0, 0, 1]
    assert launched(grouped, x, stacks[1], ends) == 1
    with torch.no_grad():
        assert torch.equal(grouped(x, stacks[1], ends), in_general(grouped, x, stacks[1], ends))
    with mx.explain() as log:
        assert launched(grouped, x, stacks[0], ends) == 0
    assert [entry.kernel for entry in log.entries] == ["small_m"]
    with pytest.raises(TypeError, match="must be int32"):
        launched(grouped, x, stacks[0], ends.long())
    gone = [weakref.ref(t) for t in (stacks[0].rowwise.data, ends)]
    del stacks, ends, given, strided, log
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


# ---------------------------------------------------------------------------------------------- custom ops


@needs_compiler
@pytest.mark.parametrize("weights", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cast", [("", ""), ("mxfp8_e4m3", "rceil")])
def test_later_calls_of_an_op_have_the_bits_of_the_first(weights, biased, cast, launches, recorded_on_a_cpu, profiled):
    """The ops are what a compiled graph holds. Each call has other activations, and one in three other weights."""
    one, shared = torch.ops.mxtensor.small_m, torch.ops.mxtensor.small_m_shared

    def call(x, operands, biases):
        tensors = [[o.data for o in operands], [o.scale for o in operands]]
        rest = 1.5, 2.0, torch.float32, *cast
        if weights == 1:
            (data,), (scale,) = tensors
            return [one(x, data, scale, "mxfp8_e4m3", 320, None, None, biases[0], None, *rest)]
        return shared(x, *tensors, "mxfp8_e4m3", 320, None, [None] * weights, biases, *rest)

    def fresh():
        operands = [mx.quantize(torch.randn(48 + 16 * i, 320), "mxfp8").rowwise for i in range(weights)]
        return operands, [torch.randn(o.shape[0]).bfloat16() if biased else None for o in operands]

    first, other = fresh(), fresh()
    for rows in (1, 3):
        for operands in (first, first, other, first):
            x = torch.randn(rows, 320).bfloat16()
            found = call(x, *operands)
            with profiled():
                expected = call(x, *operands)
            assert all(map(torch.equal, found, expected)) and [y.dtype for y in found] == [torch.float32] * weights
    assert len(launches) == 4


@needs_compiler
def test_an_op_checks_the_first_call_of_each_kind(launches, recorded_on_a_cpu):
    o, x = mx.quantize(torch.randn(48, 320), "mxfp8").rowwise, torch.randn(2, 320).bfloat16()

    def call(scale):
        rest = "mxfp8_e4m3", 320, None, None, None, None, 1.0, 1.0, torch.bfloat16, "", ""
        return torch.ops.mxtensor.small_m(x, o.data, scale, *rest)

    assert torch.equal(call(o.scale), call(o.scale)) and torch.equal(call(o.scale), call(o.scale))
    assert len(launches) == 2
    for wrong in (o.scale[:, :-1], o.scale[:-1], o.scale.float(), o.scale.t()):
        for _ in range(3):
            with pytest.raises((ValueError, TypeError), match="scale must"):
                call(wrong)
