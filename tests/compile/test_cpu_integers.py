"""Integers that change from call to call are computed outside of CPU graphs, whose recordings stay in use."""

import pytest
import torch

from mxtensor.compile import cpu_graphs
from mxtensor.compile.cpu_graphs import backend
from mxtensor.kernels.runtime import cpu_graph

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(isinstance(cpu_graph.library(), str), reason="no C++ compiler for torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler, on itself
]


class Counts:
    """What a cache counts in Python."""

    def __init__(self, first=3, second=20):
        self.first, self.second = first, second


def only_counted(counts, x):
    counts.first += 1
    counts.second = 2 * counts.first - 1
    return x * 0.5


def returned(counts, x):
    counts.first += 1
    return counts.first, x * 0.5, counts.first * 3, 7, x + 1


def in_arithmetic(counts, x):
    """As masks of transformers compute with the count of a sliding layer: directly, and of its maximum with zero."""
    counts.first += 1
    places = torch.arange(16) + max(counts.first - 5, 0)
    places += counts.second
    return x * 0.5, places, places <= counts.first, counts.second - places, x.half() * counts.first


def with_a_dtype_of_its_own(counts, x):
    """An int32 without dimensions plus a number is an int32, and plus an int64 of any kind an int64."""
    counts.first += 1
    return torch.zeros((), dtype=torch.int32) + counts.first, x * 0.5


def as_a_size(counts, x):
    counts.first += 1
    return torch.ones(counts.first).cumsum(0), x * 0.5


def steps(function, count, **options):
    """The results and counts of calls of a function, compiled or not."""
    graphs, counts, found = [], Counts(), []
    compiled = (
        torch.compile(function, fullgraph=True, backend=backend(graphs, "compiling"))
        if options.get("compiled")
        else function
    )
    for i in range(count):
        with torch.no_grad():
            found.append((compiled(counts, torch.full((4,), float(i))), counts.first, counts.second))
    return found, graphs


def equal(one, other):
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("function", [only_counted, returned, in_arithmetic])
def test_recordings_stay_in_use_while_integers_change(function):
    want, _ = steps(function, 12)
    found, graphs = steps(function, 12, compiled=True)
    assert equal(tuple(found), tuple(want))
    assert len(graphs) <= 3 and graphs[-1].refusal is None  # of the first values; of a maximum that is zero; of others
    assert graphs[-1].runs >= 5 and graphs[-1].recordings <= 3


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("function", [with_a_dtype_of_its_own, as_a_size])
def test_integers_with_other_uses_stay_arguments(function):
    want, _ = steps(function, 6)
    found, graphs = steps(function, 6, compiled=True)
    assert equal(tuple(found), tuple(want))
    assert len(graphs) == 2 and not graphs[-1].runs


def test_sizes_of_inputs_stay_arguments(monkeypatch):
    """A size is a symbol, as a count is: of a batch, for example, that torch has compiled for any."""
    taken = []
    monkeypatch.setattr(cpu_graphs, "taken_out", lambda *args, of=cpu_graphs.taken_out: taken.append(of(*args)))
    graphs = []
    f = torch.compile(lambda x: x * 2 + x.shape[0], fullgraph=True, dynamic=True, backend=backend(graphs, "compiling"))
    with torch.no_grad():
        for rows in (3, 4, 4, 4, 5):
            assert torch.equal(f(torch.ones(rows, 2)), torch.full((rows, 2), 2.0 + rows))
    assert taken == [None] and len(graphs) == 1 and graphs[0].runs
