"""Run the native code of the package under AddressSanitizer and UBSan: ``python -m tests.helpers.sanitize_native``.

The C++ casts and products, the calls of the CUDA driver, and the CUDA sources as ``cuda_on_cpu`` runs them, are
compiled with both sanitizers; Python gets their runtime by LD_PRELOAD. Then come every format, dtype and layout with
tails, hostile values and made-up codes, the tests of casts and products, and some of those of the CUDA sources. A
report ends the process with its text and the status 99.
``--casts`` stops after the casts. ``--check`` reads one value too many, to show that this is reported.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mxtensor.kernels.runtime.native_build import compiler

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
REPORT = 99
"""The status of a process in which a sanitizer has reported something."""
OPTIONS = {
    # Python and torch keep memory until the end; the fibers of cuda_on_cpu have stacks of their own
    "ASAN_OPTIONS": f"detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1:exitcode={REPORT}",
    "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=1:exitcode={REPORT}",
    "OMP_NUM_THREADS": "1",
}
SOME = "tails or each_group or several_weights or biases or cast_to_nvfp4"
TESTS = {
    "casts": ("tests/kernels/quantize/test_cpu.py", "-k", "not without_a_compiler"),
    "products": (
        "tests/kernels/gemm/test_cpu_codes.py",
        "tests/kernels/gemm/test_cpu_groups.py",
        "tests/kernels/gemm/test_large_activations.py",
        "-k",
        "not without_a_compiler and not compiled and not torchs_own",
    ),
    "attention": ("tests/kernels/attention/test_attention.py", "-k", "not triton and not device"),
    "attention of values": ("tests/kernels/attention/test_values_cpu.py",),
    "CPU graphs": ("tests/compile/test_cpu_graphs.py", "-k", "not without_a_compiler and not gradients"),
    "calls of the driver": ("tests/kernels/runtime/test_host_calls.py", "-k", "not without_the_module"),
    "CUDA sources": (
        "tests/kernels/small_m/test_small_m.py",
        "tests/kernels/small_m/test_groups.py",
        "-k",
        SOME,
    ),
}
SIZES = (
    (1,),
    (31,),
    (32,),
    (100,),
    (1, 1),
    (3, 33),
    (17, 128),
    (64, 130),
    (129, 257),
    (2, 40, 96),
    (3, 33, 35),
    (0, 32),
)
VALUES = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3e38, -1e-38, 65504.0)


def runtime(name):
    """The path of a runtime library of the compiler; None if it is not installed."""
    found = subprocess.run([*compiler(), f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    return found if os.path.isabs(found) else None


def under_sanitizers():
    """Run this module once more, in a process with the runtime of the sanitizers; its status."""
    libraries = [runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if None in libraries[:2]:
        print(
            f"{' '.join(compiler())} has no AddressSanitizer or no UBSan: install libasan and libubsan", file=sys.stderr
        )
        return 1
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            **OPTIONS,
            "LD_PRELOAD": ":".join(filter(None, libraries)),
            "XDG_CACHE_HOME": cache,
        }
        command = [sys.executable, "-m", "tests.helpers.sanitize_native", "--inside", *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


# ---------------------------------------------------------------------------------------------- inside


def arm():
    """Compile what comes with the sanitizers."""
    from mxtensor.kernels.attention import cpu_attention as attention
    from mxtensor.kernels.gemm import cpu_codes
    from mxtensor.kernels.quantize import cpu_casts
    from mxtensor.kernels.runtime import host_calls, native_build
    from tests.helpers import cuda_on_cpu

    host_calls.FLAGS = (*host_calls.FLAGS, *SANITIZERS)
    for module in (cpu_casts, cpu_codes, attention):
        module.FLAGS = (*(flag for flag in module.FLAGS if flag != "-O3"), "-O1", *SANITIZERS)
    native_build.OP_FLAGS = (*native_build.OP_FLAGS, *SANITIZERS[:1], "-fno-sanitize=undefined")
    cuda_on_cpu.FLAGS = (*cuda_on_cpu.FLAGS, *SANITIZERS)
    for found in (
        cpu_casts.library(),
        cpu_casts.nvfp4_library(),
        cpu_codes.library(),
        attention.library(),
        host_calls.module(),
    ):
        assert not isinstance(found, str), found
    return cpu_casts


def casts(cpu_casts):
    """Every format, dtype and layout, with values that end where their memory ends."""
    import torch

    import mxtensor as mx
    from mxtensor.core.kernel import Spec
    from mxtensor.kernels.quantize import cpu_casts
    from mxtensor.numerics.reference import decode, encode
    from tests.kernels.quantize.test_cpu import same_values

    def as_bytes(t):
        return t.reshape(-1).view(torch.uint8)

    count = 0
    names = [*mx.FORMATS, "mxfp8[32x32]", "mxfp4[1x64]", "nvfp4[16x16]", "mxfp6_e3m2[1x16]", "mxint8[128x128]"]
    rounded_twice = [(name, "mse") for name in ("nvfp4", "nvfp4[16x16]", "nvfp4[row_scaled]")]
    every = [*((name, None) for name in names), ("nvfp4[row_scaled]", None), *rounded_twice]
    for (name, four), dtype, size in itertools.product(every, cpu_casts.KINDS, SIZES):
        cast = mx.Cast.of(name, ("floor", "rceil", "ceil", "even")[count % 4], four_over_six=four)
        kernel = cpu_casts.QUANTIZE if cast.why_not_plain is None else cpu_casts.QUANTIZE_NVFP4
        x = torch.randn(size).to(dtype)
        for hostile in (False, True):
            if hostile and x.numel():
                x.view(-1)[torch.randint(x.numel(), (len(VALUES),))] = torch.tensor(VALUES).to(dtype)
            for source in (x, x.mT.contiguous().mT) if x.dim() > 1 else (x,):
                spec = Spec("sanitize", (tuple(source.shape),), (), dtype, source.device)
                if kernel.refuses(spec, source, cast) is not None:
                    continue
                operand, expected = kernel.run(source, cast), encode(source, cast)
                for got, want in zip(operand.tensors, expected.tensors, strict=True):
                    assert torch.equal(as_bytes(got), as_bytes(want)), (name, dtype, size)
                if cast.format.row_scaled:
                    count += 1
                    continue
                if not hostile:  # any bytes are codes and scales
                    for t in operand.tensors:
                        as_bytes(t).random_(0, 256)
                assert same_values(cpu_casts.DEQUANTIZE.run(operand, dtype), decode(operand, dtype)), (
                    name,
                    dtype,
                    size,
                )
                count += 2
    return count


def overrun(cpu_casts):
    """Read one value after the end of a tensor, as a wrong size would."""
    import ctypes

    import torch

    x = torch.randn(1000)
    cpu_casts.library().mx_amax(ctypes.c_void_p(x.data_ptr()), 0, 0, x.numel() + 1)


def inside(arguments):
    import pytest

    cpu_casts, start = arm(), time.perf_counter()
    if "--check" in arguments:
        overrun(cpu_casts)
        return 0
    print(f"{casts(cpu_casts)} casts under AddressSanitizer and UBSan: no report, {time.perf_counter() - start:.0f} s")
    if "--casts" in arguments:
        return 0
    for name, selected in TESTS.items():
        start = time.perf_counter()
        status = pytest.main([*selected, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-s", "--suite", "quick"])
        print(f"tests of the {name}: status {int(status)}, {time.perf_counter() - start:.0f} s")
        if status:
            return int(status)
    return 0


if __name__ == "__main__":
    sys.exit(inside(sys.argv[2:]) if sys.argv[1:2] == ["--inside"] else under_sanitizers())
