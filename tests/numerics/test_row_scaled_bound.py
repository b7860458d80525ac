"""The stated bound of row-scaled products, against sums as Hopper makes them."""

import pytest
import torch

import mxtensor as mx
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled import HOPPER_SUMS, exact_product, product_bound, row_scaled

BF16 = torch.bfloat16


def hopper_sums(a, b):
    """a @ b^T: 32 products at a time and the sum before are cut to 13 bits below the largest; float32 every 128."""
    out = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], 128):
        total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float64)
        for k in range(start, min(start + 128, a.shape[1]), 32):
            products = a[:, None, k : k + 32].double() * b[None, :, k : k + 32].double()
            terms = torch.cat([products, total[:, :, None]], 2)
            step = 2.0 ** (torch.frexp(terms.abs().amax(2, keepdim=True))[1] - 14).double()
            total = ((terms / step).trunc() * step).sum(2)
        out += total.float()
    return out


def product(a, b):
    left, right = row_scaled(a), row_scaled(b)
    codes = [side.codes.view(torch.float8_e4m3fn).float() for side in (left, right)]
    return (hopper_sums(*codes) * left.scale * right.scale.t()).to(BF16)


@pytest.mark.parametrize("left, right", [("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp6")])
def test_products_with_the_sums_of_hopper_are_within_the_bound(left, right):
    x = torch.randn(24, 512) * torch.exp(torch.randn(512))
    x[3, 40], x[5] = 300.0, x[5].abs()
    w = torch.randn(16, 512)
    w[2] = w[2].abs()
    a, b = encode(x, mx.Cast.of(left)), encode(w, mx.Cast.of(right))
    assert not row_scaled(a).out_of_range.any() and not row_scaled(b).out_of_range.any()
    error = (product(a, b).double() - exact_product(a, b)).abs()
    assert (error <= product_bound(a, b, BF16, HOPPER_SUMS)).all()
    assert (error <= product_bound(a, b, BF16, 2.0**-10)).all()
    assert (error > product_bound(a, b, BF16, 0.0) / 4).any()


def test_the_worst_case_of_the_sums():
    """One product, 2^13 times the others and more, which are all lost."""
    x, w = torch.full((1, 128), 1.875 * 2.0**-7), torch.full((1, 128), 1.875 * 2.0**-7)
    x[0, 0] = w[0, 0] = 1.75
    a, b = encode(x, mx.Cast.of("mxfp8")), encode(w, mx.Cast.of("mxfp8"))
    lost = product_bound(a, b, torch.float32, HOPPER_SUMS)
    error = (hopper_sums(x, w).double() - exact_product(a, b)).abs()
    assert torch.equal(exact_product(a, b), x.double() @ w.double().t())
    assert 0.5 * lost < error <= lost
