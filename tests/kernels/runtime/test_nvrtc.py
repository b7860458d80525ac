"""CUDA sources are compiled by NVRTC for several compute capabilities, without a GPU."""

import itertools
import re
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.runtime import disk_cache, nvrtc
from mxtensor.kernels.runtime.nvrtc import ELEMENTS, TYPES, cast_constants
from mxtensor.kernels.small_m.config import MOST_WEIGHTS, Facts, classes_of, constants, facts_for
from mxtensor.kernels.small_m.config import registers as registers_of
from mxtensor.kernels.small_m.heuristics import ROWS, measured_for, table
from mxtensor.kernels.small_m.launch import ACTIVATION_SOURCES, KERNEL_SOURCES

pytestmark = pytest.mark.skipif(isinstance(nvrtc.library(), str), reason="needs NVRTC")
TARGETS = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "mxfp8[32x32]",
           "float8_e4m3_row", "float8_e4m3_128x128")  # fmt: skip
ELSEWHERE = ("mxfp8_e4m3", "nvfp4")
"""Formats that are also compiled for targets other than sm_90: older devices need other instructions for the elements
of the first and the scales of the second."""
SM90 = (9, 0)


def configs(format):
    """The configs of the table for one shape, with their numbers of rows."""
    lines = [line for line in table(SM90) if (line.n, line.k) == (14336, 4096)]
    return [(line.m, line.config) for line in measured_for(format, lines)]


def said_of(code, tool, option, tmp_path):
    """The output of a CUDA tool from Triton's package for this machine code."""
    triton = pytest.importorskip("triton")
    path, file = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool, tmp_path / "kernel.cubin"
    file.write_bytes(code)
    return subprocess.run([path, option, file], check=True, capture_output=True, text=True).stdout


def resources(code, tmp_path):
    """Registers and stack of each kernel."""
    text = said_of(code, "cuobjdump", "-res-usage", tmp_path)
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", text)
    return {name: (int(registers), int(stack)) for name, registers, stack in found}


def serialized(code, tmp_path):
    """The share of wgmma instructions that wait for previous ones: one in four, which ends a group, is the best."""
    products = re.findall(r"HGMMA[^;]*;", said_of(code, "nvdisasm", "-c", tmp_path))
    return sum("gsb0" in one for one in products) / len(products)


def product(format, config, capability, even=True, rows=8, weights=1):
    copies, classes = (16, 16, 16) if even else (1, 2, 4), classes_of(format, config, rows)
    facts = Facts(format, *[torch.bfloat16] * 3, *copies, even, None, classes, weights)
    return nvrtc.compiled(KERNEL_SOURCES[config.kind], constants(facts_for(facts, config), config), capability)


CASES = [(name, SM90) for name in FORMATS] + [(name, c) for name in ELSEWHERE for c in TARGETS if c != SM90]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "capability"), CASES)
def test_products_compile_and_those_of_few_rows_do_not_spill(name, capability, tmp_path):
    format = mx.get_format(name)
    for m, config in configs(format):
        if m not in (ROWS[0], ROWS[-1]) and capability != SM90:
            continue
        if config.wgmma and capability != SM90:
            continue
        code = product(format, config if capability >= SM90 else config._replace(split=1), capability, rows=m)
        registers, stack = resources(code, tmp_path)[config.kind]
        assert registers * config.threads * config.blocks <= 65536
        if config.wgmma:  # all registers, of which the loading threads release theirs
            assert (
                registers
                == min(65536 // config.blocks // config.threads // 8 * 8, 255)
                == registers_of(config).at_start
            )
        most = 256 if capability < SM90 else 32 if config.wgmma else 0 if config.persistent else 16 if m <= 16 else 256
        assert stack <= most, f"{m} rows by {config}: {stack} bytes of stack"
        assert not config.wgmma or serialized(code, tmp_path) == 0.25, (
            f"the wgmma instructions of {name} by {config} are serialized"
        )


@pytest.mark.exhaustive
def test_tails_and_odd_alignments_compile():
    format = mx.get_format("mxfp6")
    for capability in ((8, 0), (9, 0)):
        for config in {config._replace(split=1) for m, config in configs(format) if m == 1}:
            assert product(format, config, capability, even=False)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("capability", TARGETS)
def test_products_of_several_weights_compile(capability, tmp_path):
    format = mx.get_format("mxfp4")
    for config in dict(configs(format)[::-1] if capability == SM90 else configs(format)[:1]).values():
        config = config if capability >= SM90 else config._replace(split=1)
        code = product(format, config, capability, rows=config.cols, weights=MOST_WEIGHTS)
        assert resources(code, tmp_path)[config.kind][1] <= (32 if config.wgmma else 256)
        assert not config.wgmma or serialized(code, tmp_path) == 0.25


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("capability", TARGETS)
def test_casts_of_activations_compile(capability, tmp_path):
    casts = (None, mx.Cast.of("mxfp8"), mx.Cast.of("mxint8", "floor"), mx.Cast.of("nvfp4"))
    for cast, tiles in itertools.product(casts, (0, 64)):
        row = (
            ("ELEMENT", next(iter(ELEMENTS.values()))),
            ("X", TYPES[torch.bfloat16]),
            ("X_COPY", 16),
            ("TILE_ROWS", tiles),
        )
        code = nvrtc.compiled(ACTIVATION_SOURCES, (*row, *cast_constants(cast)), capability)
        assert {stack for _, stack in resources(code, tmp_path).values()} == {0}


def test_compiled_code_is_cached_on_disk(own_cache):
    row = (("ELEMENT", "E4M3"), ("X", "BFLOAT16"), ("X_COPY", 2), ("TILE_ROWS", 0), ("CAST", 0))
    code = nvrtc.compiled(ACTIVATION_SOURCES, row, SM90)
    (file,) = own_cache.rglob("*.cubin")
    assert file.read_bytes() == code and file.stat().st_mode & 0o777 == 0o600
    stem, marked = file.stem.rpartition("-")[0], b"cached"
    file.unlink()
    (file.parent / f"{stem}-{disk_cache._digest(marked)}.cubin").write_bytes(marked)
    assert nvrtc.compiled(ACTIVATION_SOURCES, row, SM90) == marked
    assert nvrtc.compiled(ACTIVATION_SOURCES, row, (8, 0)) != marked


def test_a_home_that_cannot_be_written_is_not_an_obstacle(own_cache):
    own_cache.touch()
    row = (("ELEMENT", "E4M3"), ("X", "BFLOAT16"), ("X_COPY", 1), ("TILE_ROWS", 0), ("CAST", 0))
    assert nvrtc.compiled(ACTIVATION_SOURCES, row, SM90)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("damage", ["cut", "other bytes", "others can write it", "a folder"])
def test_cached_code_that_cannot_be_trusted_is_compiled_again(damage, own_cache):
    row = (("ELEMENT", "E4M3"), ("X", "BFLOAT16"), ("X_COPY", 4), ("TILE_ROWS", 0), ("CAST", 0))
    code = nvrtc.compiled(ACTIVATION_SOURCES, row, SM90)
    (file,) = own_cache.rglob("*.cubin")
    if damage == "others can write it":
        file.chmod(0o666)
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes(code[:100] if damage == "cut" else code[:-1] + b"x")
    assert nvrtc.compiled(ACTIVATION_SOURCES, row, SM90) == code


def test_an_unknown_device_runs_the_code_of_its_generation_or_is_refused():
    assert [nvrtc._target(c) for c in TARGETS] == list(TARGETS)
    assert nvrtc._target((9, 5)) == (9, 0) and nvrtc._target((10, 9)) == (10, 3) and nvrtc.unknown((9, 5)) is None
    row = (("ELEMENT", "E4M3"), ("X", "BFLOAT16"), ("X_COPY", 2), ("TILE_ROWS", 0), ("CAST", 0))
    assert nvrtc.compiled(ACTIVATION_SOURCES, row, (9, 5)) == nvrtc.compiled(ACTIVATION_SOURCES, row, SM90)
    assert re.fullmatch(r"NVRTC 1\d\.\d+ cannot compile for sm990; a newer torch .*", nvrtc.unknown((99, 0)))


def test_threads_that_raise_the_shared_memory_limit_agree_with_the_driver(monkeypatch):
    """The first call asks for less memory; the driver delays it until the second call has asked, or for a moment."""
    fun = nvrtc.Function.__new__(nvrtc.Function)
    fun._memory, fun._function, fun._changes = 0, None, threading.Lock()
    begun, asked, allowed = threading.Event(), threading.Event(), []

    def allow(function, which, memory):
        begun.set()
        if memory == 100:
            asked.wait(0.2)
        allowed.append(memory)
        asked.set()

    monkeypatch.setattr(nvrtc, "driver", lambda: SimpleNamespace(cuFuncSetAttribute=allow))
    monkeypatch.setattr(nvrtc, "check_error", lambda result: None)
    first = threading.Thread(target=fun._allow, args=(100,))
    first.start()
    begun.wait()
    fun._allow(200)
    first.join()
    assert allowed == [100, 200] and fun._memory == 200


def test_without_nvrtc_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(nvrtc, "_wheel", list)
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert nvrtc.library.__wrapped__() == "NVRTC is not installed; a CUDA build of torch installs it"
