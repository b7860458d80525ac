"""A format is one row: formats that the package does not list are cast, multiplied and refused as the listed ones are.

The rows cover what no listed format has: an element without mantissa bits, one of 4 bits with another exponent width,
one of 6 bits with another, and the two scale levels of NVFP4 on 6 bits.
"""

import pytest
import torch

import mxtensor as mx
from mxtensor.core import devices
from mxtensor.core.kernel import Spec
from mxtensor.kernels.gemm import select as gemm
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.kernels.quantize import cpu_casts, definition, triton_columns, triton_rows
from mxtensor.kernels.runtime.nvrtc import ELEMENTS
from mxtensor.kernels.small_m import kernel as small_m
from mxtensor.numerics.choices import ScaleCalculationMode
from mxtensor.numerics.elements import ElementFormat
from mxtensor.numerics.formats import E2M3, E8M0, UE4M3, Format
from mxtensor.numerics.reference import decode, decode_local, encode
from tests.helpers import oracle
from tests.helpers.compare import assert_same_operand, assert_same_values
from tests.kernels.quantize.conftest import one_rounding, whole_reductions  # noqa: F401

E3M0 = ElementFormat("e3m0", 3, 0, bias=3, max=16.0, dtype=torch.uint8, packing=(2, 1))
E1M2 = ElementFormat("e1m2", 1, 2, bias=0, max=3.5, dtype=torch.uint8, packing=(2, 1))
E4M1 = ElementFormat("e4m1", 4, 1, bias=7, max=384.0, dtype=torch.uint8, packing=(4, 3))
NEW = [
    Format("mxfp4_e3m0", E3M0, E8M0, (1, 32)),
    Format("mxfp4_e1m2", E1M2, E8M0, (1, 32)),
    Format("mxfp6_e4m1", E4M1, E8M0, (1, 32)),
    Format("nvfp6_e2m3", E2M3, UE4M3, (1, 16), global_scale=True),
    Format("mxfp4_e3m0_tile", E3M0, E8M0, (32, 32)),
]
each_format = pytest.mark.parametrize("format", NEW, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SCALINGS = list(ScaleCalculationMode)


def values(dtype, rows=33, cols=192):
    """Values of many magnitudes, and every tie of a few binades, on which roundings differ."""
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-6, 6, (rows, 1)).float()
    x[:4] = torch.arange(4 * cols).view(4, cols) / 16
    return x.to(dtype)


@each_dtype
@each_format
def test_the_definition_and_the_cpu_casts_agree_with_exact_arithmetic(format, dtype):
    for scaling in SCALINGS:
        x, cast = values(dtype), mx.Cast.of(format, scaling.value)
        wanted = oracle.check(encode(x, cast), x, scaling.value)
        for kernel in (cpu_casts.QUANTIZE, definition.QUANTIZE_SLICES):
            assert_same_operand(kernel.run(x, cast), encode(x, cast))
        for kernel in (cpu_casts.DEQUANTIZE, definition.DEQUANTIZE_SLICES):
            if kernel is cpu_casts.DEQUANTIZE or x.shape[0] % format.block[0] == 0:
                assert oracle.same_floats(kernel.run(encode(x, cast), torch.float32).numpy(), wanted)


@pytest.mark.exhaustive(quick=1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="only Triton's interpreter runs on the CPU")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy's about a scale of zero
@pytest.mark.usefixtures("one_rounding", "whole_reductions")
@pytest.mark.exhaustive(quick=1)
@each_dtype
@each_format
def test_the_triton_casts_agree_with_the_definition(format, dtype):
    pytest.importorskip("triton")
    for scaling in SCALINGS:
        x, cast = values(dtype), mx.Cast.of(format, scaling.value)
        operand = encode(x, cast)
        assert_same_operand(triton_rows.quantize(x, cast), operand)
        assert_same_values(triton_rows.dequantize(operand, dtype), decode(operand, dtype))
        rounded, _ = triton_rows.fake_quantize(x, cast, torch.bfloat16)
        assert_same_values(rounded, decode_local(operand).to(torch.bfloat16))
        if not format.rows_are_blocked:
            rowwise, columnwise = triton_columns.pair(x, cast)
            assert_same_operand(rowwise, operand)
            assert_same_operand(columnwise, encode(x.t(), cast))


@each_dtype
@each_format
def test_every_product_kernel_gives_the_definition_or_a_sentence(format, dtype, monkeypatch):
    x, w = values(dtype), torch.randn(16, 192)
    cast, element = mx.Cast.of(format), format.element
    a, b, args = Unquantized(x, cast), encode(w, cast), GemmArgs(dtype)
    wanted = decode(encode(x, cast), torch.float64) @ decode(b, torch.float64).t()
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    for capability in ((0, 0), (8, 0), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(devices, "device_capability", lambda device, c=capability: c)
        device = torch.device("cuda" if capability[0] else "cpu")
        spec = Spec("linear", (tuple(x.shape), tuple(w.shape)), (format, format), dtype, device)
        for kernel in gemm.GEMM:
            reason = kernel.refuses(spec, a, b, args)
            assert reason is None or " " in reason
            if kernel.name in ("scaled_mm", "dot_scaled") or (kernel.name == "small_m" and element not in ELEMENTS):
                assert reason is not None, f"{kernel.name} has no code for {format}"
    monkeypatch.undo()
    y = gemm.gemm("linear", a, b, args)
    assert (y.double() - wanted).norm() <= tolerance * wanted.norm()


def test_the_few_row_kernels_do_not_cast_to_elements_that_their_sources_lack():
    """The sources round to even mantissas, which e3m0 does not have; the activations are cast before the product."""
    assert not small_m.is_cast_here(mx.Cast.of(NEW[0]), torch.randn(2, 64).bfloat16())
    assert small_m.is_cast_here(mx.Cast.of("mxfp4"), torch.randn(2, 64).bfloat16())
