"""Attention reads and writes nothing beside its tensors: keys, values and masks as caches and models have them."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("transformers", minversion="5")

from mxtensor.integrations.kv_storage import KVStorage, StaticStorage
from mxtensor.kernels.attention import triton_attention
from mxtensor.kernels.attention.arguments import AttentionArgs
from mxtensor.kernels.runtime import triton_launch
from mxtensor.numerics.cast import Cast
from tests.helpers.in_bounds import in_bounds

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
    pytest.mark.skipif(not triton_launch.interpreted(), reason="Triton's interpreter is off"),
]
LIMIT, SIZE = 32, 64


def memory(kind, format, batch, heads, tokens, centered):
    """A static cache of ``LIMIT`` places, or one that grows, with so many tokens."""
    x = torch.randn(batch, heads, tokens, SIZE)
    if kind == "growing":
        storage = KVStorage(Cast.of(format), None, centered)
        storage.append(x)
        return storage.tokens()
    storage = StaticStorage(Cast.of(format), LIMIT, centered)
    storage.prepare(x)
    storage.start(x)
    storage.write(x, torch.arange(tokens))
    return storage.tokens(torch.tensor(tokens))


@pytest.mark.exhaustive(quick=10)
@pytest.mark.parametrize("group, queries", [(4, 1), (16, 1), (4, 3)])
@pytest.mark.parametrize("tokens", [1, 13, 16, 17, 23, 32])
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "nvfp4", "float8_row"])
@pytest.mark.parametrize("kind", ["static", "growing"])
@pytest.mark.pairs
def test_codes(kind, format, batch, tokens, group, queries):
    k, v = (memory(kind, format, batch, 1, tokens, centered) for centered in (True, False))
    q = torch.randn(batch, queries, group, SIZE).transpose(1, 2)
    args = AttentionArgs(0.125, k.mask(None, False))
    with in_bounds() as checked:
        out = triton_attention.run(q, k, v, args)
    assert checked.accesses and out.isfinite().all()


@pytest.mark.parametrize("batch, group", [(1, 4), (8, 4), (32, 4), (8, 16)])
@pytest.mark.parametrize("masked", [True, False])
def test_values(batch, group, masked):
    k, v = (torch.randn(batch, 1, LIMIT + 3, SIZE)[:, :, :LIMIT] for _ in range(2))
    q = torch.randn(batch, 1, group, SIZE).transpose(1, 2)
    mask = (torch.arange(LIMIT) < 23).view(1, 1, 1, LIMIT) if masked else None
    with in_bounds() as checked:
        out = triton_attention.attend(q, k, v, mask, 0.125)
    assert checked.accesses and out.isfinite().all()


def test_an_access_beside_a_tensor_is_found():
    q, k = torch.randn(1, 4, 1, SIZE), torch.randn(1, 1, LIMIT, SIZE)
    short = torch.zeros(1, 1, 1, LIMIT - 1)
    with in_bounds(), pytest.raises(Exception, match="a load are in no argument"):  # of the interpreter
        triton_attention.attend(q, k, k, short, 0.125)
