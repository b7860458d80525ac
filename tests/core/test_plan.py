"""Plans: one decision for all calls of a kind, the bits of the first call, and no plan for what has changed."""

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
from mxtensor.core import devices, plan
from mxtensor.core.kernel import Spec
from mxtensor.core.plan import PLANS, Plan, PlanCache
from mxtensor.kernels.gemm import select
from mxtensor.kernels.gemm.spec import Form
from mxtensor.kernels.runtime import nvrtc
from mxtensor.kernels.small_m import kernel as small_m
from mxtensor.kernels.small_m import later_launch, launch, ops
from mxtensor.kernels.small_m.config import LaunchConfig
from mxtensor.numerics.operand import Operand
from mxtensor.tensor.mxtensor import MXTensor
from tests.helpers import cuda_on_cpu

needs_compiler = pytest.mark.skipif(cuda_on_cpu.compiler() is None, reason="needs a C++ compiler")
ONE_LAUNCH = LaunchConfig(1, 1, 1, 4, 4, 3, 1, 1, True, persistent=1)

# ---------------------------------------------------------------------------------------------- the cache


def a_plan(name="mm"):
    return Plan(Spec(name, (), (), torch.float32, torch.device("cpu")), None, {})


def test_the_least_recently_used_plan_is_dropped_first(monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 3)
    cache, plans = PlanCache(), {key: a_plan() for key in "abcde"}
    for key in "abc":
        cache.put(key, plans[key])
    assert cache.get("a") is plans["a"] and len(cache) == 3
    cache.put("d", plans["d"])
    cache.put("c", plans["e"])
    cache.put("e", plans["e"])
    assert [cache.get(key) for key in "abcde"] == [None, None, plans["e"], plans["d"], plans["e"]]
    cache.clear()
    assert len(cache) == 0 and cache.get("c") is None


def test_a_plan_put_again_is_used_again(monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 2)
    cache = PlanCache()
    for key in ("a", "b", "a", "c"):
        cache.put(key, a_plan())
    assert cache.get("a") is not None and cache.get("b") is None


def test_the_cache_of_the_process_is_bounded(monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 8)
    weight = mx.quantize(torch.randn(16, 64), "mxfp8")
    for rows in range(1, 20):
        F.linear(torch.randn(rows, 64), weight)
    assert len(PLANS) <= 8


def test_threads_share_the_cache(monkeypatch):
    monkeypatch.setattr(plan, "MAX_PLANS", 4)
    cache, wrong, plans = PlanCache(), [], {key: a_plan() for key in range(12)}

    def use(first):
        try:
            for i in range(20_000):
                key = (first * 7 + i * i) % 12
                found = cache.get(key)
                if found is None:
                    cache.put(key, plans[key])
                elif found is not plans[key]:
                    wrong.append(key)
                if i % 1000 == 0:
                    cache.clear()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(cache) <= 4


# ---------------------------------------------------------------------------------------------- one plan for each kind


def test_a_second_training_step_asks_no_kernel(monkeypatch):
    linear, x, asked = torch.nn.Linear(64, 48), torch.randn(32, 64, requires_grad=True), []

    def watched(kernel):
        return replace(kernel, refuses=lambda spec, *rest: asked.append(spec) or kernel.refuses(spec, *rest))

    monkeypatch.setattr(select, "GEMM", tuple(map(watched, select.GEMM)))
    counts = []
    for _ in range(3):
        with mx.autocast():
            linear(x).sum().backward()
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1] == counts[2]
    assert {spec.op for spec in asked} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize(("kernel", "form"), [("emulated", torch.float32), ("cpu_codes", Form.CODES)])
def test_the_same_plan_says_which_form_a_kernel_wants_and_runs_the_product(kernel, form):
    x, w = torch.randn(2, 64), mx.quantize(torch.randn(48, 64), "mxfp8")
    args = select.GemmArgs(torch.float32)
    assert select.wanted_form("mm", x, w.rowwise, args, kernel) is form
    asked = len(PLANS)
    select.gemm("mm", x, w.rowwise, args, kernel)
    assert select.plan_of("mm", x, w.rowwise, args, kernel).kernel.name == kernel and len(PLANS) == asked


# ---------------------------------------------------------------------------------------------- launches


@pytest.fixture
def launches(monkeypatch):
    """Products of few rows run on the CPU, by one launch; the inputs of launches that came from a plan."""
    monkeypatch.setattr(nvrtc, "function", cuda_on_cpu.function)
    monkeypatch.setattr(later_launch, "PackedLaunches", cuda_on_cpu.PackedLaunches)
    monkeypatch.setattr(devices, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "unknown", lambda capability: None)
    monkeypatch.setattr(launch, "choose_config", lambda *args: ONE_LAUNCH)
    launch.resolve.cache_clear()
    anywhere = replace(small_m.KERNEL, device=None)
    monkeypatch.setattr(select, "GEMM", tuple(anywhere if k is small_m.KERNEL else k for k in select.GEMM))
    stacks = replace(small_m.GROUPED, device=None)
    monkeypatch.setattr(select, "GROUPED", tuple(stacks if k is small_m.GROUPED else k for k in select.GROUPED))
    monkeypatch.setattr(select, "has_launches", lambda *given: True)
    calls, lock = [], threading.Lock()
    whole = later_launch.Launch.run

    def counted(self, x, *results):
        calls.append(x)
        with lock:  # the stand-in for a GPU runs one kernel at a time
            whole(self, x, *results)

    monkeypatch.setattr(later_launch.Launch, "run", counted)
    yield calls
    launch.resolve.cache_clear()


def layer(config, bias=True, out=48):
    return mx.quantize_(torch.nn.Linear(320, out, bias=bias, dtype=torch.bfloat16), config)


@pytest.mark.exhaustive(quick=2)
@needs_compiler
@pytest.mark.parametrize("config", ["mxfp8", "mxfp4-weight-only", "nvfp4", "nvfp4-weight-only", "mxfp6"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_second_call_has_the_bits_of_the_first(config, bias, mode, launches):
    linear, inputs = layer(config, bias), [torch.randn(*shape, 320).bfloat16() for shape in ((1,), (3,), (1, 2), ())]
    with mode():
        first = [linear(x) for x in inputs]
        assert not launches
        second = [linear(x) for x in inputs]
        assert len(launches) == len(inputs)
        others = [linear(x + 1) for x in inputs]
    for one, two, other in zip(first, second, others, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)
        assert not torch.equal(one, other)


def ends_of(*counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


OF_GROUPS = ONE_LAUNCH._replace(persistent=0)


def stack_of(name, activation=None):
    operand = mx.quantize(torch.randn(3, 48, 320).bfloat16(), name).rowwise
    return MXTensor(operand, None, mx.LinearRecipe.inference(name, activation), torch.bfloat16)


@needs_compiler
@pytest.mark.parametrize("formats", [("mxfp8", "mxfp8"), ("mxfp4",), ("nvfp4",)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_second_call_with_groups_takes_the_ends_of_that_call(formats, mode, launches, monkeypatch):
    monkeypatch.setattr(launch, "choose_config", lambda *args: OF_GROUPS)
    stack = stack_of(*formats)
    x, choices = torch.randn(5, 320).bfloat16(), [ends_of(2, 0, 3), ends_of(0, 4, 0), ends_of(5, 0, 0)]
    with mode():
        first = [F.grouped_mm(x, stack.mT, offs=ends) for ends in choices]
        assert len(launches) == 2  # one kind of call
        second = [F.grouped_mm(x, stack.mT, offs=ends) for ends in choices]
        assert len(launches) == 5
        alone = [F.linear(x[:2], stack[0]), F.linear(x[2:], stack[2])]
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert torch.equal(first[0], torch.cat(alone)) and not first[1][4:].any()


@needs_compiler
def test_other_groups_rows_or_stacks_are_other_plans(launches, monkeypatch):
    monkeypatch.setattr(launch, "choose_config", lambda *args: OF_GROUPS)

    def taken(x, stack, ends):
        before = len(launches)
        with torch.no_grad():
            F.grouped_mm(x, stack.mT, offs=ends)
        return len(launches) - before

    stacks = [stack_of("mxfp8") for _ in range(2)]
    x, ends = torch.randn(5, 320).bfloat16(), ends_of(2, 0, 3)
    strided = torch.stack([ends, ends], 1)[:, 0]
    for given in ((x, stacks[0], ends), (x, stacks[1], ends), (x[:4], stacks[0], ends_of(1, 1, 2))):
        assert [taken(*given) for _ in range(2)] == [0, 1]
    assert [taken(x, stacks[0], strided) for _ in range(2)] == [0, 0]
    with mx.explain() as log:
        assert taken(x, stacks[0], ends) == 0
    assert [entry.kernel for entry in log.entries] == ["small_m"]
    with pytest.raises(TypeError, match="must be int32"):
        taken(x, stacks[0], ends.long())
    gone = [weakref.ref(t) for t in (stacks[0].rowwise.data, ends)]
    del stacks, ends, given, strided, log
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.fixture
def launched(launches):
    """How many launches of plans a call takes."""

    def count(module, *args):
        before = len(launches)
        with torch.no_grad():
            module(*args)
        return len(launches) - before

    return count


@needs_compiler
def test_another_bias_is_another_plan(launched):
    linear, x = layer("mxfp8"), torch.randn(2, 320).bfloat16()
    assert [launched(linear, x) for _ in range(2)] == [0, 1]
    linear.bias = torch.nn.Parameter(linear.bias + 1)
    assert [launched(linear, x) for _ in range(2)] == [0, 1]


@needs_compiler
def test_a_weight_replaced_in_place_has_no_stale_plan(launched):
    linear, other, x = layer("mxfp8"), layer("mxfp8"), torch.randn(2, 320).bfloat16()
    assert [launched(linear, x) for _ in range(2)] == [0, 1]
    linear.load_state_dict(other.state_dict())  # into the same memory: the launch reads the new codes
    assert launched(linear, x) == 1
    with torch.no_grad():
        assert torch.equal(linear(x), other(x))
        linear.weight.mul_(2)
        assert torch.equal(linear(x), F.linear(x, linear.weight.clone(), linear.bias))
    linear.load_state_dict(layer("mxfp8").state_dict(), assign=True)  # other memory
    assert launched(linear, x) == 0
    linear.weight.data = other.weight.detach() * 3
    with torch.no_grad():
        assert torch.equal(linear(x), F.linear(x, linear.weight.clone(), linear.bias))


def with_components(weight, **changes):
    """An MXTensor over the same codes and scales, seen otherwise."""
    operand = Operand(**{"data": weight.rowwise.data, "scale": weight.rowwise.scale, "global_scale": None} | changes)
    return MXTensor(operand, None, mx.LinearRecipe.inference(mx.Cast.of(operand.format)), torch.bfloat16)


@needs_compiler
def test_the_same_memory_seen_otherwise_is_another_plan(launches):
    """As when a tensor is freed and another one gets its memory: each has its own bits, first and second time."""
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
def test_another_recipe_of_the_same_codes_is_another_plan(launched):
    weight, x = layer("mxfp8-weight-only").weight, torch.randn(2, 320).bfloat16()
    cast, operand = mx.Cast.of("mxfp8"), weight.rowwise
    recipes = [mx.LinearRecipe.inference(cast), mx.LinearRecipe.inference(cast, cast)]
    plain, both = (MXTensor(operand, None, recipe, torch.bfloat16) for recipe in recipes)
    assert [launched(F.linear, x, w) for w in (plain, both, plain, both)] == [0, 0, 1, 1]
    asks = MXTensor(operand, None, mx.LinearRecipe.inference(cast, None, "emulated"), torch.bfloat16)
    assert [launched(F.linear, x, asks) for _ in range(2)] == [0, 0]


@needs_compiler
def test_a_recipe_that_is_gone_leaves_its_id_to_no_other(launched):
    """A plan holds on to the recipe whose id is in its key, and to nothing else of the weight."""
    operand, x = layer("mxfp8-weight-only").weight.rowwise, torch.randn(2, 320).bfloat16()
    ids = set()
    for n in range(20):
        recipe = replace(mx.LinearRecipe.inference("mxfp8"), name=f"recipe {n}")
        assert id(recipe) not in ids
        ids.add(id(recipe))
        assert launched(F.linear, x, MXTensor(operand, None, recipe, torch.bfloat16)) == 0
        del recipe


@needs_compiler
def test_an_input_of_another_dtype_layout_or_alignment_is_another_plan(launched):
    weight, x = layer("mxfp8-weight-only").weight, torch.randn(4, 320).bfloat16()
    shifted = torch.empty(4 * 320 + 1, dtype=torch.bfloat16)[1:].view(4, 320).copy_(x)
    strided = torch.randn(320, 4).bfloat16().t()
    for other in (x, x[:2], x.view(2, 2, 320), shifted):
        assert [launched(F.linear, other, weight) for _ in range(2)] == [0, 1]
    assert [launched(F.linear, strided, weight) for _ in range(2)] == [0, 0]
    with pytest.raises(RuntimeError, match="one dtype"), torch.no_grad():
        F.linear(x.half(), weight)
    with pytest.raises(RuntimeError, match="one dtype"), torch.no_grad():
        F.linear(x, MXTensor(weight.rowwise, None, weight.recipe, torch.float16))


@needs_compiler
def test_a_plan_keeps_no_tensor_alive():
    linear, x = layer("mxfp8"), torch.randn(2, 320).bfloat16()
    gone = [weakref.ref(t) for t in (linear.weight.rowwise.data, linear.weight, linear.bias, x)]
    with torch.no_grad():
        linear(x), linear(x)
    del linear, x
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


@needs_compiler
def test_explain_and_kernels_see_a_whole_call_and_leave_the_plan_as_it_is(launched):
    linear, x = layer("mxfp8"), torch.randn(2, 320).bfloat16()
    with mx.explain() as log, mx.kernels("emulated"):
        assert [launched(linear, x) for _ in range(2)] == [0, 0]
    assert [entry.kernel for entry in log.entries if entry.spec.op == "linear"] == ["emulated"] * 2
    assert [launched(linear, x) for _ in range(2)] == [0, 1]
    with mx.explain() as log:
        assert launched(linear, x) == 0
    assert [entry.kernel for entry in log.entries] == ["small_m"]
    with mx.kernels("emulated"):
        assert launched(linear, x) == 0
    with mx.strict():
        assert launched(linear, x) == 1
    assert launched(linear, x) == 1


@needs_compiler
def test_gradients_traces_and_modes_take_no_launch(launches):
    linear, x = layer("mxfp8-weight-only"), torch.randn(2, 320).bfloat16()
    with torch.no_grad():
        linear(x), linear(x)
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
def test_a_product_of_several_launches_is_packed_once(name, kind, launches, monkeypatch):
    config, rows, k = SEVERAL_LAUNCHES[kind]
    monkeypatch.setattr(launch, "choose_config", lambda *args: config)
    asked, kernel = [], next(k for k in select.GEMM if k.name == "small_m")
    watched = replace(kernel, launch_for=lambda *args: asked.append(args) or kernel.launch_for(*args))
    monkeypatch.setattr(select, "GEMM", tuple(watched if k is kernel else k for k in select.GEMM))
    linear = mx.quantize_(torch.nn.Linear(k, 64, bias=False, dtype=torch.bfloat16), name)
    xs = [torch.randn(rows, k).bfloat16() * scale for scale in (1, 100, 1)]
    with torch.no_grad():
        repeated = [linear(x) for x in (xs[0], *xs)][1:]
        assert len(asked) == 1 and len(launches) == 3
        with mx.kernels("small_m"):  # this asks for the kernel anew, and launches as a first call does
            expected = [linear(x) for x in xs]
    assert len(launches) == 3
    assert all(map(torch.equal, repeated, expected))


@needs_compiler
@pytest.mark.parametrize("weights", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cast", [("", ""), ("mxfp8_e4m3", "rceil")])
def test_the_second_call_of_an_op_has_the_bits_of_the_first(weights, biased, cast, launches, monkeypatch):
    """The ops are what a compiled graph holds. Each call has other activations, and the third one other weights."""
    monkeypatch.setattr(ops, "has_launches", lambda x: True)
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
        call(torch.randn(rows, 320).bfloat16(), *first)
        for operands in (first, other, first):
            x = torch.randn(rows, 320).bfloat16()
            found = call(x, *operands)
            monkeypatch.setattr(ops, "has_launches", lambda x: False)
            expected = call(x, *operands)
            monkeypatch.setattr(ops, "has_launches", lambda x: True)
            assert all(map(torch.equal, found, expected)) and [y.dtype for y in found] == [torch.float32] * weights
    assert len(launches) == 4  # of six calls, two store the launches of the other weights


@needs_compiler
def test_an_op_checks_the_first_call_of_each_kind(launches, monkeypatch):
    monkeypatch.setattr(ops, "has_launches", lambda x: True)
    o, x = mx.quantize(torch.randn(48, 320), "mxfp8").rowwise, torch.randn(2, 320).bfloat16()

    def call(scale):
        rest = "mxfp8_e4m3", 320, None, None, None, None, 1.0, 1.0, torch.bfloat16, "", ""
        return torch.ops.mxtensor.small_m(x, o.data, scale, *rest)

    assert torch.equal(call(o.scale), call(o.scale)) and len(launches) == 1
    for wrong in (o.scale[:, :-1], o.scale[:-1], o.scale.float(), o.scale.t()):
        with pytest.raises((ValueError, TypeError), match="scale must"):
            call(wrong)


@needs_compiler
def test_biases_of_rows_have_no_launch(launched):
    linear = layer("mxfp8-weight-only")
    bias, x = torch.randn(2, 48).bfloat16(), torch.randn(2, 320).bfloat16()
    assert [launched(F.linear, x, linear.weight, bias) for _ in range(2)] == [0, 0]


def test_where_no_kernel_has_a_launch_no_key_is_made(monkeypatch):
    from mxtensor.ops import functional

    monkeypatch.setattr(functional, "launch_key", lambda *args: pytest.fail("a key was made"))
    devices = [torch.device(name) for name in ("cuda:0", "cpu", "xpu")]
    assert [select.has_launches(device) for device in devices] == [True, True, False]
    assert [select.has_launches(device, select.GROUPED) for device in devices] == [True, False, False]
    monkeypatch.setattr(select, "has_launches", lambda device: False)
    linear = layer("mxfp8")
    with torch.no_grad():
        linear(torch.randn(2, 320).bfloat16())


@needs_compiler
def test_a_copy_of_a_weight_has_its_own_plan(launched):
    linear, x = layer("mxfp4"), torch.randn(1, 320).bfloat16()
    with torch.no_grad():
        y = linear(x)
        for twin in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
            assert torch.equal(twin(x), y)
            assert twin.weight.__dict__.keys() == layer("mxfp4").weight.__dict__.keys()
            assert launched(twin, x) == 1


@needs_compiler
def test_threads_decode_through_one_plan(launches):
    linear, x = layer("mxfp8-weight-only"), torch.randn(2, 320).bfloat16()
    with torch.no_grad():
        expected, found = linear(x), []

    def decode():
        with torch.no_grad():
            found.extend(linear(x) for _ in range(20))

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(torch.equal(y, expected) for y in found)
