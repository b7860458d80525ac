"""Best scales and GPTQ of one matrix: equal to casts, to a search by hand, and to the best corrections there are."""

import pytest
import torch

from mxtensor.calibration.rounding import (
    OF_FRACTIONS,
    corrected,
    element_table,
    gptq,
    inverse_cholesky,
    multiples_of,
    nearest,
)
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.elements import decode_elements, encode_elements
from mxtensor.numerics.formats import FORMATS
from mxtensor.numerics.reference import decode, encode, scale_to_float, tensor_amax

SHAPES = [(48, 96), (40, 72), (33, 130)]


def inputs(cols, rows=400):
    """Inputs whose columns are correlated, as those of a model are."""
    return torch.randn(rows, cols) @ (torch.randn(cols, cols) / cols**0.5 + 0.5 * torch.eye(cols))


def values(operand):
    return decode(operand, torch.float32)


def bits(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.exhaustive(quick=8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_without_a_search_the_scales_and_codes_are_those_of_a_cast(name, shape):
    w, cast = torch.randn(shape), Cast.of(name)
    w[0, :40] = 0
    expected, got = encode(w, cast), nearest(w, cast, (1.0,))
    for a, b in zip(expected.tensors, got.tensors, strict=True):
        assert a.dtype is b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


@pytest.mark.exhaustive(quick=1)
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxfp6_e3m2", "float8_e4m3_1x128"])
def test_each_block_has_the_best_of_the_candidates(name):
    w, cast, importance = torch.randn(6, 256), Cast.of(name), torch.rand(256)
    multiples = multiples_of(cast.format.scale)
    got = values(nearest(w, cast, multiples, importance))
    width = cast.format.block[1]
    for row in range(6):
        for begin in range(0, 256, width):
            block = slice(begin, begin + width)

            def error(q, row=row, block=block):
                return ((q[row, block] - w[row, block]).square() * importance[block]).sum()

            best = min(error(values(nearest(w, cast, (multiple,)))) for multiple in multiples)
            assert torch.isclose(error(got), best, rtol=1e-5, atol=0)
    assert (got - w).square().mul(importance).sum() < (values(encode(w, cast)) - w).square().mul(importance).sum()


def test_four_over_six_is_among_the_candidates():
    w = torch.tensor([[4.0, 3.0, 2.0, 1.0] * 4, [6.0, 0.5, 1.5, -3.0] * 4]) * 1.0
    cast = Cast.of("nvfp4")
    best = values(nearest(w, cast, OF_FRACTIONS))
    assert (best - w).abs().max() < 0.04 < (values(encode(w, cast)) - w).abs().max()


def best_rest(w, q, h, j):
    """Columns j and later of ``w``, with the least squared error of outputs if those before are ``q``: solved anew."""
    h, w, q = h.double(), w.double(), q.double()
    return w[:, j:] + torch.linalg.solve(h[j:, j:], h[j:, :j] @ (w - q)[:, :j].T).T


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxint8", "nvfp4", "mxfp6_e2m3"])
def test_each_column_is_the_nearest_to_the_best_correction_of_those_before(name):
    w, cast, x = torch.randn(8, 160) * 0.1, Cast.of(name), inputs(160, 2000)
    h = x.T @ x / len(x) + 0.01 * torch.eye(160)
    operand = gptq(w, inverse_cholesky(h, 0.0), cast, (1.0,))
    q, width, element = values(operand), cast.format.block[1], cast.format.element
    scale = scale_to_float(operand.scale, cast.format.scale)
    scale = scale if operand.global_scale is None else scale * operand.global_scale
    every = decode_elements(torch.arange(2**element.bits, dtype=torch.uint8).view(element.dtype), element).double()
    every = every[every.isfinite()]
    same_scales = []
    for j in range(160):
        wanted, block = best_rest(w, q, h, j), j // width
        if j % width == 0:
            expected = encode(wanted[:, :width].float(), cast, tensor_amax(w)).scale
            same_scales.append(operand.scale[:, block, None] == expected)
        distance = (every * scale[:, block, None] - wanted[:, :1]).abs().amin(1)
        assert ((q[:, j] - wanted[:, 0]).abs() <= distance + 1e-5).all()
    assert torch.cat(same_scales).float().mean() > 0.98  # the two sums differ in their last bits


@pytest.mark.exhaustive(quick=6)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_gptq_lessens_the_error_of_outputs_in_every_format(name, shape):
    w, cast, x = torch.randn(shape), Cast.of(name), inputs(shape[1])
    upper = inverse_cholesky(x.T @ x / len(x), 0.01)

    def error(operand):
        return ((values(operand) - w) @ x.T).norm()

    by_gptq = gptq(w, upper, cast, multiples_of(cast.format.scale))
    assert by_gptq.shape == w.shape and by_gptq.scale.shape == encode(w, cast).scale.shape
    assert error(by_gptq) < 0.85 * error(encode(w, cast))


def test_a_corrected_weight_is_the_least_squares_solution():
    w, before = torch.randn(5, 24), torch.randn(500, 24)
    now = before + 0.3 * torch.randn(500, 24)
    second = now.T @ now / 500
    got = corrected(w, before.T @ now / 500, second, inverse_cholesky(second, 0.0))
    expected = torch.linalg.lstsq(now.double(), (before @ w.T).double()).solution.T
    assert torch.allclose(got.double(), expected, atol=1e-4)
    assert torch.equal(corrected(w, second, second, inverse_cholesky(second, 0.01)), w)


def test_inputs_of_low_rank_and_no_inputs_are_damped():
    x = torch.randn(4, 64)
    assert inverse_cholesky(x.T @ x, 1e-9).isfinite().all()
    assert torch.equal(inverse_cholesky(torch.zeros(8, 8), 0.01), torch.eye(8))
    with pytest.raises(ValueError, match="not all finite"):
        inverse_cholesky(torch.full((2, 2), torch.nan), 0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_the_table_of_elements_rounds_as_the_definition(name):
    element = Cast.of(name).format.element
    table = element_table(element, torch.device("cpu"))
    y = torch.cat([table.values, table.bounds, (table.values[1:] + table.values[:-1]) / 2, torch.randn(2000) * 3])
    y = torch.cat([y, y.nextafter(torch.tensor(9e9)), y.nextafter(torch.tensor(-9e9)), torch.tensor([1e9, -1e9])])
    codes = encode_elements(y.clone(), element)
    assert torch.equal(table.values[table.index(y)], decode_elements(codes, element))
    stored = table.codes[table.index(y)].view(element.dtype)
    assert torch.equal(decode_elements(stored, element), decode_elements(codes, element))
