"""The C++ casts to NVFP4 with four over six and with global scales of rows, against the definition."""

import pytest
import torch

from mxtensor.core import recording
from mxtensor.core.kernel import Spec
from mxtensor.kernels.gemm.global_scales import times_global_scales
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.quantize import cpu_casts
from mxtensor.kernels.quantize.choose_cast import quantize_operand
from mxtensor.numerics import reference
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import encode

CASTS = [
    Cast.of(format, four_over_six=four)
    for format in ("nvfp4", "nvfp4[16x16]", "nvfp4[row_scaled]")
    for four in (None, "mae", "mse", "mae_448", "mse_448")
    if four is not None or "row" in format
]
VALUES = (torch.nan, torch.inf, -torch.inf, -0.0, 1e-45, 3e38, -1e-38, 65504.0)


def spec_of(x):
    return Spec("quantize", (tuple(x.shape),), (), x.dtype, x.device)


def check(x, cast):
    assert cpu_casts.QUANTIZE_NVFP4.refuses(spec_of(x), x, cast) is None
    made, wanted = cpu_casts.QUANTIZE_NVFP4.run(x, cast), encode(x, cast)
    assert made.shape == wanted.shape and made.format is wanted.format
    for one, other in zip(made.tensors, wanted.tensors, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (33, 65), (40, 31), (17, 160)], ids=str)
@pytest.mark.pairs
def test_the_bits_are_those_of_the_definition(shape, dtype, cast):
    for size in (1.0, 1e-40, 1e36):
        x = (torch.randn(shape) * torch.randn(shape[0], 1).mul(4).exp() * size).to(dtype)
        check(x, cast)
        check(x.t().contiguous().t(), cast)
        check(x.repeat(1, 2)[:, : shape[1]], cast)


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.label)
def test_special_values(cast):
    for i in range(len(VALUES)):
        x = torch.randn(20, 48)
        x[2], x[:, 16:32] = 0.0, -0.0
        x.view(-1)[torch.randint(x.numel(), (i + 1,))] = torch.tensor(VALUES[: i + 1])
        check(x, cast)


def test_stacks_and_threads():
    rows, four = Cast.of("nvfp4[row_scaled]"), Cast.of("nvfp4", four_over_six="mae")
    for cast in (rows, four):
        check(torch.randn(3, 5, 40, dtype=torch.bfloat16), cast)
        check(torch.randn(70), cast)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        check(torch.randn(700, 400), Cast.of("nvfp4[16x16]", four_over_six="mae"))
        check(torch.randn(700, 400), rows)
    finally:
        torch.set_num_threads(before)


def test_other_casts_are_refused_and_run_elsewhere(request):
    x, cast = torch.randn(32, 64), Cast.of("nvfp4", four_over_six="mae")
    refuses = cpu_casts.QUANTIZE_NVFP4.refuses
    assert refuses(spec_of(x), x, Cast.of("nvfp4")) == "for four over six and global scales of rows"
    stack, tiles = torch.randn(2, 32, 64), Cast.of("nvfp4[16x16]", four_over_six="mae")
    assert refuses(spec_of(stack), stack, tiles) == "not a matrix, and not contiguous rows"
    wide = Cast.of("nvfp4[1x32]", four_over_six="mae")
    assert refuses(spec_of(x), x, wide) == "not for e2m1 in blocks of 1x32"
    assert refuses(spec_of(x.double()), x.double(), cast) == "not for float64"
    assert refuses(spec_of(x[:0]), x[:0], cast) == "no values"
    request.getfixturevalue("no_compiler")
    assert refuses(spec_of(x), x, cast) == "there is no C++ compiler"
    for y, each in ((x, cast), (stack, tiles), (x, wide), (x.double(), cast)):
        made, wanted = quantize_operand(y, each), encode(y, each)
        assert all(map(torch.equal, made.tensors, wanted.tensors))


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.label)
def test_the_definition_can_be_recorded_as_on_a_gpu(cast, monkeypatch):
    monkeypatch.setattr(reference, "is_traced", lambda *tensors: True)  # nothing is read, as if x were on a GPU

    def work(x):
        operand = encode(x, cast)
        args = GemmArgs(torch.float32)
        return [
            *operand.tensors,
            *((times_global_scales(x @ x.t(), [operand.global_scale], args),) * cast.format.row_scaled),
        ]

    x, y = torch.randn(2, 33, 48).unbind()
    out, program = recording.record(lambda: work(x), (x,), lambda out: out)
    assert program is not None
    for found, given in ((out, x), (program(y), y), (program(x), x)):
        assert all(map(torch.equal, found, work(given)))
