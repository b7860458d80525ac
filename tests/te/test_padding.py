"""Fp8Padding and Fp8Unpadding: shapes, gradients, and unchanged codes and scales of the real rows."""

import pytest
import torch
from torch import nn

import mxtensor as mx
from mxtensor import recipe
from mxtensor.te.moe import Fp8Padding, Fp8Unpadding, align_size_of
from mxtensor.training.linear import Options
from tests.helpers.compare import relative_error
from tests.helpers.separate_layers import separate_layers

SPLITS = [5, 0, 37, 1, 64, 21]
ROWS = sum(SPLITS)


def with_zeros(x, splits, size):
    """The reference of the padding, row by row."""
    out, start = [], 0
    for n in splits:
        whole = -(-n // size) * size
        out.append(torch.cat([x[start : start + n], torch.zeros(whole - n, x.shape[1], dtype=x.dtype)]))
        start += n
    return torch.cat(out), [len(part) for part in out]


# ---------------------------------------------------------------------------------------------- the two modules


@pytest.mark.parametrize("size", [1, 8, 16, 32])
@pytest.mark.parametrize("kind", [list, tuple, torch.tensor])
def test_padding_appends_zero_rows_and_unpadding_removes_them(size, kind):
    x = torch.randn(ROWS, 24)
    padded, sizes = Fp8Padding(len(SPLITS), size)(x, kind(SPLITS))
    wanted, wanted_sizes = with_zeros(x, SPLITS, size)
    assert torch.equal(padded, wanted) and sizes == wanted_sizes and all(type(n) is int for n in sizes)
    assert torch.equal(Fp8Unpadding(len(SPLITS), size)(padded, kind(SPLITS)), x)


def test_without_padding_the_input_itself_is_returned():
    x = torch.randn(96, 8)
    assert Fp8Padding(3, 32)(x, [32, 64, 0])[0] is x
    assert Fp8Unpadding(3, 32)(x, [32, 64, 0]) is x


def test_gradients_pass_to_the_real_rows_only():
    pad, unpad = Fp8Padding(len(SPLITS), 16), Fp8Unpadding(len(SPLITS), 16)
    x = torch.randn(ROWS, 8, requires_grad=True)
    padded, _ = pad(x, SPLITS)
    g = torch.randn_like(padded)
    (dx,) = torch.autograd.grad(padded, x, g)
    assert torch.equal(dx, unpad(g, SPLITS))

    y = torch.randn_like(padded).requires_grad_()
    out = unpad(y, SPLITS)
    g = torch.randn_like(out)
    (dy,) = torch.autograd.grad(out, y, g)
    assert torch.equal(dy, pad(g, SPLITS)[0])


def test_leading_dimensions_count_as_rows():
    x = torch.randn(4, 16, 8)
    padded, sizes = Fp8Padding(2, 16)(x, [30, 34])
    assert sizes == [32, 48] and padded.shape == (80, 8)
    assert torch.equal(Fp8Unpadding(2, 16)(padded, [30, 34]), x.view(64, 8))


def test_no_columns_and_no_rows():
    assert Fp8Padding(2, 16)(torch.ones(3, 0), [1, 2])[0].shape == (32, 0)
    assert Fp8Padding(2, 16)(torch.ones(0, 5), [0, 0])[0].shape == (0, 5)


# ---------------------------------------------------------------------------------------------- how far

ALIGNED = [
    (recipe.MXFP8BlockScaling(), 32), (recipe.MXFP6BlockScaling(), 32), (recipe.MXFP4BlockScaling(), 32),
    (recipe.NVFP4BlockScaling(), 32), (recipe.Float8CurrentScaling(), 16), (recipe.DelayedScaling(), 16),
    (recipe.Float8BlockScaling(), 16), (recipe.CustomRecipe(mx.get_format("mxfp8").with_block(64)), 64),
    (recipe.CustomRecipe(None, None, None), 16),
]  # fmt: skip


@pytest.mark.parametrize("active, size", ALIGNED, ids=lambda v: type(v).__name__ if isinstance(v, recipe.Recipe) else v)
def test_the_active_recipe_sets_the_multiple_at_each_call(active, size):
    pad, unpad = Fp8Padding(2), Fp8Unpadding(2)
    x = torch.randn(6, 8)
    assert align_size_of(active.linear_recipe()) == size
    with mx.autocast(recipe=active):
        padded, sizes = pad(x, [5, 1])
        assert sizes == [size, size] and torch.equal(unpad(padded, [5, 1]), x)
    assert pad(x, [5, 1])[1] == [16, 16]


def test_a_given_align_size_wins():
    with mx.autocast():
        assert Fp8Padding(1, 8)(torch.randn(3, 2), [3])[1] == [8]
    assert repr(Fp8Padding(3, 8)) == "Fp8Padding(num_gemms=3, align_size=8)"


def test_compiles_whole():
    pad, unpad = Fp8Padding(len(SPLITS)), Fp8Unpadding(len(SPLITS))
    compiled = torch.compile(lambda x: unpad(pad(x, SPLITS)[0] * 2, SPLITS), fullgraph=True, backend="aot_eager")
    x = torch.randn(ROWS, 8, requires_grad=True)
    with mx.autocast():
        y = compiled(x)
    g = torch.randn_like(y)
    assert torch.equal(y, x * 2) and torch.equal(torch.autograd.grad(y, x, g)[0], g * 2)


# ---------------------------------------------------------------------------------------------- what it cannot change

NEAREST = [
    recipe.MXFP8BlockScaling(), recipe.MXFP8BlockScaling(fp8_format=recipe.Format.HYBRID, grad_scaling="floor"),
    recipe.MXFP6BlockScaling(), recipe.MXFP4BlockScaling(stochastic_rounding=False),
    recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), recipe.Float8CurrentScaling(),
    recipe.Float8BlockScaling(), recipe.Float8BlockScaling(use_f32_scales=True),
]  # fmt: skip


def trained(x, weights, biases, splits, options, g):
    """y and all gradients of a grouped linear layer."""
    leaves = [x, *weights, *biases]
    y = separate_layers(x, weights, biases, splits, options)
    return y, *torch.autograd.grad(y, leaves, g)


@pytest.mark.parametrize("active", NEAREST, ids=str)
def test_padded_and_unpadded_rows_give_the_same_quantized_layers(active):
    """In float64, which detects a changed code and hides the order of summation."""
    options, pad, unpad = Options(active.linear_recipe()), Fp8Padding(len(SPLITS)), Fp8Unpadding(len(SPLITS))
    x = (torch.randn(ROWS, 70, dtype=torch.float64) * torch.rand(ROWS, 1).exp2()).requires_grad_()
    weights = [torch.randn(48, 70, dtype=torch.float64, requires_grad=True) for _ in SPLITS]
    biases = [torch.randn(48, dtype=torch.float64, requires_grad=True) for _ in SPLITS]
    g = torch.randn(ROWS, 48, dtype=torch.float64)
    plain = trained(x, weights, biases, SPLITS, options, g)

    with mx.autocast(recipe=active):
        rows, sizes = pad(x.detach(), SPLITS)
        grad, _ = pad(g, SPLITS)
        y, dx, *rest = trained(rows.requires_grad_(), weights, biases, sizes, options, grad)
        padded = unpad(y, SPLITS), unpad(dx, SPLITS), *rest
    assert all(n % align_size_of(active.linear_recipe()) == 0 for n in sizes)
    for a, b in zip(plain, padded, strict=True):
        assert a.shape == b.shape and a.any() == b.any()
        assert not a.any() or relative_error(b, a) < 1e-12


def test_stochastic_rounding_draws_other_numbers_for_padded_rows():
    options = Options(recipe.MXFP4BlockScaling().linear_recipe())
    x, w, g = torch.randn(5, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(5, 48)
    grads = []
    for rows in (x, Fp8Padding(1, 32)(x, [5])[0]):
        torch.manual_seed(1)
        y = separate_layers(rows, [w], None, [rows.shape[0]], options)
        grads.append(torch.autograd.grad(y, w, g if rows is x else Fp8Padding(1, 32)(g, [5])[0])[0])
    assert not torch.equal(*grads)


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("module", [Fp8Padding, Fp8Unpadding])
def test_m_splits_that_do_not_fit_are_named(module):
    name, x = module.__name__, torch.randn(32, 4)
    with pytest.raises(ValueError, match=rf"{name}: m_splits has 1 row counts, there are 2 groups: \[32\]"):
        module(2, 16)(x, [32])
    with pytest.raises(ValueError, match=rf"{name}: m_splits has negative row counts: \[40, -8\]"):
        module(2, 16)(x, [40, -8])
    with pytest.raises(ValueError, match=rf"{name}: m_splits \[16, 32\] sum to 48, the input has 32 rows"):
        module(2, 16)(x, [16, 32])
    with pytest.raises(TypeError, match=rf"{name}: m_splits is \[16.0, 16.0\]; row counts are integers"):
        module(2, 16)(x, [16.0, 16.0])
    with pytest.raises(ValueError, match=f"{name}: align_size is 0; it must be an integer from 1"):
        module(2, 0)
    with pytest.raises(ValueError, match=f"{name}: the input is 0-dimensional"):
        module(1, 16)(torch.ones(()), [1])


def test_both_are_modules_without_state():
    assert nn.Sequential(Fp8Padding(2), Fp8Unpadding(2)).state_dict() == {}
