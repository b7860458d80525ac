"""Dynamo compiles one function in ways for which torch.compile has no options."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from mxtensor.core.compat_compile import compiled_alone, compiler_errors, exceeds_limit, size_hint, traced_as_symbols

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Counter:
    def __init__(self, count=3):
        self.count = count


def add(x, counter):
    counter.count += 1
    return x + counter.count


def graphs_of(function, *calls):
    """How many graphs these calls compile, and whether each takes sizes or integers that are symbols."""
    found = []

    def backend(module, inputs):
        values = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        found.append(any(isinstance(value, torch.SymInt) for value in values))
        return module

    compiled = compiled_alone(function, backend=backend)
    for args in calls:
        compiled(*args)
    return found


def test_an_integer_is_a_symbol_from_its_first_value_on():
    counter, other, x = Counter(), Counter(), torch.ones(2)
    assert graphs_of(add, (x, counter), (x, counter)) == [False, True]
    before = torch.compiler.config.dynamic_sources
    with traced_as_symbols(r".*\.count$"):
        assert graphs_of(add, (x, other), (x, other)) == [True]
        with traced_as_symbols("other"):
            assert torch.compiler.config.dynamic_sources.endswith(r".*\.count$,other")
    assert torch.compiler.config.dynamic_sources == before and counter.count == other.count == 5


def test_a_torch_without_such_names_compiles_one_graph_more(monkeypatch):
    class Without:
        pass

    monkeypatch.setattr(torch.compiler, "config", Without())
    with traced_as_symbols(r".*\.count$"):
        pass
    assert not vars(torch.compiler.config)


def test_sizes_that_another_function_was_called_with_do_not_count_as_changed():
    one, two = torch.ones(3), torch.ones(4)
    assert graphs_of(double, (one,), (two,)) == [False, True]
    assert graphs_of(double, (one,)) == [False]
    assert graphs_of(double, (torch.ones(5),)) == [False]


def double(x):
    return x * 2


def broken(x):
    torch._dynamo.graph_break()
    return x * 2


def never(module, inputs):
    raise OSError("no compiler")


def test_errors_of_the_compiler_are_told_from_those_of_the_function():
    with pytest.raises(compiler_errors()) as found:
        compiled_alone(broken, backend="eager")(torch.ones(2))
    assert not exceeds_limit(found.value)
    with pytest.raises(compiler_errors()) as found:
        compiled_alone(double, backend=never)(torch.ones(2))
    assert not exceeds_limit(found.value)
    with torch._dynamo.config.patch(recompile_limit=1):
        limited = compiled_alone(double, backend="eager", dynamic=False)
        limited(torch.ones(2))
        with pytest.raises(compiler_errors()) as found:
            limited(torch.ones(3))
    assert exceeds_limit(found.value) and not issubclass(ValueError, compiler_errors())


def test_the_size_of_a_symbol_is_known_without_a_guard():
    shapes = ShapeEnv()
    symbol = shapes.create_unbacked_symint()
    seen = []

    def work(x):
        seen.append([size_hint(n) for n in (*x.shape, 7)])
        return x * 2

    graph = make_fx(work, tracing_mode="symbolic")(torch.ones(5, 3))
    assert seen == [[5, 3, 7]] and torch.equal(graph(torch.ones(9, 4)), torch.full((9, 4), 2.0))
    with pytest.raises(GuardOnDataDependentSymNode):
        size_hint(symbol)
