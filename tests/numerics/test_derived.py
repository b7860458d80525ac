"""What is computed from a tensor is cached until the tensor is written to or ends, and never where that is wrong."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtensor.numerics import derived
from mxtensor.numerics.derived import cached_value, known_value, swizzle
from tests.helpers.slow_swizzle import scales, slowly


class Counted:
    def __init__(self):
        self.calls = 0

    def __call__(self, scale):
        self.calls += 1
        return swizzle(scale)


def test_a_scale_is_swizzled_once_for_each_layout():
    scale, make = scales(130, 5), Counted()
    first = cached_value(scale, "a", make)
    assert cached_value(scale, "a", make) is first and make.calls == 1
    assert cached_value(scale, "b", make) is not first and make.calls == 2


def test_a_write_is_seen():
    scale, make = scales(130, 5), Counted()
    cached_value(scale, "a", make)
    scale.copy_(scales(130, 5))
    assert torch.equal(cached_value(scale, "a", make), slowly(scale)) and make.calls == 2
    scale[3, 2] ^= 1
    assert torch.equal(cached_value(scale, "a", make), slowly(scale)) and make.calls == 3


def test_a_cached_result_ends_with_its_scale():
    scale = scales(130, 5)
    made = weakref.ref(cached_value(scale, "a", swizzle))
    whole = scales(128, 4)
    view = weakref.ref(whole)
    cached_value(whole, "a", lambda s: s.view(-1))
    assert made() is not None
    del scale, whole
    gc.collect()
    assert made() is None and view() is None


def test_nothing_is_cached_for_traced_scales_or_scales_without_a_version():
    make = Counted()
    with FakeTensorMode():
        fake = torch.empty(130, 5, dtype=torch.uint8, device="cuda")
        cached_value(fake, "a", make), cached_value(fake, "a", make)
    with torch.inference_mode():
        inference = scales(130, 5)
        cached_value(inference, "a", make), cached_value(inference, "a", make)
    assert make.calls == 4 and not {id(fake), id(inference)} & derived._cache.keys()


@pytest.mark.gpu
def test_a_graph_sees_the_scale_as_it_is_at_each_replay():
    scale = scales(130, 5).cuda()
    cached_value(scale, "a", swizzle)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cached_value(scale, "a", swizzle)
    for _ in range(2):
        scale.copy_(scales(130, 5))
        graph.replay()
        assert torch.equal(out.cpu(), slowly(scale.cpu()))
        assert torch.equal(cached_value(scale, "a", swizzle).cpu(), slowly(scale.cpu()))


def test_a_known_value_is_that_of_this_tensor_and_version():
    scale, make = scales(130, 5), Counted()
    assert known_value(scale, "a") is None
    made = cached_value(scale, "a", make)
    assert known_value(scale, "a") is made and known_value(scale, "b") is None
    assert known_value(scale.clone(), "a") is None
    scale.add_(1)
    assert known_value(scale, "a") is None


def test_another_tensor_with_the_same_id_finds_nothing():
    first = scales(130, 5)
    cached_value(first, "a", swizzle)
    entry = derived._cache[id(first)]
    other = scales(130, 5)
    derived._cache[id(other)] = entry
    try:
        assert known_value(other, "a") is None
        assert torch.equal(cached_value(other, "a", swizzle), slowly(other))
        del first
        gc.collect()
        assert known_value(other, "a") is not None  # the end of the first one's entry left this one
    finally:
        derived._cache.pop(id(other), None)
