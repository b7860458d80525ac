"""Bars and clocks appear for work of more than a second, and not for quick work."""

import sys
import time

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor.core import progress
from mxtensor.core.progress import clock, progress_bars, with_progress

tqdm = pytest.importorskip("tqdm")


def test_quick_work_shows_nothing(capsys):
    mx.quantize(torch.randn(64, 64), "mxfp8")  # which loads the kernels
    mx.quantize_(nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)]), "mxfp8")
    assert capsys.readouterr().err == ""


def test_quantize_shows_a_bar_of_any_size_if_it_takes_long(bars_at_once, capsys):
    mx.quantize_(nn.Sequential(*[nn.Linear(64, 64) for _ in range(9)]), "mxfp8")
    assert "quantizing" in (shown := capsys.readouterr().err) and "9/9" in shown


def test_long_work_shows_a_bar_with_what_is_done(monkeypatch, capsys):
    now = iter(range(100))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now) * 0.6)
    assert list(with_progress(iter("abcde"), "reading", "tensor", 5)) == [*"abcde"]
    shown = capsys.readouterr().err
    assert "reading" in shown and "2/5" in shown and "5/5" in shown and "1/5" not in shown


@pytest.mark.parametrize("shown", [True, False])
def test_items_come_in_their_order_and_a_break_closes_the_bar(shown, request, capsys):
    if shown:
        request.getfixturevalue("bars_at_once")
    closed = []

    def items():
        try:
            yield from range(9)
        finally:
            closed.append(True)

    for item in with_progress(items(), "reading", "tensor", 9):
        if item == 4:
            break
    assert item == 4 and ("reading" in capsys.readouterr().err) is shown
    assert list(with_progress([], "reading", "tensor")) == []
    with progress_bars(False):
        numbers = [1, 2]
        assert with_progress(numbers, "reading", "tensor") is numbers


def until(said):
    """Wait until ``said()``, for 20 seconds at most."""
    end = time.monotonic() + 20
    while not said() and time.monotonic() < end:
        time.sleep(0.01)
    assert said()


def test_a_clock_shows_once_what_takes_long(bars_at_once, capsys):
    with clock("compiling a step"), clock("compiling again"):
        texts = []
        until(lambda: texts.append(capsys.readouterr().err) or "00:0" in "".join(texts))
    shown = "".join(texts) + capsys.readouterr().err
    assert "compiling a step: 00:0" in shown and "compiling again" not in shown


def test_a_clock_of_quick_work_shows_nothing_and_errors_pass(capsys):
    with pytest.raises(KeyError), clock("compiling"):
        raise KeyError(3)
    assert capsys.readouterr().err == ""


def test_without_tqdm_the_log_says_it(bars_at_once, monkeypatch, logged):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with clock("compiling a step"):
        until(lambda: logged.records)
    assert [record.getMessage() for record in logged.records] == ["compiling a step"]
