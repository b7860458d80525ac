"""Wrong calls of every public callable raise sentences; ``python -m tests.docs.wrong_calls`` runs all of them."""

import os

import pytest

from .wrong_calls import ROWS, calls, judged

NOT_YET = 43
"""Calls of the whole sweep whose error is not a sentence yet; this number may only fall."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("label", ["None", "3", "numpy", "object"])
def test_a_wrong_argument_is_a_sentence(label):
    named = ("quantize", "quantize_", "Cast", "LinearRecipe", "MXTensor.to_mx", "get_format", "kernels", "autocast")
    faults = [
        f"{row.name}({argument}): {why}"
        for row in ROWS
        if row.name in named
        for argument, given in calls(row)
        if given == label and (why := judged(row, argument, given)) is not None
    ]
    assert faults == []


@pytest.mark.exhaustive
def test_every_wrong_call_is_a_sentence():
    every = [(row, argument, label) for row in ROWS for argument, label in calls(row)]
    faults = [f"{row.name}({argument}={label})" for row, argument, label in every if judged(row, argument, label)]
    assert len(every) >= 2080 and len(faults) <= NOT_YET, (len(faults), faults, os.getcwd())
