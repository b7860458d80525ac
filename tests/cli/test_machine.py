"""doctor and tune: what they say of this machine."""

import json
import math
import re

import pytest
import torch

import mxtensor as mx
from mxtensor.cli import machine
from tests.helpers.checkpoint_files import checkpoint
from tests.helpers.cli import run

cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_doctor_runs_every_product_and_says_why_others_do_not(capsys):
    code, out, _ = run(capsys, "doctor")
    count = 24 * (1 + torch.cuda.is_available())
    assert code == 0 and f"torch {torch.__version__}" in out and f"{count} of {count} products are right" in out
    if not torch.cuda.is_available():
        assert "small_m: runs on cuda, this tensor is on cpu" in out
    fields = json.loads(run(capsys, "doctor", "--json")[1])
    formats = {p["format"] for p in fields["products"]}
    assert len(formats) == 12 and {"mxfp8-weight-only", "mxfp8", "nvfp4-weight-only", "nvfp4"} < formats
    assert all(p["right"] and 0 < p["error"] < 0.01 for p in fields["products"] if p["device"] == "cpu")
    assert fields["packages"]["mxtensor"] == mx.__version__ and fields["cache"]["folder"]


def test_doctor_finds_a_wrong_product(capsys, monkeypatch):
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: linear(x, w) * 1.5)
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and re.search(r"\b0 of \d+ products are right", out) and "WRONG" in out

    def fails(x, w):
        raise MemoryError("no memory")

    monkeypatch.setattr(torch.nn.functional, "linear", fails)
    code, out, _ = run(capsys, "doctor", "--json")
    products = json.loads(out)["products"]
    assert code == 1 and products[0]["failure"] == "MemoryError: no memory" and products[0]["error"] is None


def test_the_error_of_a_product_is_that_of_the_dequantized_operands():
    product = machine._product("cpu", "mxfp4", 3)
    assert product.is_right and math.isfinite(product.error) and product.kernel != "-"


@pytest.fixture
def source(tmp_path):
    weights = {f"layers.{i}.{name}.weight": torch.randn(n, 64) for i in range(2) for name, n in (("q", 64), ("k", 32))}
    return str(
        checkpoint(tmp_path / "a", weights | {"norm.weight": torch.ones(64), "lm_head.weight": torch.ones(8, 64)})
    )


def test_tune_says_what_it_would_measure(source, tmp_path, capsys):
    code, out, _ = run(capsys, "tune", source, "--format", "mxfp8", "--rows", 1, 8, "--dry-run", "--json")
    fields = json.loads(out)
    assert code == 0 and fields["rows"] == [1, 8] and not fields["tuned"]
    assert [(p["format"], p["casts"], p["n"], p["k"], len(p["names"])) for p in fields["products"]] == [
        ("mxfp8_e4m3", True, 32, 64, 2), ("mxfp8_e4m3", True, 64, 64, 2),
    ]  # fmt: skip
    mx.checkpoints.convert(source, tmp_path / "q", format="mxfp4-weight-only")
    code, out, _ = run(capsys, "tune", tmp_path / "q", "--dry-run")
    assert code == 0 and "would measure 2 products with 1, 2, 4, 8, 16, 32, 64, 128 rows" in out
    assert "mxfp4_e2m1  32  64       2" in out


@cpu_only
def test_tune_without_a_gpu_is_a_refusal(source, capsys):
    code, out, err = run(capsys, "tune", source, "--format", "mxfp8")
    assert code == 1 and "would measure 2 products" in out
    assert err == (
        "mxtensor: error: nothing was measured: torch finds no CUDA device here, and only its kernels have launch "
        "configs\n"
    )


def test_tune_measures_one_weight_of_each_product(source, capsys, monkeypatch):
    seen = {}

    def measures(model, rows, seconds):
        seen.update(rows=rows, seconds=seconds, weights=[layer.weight for layer in model])
        return {(m, 64, 64): "persistent" for m in rows}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "tune_model", measures)
    arguments = ("--format", "nvfp4", "--rows", 1, 2, "--seconds", 5, "--device", "cpu")
    code, out, err = run(capsys, "tune", source, *arguments)
    assert code == 0 and err == "" and seen["rows"] == (1, 2) and seen["seconds"] == 5
    assert all(isinstance(w, mx.MXTensor) and w.recipe.activation is not None for w in seen["weights"])
    assert [(w.format.name, tuple(w.shape)) for w in seen["weights"]] == [("nvfp4", (32, 64)), ("nvfp4", (64, 64))]
    assert "1: persistent, 2: persistent" in out and "measured 2 of 4: 2 products with 1, 2 rows each" in out


@pytest.mark.gpu
def test_tune_measures_on_a_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wide"
    mx.checkpoints.save({"up.weight": torch.randn(1024, 512), "down.weight": torch.randn(512, 1024)}, source)
    code, out, _ = run(capsys, "tune", source, "--format", "mxfp8-weight-only", "--rows", 1, "--seconds", 30, "--json")
    fields = json.loads(out)
    assert code == 0 and fields["tuned"] and all(p["kernels"]["1"] for p in fields["products"])
