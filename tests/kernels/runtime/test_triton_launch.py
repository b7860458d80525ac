"""Launches of Triton kernels: the key of a compiled kernel has all it depends on, and refusals give the reason."""

from types import SimpleNamespace

import pytest
import torch

from mxtensor import Cast, get_format
from mxtensor.core import compat
from mxtensor.core.kernel import Spec
from mxtensor.kernels.quantize import triton_columns, triton_rows
from mxtensor.kernels.quantize import triton_common as tiles
from mxtensor.kernels.quantize.triton_common import cast_code, format_code
from mxtensor.kernels.runtime import triton_launch
from mxtensor.numerics.operand import Operand

CUDA = torch.device("cuda", 0)


class Kernel:
    """Stands in for a ``@triton.jit`` function: ``made`` are the calls that compile, ``ran`` those that do not."""

    def __init__(self):
        self.made, self.ran = [], []

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.made.append((grid, arguments, options))
            return Compiled(self)

        return call


class Compiled:
    """Stands in for what Triton compiled: ``[grid]`` tells profilers of the call, ``run`` does not."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.ran.append(("told", grid, arguments))

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert (function, metadata, rest[:3]) == ("function", "metadata", (None, None, None))
        self.kernel.ran.append((stream, (x, y, z), rest[3:]))


@pytest.fixture
def device(monkeypatch):
    """A device on which kernels are compiled; ``index``: the current one; ``hooks``: who wants to know of launches."""
    state = SimpleNamespace(index=0, hooks=[])
    hook = SimpleNamespace(calls=state.hooks)
    for owner, name, value in (
        (triton_launch, "interpreted", lambda: False),
        (compat, "current_cuda_device", lambda: state.index),
        (compat, "current_cuda_stream", lambda index: f"stream {index}"),
        (triton_launch, "_hooks", lambda: (hook, hook)),
        (triton_launch, "_compiled", {}),
    ):
        monkeypatch.setattr(owner, name, value)
    return state


@pytest.fixture
def a_gpu(with_triton):
    """A CUDA build of torch with Triton, and a device of sm_90, or of the capability that it is called with."""
    with_triton((9, 0))
    return lambda *capability: with_triton(capability)


# ---------------------------------------------------------------------------------------------- launch

CODE = ("facts", 8)
BYTES = torch.zeros(256, dtype=torch.uint8)
ALIGNED = BYTES[-BYTES.data_ptr() % 16 :]
FIRST = (ALIGNED, None, 32, 7)


def test_the_first_call_compiles_and_the_next_ones_run_what_was_compiled(device):
    kernel = Kernel()
    for programs in (3, 5):
        triton_launch.launch(kernel, programs, FIRST, (CODE, 64), 4)
    assert kernel.made == [((3,), (*FIRST, CODE, 64), {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False})]
    assert kernel.ran == [("stream 0", (5, 1, 1), (*FIRST, CODE, 64))]
    triton_launch.launch(kernel, 3, FIRST, (CODE, 64), 4, 2)
    assert kernel.made[1:] == [((3,), (*FIRST, CODE, 64), {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False})]


def test_a_profiler_is_told_of_a_launch(device):
    kernel = Kernel()
    triton_launch.launch(kernel, 3, FIRST, (CODE, 64), 4)
    device.hooks.append(print)
    triton_launch.launch(kernel, 3, FIRST, (CODE, 64), 4)
    assert kernel.ran == [("told", (3, 1, 1), (*FIRST, CODE, 64))]


def test_the_hooks_of_triton_exist():
    pytest.importorskip("triton")
    assert [hook.calls for hook in triton_launch._hooks()] == [[], []]


SAME = {
    "another multiple of 16": (ALIGNED, None, 64, 7),
    "another number that is none": (ALIGNED, None, 32, 9),
    "another tensor": (ALIGNED[32:], None, 32, 7),
    "the largest 32-bit number": (ALIGNED, None, 32, 0x7FFFFFFF),
}
OTHER = {
    "a tensor at no multiple of 16": (ALIGNED[8:], None, 32, 7),
    "another dtype": (ALIGNED.view(torch.int8), None, 32, 7),
    "a tensor that was absent": (ALIGNED, ALIGNED, 32, 7),
    "an absent tensor": (None, None, 32, 7),
    "a number that was a multiple of 16": (ALIGNED, None, 33, 7),
    "a number that now is a multiple of 16": (ALIGNED, None, 32, 16),
    "one": (ALIGNED, None, 32, 1),
    "zero": (ALIGNED, None, 0, 7),
    "more than 32 bits": (ALIGNED, None, 32, 0x80000001),
}


def recompiles(arguments=FIRST, constants=(CODE, 64), warps=4, kernel=None):
    """Whether these are another compilation than FIRST."""
    first = Kernel()
    triton_launch.launch(first, 1, FIRST, (CODE, 64), 4)
    used = kernel or first
    before = len(used.made)
    triton_launch.launch(used, 1, arguments, constants, warps)
    triton_launch.launch(used, 1, arguments, constants, warps)
    assert len(used.made) + len(used.ran) == before + 2 and len(used.ran) >= 1
    return len(used.made) > before


@pytest.mark.parametrize("change", SAME)
def test_what_a_kernel_does_not_depend_on(change, device):
    assert not recompiles(SAME[change])


@pytest.mark.parametrize("change", OTHER)
def test_what_the_compiler_is_told_of_an_argument(change, device):
    """Triton takes 1 as a constant, knows multiples of 16 from other numbers, and 64 bits from 32."""
    assert recompiles(OTHER[change])


def test_constants_warps_kernel_and_device_are_part_of_the_key(device):
    assert recompiles(constants=(CODE, 128))
    assert recompiles(constants=(("facts", 6), 64))
    assert recompiles(constants=(CODE, True))
    assert recompiles(warps=8)
    assert recompiles(kernel=Kernel())
    kernel = Kernel()
    for device.index in (0, 1):
        triton_launch.launch(kernel, 1, FIRST, (CODE, 64), 4)
    assert len(kernel.made) == 2 and kernel.ran == []


def test_a_constant_that_is_gone_is_not_taken_for_a_new_one_in_its_place(device):
    """The first constant is known by its identity, which must not be given away."""
    kernel = Kernel()
    for bits in range(50):
        triton_launch.launch(kernel, 1, FIRST, (["facts", bits], 64), 4)
    assert [call[1][-2][1] for call in kernel.made] == list(range(50)) and kernel.ran == []


def test_in_the_interpreter_every_call_is_tritons_own(monkeypatch):
    monkeypatch.setattr(triton_launch, "interpreted", lambda: True)
    kernel = Kernel()
    for _ in range(2):
        triton_launch.launch(kernel, 2, FIRST, (CODE, 64), 4)
    assert len(kernel.made) == 2 and kernel.ran == []


# ---------------------------------------------------------------------------------------------- where it can run


def spec(device=CUDA, dtype=torch.bfloat16, shape=(8, 64)):
    return Spec("quantize", (shape,), (dtype,), dtype, device)


def test_a_device_that_can_run_triton_is_not_refused(a_gpu):
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        a_gpu(*capability)
        assert triton_launch.missing(spec()) is None


def test_a_tensor_elsewhere_is_refused(a_gpu):
    assert triton_launch.missing(spec(torch.device("cpu"))) == "runs on cuda, this tensor is on cpu"
    assert triton_launch.missing(spec(torch.device("meta"))) == "runs on cuda, this tensor is on meta"


def test_an_old_device_is_refused_by_its_capability(a_gpu):
    a_gpu(7, 5)
    assert triton_launch.missing(spec()) == "Triton needs sm80, this device is sm75"


def test_a_build_without_triton_and_one_for_rocm_are_refused(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "this build of torch is for ROCm" in triton_launch.missing(spec())
    monkeypatch.setattr(triton_launch, "_installed", lambda: False)
    assert triton_launch.missing(spec()) == "triton is not installed"


def test_the_interpreter_has_the_instructions_of_no_device(a_gpu, monkeypatch):
    for interpreted, capability in ((False, (9, 0)), (True, (0, 0))):
        monkeypatch.setattr(triton_launch, "interpreted", lambda now=interpreted: now)
        assert triton_launch.instructions_of(CUDA) == capability


def test_float8_is_rounded_by_instructions_from_sm89_on():
    """And by integer arithmetic before, in the interpreter, and for elements that no instruction rounds to."""
    for capability, word in (((0, 0), ""), ((8, 0), ""), ((8, 6), ""), ((8, 9), "e4m3"), ((9, 0), "e4m3")):
        assert cast_code(Cast.of("mxfp8_e4m3"), capability).float8 == word
        assert format_code(get_format("float8_row"), capability, False).float8 == word
        assert cast_code(Cast.of("mxfp4"), capability).float8 == ""


# ---------------------------------------------------------------------------------------------- what casts refuse


def test_casts_refuse_what_no_triton_kernel_runs(a_gpu):
    a_gpu(7, 0)
    x, cast = torch.randn(8, 64), Cast.of("mxfp8")
    sentence = "Triton needs sm80, this device is sm70"
    assert triton_rows.refuses_quantize(spec(), x, cast) == sentence
    assert triton_columns.refuses_both(spec(), x, cast) == sentence
    assert triton_rows.refuses_quantize(spec(), x, cast, torch.bfloat16) == sentence
    operand = Operand(torch.zeros(8, 64), torch.zeros(8, 2), None, cast.format, (8, 64))
    assert triton_rows.refuses_dequantize(spec(), operand, torch.bfloat16) == sentence


def test_casts_accept_every_format_and_dtype_but_float64(a_gpu):
    x = torch.randn(8, 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert triton_rows.refuses_quantize(spec(dtype=dtype), x, Cast.of("mxfp8")) is None
        assert triton_columns.refuses_both(spec(dtype=dtype), x, Cast.of("nvfp4")) is None
        assert triton_rows.refuses_quantize(spec(dtype=dtype), x, Cast.of("float8_row"), dtype) is None
    assert triton_rows.refuses_quantize(spec(dtype=torch.float64), x, Cast.of("mxfp8")) == "not for float64"
    reason = triton_rows.refuses_quantize(spec(), x, Cast.of("mxfp8"), torch.float64)
    assert reason == "not for float64"


def test_a_tensor_without_values_is_refused(a_gpu):
    for shape in ((0, 64), (8, 0)):
        reason = triton_rows.refuses_quantize(spec(shape=shape), torch.empty(shape), Cast.of("mxfp8"))
        assert reason == "the tensor is empty"


@pytest.mark.parametrize("name", ["mxfp8[32x32]", "float8_row", "float8_tensor", "float8_128x128"])
def test_two_copies_are_made_of_blocks_along_rows_only(name, a_gpu):
    reason = triton_columns.refuses_both(spec(), torch.randn(8, 64), Cast.of(name))
    assert reason == "makes both copies of blocks along rows only"
    assert triton_columns.refuses_both(spec(), torch.randn(2, 4, 64), Cast.of("mxfp8")) == "matrices only"


def test_an_exported_program_has_no_triton_in_it(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    reason = triton_rows.refuses_quantize(spec()._replace(traced=True), torch.randn(8, 64), Cast.of("mxfp8"))
    assert reason == "an exported program holds aten ops only"


def test_sizes_of_tiles_divide_by_what_they_hold():
    """Powers of two, which Triton wants, and whole blocks of every format, which the kernels want."""
    widest = max(get_format(f"mxfp8[1x{n}]").block[1] for n in (16, 32, 64, 128))
    every = [*tiles.ROW_TILES.values(), *tiles.DECODE_TILES.values(), *tiles.COLUMN_TILES.values()]
    for first, second, *_ in [*every, tiles.PAIR_TILE, (1, *tiles.FULL_ROW_TILE)]:
        assert first & (first - 1) == 0 and second & (second - 1) == 0
    assert all(cols % widest == 0 for _, cols, *_ in [*tiles.ROW_TILES.values(), *tiles.DECODE_TILES.values()])
    assert 2 * tiles.PAIR_TILE[1] % widest == 0
