"""What a conversion calls exact: codes, scales, dtypes and decoded values that are the same bit for bit."""

import json

import pytest
import torch

import mxtensor as mx
from tests.helpers.cli import run


def test_a_global_scale_that_takes_a_step_is_named(tmp_path, capsys):
    """compressed-tensors stores the reciprocal: of some scales it is read back as a float32 beside them."""
    torch.manual_seed(0)
    state = {f"{i}.weight": mx.quantize(torch.randn(32, 64) * 1.1**i, "nvfp4") for i in range(40)}
    mx.checkpoints.save(state, tmp_path / "a")
    report = mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="compressed-tensors")
    after = mx.checkpoints.load(tmp_path / "b")
    scales = {name: (t.rowwise.global_scale, after[name].rowwise.global_scale) for name, t in state.items()}
    assert set(report.stepped) == {name for name, (before, now) in scales.items() if not torch.equal(before, now)}
    assert 0 < len(report.stepped) < 40 and sorted(report.exact + report.stepped) == sorted(state)
    assert f"{len(report.stepped)} tensors, such as {report.stepped[0]}, keep their codes" in str(report)
    for name, t in state.items():
        steps = abs(scales[name][0].view(torch.int32) - scales[name][1].view(torch.int32))
        assert steps <= 4 and torch.equal(t.rowwise.data, after[name].rowwise.data)
    arguments = ("convert", tmp_path / "a", "-o", tmp_path / "d", "--layout", "compressed-tensors", "--json")
    fields = json.loads(run(capsys, *arguments)[1])
    assert set(fields["stepped"]) == set(report.stepped) and len(fields["exact"]) == len(report.exact)
    back = mx.checkpoints.convert(tmp_path / "b", tmp_path / "c", layout="compressed-tensors")
    assert back.stepped == [] and sorted(back.exact) == sorted(state)


def test_a_dtype_that_readers_take_from_the_configuration_is_named(tmp_path):
    state = {"a.weight": mx.quantize(torch.randn(64, 64).bfloat16(), "mxfp4"),
             "b.weight": mx.quantize(torch.randn(32, 64), "mxfp4")}  # fmt: skip
    mx.checkpoints.save(state, tmp_path / "a")
    report = mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="compressed-tensors")
    assert report.retyped == ["b.weight"] and "1 weights, such as b.weight, are read in the dtype" in str(report)
    assert mx.checkpoints.load(tmp_path / "b")["b.weight"].dtype == torch.bfloat16
    assert mx.checkpoints.convert(tmp_path / "a", tmp_path / "c", layout="torchao").retyped == []


@pytest.mark.parametrize(
    ("format", "dtype", "exact"),
    [("mxfp4", torch.bfloat16, True), ("mxfp8", torch.bfloat16, True), ("mxint8", torch.float16, True),
     ("nvfp4", torch.bfloat16, False), ("float8_row", torch.bfloat16, False), ("float8_row", torch.float32, True)],
)  # fmt: skip
def test_decoded_values_are_exact_only_if_their_dtype_holds_them(format, dtype, exact, tmp_path):
    t = mx.quantize(torch.randn(64, 64).to(dtype), format)
    mx.checkpoints.save({"a.weight": t, "n.weight": torch.ones(3)}, tmp_path / "a")
    report = mx.checkpoints.convert(tmp_path / "a", tmp_path / "b", layout="plain")
    after, decoded = mx.checkpoints.load(tmp_path / "b")["a.weight"], t.dequantize(torch.float32)
    assert torch.equal(after, t.dequantize()) and torch.equal(after.float(), decoded) == exact
    assert report.exact == ["a.weight", "n.weight"][0 if exact else 1 :]
    error = (after.double() - decoded.double()).norm() / decoded.double().norm()
    assert report.errors == ({} if exact else {"a.weight": pytest.approx(float(error), rel=1e-6)})
