"""CPU graphs: the recorded calls of a compiled graph give what its generated code gives, bit for bit, and are recorded
again where something else than values has changed."""

import gc
import threading
import weakref
from itertools import pairwise

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.compile import cpu_graphs
from mxtensor.compile.cpu_graphs import ReplacedError, backend
from mxtensor.core import compat_compile
from mxtensor.kernels.attention.cpu_attention import attention_of_values
from mxtensor.kernels.runtime import cpu_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(isinstance(cpu_graph.library(), str), reason="no C++ compiler for torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler, on itself
]


class Compiled:
    """A function, compiled; ``graph`` is the CPU graph of its one compiled graph.

    The first call's arguments live until the second call ends, so that new ones of the second are at other addresses,
    and are copied from then on: what runs from the third call on does not depend on the allocator.
    """

    def __init__(self, function, **options):
        self.graphs, self._calls, self._alive = [], 0, None
        self.function = torch.compile(function, fullgraph=True, backend=backend(self.graphs, "compiling"), **options)

    def __call__(self, *args):
        self._calls += 1
        with torch.no_grad():
            results = self.function(*args)
        self._alive = args if self._calls == 1 else None
        return results

    @property
    def graph(self):
        (graph,) = self.graphs
        return graph

    def by_code(self, *args):
        """The results of the generated code."""
        graph, before = self.graph, self.graph.refusal
        graph.refusal = "for the test"
        try:
            return self(*args)
        finally:
            graph.refusal = before


def block(config="mxfp4-weight-only", width=64):
    torch.manual_seed(0)
    layers = nn.Linear(width, 96), nn.SiLU(), nn.Linear(96, width)
    return mx.quantize_(nn.Sequential(*layers).bfloat16(), config)


def x_like(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape).to(dtype)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("config", ["mxfp4-weight-only", "mxint8", "nvfp4-weight-only"])
@pytest.mark.parametrize("rows", [1, 5])
def test_runs_have_the_results_of_the_generated_code(config, rows):
    f = Compiled(block(config))
    f(x_like(rows, 64)), f(x_like(rows, 64))
    for count in range(1, 4):
        x = x_like(rows, 64)
        got = f(x)
        assert f.graph.refusal is None and f.graph.runs >= count
        assert torch.equal(got, f.by_code(x))


def ops_of_a_run(f, *args):
    """The ops of this package that torch calls in a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        f(*args)
    return {event.key for event in profile.key_averages() if event.key.startswith("mxtensor::")}


@pytest.mark.parametrize("config", ["mxfp4-weight-only", "mxint8", "nvfp4-weight-only", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_are_made_again_without_torch(config, rows):
    f = Compiled(block(config))
    f(x_like(rows, 64)), f(x_like(rows, 64))
    assert ops_of_a_run(f, x_like(rows, 64)) == {"mxtensor::cpu_graph_run"}


def test_products_whose_sums_may_overflow_go_through_the_op():
    """Values from 2^95 on, which it makes smaller first where the weight has a global scale."""
    f = Compiled(block("nvfp4-weight-only"))
    for size in (1, 1, 1e30, 1, 1e34):
        x = x_like(1, 64) * size
        got = f(x)
        assert torch.equal(got, f.by_code(x)) and got.isfinite().all()
    assert "mxtensor::cpu_linear" in ops_of_a_run(f, x_like(1, 64) * 1e34)


def test_products_that_were_recorded_with_such_values_read_later_ones():
    """The op multiplies a smaller copy of them, which does not live longer than its call."""
    width = 1 << 14
    f = Compiled(block("nvfp4-weight-only", width))
    f(x_like(1, width) * 1e34), f(x_like(1, width) * 1e34)
    for size in (1, 1e34, 2, 3):
        x = x_like(1, width) * size
        got = f(x)
        assert f.graph.runs and torch.equal(got, f.by_code(x))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32])
def test_attention_is_made_again_with_another_mask(queries, dtype):
    f = Compiled(lambda q, k, v, mask: attention_of_values(q + 1, k, v, mask, 0.125) * 2)
    k, v = (x_like(2, 3, 40, 64) for _ in "kv")
    for _ in range(4):
        mask = torch.rand(2, 1, queries, 40) > 0.3 if dtype is torch.bool else x_like(2, 1, queries, 40, dtype=dtype)
        args = x_like(2, 6, queries, 64), k, v, mask
        assert torch.equal(f(*args), f.by_code(*args))
    assert f.graph.runs and ops_of_a_run(f, *args) == {"mxtensor::cpu_graph_run"}


def test_attention_of_tensors_that_it_copies_first_goes_through_the_op():
    f = Compiled(lambda q, k, v: attention_of_values(q.transpose(1, 2), k, v, None, 0.125) * 2)
    k, v = (x_like(1, 2, 40, 64) for _ in "kv")
    for _ in range(4):
        args = x_like(1, 3, 4, 64), k, v
        assert torch.equal(f(*args), f.by_code(*args))
    assert f.graph.runs and "mxtensor::cpu_attention" in ops_of_a_run(f, *args)


def test_results_are_new_tensors():
    f = Compiled(block())
    xs = [x_like(1, 64) for _ in range(6)]
    results = [f(x) for x in xs]
    assert f.graph.runs
    assert all(torch.equal(y, f.by_code(x)) for x, y in zip(xs, results, strict=True))


class Step(nn.Module):
    """Writes a token to a cache and reads all of it."""

    def __init__(self):
        super().__init__()
        self.k, self.out = (mx.quantize_(nn.Linear(64, 64, bias=False).bfloat16(), "mxfp8-weight-only") for _ in "ab")

    def forward(self, x, cache, place, count):
        cache.index_copy_(0, place, self.k(x))
        count.add_(1)
        return self.out(cache.sum(0, keepdim=True).bfloat16())


def steps(f, cache, count, inputs):
    return [f(x, cache, torch.tensor([i]), count) for i, x in enumerate(inputs)]


def test_inputs_that_are_written_to_are_those_of_the_caller():
    step, inputs = Step(), [x_like(1, 64) for _ in range(5)]
    f, found = Compiled(step), []
    for run in (f, f, torch.no_grad()(step)):
        cache, count = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros((), dtype=torch.int64)
        found.append((steps(run, cache, count, inputs), cache, count))
    assert f.graph.refusal is None and f.graph.runs >= 6
    for results, cache, count in found[:2]:
        torch.testing.assert_close(results, found[2][0], rtol=2e-2, atol=2e-2)
        assert torch.equal(cache, found[2][1]) and count == 5


def test_weights_may_change_their_values_and_be_replaced():
    model, x = block(), x_like(1, 64)
    f = Compiled(model)
    for _ in range(3):
        f(x)
    other = block("mxfp4-weight-only")
    with torch.no_grad():
        other[0].weight.copy_(torch.randn(96, 64))
        want = other(x)
        model[0].weight.copy_(other[0].weight)
    assert torch.equal(f(x), want)
    model[2].load_state_dict(block()[2].state_dict(), assign=True)
    assert torch.equal(f(x), want) and torch.equal(f(x), want)
    model[0].weight = nn.Parameter(other[0].weight.detach().clone())
    assert torch.equal(f(x), want) and torch.equal(f(x), want)


def with_data(weight, other):
    weight.data = other.detach()


def over_data(weight, other):
    """Other memory for the codes, as FSDP2 gives it."""
    weight.rowwise.data.set_(other.rowwise.data.clone())


@pytest.mark.parametrize("give", [with_data, over_data])
def test_a_weight_may_get_the_codes_of_another(give):
    model, other, x = block()[0], block()[0], x_like(1, 64)
    with torch.no_grad():
        other.weight.copy_(torch.randn(96, 64))
        f, before, want = Compiled(model), model(x), nn.functional.linear(x, other.weight, model.bias)
    for _ in range(3):
        f(x)
    assert f.graph.runs and torch.equal(f(x), before) and not torch.equal(before, want)
    if give is over_data:
        other.weight.rowwise.scale.copy_(model.weight.rowwise.scale)
        with torch.no_grad():
            want = nn.functional.linear(x, other.weight, model.bias)
    give(model.weight, other.weight)
    assert torch.equal(f(x), want) and torch.equal(f(x), want)


UNGUARDED = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
"""What ``mx.compile_decoding`` gives to torch: one graph stays in use when a parameter is replaced."""


def test_memory_of_a_weight_that_was_replaced_can_be_freed():
    """Also by a graph that has not run since."""
    model = block()[0]
    f = Compiled(model, options=dict(UNGUARDED), dynamic=False)
    for x in (x_like(1, 64), x_like(2, 64)):
        f(x), f(x), f(x)
    assert all(graph.runs for graph in f.graphs) and len(f.graphs) == 2
    found = weakref.ref(model.weight.rowwise.data.untyped_storage())
    model.weight = block()[0].weight
    f(x_like(1, 64))
    gc.collect()
    assert found() is None
    for rows in (2, 1, 2):
        x = x_like(rows, 64)
        with torch.no_grad():
            assert torch.equal(f(x), model(x))


def references(compiled, model):
    """How many weak references to the weight of a layer a compiled call leaves."""
    with torch.no_grad():
        compiled(x_like(1, 64))
    return weakref.getweakrefcount(model.weight)


def test_a_layer_may_be_converted_after_it_was_compiled():
    """``nn.Module.to`` refuses a quantized weight with weak references."""
    model, other, x = block()[0], block()[0], x_like(1, 64)
    if references(torch.compile(other, fullgraph=True), other):
        pytest.skip("this torch leaves references in graphs of its own backend")
    f = Compiled(model)
    for _ in range(3):
        f(x)
    assert f.graph.runs and references(f, model) == 0
    model.to(torch.float32)
    with torch.no_grad():
        assert torch.equal(f(x.float()), model(x.float()))


def others_of(kind):
    plain = nn.Linear(64, 96).bfloat16()
    return {
        "in high precision": (block()[0], plain.weight),
        "quantized": (plain, block()[0].weight),
        "in another dtype": (plain, nn.Parameter(torch.randn(96, 64))),
        "in another format": (block()[0], block("mxfp8-weight-only")[0].weight),
    }[kind]


@pytest.mark.parametrize("kind", ["in high precision", "quantized", "in another dtype", "in another format"])
def test_a_parameter_of_another_kind_is_refused_where_torch_does_not_look(kind):
    model, other = others_of(kind)
    f, x, before = Compiled(model, options=dict(UNGUARDED)), x_like(1, 64), model.weight
    f(x), f(x), f(x)
    assert f.graph.runs
    model.weight = other
    for _ in range(2):
        with pytest.raises(ReplacedError):
            f(x)
    model.weight = before
    assert torch.equal(f(x), f.by_code(x))


def test_results_may_be_arguments_and_numbers():
    f, y = Compiled(lambda x, y: (x + y, 3, y, None, x + 1)), torch.randn(4)
    for _ in range(4):
        x = torch.randn(4)
        one, three, same, nothing, two = f(x, y)
        assert torch.equal(one, x + y) and torch.equal(two, x + 1)
        assert three == 3 and same is y and nothing is None
    assert f.graph.refusal is None and f.graph.runs


def test_results_that_share_memory_still_do():
    def twice(x):
        y = x * 2
        return x + 1, y, y.t(), y[1:, 1]

    f = Compiled(twice)
    for _ in range(4):
        x = torch.randn(4, 2)
        _, y, transposed, part = f(x)
        assert torch.equal(y, x * 2)
        y.add_(1)
        assert torch.equal(transposed, x.t() * 2 + 1) and torch.equal(part, x[1:, 1] * 2 + 1)
    assert f.graph.refusal is None and f.graph.runs


def test_results_that_are_views_of_arguments_run_the_generated_code():
    f = Compiled(lambda x: (x + 1, x.t()))
    for _ in range(3):
        x = torch.randn(4, 2)
        one, transposed = f(x)
        assert torch.equal(one, x + 1) and transposed.data_ptr() == x.data_ptr()
    assert f.graph.refusal == "an output is a view of an input" and not f.graph.runs


def test_results_that_are_quantized_tensors_run_the_generated_code():
    weight = block()[0].weight
    f = Compiled(lambda x: (x + 1, weight.clone()))
    for _ in range(3):
        x = torch.randn(4)
        one, copy = f(x)
        assert torch.equal(one, x + 1) and isinstance(copy, mx.MXTensor) and torch.equal(copy, weight)
    assert f.graph.refusal == "a result is not an output of the generated code" and not f.graph.runs


def test_calls_with_gradients_are_not_recorded():
    weight = torch.randn(4, requires_grad=True)
    graphs = []
    f = torch.compile(lambda x: (x * weight).exp(), fullgraph=True, backend=backend(graphs, "compiling"))
    for _ in range(4):
        weight.grad = None
        f(torch.ones(4)).sum().backward()
        torch.testing.assert_close(weight.grad, weight.detach().exp())
    assert not any(graph.runs for graph in graphs)


def with_ops(x, weight):
    """Ops of torch that its compiler calls as they are: a product of bfloat16 with ``out=``, and a functional one."""
    ranked = torch.ops.aten.cummax(x.float(), 1)
    return x @ weight, ranked[0] + 1, ranked[1]


def test_ops_of_torch_are_called_again():
    f, weight = Compiled(with_ops), x_like(64, 32)
    for _ in range(4):
        x = x_like(3, 64)
        for got, want in zip(f(x, weight), with_ops(x, weight), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert f.graph.refusal is None and f.graph.runs


@torch.library.custom_op("mxtensor_tests::accumulate", mutates_args=("total",))
def accumulate(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Adds x to the total, and returns their products."""
    total.add_(x)
    return total * x


@accumulate.register_fake
def _(total, x):
    return torch.empty_like(x)


def test_an_op_of_python_may_write_to_an_input_and_return_a_tensor():
    total, f = torch.zeros(8), Compiled(lambda total, x: accumulate(total, x).exp())
    want = torch.zeros(8)
    for _ in range(5):
        x = torch.randn(8)
        got, want = f(total, x), want + x
        torch.testing.assert_close(total, want)
        torch.testing.assert_close(got, (want * x).exp())
    assert f.graph.refusal is None and f.graph.runs


def test_memory_of_the_caller_can_be_freed():
    """That of an input of a kernel, and of an op."""
    place, count = torch.tensor([1]), torch.zeros((), dtype=torch.int64)
    calls = {
        Compiled(Step()): (torch.zeros(8, 64, dtype=torch.bfloat16), lambda t: (x_like(1, 64), t, place, count)),
        Compiled(lambda total, x: accumulate(total, x).exp()): (torch.zeros(8), lambda t: (t, torch.randn(8))),
    }
    for f, (memory, args_of) in calls.items():
        for _ in range(4):
            f(*args_of(memory))
        assert f.graph.runs
    found = [weakref.ref(memory.untyped_storage()) for memory, _ in calls.values()]
    del memory
    for f in calls:
        calls[f] = None
    gc.collect()
    assert [storage() for storage in found] == [None, None]


def test_memory_between_kernels_is_nobody_elses():
    """Of a size that no other tensor of the process has: memory that was given back is that of the next one."""

    def spread(x):
        sums = x.view(-1, 8).sum(1)
        return sums - sums.max()

    f = Compiled(spread)
    for _ in range(4):
        f(torch.randn(8 * 12347))
    assert f.graph.runs
    others = [torch.full((12347,), torch.nan) for _ in range(20)]
    x = torch.randn(8 * 12347)
    assert torch.equal(f(x), f.by_code(x))
    assert all(other.isnan().all() for other in others)


def test_random_numbers_are_drawn_again():
    f, x = Compiled(lambda x: torch.ops.aten.randperm(50) + x), torch.zeros(50, dtype=torch.int64)
    drawn = [f(x) for _ in range(4)]
    assert all(torch.equal(each.sort().values, torch.arange(50)) for each in drawn)
    assert not any(torch.equal(a, b) for a, b in pairwise(drawn))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["sizes", "numbers"])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_what_depends_on_values_is_refused_and_runs_as_it_is(name):
    of = {"sizes": lambda x: x.nonzero().sum(0), "numbers": lambda x: x + torch.full((3,), x[0].item())}[name]
    f = Compiled(of)
    for i in range(3):
        x = torch.arange(5.0)[2:] * (i + 1) - i
        assert torch.equal(f(x), of(x))
    assert f.graph.refusal and not f.graph.runs


def test_large_inputs_that_move_in_each_call_run_the_generated_code(monkeypatch):
    monkeypatch.setattr(cpu_graphs, "COPIED_BYTES", 64)
    f, inputs = Compiled(lambda x: (x @ x.T).exp()), []
    for _ in range(3 * cpu_graphs.MOST_UNUSED):
        inputs.append(x := torch.randn(8, 8))
        torch.testing.assert_close(f(x), (x @ x.T).exp())
    assert f.graph.recordings == cpu_graphs.MOST_UNUSED and not f.graph.runs


def test_other_shapes_are_not_taken_for_the_recorded_ones():
    f, memory = Compiled(lambda x: x.cos().sum(0), dynamic=True), torch.randn(12, 8)
    for rows in (4, 6, 4, 6, 6, 6, 12):
        x = memory[:rows]
        torch.testing.assert_close(f(x), x.cos().sum(0))
    assert f.graph.runs


@torch.library.custom_op("mxtensor_tests::root", mutates_args=())
def root(x: torch.Tensor) -> torch.Tensor:
    """The square root; raises NotImplementedError, as a refused recording does, for negative values."""
    if bool((x < 0).any()):
        raise NotImplementedError("a negative value")
    return x.sqrt()


@root.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_error_is_raised_in_each_run_and_leaves_no_recording_open():
    f, good, bad = Compiled(lambda x: root(x) + 1), torch.full((3,), 4.0), torch.tensor([4.0, -4.0, 4.0])
    for x in (bad, good, good.clone(), good.clone(), bad, good.clone()):
        if x is bad:
            with pytest.raises(NotImplementedError, match="a negative value"):
                f(x)
        else:
            assert f(x).tolist() == [3.0] * 3
    assert f.graph.refusal is None and f.graph.runs and f.graph.recordings < 5


def test_ops_that_only_check_values_are_called_again():
    """torch 2.13 compiles the check of a Cholesky decomposition, an op without a result; torch 2.11 leaves it out."""
    good, bad = torch.eye(3) * 4, -torch.eye(3)

    def raises(function):
        with torch.no_grad():
            try:
                function(bad)
                return False
            except RuntimeError:
                return True

    f = Compiled(torch.linalg.cholesky)
    for x in (good, good.clone(), good.clone(), good.clone()):
        assert torch.equal(f(x), torch.eye(3) * 2)
    assert raises(f) == raises(torch.compile(torch.linalg.cholesky, fullgraph=True))
    assert torch.equal(f(good), torch.eye(3) * 2) and f.graph.runs >= 2


def test_threads_take_turns():
    f, failed = Compiled(block()), []
    f(x_like(1, 64)), f(x_like(1, 64))
    inputs = [x_like(1, 64) for _ in range(40)]
    wanted = [f.by_code(x) for x in inputs]

    def call(part):
        failed.extend(i for i in range(part, 40, 4) if not torch.equal(f(inputs[i]), wanted[i]))

    threads = [threading.Thread(target=call, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and f.graph.runs


def test_a_graph_from_torchs_cache_is_recorded_too():
    model = block()
    first = Compiled(model)
    first(x_like(1, 64))
    torch._dynamo.reset()
    second = Compiled(model)
    for _ in range(3):
        second(x_like(1, 64))
    assert second.graph is not first.graph and second.graph.runs


def test_graphs_of_other_backends_are_left_alone():
    graphs = []
    backend(graphs, "compiling")
    with torch.no_grad():
        torch.compile(block(), fullgraph=True)(x_like(1, 64))
    assert not graphs


def test_without_a_compiler_the_generated_code_runs(no_compiler):
    f = Compiled(block())
    x = x_like(1, 64)
    assert torch.equal(f(x), f(x)) and f.graph.refusal == "there is no C++ compiler"


def test_code_that_may_call_something_else_is_not_recorded():
    def code(args):
        return (torch.sin(args[0]), gc.get_count())

    for given, why in ((code, "generated code calls gc"), (len, "builtin_function_or_method is not generated code")):
        assert compat_compile.observed(given, lambda function, address: function, lambda function: function) == why
