"""The op ``mxtensor::cpu_attention``: a few queries over keys and values in high precision, against float64."""

import pytest
import torch

from mxtensor.kernels.attention import cpu_attention
from mxtensor.kernels.attention.cpu_attention import attention_of_values
from mxtensor.kernels.runtime import native_build

pytestmark = pytest.mark.skipif(native_build.compiler() is None, reason="needs a C++ compiler")
SHAPES = [(1, 9, 3, 1, 256, 64), (2, 4, 4, 3, 70, 80), (3, 8, 1, 8, 33, 128), (1, 6, 2, 1, 1, 16), (2, 2, 2, 5, 600, 7)]
"""Batch, heads, heads of keys, queries, keys, head size."""
EPS = {torch.float32: 2**-18, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def inputs(shape, dtype):
    batch, heads, groups, queries, count, size = shape
    return (
        torch.randn(batch, heads, queries, size).to(dtype),
        *(torch.randn(batch, groups, count, size).to(dtype) for _ in range(2)),
    )


def definition(q, k, v, mask, scale):
    """In float64; a row without keys is 0."""
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q.double() @ k.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    return scores.softmax(-1).nan_to_num(0.0) @ v


def assert_attention(q, k, v, mask, scale=0.2):
    out = attention_of_values(q, k, v, mask, scale)
    want = definition(q, k, v, mask, scale)
    assert out.dtype is q.dtype and out.shape == want.shape
    assert out.transpose(1, 2).is_contiguous()
    assert ((out.double() - want).abs() <= EPS[q.dtype] * (want.abs() + v.double().abs().max() * 2**-3)).all()


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_queries_are_as_the_definition_says(shape, dtype):
    q, k, v = inputs(shape, dtype)
    batch, heads, _, queries, count, _ = shape
    assert_attention(q, k, v, None)
    seen = torch.rand(batch, 1, queries, count) < 0.7
    assert_attention(q, k, v, seen)
    assert_attention(q, k, v, torch.randn(batch, heads, queries, count).to(dtype))
    assert_attention(q, k, v, torch.randn(count))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_a_head(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_attention(*inputs((1, 2, 1, 2, 3000, 32), torch.float32), None)
    finally:
        torch.set_num_threads(before)


def test_places_of_a_cache_that_the_mask_hides_are_not_read():
    q, k, v = inputs((2, 6, 2, 1, 512, 64), torch.bfloat16)
    mask = torch.zeros(2, 1, 1, 512)
    mask[0, ..., 17:], mask[1, ..., 300:] = -torch.inf, -torch.inf
    want = definition(q, k, v, mask, 0.2)
    for t in (k, v):
        t[0, :, 17:], t[1, :, 300:] = torch.nan, torch.nan
    out = attention_of_values(q, k, v, mask, 0.2)
    assert ((out.double() - want).abs() <= 2**-7).all()
    assert attention_of_values(q, k, v, torch.zeros(512), 0.2)[0].isnan().all()


def test_a_query_without_keys_is_zero():
    q, k, v = inputs((1, 2, 2, 3, 40, 16), torch.float32)
    seen = torch.ones(1, 1, 3, 40, dtype=torch.bool)
    seen[:, :, 1] = False
    assert_attention(q, k, v, seen)
    assert not attention_of_values(q, k, v, seen, 0.2)[:, :, 1].any()


def test_caches_are_read_by_their_strides():
    q, k, v = inputs((2, 4, 2, 1, 90, 32), torch.bfloat16)
    want = attention_of_values(q, k, v, None, 0.2)
    k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
    assert torch.equal(attention_of_values(q, k, v, None, 0.2), want)
    assert torch.equal(attention_of_values(q, k.mT.contiguous().mT, v[..., :90, :], None, 0.2), want)


@pytest.mark.parametrize(
    ("shapes", "dtype", "message"),
    [
        (((1, 2, 65, 8), (1, 1, 9, 8), (1, 1, 9, 8)), torch.float32, "64 rows that read a head"),
        (((1, 3, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8)), torch.float32, "do not fit"),
        (((1, 2, 1, 8), (1, 2, 9, 8), (1, 2, 8, 8)), torch.float32, "do not fit"),
        (((2, 1, 8), (2, 9, 8), (2, 9, 8)), torch.float32, r"takes \(batch, heads, tokens, head size\)"),
        (((1, 2, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8)), torch.float64, "float32, bfloat16 and float16"),
    ],
)
def test_what_the_op_cannot_do_is_refused(shapes, dtype, message):
    assert cpu_attention.op_library() is None
    with pytest.raises(ValueError, match=message):
        attention_of_values(*(torch.randn(shape).to(dtype) for shape in shapes), None, 1.0)
