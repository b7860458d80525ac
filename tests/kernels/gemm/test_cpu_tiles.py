"""Products in the tile registers of AMX: the same kernel with emulated registers everywhere, and with the real ones
where the processor has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.gemm import cpu_codes
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import encode
from tests.kernels.gemm import test_cpu_codes as codes

ROOT = Path(__file__).parents[3]
EMULATED = ROOT / "tests" / "helpers" / "emulated_tiles.h"
ROWS = 1, 192
needs_x86 = pytest.mark.skipif("avx2" not in cpu_codes.usable_instructions(),
                               reason="needs a processor with AVX2 or more")  # fmt: skip
needs_amx = pytest.mark.skipif("amx" not in cpu_codes.usable_instructions(), reason="this processor has no AMX")


def emulate():
    """Build the products of this process with emulated tile registers; for a process of its own."""
    cpu_codes.TILE_ROWS = ROWS
    emulated = "-ffp-contract=off", f'-DMX_TILES="{EMULATED}"', *cpu_codes.tile_flags()
    cpu_codes.FLAGS = (*cpu_codes.FLAGS, *emulated)
    cpu_codes.HEADERS = (*cpu_codes.HEADERS, EMULATED)


def real():
    """Build the products of this process with the tile registers of AMX from one row on."""
    cpu_codes.TILE_ROWS = ROWS
    assert cpu_codes.library().instructions == "amx"


def steps():
    """Steps that were multiplied in emulated registers."""
    return cpu_codes.library().kernels.mx_emulated_steps()


def weight(name, n, k):
    """A weight with a block of zeros in some rows, whose scale is the smallest."""
    values = torch.randn(n, k)
    values[1:3, : k // 2] = 0
    return mx.quantize(values, name).rowwise


def check_products(count=lambda: None):
    """Every format with scales that bfloat16 holds; tiles that are not full, pieces of a row, blocks of x."""
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "mxfp4[1x128]"):
        for m, n, k in ((1, 33, 576), (5, 16, 70), (17, 49, 130), (32, 7, 1100), (70, 150, 96), (130, 20, 64)):
            w, x, before = weight(name, n, k), torch.randn(m, k, dtype=torch.bfloat16), count()
            out = codes.product(x, w, torch.float32)
            assert before is None or count() > before, (name, m)
            codes.assert_product(out, x.double(), codes.exact(w))
            for bias in (torch.randn(n), torch.randn(n).bfloat16()):
                codes.assert_product(codes.product(x, w, bias=bias), x.double(), codes.exact(w), bias)


def check_corners():
    """Every code with every scale, scales that need care, extreme activations, casts: as for few rows."""
    for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"):
        codes.test_every_code_with_every_scale(name, torch.bfloat16)
        for rows in (1, 5):
            codes.test_unusual_scales_among_usual_ones(name, rows)
    for rows in (3, 40):
        codes.test_extreme_activations(rows, torch.bfloat16)
    codes.test_results_do_not_depend_on_threads()
    w = weight("mxfp8", 40, 160)
    x = (torch.randn(50, 160) * 1e30).bfloat16()  # more rows than are multiplied with care
    codes.assert_product(codes.product(x, w), x.double(), codes.exact(w))
    for name in ("mxint8", "mxfp8", "nvfp4"):
        for rows in (3, 40):
            w, x, cast = weight(name, 40, 160), torch.randn(rows, 160), Cast.of(name)
            out = codes.product(codes.Unquantized(x, cast), w, torch.float32)
            codes.assert_product(out, codes.exact(encode(x, cast)), codes.exact(w))


def outputs():
    """Results whose every bit counts: the same in each process."""
    torch.manual_seed(7)
    found = []
    for name in ("mxfp8", "mxfp4", "mxint8", "nvfp4"):
        for m, n, k in ((1, 33, 576), (17, 49, 1100), (70, 150, 96)):
            x = torch.randn(m, k, dtype=torch.bfloat16)
            found.append(codes.product(x, mx.quantize(torch.randn(n, k), name).rowwise, torch.float32))
    return found


def in_process(script, *arguments):
    """Run lines of Python that have the functions of this file; fail with what they print."""
    lines = "import sys, torch; torch.manual_seed(0); from tests.kernels.gemm.test_cpu_tiles import *; " + script
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", lines, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
@needs_x86
def test_products_in_emulated_tiles():
    in_process("emulate(); check_products(steps)")


@needs_x86
@pytest.mark.exhaustive
def test_corners_in_emulated_tiles():
    in_process("emulate(); check_corners(); assert steps() > 0")


@needs_amx
def test_products_in_tiles():
    in_process("real(); check_products(); check_corners()")


@needs_amx
def test_tiles_have_the_bits_of_the_emulation(tmp_path):
    """What the manual says that the instruction does is what the processor does."""
    for name in ("emulate", "real"):
        in_process(f"{name}(); torch.save(outputs(), sys.argv[1])", tmp_path / name)
    for emulated, computed in zip(torch.load(tmp_path / "emulate"), torch.load(tmp_path / "real"), strict=True):
        assert torch.equal(emulated, computed)


def test_tiles_are_for_processors_whose_system_permits_them(monkeypatch):
    monkeypatch.setattr(cpu_codes, "instruction_sets", lambda: set(cpu_codes.X86["amx"][0]))
    monkeypatch.setattr(cpu_codes.platform, "machine", lambda: "x86_64")
    for permitted, name in ((True, "amx"), (False, "avx512")):
        monkeypatch.setattr(cpu_codes, "permits_tiles", lambda permitted=permitted: permitted)
        wanted, flags = cpu_codes.instructions()
        assert wanted == name and ("-mamx-bf16" in flags) is permitted and "-mavx512bf16" in flags
        assert (f"-DTILES_FROM={cpu_codes.TILE_ROWS[0]}" in flags) is permitted


def test_a_compiler_that_does_not_know_tiles_builds_the_next_set(monkeypatch):
    built = []

    def load(source, flags, headers, symbols):
        built.append(flags)
        return "linear.cpp did not build"

    monkeypatch.setattr(cpu_codes, "load", load)
    monkeypatch.setattr(cpu_codes, "instructions", lambda: ("amx", cpu_codes.flags_of("amx")))
    assert cpu_codes.load_kernels() == "linear.cpp did not build"
    assert ["-mamx-bf16" in flags for flags in built] == [True, False] and "-mavx512vbmi" in built[1]
