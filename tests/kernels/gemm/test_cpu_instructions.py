"""The CPU products compiled for narrower instruction sets than that of this processor."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxtensor.kernels.gemm import cpu_codes

ROOT = Path(__file__).parents[3]
NEON = ROOT / "tests" / "helpers" / "neon" / "arm_neon.h"


CHECK = """
import sys, torch
torch.manual_seed(0)  # with 7 of 100 seeds a sum is beyond float32, but not beyond the float64 of the definition
from mxtensor.kernels.gemm import cpu_codes
from tests.kernels.gemm import test_cpu_codes as t
found = cpu_codes.library()
assert found.instructions.startswith(sys.argv[1]), found.instructions
for i, name in enumerate([*t.FORMATS, *t.BLOCKS]):
    for m, n, k in ((1, 33, 576), (3, 7, 70), (6, 9, 200)):
        t.test_every_format_is_multiplied_as_the_definition_says(name, (m, n, k), t.DTYPES[i % 3])
    t.test_many_rows_are_multiplied_in_slabs(name, t.DTYPES[i % 3])
for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4"):
    t.test_every_code_with_every_scale(name, torch.bfloat16)
    t.test_unusual_scales_among_usual_ones(name, 1)
from tests.kernels.gemm import test_cpu_integers as t
for i, name in enumerate(t.CASTS):
    for shape in t.SHAPES:
        t.test_integer_codes_times_activations_cast_to_integers(name, shape, t.DTYPES[i % 3])
for name in t.ELEMENTS:
    for weights in t.ELEMENTS:
        t.test_every_code_times_every_code_is_exact(name, weights, 2)
        t.test_integers_with_scales_of_any_size(name, weights, -60, 3)
"""


def check(script, name, variable):
    environment = {**os.environ, cpu_codes.VARIABLE: variable, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", script, name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", cpu_codes.usable_instructions()[1:])
def test_other_instruction_sets(name):
    check(CHECK, name, name)


def emulate():
    """Build the products of this process with the instructions of ARM, element by element; for a process of its own."""
    cpu_codes.FLAGS = (*cpu_codes.FLAGS, "-DMX_NEON", f"-I{NEON.parent}", f"-I{cpu_codes.HERE}")
    cpu_codes.HEADERS = (*cpu_codes.HEADERS, NEON)


@pytest.mark.exhaustive
def test_the_instructions_of_arm_emulated():
    """On a processor of ARM these are its own, which ``test_cpu_codes.py`` runs."""
    check("from tests.kernels.gemm.test_cpu_instructions import emulate; emulate()\n" + CHECK, "neon", "plain")


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_a_processor_of_arm_has_its_instructions(machine, monkeypatch):
    monkeypatch.setattr(cpu_codes.platform, "machine", lambda: machine)
    assert cpu_codes.instructions() == ("neon", ())
    monkeypatch.setenv(cpu_codes.VARIABLE, "plain")
    assert cpu_codes.instructions() == ("plain", ("-DMX_PLAIN",))
    monkeypatch.setenv(cpu_codes.VARIABLE, "avx2")
    with pytest.raises(ValueError, match="this processor runs neon, plain"):
        cpu_codes.instructions()


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv(cpu_codes.VARIABLE, "avx1024")
    with pytest.raises(ValueError, match=r"MXTENSOR_CPU_INSTRUCTIONS is 'avx1024'; this processor runs .*plain"):
        cpu_codes.instructions()
