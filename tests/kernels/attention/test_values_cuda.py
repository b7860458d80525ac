"""Attention of few queries over keys and values as a cache stores them, on a device: torch's in float64, rounded."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mxtensor.kernels.attention import triton_attention
from mxtensor.kernels.attention.triton_attention import ranges

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = {
    "one query": (2, 2, 4, 1, 100),
    "one range": (1, 2, 3, 1, 70),
    "no group": (1, 3, 1, 5, 77),
    "one key": (2, 1, 2, 3, 1),
    "long": (1, 2, 2, 1, 700),
}
"""(batch, heads of keys, queries' heads for each, queries, keys)."""
SIZES = [(64, 64), (128, 128), (80, 80), (48, 96), (8, 8)]
"""Values of a key, and of a value."""


def tensors(call, size, dtype=torch.float32):
    """Queries as a model has them, and keys and values as a cache has them: neither is contiguous."""
    batch, heads, group, queries, count = CALLS[call]
    q = torch.randn(batch, queries, heads * group, size[0]).transpose(1, 2)
    k, v = (torch.randn(batch, heads, count + 5, n)[:, :, 2 : count + 2] for n in size)
    return [t.to(dtype).to(DEVICE) for t in (q, k, v)]


def masks(kind, q, count):
    batch, heads, queries = q.shape[:3]
    some = torch.rand(batch, 1, queries, count) > 0.3
    some[..., 0] = True  # no query without a key
    made = {
        "none": None,
        "bool": some,
        "added": torch.randn(1, 1, queries, count),
        "by head": torch.randn(1, heads, 1, count).transpose(1, 3).contiguous().transpose(1, 3),
        "of a cache": torch.zeros(batch, 1, 1, count).masked_fill_(torch.arange(count) > count // 3, -math.inf),
    }[kind]
    return None if made is None else made.to(DEVICE)


def wanted(q, k, v, mask, scale):
    """The definition, in float64."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(t.double().repeat_interleave(group, 1) for t in (k, v))
    mask = mask if mask is None or mask.dtype is torch.bool else mask.double()
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


@pytest.mark.exhaustive(quick=6)
@pytest.mark.parametrize("mask", ["none", "bool", "added", "by head", "of a cache"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.pairs
def test_it_is_attention_of_the_values(call, size, mask):
    pytest.importorskip("triton")
    q, k, v = tensors(call, size)
    mask, scale = masks(mask, q, k.shape[2]), size[0] ** -0.5
    out, expected = triton_attention.attend(q, k, v, mask, scale), wanted(q, k, v, mask, scale)
    assert out.shape == expected.shape and out.dtype is q.dtype
    assert out.transpose(1, 2).is_contiguous()  # as torch's, for models that view all heads of a token as one row
    assert (out - expected).abs().max() <= 4e-6 * expected.abs().max()


def test_the_calls_have_one_range_and_several():
    found = {name: ranges(call[0] * call[1], call[4], torch.device("cpu")) for name, call in CALLS.items()}
    assert found["one range"] == 1 and found["long"] > 2


@pytest.mark.parametrize("call", ["one range", "long"])
def test_a_query_without_keys_is_zero_and_a_nan_stays_one(call):
    pytest.importorskip("triton")
    q, k, v = tensors(call, (32, 32))
    mask = torch.zeros(1, q.shape[1], 1, k.shape[2], device=DEVICE)
    mask[:, 1] = -math.inf
    out, expected = triton_attention.attend(q, k, v, mask, 0.2), wanted(q, k, v, mask, 0.2)
    assert (out[:, 1] == 0).all() and (out - expected)[:, 2:].abs().max() <= 4e-6
    mask[:, 2, :, 40] = math.nan
    out = triton_attention.attend(q, k, v, mask, 0.2)
    assert out[:, 2].isnan().all() and out[:, 3:].isfinite().all()


def test_keys_that_the_mask_hides_are_not_read():
    pytest.importorskip("triton")
    q, k, v = tensors("long", (32, 32))
    mask = masks("of a cache", q, 700)
    before = triton_attention.attend(q, k, v, mask, 0.2)
    k[:, :, 320:], v[:, :, 320:] = math.nan, math.nan
    assert torch.equal(triton_attention.attend(q, k, v, mask, 0.2), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_have_the_dtype_of_the_queries(dtype):
    pytest.importorskip("triton")
    q, k, v = tensors("one query", (64, 64), dtype)
    mask = masks("added", q, 100).to(dtype)
    out, expected = triton_attention.attend(q, k, v, mask, 0.125), wanted(q, k, v, mask, 0.125)
    assert out.dtype is dtype
    assert (out.double() - expected).abs().max() <= 3 * torch.finfo(dtype).eps * expected.abs().max()


def fake(*shape, dtype=torch.bfloat16, device="cuda", strides=None):
    """What ``takes`` asks of a tensor."""
    found = torch.empty(shape, device="meta")
    return SimpleNamespace(
        shape=torch.Size(shape), dtype=dtype, device=torch.device(device), dim=lambda: len(shape),
        stride=lambda i=None: (strides or found.stride()) if i is None else (strides or found.stride())[i],
    )  # fmt: skip


GIVEN = {"q": (2, 8, 1, 64), "k": (2, 2, 90, 64), "v": (2, 2, 90, 64), "mask": (2, 1, 1, 90)}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True), ({"q": (2, 8, 16, 64)}, True), ({"q": (2, 8, 17, 64)}, False), ({"q": (2, 7, 1, 64)}, False),
        ({"v": (2, 2, 91, 64)}, False), ({"v": (2, 2, 90, 260)}, False), ({"v": (2, 2, 90, 12)}, False),
        ({"k": (2, 2, 0, 64), "v": (2, 2, 0, 64)}, False), ({"q": (2, 8, 64)}, False), ({"mask": (90,)}, False),
    ],
)  # fmt: skip
def test_which_calls_it_takes(change, taken, triton_anywhere):
    given = {name: fake(*shape) for name, shape in (GIVEN | change).items()}
    assert triton_attention.takes(**given) is taken
    assert not triton_attention.takes(**given | {"k": fake(*GIVEN["k"], dtype=torch.float16)})
    assert not triton_attention.takes(**given | {"q": fake(*GIVEN["q"], device="cpu")})
    assert not triton_attention.takes(**given | {"v": fake(*GIVEN["v"], strides=(11520, 5760, 1, 90))})
    assert triton_attention.takes(**given | {"mask": None}) is (taken or "mask" in change)


def test_other_strides_of_a_compiler_are_taken(monkeypatch):
    pytest.importorskip("triton")
    q, k, v = tensors("one query", (32, 32))
    monkeypatch.setattr(triton_attention, "takes", lambda *given: all(t.stride(-1) == 1 for t in given[:3]))
    odd = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    assert all(t.stride(-1) != 1 for t in odd[1:])
    assert torch.equal(
        triton_attention.attention_of_values(*odd, None, 0.2), triton_attention.attend(q, k, v, None, 0.2)
    )


def test_the_op_says_what_it_does_not_take():
    q, k, v = torch.randn(1, 4, 1, 32), *torch.randn(2, 1, 2, 9, 32)
    with pytest.raises(ValueError, match=r"does not take torch.float32 queries \(1, 4, 1, 32\) and keys .* on cpu"):
        triton_attention.attention_of_values(q, k, v, None, 0.1)
    for shape in ((1, 1, 1, 8), (1, 2, 1, 9), (1, 9)):
        with pytest.raises(ValueError, match=r"a mask of .* does not broadcast to \(1, 4, 1, 9\)"):
            triton_attention.attention_of_values(q, k, v, torch.zeros(shape), 0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("queries", "count"), [(1, 84), (1, 5000), (7, 333)])
def test_a_gpu_gives_what_the_definition_gives(queries, count, size, dtype):
    """Three calls: general, recorded and repeated."""
    for _ in range(3):
        q = torch.randn(2, queries, 16, size, device="cuda").to(dtype).transpose(1, 2)
        k, v = (torch.randn(2, 4, count, size, device="cuda").to(dtype) for _ in range(2))
        mask = torch.randn(2, 1, queries, count, device="cuda").to(dtype)
        mask[..., count * 3 // 4 :] = -math.inf
        out, expected = triton_attention.attention_of_values(q, k, v, mask, 0.1), wanted(q, k, v, mask, 0.1)
        bound = 4e-6 if dtype is torch.float32 else 3 * torch.finfo(dtype).eps
        assert out.dtype is dtype and (out - expected).abs().max() <= bound * expected.abs().max()
