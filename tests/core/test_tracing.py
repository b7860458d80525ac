"""What counts as being traced."""

import threading

import pytest
import torch

import mxtensor as mx
from mxtensor.core.tracing import is_traced


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_thread_that_compiles_changes_nothing_in_another_one():
    """torch 2.13 tells all threads that they are compiling."""
    w = mx.quantize(torch.randn(64, 64), "mxfp8")
    x = torch.randn(8, 64)
    compiling, done = threading.Event(), threading.Event()

    def backend(graph, _inputs):
        compiling.set()
        assert done.wait(60)
        return graph

    expected = torch.nn.functional.linear(x, w)
    thread = threading.Thread(target=torch.compile(lambda a: a + 1, backend=backend), args=(torch.ones(2),))
    thread.start()
    try:
        assert compiling.wait(60)
        with mx.explain() as log:
            found = torch.nn.functional.linear(x, w)
        assert not is_traced(x, w.rowwise.data) and torch.equal(found, expected) and "traced" not in str(log)
    finally:
        done.set()
        thread.join()
