"""Row-scaled operands of square blocks, of a matrix or stack and of its transpose: bitwise those of the definition."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxtensor as mx
from mxtensor.kernels.operands import Form, Unquantized
from mxtensor.kernels.quantize.to_row_scaled_both import PAIR_BY_CODES, wants_rows, why_not_by_codes, why_not_rows
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import row_scaled
from tests.helpers.row_scaled import check_rows
from tests.helpers.stand_in import BF16

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")


def wide_range(*shape, device="cpu"):
    """Values whose blocks of 32 columns are many powers of two apart."""
    x = torch.randn(shape)
    return (x * 2.0 ** (7.0 * (torch.arange(shape[-1]) // 32))).to(device, BF16)


def check(made, x, cast):
    """Each matrix of a stack."""
    matrices, rows = x.reshape(-1, *x.shape[-2:]), x.shape[-2]
    assert made.shape == tuple(x.shape) and made.format is cast.format
    for i, matrix in enumerate(matrices):
        part = slice(i * rows, (i + 1) * rows)
        expected = row_scaled(encode(matrix.cpu(), cast), unlimited_range=True)
        check_rows([t[part].cpu() for t in made[:3]], expected, x.shape[-1])


def case(name, shape, device):
    x, cast = wide_range(*shape, device=device), mx.Cast.of(name)
    row, column = PAIR_BY_CODES.run(x, cast, Form.ROWS, Form.ROWS)
    check(row, x, cast), check(column, x.mT.contiguous(), cast)
    one, none = PAIR_BY_CODES.run(x, cast, Form.ROWS, None)
    assert none is None and torch.equal(one.codes, row.codes)
    none, other = PAIR_BY_CODES.run(x, cast, None, Form.ROWS)
    assert none is None and torch.equal(other.codes, column.codes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same runs on the device")
@pytest.mark.parametrize("name, shape", [("mxfp8[32x32]", (64, 96)), ("mxfp4[32x32]", (2, 32, 64))])
def test_both_operands_are_those_of_the_definition(name, shape):
    case(name, shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8[32x32]", "mxfp4[32x32]", "mxfp6_e2m3[32x32]", "float8_e4m3_128x128_pow2"])
@pytest.mark.parametrize("shape", [(256, 512), (3, 128, 1024)])
def test_both_operands_on_the_gpu(name, shape):
    case(name, shape, "cuda")


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("mxfp8[32x32]", (48, 64), "needs a matrix of multiples of 32 rows and columns or a stack of them, not (48,"),
        ("float8_e4m3_128x128_pow2", (64, 128), "needs a matrix of multiples of 128"),
        ("mxfp8", (64, 64), "casts square blocks to nearest"),
        ("nvfp4[16x16]", (64, 64), "needs scales that are powers of two"),
        ("float8_e4m3_tensor_pow2", (64, 64), "casts square blocks to nearest"),
    ],
)
def test_what_is_refused(name, shape, reason):
    assert reason in why_not_by_codes(torch.empty(shape, dtype=BF16), mx.Cast.of(name))


def test_one_of_both_ways_makes_the_rows_that_a_product_wants():
    x = torch.empty(64, 64, dtype=BF16)
    square, rows, none = (mx.Cast.of(name) for name in ("mxfp8[32x32]", "mxfp8", "nvfp4"))
    assert why_not_rows(x, square) is None and why_not_rows(x, rows) is None and why_not_rows(x, none) is not None
    assert wants_rows(Unquantized(x, rows), Unquantized(x, square))
    assert not wants_rows(Unquantized(x, rows), Unquantized(x, none))


def test_a_traced_cast_has_the_shapes_of_the_eager_one(pretend):
    pretend((9, 0))
    cast, x = mx.Cast.of("mxfp8[32x32]"), wide_range(64, 96)
    eager = PAIR_BY_CODES.run(x, cast, Form.ROWS, Form.ROWS)
    with FakeTensorMode():
        fake = PAIR_BY_CODES.run_traced(torch.empty(64, 96, dtype=BF16), cast, Form.ROWS, Form.ROWS)
    for one, two in zip(eager, fake, strict=True):
        assert [(t.shape, t.dtype) for t in one[:4]] == [(t.shape, t.dtype) for t in two[:4]]
