"""The kernel row ``small_m``: which operands it takes, and why it refuses others."""

import pytest
import torch

import mxtensor as mx
from mxtensor.core.kernel import Spec
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import FakeQuantized, Unquantized
from mxtensor.kernels.small_m import kernel as small_m
from mxtensor.kernels.small_m import launch
from mxtensor.kernels.small_m.heuristics import most_rows
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.reference import encode
from tests.helpers.small_m import E3M0, PERSISTENT, PIPELINED, TOLERANCE, error, on_the_cpu, product, values, weight

pytestmark = on_the_cpu


def spec(m, n, k, format="mxfp8", capability=(9, 0)):
    class Device(Spec):
        @property
        def capability(self):
            return capability

    return Device("mm", ((m, k), (n, k)), (torch.bfloat16, mx.FORMATS[format]), torch.bfloat16, torch.device("cuda", 0))


def test_refusals_give_the_reason():
    w, x, args = weight("mxfp8", 32, 64), torch.randn(2, 64).bfloat16(), GemmArgs(torch.bfloat16)

    def why(a=x, b=w, args=args, m=2, capability=(9, 0)):
        return small_m.refuses(spec(m, 32, 64, capability=capability), a, b, args)

    assert why() is None
    assert why(capability=(7, 5)) == "needs sm80, this device is sm75"
    assert why(b=x) == "needs a quantized right operand, this one has no codes"
    assert why(b=weight(E3M0, 32, 64)) == "has no decoder for elements of e3m0"
    assert why(b=weight("mxfp8[1x64]", 32, 64)) == "has no decoder for e8m0 scales of 1x64 blocks"
    assert why(a=x.float()).endswith("in bfloat16 or float16, these are float32")
    assert why(args=GemmArgs(torch.float64)) == "writes bfloat16, float16 or float32, not float64"
    assert why(a=Unquantized(x, Cast.of("float8_row"))).startswith(
        "the values of float8_e4m3_row are not exact in bfloat16"
    )
    unaligned = weight("mxfp8", 32, 72)  # its rows of codes start at multiples of 8 bytes: wgmma cannot run
    assert why(b=unaligned, m=129).startswith("for at most 128 rows") and why(m=129) is None
    assert why(m=513).startswith("for at most 512 rows") and most_rows((9, 0)) == 512
    assert why(m=65, capability=(8, 0)).startswith("for at most 64 rows")
    assert why(m=0) == "no values"


@pytest.mark.parametrize("kind", ["plain", "unquantized", "nvfp4", "fake quantized", "operand", "stack of rows"])
def test_operands_of_every_kind_are_accepted(kind, monkeypatch):
    monkeypatch.setattr(launch, "choose_config", lambda *args, **options: PIPELINED)
    w, x = weight("mxfp4", 32, 64), torch.randn(4, 64).bfloat16()
    cast = Cast.of("nvfp4" if kind == "nvfp4" else "mxfp8")
    cast_values = values(encode(x, cast))
    gemm_operands = {
        "plain": (x, x.double()),
        "unquantized": (Unquantized(x, cast), cast_values),
        "nvfp4": (Unquantized(x, cast), cast_values),
        "fake quantized": (FakeQuantized(cast_values.bfloat16(), None, cast.format), cast_values),
        "operand": (encode(x, cast), cast_values),
        "stack of rows": (x.view(2, 2, 64), x.double()),
    }
    gemm_operand, reference = gemm_operands[kind]
    y = small_m.KERNEL.run(gemm_operand, w, GemmArgs(torch.float32))
    assert y.shape == (*gemm_operand.shape[:-1], 32)
    assert error(y.view(4, 32), reference @ values(w).t()) < TOLERANCE


def test_a_product_that_does_not_fit_is_refused_with_its_sizes():
    with pytest.raises(
        RuntimeError, match=r"a product of 9x16x64 by LaunchConfig.* does not fit in the shared memory of this device"
    ):
        product(torch.randn(9, 64).bfloat16(), weight("mxfp8", 16, 64), PERSISTENT)
