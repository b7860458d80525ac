"""The reference of a training step of a linear layer: quantized by the oracle, multiplied in float64.

It shares no code with the package except the rows of formats. It rounds to nearest only; stochastic casts have their
own tests.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from mxtensor.numerics.formats import FORMATS
from tests.helpers import four_over_six, oracle
from tests.helpers.compare import relative_error


class Step(NamedTuple):
    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    db: torch.Tensor


def hadamard16(signs):
    """diag(signs) @ H16 / 4 from the recursive definition; bit i of ``signs`` set: row i is negated."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    sign = np.array([-1.0 if signs >> i & 1 else 1.0 for i in range(16)])
    return sign[:, None] * h / 4


def rotated(x, signs):
    """Groups of 16 of the last dimension, padded with zeros, times the matrix; rounded to bfloat16."""
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
    out = (x.reshape(-1, 16) @ hadamard16(signs)).reshape(x.shape)
    return torch.from_numpy(out).to(torch.bfloat16).double().numpy()


def rounded(x, cast):
    """x (rows, cols) fake-quantized, in float64, with blocks along the last dimension; None: x itself."""
    if cast is None or 0 in x.shape:
        return x
    x = x.astype(np.float32)
    if cast.format.row_scaled:
        one = replace(cast, format=FORMATS["nvfp4"])
        return np.concatenate([rounded(row[None], one) for row in x])
    if cast.four_over_six is not None:
        return four_over_six.rounded(x, cast.format.block[0], cast.four_over_six).astype(np.float64)
    return oracle.decode(oracle.encode(x, cast.format, cast.scaling.value), cast.format, x.shape).astype(np.float64)


def gemm_operands(x, casts):
    """Both copies of a matrix (float64): rowwise (rows, cols), columnwise (cols, rows)."""
    transposed = x.T if casts.signs is None or casts.columnwise is None else rotated(x.T, casts.signs)
    rowwise = rounded(np.ascontiguousarray(x), casts.rowwise)
    if casts.from_rowwise and not (casts.rowwise == casts.columnwise and casts.rowwise.format.square):
        transposed = rowwise.T  # a square tile has the same values in both orientations and is not rounded again
    return rowwise, rounded(np.ascontiguousarray(transposed), casts.columnwise)


def train_step(x, w, b, g, linear_recipe):
    """The exact y, dx, dw and db (float64) for tensors of any dtype; x and g may have any leading dimensions."""
    x2, g2 = (t.detach().double().reshape(-1, t.shape[-1]).numpy() for t in (x, g))
    (x_row, x_col), (g_row, g_col) = gemm_operands(x2, linear_recipe.input), gemm_operands(g2, linear_recipe.grad)
    w_row, w_col = gemm_operands(w.detach().double().numpy(), linear_recipe.weight)
    y, dx, dw = (torch.from_numpy(a @ b.T) for a, b in ((x_row, w_row), (g_row, w_col), (g_col, x_col)))
    if b is not None:
        y = y + b.detach().double()
    return Step(y.reshape(g.shape), dx.reshape(x.shape), dw, torch.from_numpy(g2.sum(0)))


TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}
"""Relative error, by norm, of a float32 sum rounded once to this dtype: half a unit in the last place."""


def check_step(actual, x, w, b, g, linear_recipe):
    """Check that (y, dx, dw, db) equal the reference except for the last rounding. None skips a result."""
    expected = train_step(x, w, b, g, linear_recipe)
    for name, mine, exact in zip(Step._fields, actual, expected, strict=True):
        if mine is None:
            continue
        assert mine.shape == exact.shape, name
        assert mine.isfinite().all(), name
        if mine.numel() and exact.abs().max() > 0:
            error = relative_error(mine, exact)
            assert error < TOLERANCE[mine.dtype], f"{name}: {error:.2e} relative error to the reference"


def products(log):
    """The quantized products of linear layers in a log of ``explain()``, in order: fprop, dgrad, wgrad."""
    ops = ("fprop", "dgrad", "wgrad")
    return [e.spec.op for e in log.entries if e.spec.op in ops and e.kernel != "high precision"]
