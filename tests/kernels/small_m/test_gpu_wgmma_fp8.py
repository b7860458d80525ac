"""Products of E4M3 codes under the scales of rows, on a CUDA device: the bound of ``fp8_rows``, a captured graph."""

import pytest
import torch

import mxtensor as mx
from mxtensor.kernels.small_m.heuristics import WGMMA_CAPABILITY
from mxtensor.numerics.reference import encode
from mxtensor.numerics.row_scaled_bound import HOPPER_SUMS
from tests.helpers.row_scaled import assert_within_the_bound
from tests.kernels.small_m.test_wgmma_fp8 import CONFIGS, PAIRS, crafted_weight, product
from tests.kernels.test_gpu_fp8_rows import values

pytestmark = pytest.mark.gpu
WIDE = CONFIGS["one"]._replace(nt=16, wk=2)
ON_DEVICE = [CONFIGS["through global memory"], CONFIGS["sent"], CONFIGS["groups"], WIDE,
             WIDE._replace(wk=1, wr=8, stages=6, split=4, reduce_dsmem=True)]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    if torch.cuda.get_device_capability() != WGMMA_CAPABILITY:
        pytest.skip("no wgmma")


@pytest.fixture(autouse=True)
def on_the_cpu():
    """Not here."""


@pytest.mark.parametrize("left, right", PAIRS)
@pytest.mark.parametrize("config", ON_DEVICE)
def test_every_product_is_within_the_bound(config, left, right):
    for rows, width, cols in ((40, 96, 576), (200, 320, 4096)):
        cast, bias = mx.Cast.of(left), torch.randn(width, dtype=torch.bfloat16, device="cuda")
        for wide in (False, True):
            x = values(rows, cols, wide)
            for w in (values(width, cols, wide), torch.randn(width, cols, device="cuda")):
                b = encode(w, mx.Cast.of(right))
                y = product(x, b, cast, config, bias)
                assert_within_the_bound(y, encode(x, cast), b, bias, HOPPER_SUMS)
                assert torch.equal(y.nan_to_num(), product(x, b, cast, config, bias).nan_to_num())


@pytest.mark.parametrize("right", ["mxfp8", "mxfp6_e2m3", "mxfp4"])
def test_weights_that_no_cast_makes(right):
    cast, x = mx.Cast.of("mxfp8"), values(96, 512, False)
    b = crafted_weight(right, 256, 512, "cuda")
    assert_within_the_bound(product(x, b, cast, WIDE), encode(x, cast), b, None, HOPPER_SUMS)


def test_a_captured_product_follows_later_values():
    cast, x = mx.Cast.of("mxfp8"), values(128, 4096, False)
    b = encode(torch.randn(512, 4096, device="cuda"), cast)
    product(x, b, cast, WIDE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product(x, b, cast, WIDE)
    for wide in (False, True):
        x.copy_(values(128, 4096, wide))
        b.data.copy_(encode(values(512, 4096, wide), cast).data)
        graph.replay()
        expected = product(x, b, cast, WIDE)
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.nan_to_num(), expected.nan_to_num())
