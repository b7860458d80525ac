"""Contenders in processes of their own: they start together, take contenders, and an error of one leaves the others."""

import os
import signal
import time

from benchmarks.contenders import Contenders


class Contender:
    def __init__(self, name, text):
        if name == "bad":
            raise ValueError("cannot\nstart")
        self.name, self.text, self.calls = name, text, 0

    def count(self, by):
        self.calls += by
        return self.name, self.text, self.calls

    def moment(self):
        start = time.monotonic()
        time.sleep(0.05)
        return start, time.monotonic(), os.getpid()

    def fail(self):
        if self.name == "a":
            raise RuntimeError("no more")
        return self.name

    def process(self):
        return os.getpid()

    def leave(self):
        os._exit(3)


def test_each_contender_has_a_process_of_its_own():
    with Contenders(("a", "bad", "b"), Contender, "x") as contenders:
        assert contenders.failed == {"bad": "ValueError: cannot"} and contenders.running == ["a", "b"]
        assert contenders.side_by_side("count", 2) == {"a": ("a", "x", 2), "b": ("b", "x", 2)}
        assert contenders.one("b", "count", 3) == ("b", "x", 5)
        (a_start, a_end, a_process), (b_start, b_end, b_process) = contenders.one_by_one("moment").values()
        assert a_end <= b_start and a_start < a_end and b_start < b_end
        assert len({a_process, b_process, os.getpid()}) == 3
        assert contenders.one_by_one("fail") == {"b": "b"} and contenders.failed["a"] == "RuntimeError: no more"
        contenders.forgive()
        assert contenders.running == ["a", "b"] and contenders.one("a", "count", 1) == ("a", "x", 3)
        assert contenders.side_by_side("leave") == {} and contenders.failed["b"] == "its process has ended"
        assert contenders.running == []


def test_a_process_that_ends_between_two_calls_leaves_the_others():
    """As the system ends one that takes too much memory."""
    with Contenders(("a", "b"), Contender, "x") as contenders:
        os.kill(contenders.one("a", "process"), signal.SIGKILL)
        contenders._processes[0].join(20)
        assert contenders.side_by_side("count", 2) == {"b": ("b", "x", 2)}
        assert contenders.failed == {"a": "its process has ended"} and contenders.one("a", "count", 1) is None
        contenders.forgive()
        assert contenders.running == ["b"]
