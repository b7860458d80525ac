"""Temporary memory in one allocation: what is needed at the same time does not overlap, and little is wasted."""

import random

import pytest

from mxtensor.core.program import ALIGNMENT, Need, places


def at_once(needs):
    return max((sum(n.size for n in needs if n.first <= t <= n.last) for t in range(40)), default=0)


@pytest.mark.parametrize("seed", range(30))
def test_no_two_at_the_same_time_overlap(seed):
    draw = random.Random(seed)
    starts = [draw.randrange(30) for _ in range(draw.randrange(1, 12))]
    needs = [Need(first, first + draw.randrange(10), draw.choice([1, 100, 4096, 10**6])) for first in starts]
    offsets, size = places(needs)
    for i, (one, start) in enumerate(zip(needs, offsets, strict=True)):
        assert start % ALIGNMENT == 0 and start + one.size <= size
        for other, begin in zip(needs[:i], offsets[:i], strict=True):
            together = one.first <= other.last and other.first <= one.last
            assert not together or start + one.size <= begin or begin + other.size <= start
    assert at_once(needs) <= size <= 2 * at_once(needs) + ALIGNMENT * len(needs)


def test_what_comes_later_takes_the_place_of_what_is_over():
    assert places([Need(0, 1, 1000), Need(2, 3, 900), Need(1, 2, 512)]) == ([0, 0, 1024], 1536)
    assert places([]) == ([], 0)
