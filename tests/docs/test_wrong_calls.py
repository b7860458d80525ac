"""A wrong argument of a public callable is refused by a sentence that says what was given: ``wrong_calls.py``."""

import contextlib

import pytest
import torch

import mxtensor as mx
import mxtensor.te as te
from mxtensor.core.arguments import SIZE, check, checked, described
from tests.docs.wrong_calls import ROWS, calls, judged

EVERY = 9
"""The quick test makes every ninth call of each row."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some calls write a file


def faults(row, step=1):
    found = {f"{argument}={label}": judged(row, argument, label) for argument, label in calls(row)[::step]}
    return {call: why for call, why in found.items() if why is not None}


def test_there_are_enough_calls():
    assert sum(len(calls(row)) for row in ROWS) > 15_000


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_right_calls_succeed(row):
    function, right = row.make()
    with contextlib.suppress(*row.also):
        function(**right)


@pytest.mark.exhaustive(quick=2)
@pytest.mark.parametrize("part", range(4))
def test_some_wrong_calls_say_what_was_given(part):
    found = {row.name: faults(row, EVERY) for row in ROWS[part::4]}
    assert {name: why for name, why in found.items() if why} == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_wrong_call_says_what_was_given(row):
    assert faults(row) == {}


@pytest.mark.parametrize(
    "wrong", [None, [1.0], 3, object(), torch.ones(3).to_sparse(), "x", 1j], ids=lambda wrong: type(wrong).__name__
)
@pytest.mark.parametrize("call", [
    lambda x: mx.quantize(x, "mxfp8"),
    lambda x: mx.quantize_(x, "mxfp8"),
    lambda x: mx.quantize_(torch.nn.Linear(64, 64), x),
    lambda x: mx.quantize(torch.randn(64), x),
    mx.MXTensor,
    mx.LinearRecipe,
    mx.Cast,
])  # fmt: skip
def test_the_first_argument_of_all(call, wrong):
    with pytest.raises((TypeError, ValueError)) as error:
        call(wrong)
    assert "has no attribute" not in str(error.value) and (
        described(wrong) in str(error.value) or "neither" in str(error.value)
    )


class TestChecked:
    def test_annotations_say_what_is_wanted(self):
        @checked(rows=SIZE)
        def made(rows: int, dtype: "torch.dtype | None" = None, name: object = None) -> int:
            return rows

        assert made(3) == 3 and made(rows=3, dtype=torch.bfloat16, name=object()) == 3
        with pytest.raises(TypeError, match=r"rows is '3'; pass an integer from 0"):
            made("3")
        with pytest.raises(ValueError, match=r"rows is -1; it must be an integer from 0"):
            made(-1)
        with pytest.raises(TypeError, match=r"missing 1 required positional argument"):
            made()

    def test_a_tensor_is_described_without_its_values(self):
        assert described(torch.ones(2, 3, device="meta")) == "a tensor (2, 3) of float32 on meta"
        assert described(mx.quantize(torch.randn(2, 3), "nvfp4")) == "an MXTensor (2, 3) of float32 in nvfp4"
        assert described(torch.nn.Linear) == "the class Linear" and described("x" * 99).endswith("... (str)")

    def test_an_optional_argument(self):
        with pytest.raises(TypeError, match=r"Linear: params_dtype is 'bfloat16'; pass one of .*, or None"):
            te.Linear(64, 64, params_dtype="bfloat16")
        check("f", "size", 2**31 - 1, SIZE)
