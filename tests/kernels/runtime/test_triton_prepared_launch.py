"""A recorded launch of Triton calls its function in C with the arguments that Triton's own Python gives it."""

import types

import pytest
import torch

from mxtensor.core import recording
from mxtensor.kernels.runtime import triton_launch
from mxtensor.kernels.runtime.triton_launch import prepared_launch

pytest.importorskip("triton")
from triton.backends.nvidia.driver import CudaLauncher

ARGUMENTS = (0x7F0000000000, 48, None, 2.5, "codes", True)


def launcher(scratch=0):
    run, seen = CudaLauncher.__new__(CudaLauncher), []
    sizes = {"global_scratch_size": scratch, "profile_scratch_size": 0}
    options = {"global_scratch_align": 1, "profile_scratch_align": 1, "num_ctas": 1, "launch_pdl": False}
    kinds = {"launch_cooperative_grid": False, "arg_annotations": ["kinds"], "kernel_signature": b"signature"}
    vars(run).update(sizes | options | kinds, launch=lambda *a: seen.append(a))
    return types.SimpleNamespace(run=run, function=0xF00, packed_metadata=(4, 1, 0)), seen


def test_the_arguments_are_those_of_triton():
    compiled, seen = launcher()
    compiled.run(7, 1, 1, 5, compiled.function, compiled.packed_metadata, None, None, None, *ARGUMENTS)
    launch = prepared_launch(compiled, 7, ARGUMENTS)
    given = (launch.arguments,) if launch.in_tuple else launch.arguments
    launch.function(*launch.before, 5, *launch.after, *given)
    assert launch.function is compiled.run.launch and seen[0] == seen[1]


def test_a_program_passes_them_on():
    compiled, seen = launcher()

    def work(x):
        out = torch.empty(4)
        recorder = recording.active()
        if recorder is not None:
            recorder.launch(prepared_launch(compiled, 3, (x, out, 4, None)))
        return out

    x = torch.randn(4)
    _, program = recording.record(lambda: work(x), [x], lambda out: [out])
    other = torch.randn(4)
    (out,) = program(other)
    compiled.run(
        3, 1, 1, 0, compiled.function, compiled.packed_metadata, None, None, None,
        other.data_ptr(), out.data_ptr(), 4, None,
    )  # fmt: skip
    assert seen[0] == seen[1]


@pytest.mark.parametrize("unknown", ["scratch memory", "version", "launcher"])
def test_what_is_unknown_is_launched_by_triton_itself(unknown, monkeypatch):
    compiled, _ = launcher(scratch=64 if unknown == "scratch memory" else 0)
    if unknown == "version":
        monkeypatch.setattr(triton_launch, "_version", lambda: "9.0")
    if unknown == "launcher":
        compiled.run = lambda *a: None
    launch = prepared_launch(compiled, 7, ARGUMENTS)
    assert launch.function is compiled.run and not launch.in_tuple
    assert launch.after == (compiled.function, compiled.packed_metadata, None, None, None)
