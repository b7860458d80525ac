"""``tl.dot_scaled`` products equal the definition for every pair of formats, at every edge, and refuse with a sentence.

Without a GPU they run in Triton's interpreter, which has no ``dot_scaled``: ``instruction`` gives it one, exact, from
the definition of elements and scales. What is shown is all around it: loads, masks, scales, groups, the epilogue.
"""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxtensor.core import devices
from mxtensor.kernels.gemm import dot_scaled, select
from mxtensor.kernels.gemm.spec import GemmArgs
from mxtensor.kernels.operands import Unquantized
from mxtensor.numerics import reference
from mxtensor.numerics.cast import Cast
from mxtensor.numerics.elements import decode_elements, decode_packed
from mxtensor.numerics.formats import E2M1, E4M3, E5M2, E8M0, UE4M3, get_format
from mxtensor.numerics.operand import Operand
from mxtensor.numerics.reference import decode
from tests.helpers.compare import assert_same_product, relative_error
from tests.helpers.in_bounds import in_bounds

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRS = [
    ("mxfp8_e4m3", "mxfp8_e4m3"),
    ("mxfp8_e4m3", "mxfp8_e5m2"),
    ("mxfp8_e5m2", "mxfp8_e4m3"),
    ("mxfp4", "mxfp4"),
    ("mxfp8_e4m3", "mxfp4"),
    ("mxfp4", "mxfp8_e5m2"),
    ("mxfp8[32x32]", "mxfp8"),
    ("mxfp4", "mxfp4[32x32]"),
    ("nvfp4", "nvfp4"),
    ("nvfp4_single_level", "nvfp4"),
    ("nvfp4", "nvfp4[16x16]"),
]
SHAPES = {  # M, N, K: tiles are 32x32x128, of 4-bit pairs 32x32x256
    "whole tiles": (64, 64, 256),
    "tails of rows and columns": (70, 41, 256),
    "a K of whole blocks": (33, 40, 160),
    "a K that ends inside a block": (40, 33, 300),
    "an odd K": (5, 7, 33),
    "less than 16 bytes": (3, 2, 9),
}


@pytest.fixture(autouse=True)
def instruction(monkeypatch):
    """``tl.dot_scaled`` for the interpreter: decode exactly, multiply in float64, add in float32.

    Triton before 3.9 has none there, and that one's multiplies in numpy, whose sums are in an order of its own.
    """
    if DEVICE.type == "cuda":
        return
    from triton.runtime import interpreter

    words = {"E4M3": E4M3, "E5M2": E5M2, "E2M1": E2M1}

    def values(data, scale, element):  # data (rows, bytes), scale (rows, blocks), both numpy bytes
        codes = torch.from_numpy(data.data.copy())
        kind = UE4M3 if scale.dtype.is_fp8e4nv() else E8M0
        decoded = (
            decode_packed(codes, element) if element.packed else decode_elements(codes.view(element.dtype), element)
        )
        multiplier = reference.scale_to_float(torch.from_numpy(scale.data.copy()), kind).double()
        return decoded.double() * multiplier.repeat_interleave(decoded.shape[1] // multiplier.shape[1], 1)

    def create_dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, fast, lhs_k, rhs_k, total):
        transposed = interpreter.TensorHandle(rhs.data.T, rhs.dtype)
        product = (
            values(lhs, lhs_scale, words[lhs_format.name]) @ values(transposed, rhs_scale, words[rhs_format.name]).T
        )
        return interpreter.TensorHandle(total.data + product.float().numpy(), total.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot_scaled", create_dot_scaled, raising=False)


@pytest.fixture(autouse=True)
def poison():
    """Memory from ``empty`` is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.randn(2).new_empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def needs_device(*formats):
    """Skip what the device here cannot compile: blocks of 16 before Blackwell."""
    capability = devices.device_capability(DEVICE)
    if DEVICE.type == "cuda" and capability not in dot_scaled.MIXES and "nvfp4" in "".join(formats):
        pytest.skip(f"Triton does not compile blocks of 16 for sm{capability[0]}{capability[1]}")


def operand(*shape, format):
    """Gaussian values over many magnitudes, quantized; rows of NaN follow it in memory."""
    rows = shape[-2] + (32 if len(shape) == 2 else 0)
    x = torch.randn(*shape[:-2], rows, shape[-1], device=DEVICE)
    x *= 2.0 ** torch.randint(-5, 4, (rows, 1), device=DEVICE).float()
    format = get_format(format)
    if len(shape) > 2 or format.rows_are_blocked or format.global_scale:
        return reference.encode(x[..., : shape[-2], :], Cast(format))
    x[shape[-2] :] = float("nan")
    whole = reference.encode(x, Cast(format))
    return Operand(whole.data[: shape[0]], whole.scale[: shape[0]], whole.global_scale, format, shape)


def values(operand):
    return decode(operand, torch.float32).double().cpu()


def check(y, product, *operands):
    """Equal to the definition to float32 rounding; on a GPU, to the truncation of its matrix instructions."""
    y, operands = y.cpu(), [f.cpu() for f in operands]  # where poison() leaves a float64 product alone
    if DEVICE.type == "cpu":
        assert_same_product(y, product, *operands)
    else:
        limit = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}[y.dtype]
        assert relative_error(y, product(*operands)) < limit


def mm(a, b):
    return a @ b.transpose(-1, -2)


# ---------------------------------------------------------------------------------------------- one matrix


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_the_product_is_that_of_the_values(pair, shape):
    needs_device(*pair)
    m, n, k = shape
    a, b = operand(m, k, format=pair[0]), operand(n, k, format=pair[1])
    check(dot_scaled.run(a, b, GemmArgs(torch.float32)), mm, values(a), values(b))


@pytest.mark.parametrize("out_dtype", dot_scaled.OUT_DTYPES)
@pytest.mark.parametrize("pair", [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4")], ids=" x ".join)
def test_one_rounding_with_bias_alpha_and_beta(pair, out_dtype):
    needs_device(*pair)
    a, b = operand(40, 160, format=pair[0]), operand(50, 160, format=pair[1])
    for bias in (torch.randn(50), torch.randn(40, 50), torch.randn(40, 1), torch.randn(1), torch.randn(())):
        bias = bias.to(DEVICE, torch.bfloat16)
        args = GemmArgs(out_dtype, bias, alpha=0.25, beta=2.0)
        y = dot_scaled.run(a, b, args)
        if DEVICE.type == "cpu" and out_dtype is torch.bfloat16:  # the interpreter truncates, cvt.rn does not
            wide = dot_scaled.run(a, b, args._replace(out_dtype=torch.float32))
            assert torch.equal(y.float(), (wide.view(torch.int32) & ~0xFFFF).view(torch.float32))
            continue
        check(y, lambda a, b, c: 0.25 * mm(a, b) + 2.0 * c, values(a), values(b), bias.double())


def test_a_bias_times_zero_is_not_there():
    a, b = operand(4, 64, format="mxfp8"), operand(8, 64, format="mxfp8")
    y = dot_scaled.run(a, b, GemmArgs(torch.float32, torch.full((8,), float("nan"), device=DEVICE), beta=0))
    check(y, mm, values(a), values(b))


def test_leading_dimensions_are_rows():
    a, b = operand(2, 3, 5, 96, format="mxfp8"), operand(24, 96, format="mxfp4")
    bias = torch.randn(3, 1, 24, device=DEVICE)
    y = dot_scaled.run(a, b, GemmArgs(torch.float32, bias))
    check(y, lambda a, b, c: mm(a, b) + c, values(a), values(b), bias.double())


def test_plain_values_are_cast_first():
    x, w = torch.randn(9, 80, device=DEVICE), torch.randn(17, 80, device=DEVICE)
    e4m3, e5m2 = Cast.of("mxfp8_e4m3"), Cast.of("mxfp8_e5m2", "floor")
    y = dot_scaled.run(Unquantized(x, e4m3), Unquantized(w, e5m2), GemmArgs(torch.float32))
    check(y, mm, values(reference.encode(x, e4m3)), values(reference.encode(w, e5m2)))


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp4"])
def test_a_block_of_nan_makes_its_row_nan_and_no_other(format):
    x, w = torch.randn(40, 96, device=DEVICE), torch.randn(24, 96, device=DEVICE)
    x[7, 40], w[3, 95] = float("inf"), float("nan")
    a, b = (reference.encode(t, Cast.of(format)) for t in (x, w))
    y = dot_scaled.run(a, b, GemmArgs(torch.float32))
    expected = torch.zeros(40, 24, dtype=torch.bool, device=DEVICE)
    expected[7], expected[:, 3] = True, True
    assert torch.equal(y.isnan(), expected)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 64), (8, 0, 64), (8, 8, 0)])
def test_empty_products(m, n, k):
    a, b = operand(m, k, format="mxfp8"), operand(n, k, format="mxfp8")
    bias = torch.randn(n, device=DEVICE)
    y = dot_scaled.run(a, b, GemmArgs(torch.float32, bias))
    assert torch.equal(y, bias.expand(m, n))


# ---------------------------------------------------------------------------------------------- groups


ENDS = {
    "one group": (70,),
    "empty groups at both ends and between": (0, 3, 3, 40, 70, 70),
    "rows after the last end": (5, 37, 50),
    "no rows at all": (0, 0),
    "more groups than rows": (1, 1, 2, 2, 2, 3, 70),
}


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize(
    "pair",
    [("mxfp8_e4m3", "mxfp8_e5m2"), ("mxfp8", "mxfp4[32x32]"), ("mxfp8[32x32]", "mxfp8"), ("nvfp4", "nvfp4")],
    ids=" x ".join,
)
def test_every_group_meets_its_own_weight_and_later_rows_give_zeros(pair, ends):
    needs_device(*pair)
    a, b = operand(70, 200, format=pair[0]), operand(len(ends), 40, 200, format=pair[1])
    if b.has_stack_scales:  # the kernel takes one, and the results are multiplied by the rest
        b = replace(b, global_scale=b.global_scale.reshape(-1)[0])
    bias = torch.randn(40, device=DEVICE)
    where = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    y = dot_scaled.run_grouped(a, b, where, GemmArgs(torch.float32, bias, alpha=0.5))
    left, right = values(a), values(b)
    for g, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        check(y[start:end], lambda a, b, c: 0.5 * mm(a, b) + c, left[start:end], right[g], bias.double())
    assert torch.equal(y[ends[-1] :], torch.zeros(70 - ends[-1], 40, device=DEVICE))


def test_rows_that_are_in_no_group_are_zeros_even_where_they_are_nan():
    x = torch.randn(40, 64, device=DEVICE)
    x[10:] = float("nan")
    a, b = reference.encode(x, Cast.of("mxfp8")), operand(2, 8, 64, format="mxfp8")
    bias = torch.full((8,), float("inf"), device=DEVICE)
    ends = torch.tensor([4, 10], dtype=torch.int32, device=DEVICE)
    y = dot_scaled.run_grouped(a, b, ends, GemmArgs(torch.float32, bias))
    assert torch.equal(y[10:], torch.zeros(30, 8, device=DEVICE)) and y[:10].isinf().all()


# ---------------------------------------------------------------------------------------------- refusals


def fake(*shape, format):
    """An operand on a CUDA device that this machine lacks; call inside FakeTensorMode."""
    return Operand.empty(get_format(format), shape, "cuda")


def refusal(a, b, args=None):
    args = args or GemmArgs(torch.bfloat16)
    return dot_scaled.refuses(select._spec("mm", a, b, args), a, b, args)


def test_a_tensor_on_the_cpu_is_refused():
    a = reference.encode(torch.randn(4, 64), Cast.of("mxfp8"))
    assert refusal(a, a) == "runs on cuda, this tensor is on cpu"


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm90"), ((12, 1), "sm121"), ((8, 9), "sm89")])
def test_a_device_without_the_instructions_is_refused(pretend, capability, name):
    pretend(capability)
    with FakeTensorMode():
        a = fake(8, 64, format="mxfp8")
        assert refusal(a, a) == (
            f"needs sm100, sm103, sm110, sm120 for Triton's block-scaled products, this device is {name}"
        )


@pytest.mark.parametrize("capability", dot_scaled.MIXES)
def test_pairs_of_unlike_width_need_tensor_memory(pretend, capability):
    pretend(capability)
    with FakeTensorMode():
        for pair in PAIRS:
            a, b = fake(32, 64, format=pair[0]), fake(64, 64, format=pair[1])
            mixed = a.format.element.bits != b.format.element.bits
            reason = refusal(a, b)
            if mixed and capability == (12, 0):
                names = f"{a.format.element.name} with {b.format.element.name}"
                assert reason == f"Triton has no instruction for {names} on sm120"
            else:
                assert reason is None


@pytest.mark.parametrize("format", ["mxfp6_e2m3", "mxint8", "mxfp8[1x64]", "mxfp4[1x16]", "float8_e4m3_row"])
def test_formats_without_an_instruction_are_refused(pretend, format):
    pretend((10, 0))
    with FakeTensorMode():
        assert refusal(fake(8, 64, format="mxfp8"), fake(8, 64, format=format)) == (
            "tl.dot_scaled takes e4m3, e5m2 and e2m1 with an e8m0 scale for 32 values, "
            "or e2m1 with an e4m3 scale for 16 values, "
            f"not {get_format(format)}"
        )


def test_other_refusals_name_the_values(pretend):
    pretend((10, 0))
    with FakeTensorMode():
        a, b = fake(8, 64, format="mxfp4"), fake(16, 64, format="mxfp4")
        assert (
            refusal(a, fake(16, 64, format="nvfp4")) == "needs one scale format for both operands, not e8m0 with ue4m3"
        )
        plain = torch.empty(8, 64, dtype=torch.bfloat16, device="cuda")
        assert refusal(plain, b) == "needs both operands quantized, one is bfloat16"
        assert refusal(a, b, GemmArgs(torch.float64)) == "writes bfloat16, float16 or float32, not float64"
        batch = fake(3, 16, 64, format="mxfp4")
        assert refusal(batch, batch) == "multiplies rows with one matrix, not (3, 16, 64) with (3, 16, 64)"
        tiles = fake(3, 16, 64, format="mxfp4[32x32]")
        assert refusal(tiles, b) == (
            "the rows of (3, 16, 64) cannot be flattened: mxfp4_e2m1[32x32] shares scales between rows"
        )
        args = GemmArgs(torch.bfloat16, torch.empty(8, 16, device="cuda"))
        ends = torch.empty(3, dtype=torch.int32, device="cuda")
        reason = dot_scaled.refuses_grouped(select._spec("mm", a, batch, args), a, batch, ends, args)
        assert reason == "a bias of groups is one value a column, not (8, 16)"


# ---------------------------------------------------------------------------------------------- under a trace


@pytest.mark.parametrize("pair", PAIRS, ids=" x ".join)
def test_a_traced_product_is_one_op_of_the_right_shape(pretend, pair):
    pretend((10, 0))
    with FakeTensorMode():
        a, b = fake(70, 96, format=pair[0]), fake(48, 96, format=pair[1])
        y = select.gemm("mm", a, b, GemmArgs(torch.float16, torch.empty(48, device="cuda")), prefer="dot_scaled")
        assert (y.shape, y.dtype, y.device.type) == ((70, 48), torch.float16, "cuda")
        stack, ends = fake(3, 48, 96, format=pair[1]), torch.empty(3, dtype=torch.int32, device="cuda")
        y = select.grouped_gemm("grouped_mm", a, stack, ends, GemmArgs(torch.bfloat16), prefer="dot_scaled")
        assert (y.shape, y.dtype, y.device.type) == ((70, 48), torch.bfloat16, "cuda")


def test_the_op_keeps_its_promises_to_torch():
    a, b = operand(6, 96, format="mxfp4"), operand(2, 10, 96, format="mxfp4")  # opcheck cannot compare float8
    ends = torch.tensor([2, 5], dtype=torch.int32, device=DEVICE)
    args = (
        a.data,
        a.scale,
        b.data,
        b.scale,
        a.format.name,
        b.format.name,
        96,
        None,
        None,
        None,
        ends,
        1.0,
        1.0,
        torch.float16,
    )
    torch.library.opcheck(dot_scaled.dot_scaled, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter sees each access")
@pytest.mark.parametrize("ends", [[-5, 40], [100, 7], [40, 1000], [2**31 - 1, -(2**31)], [-(2**31), 2**31 - 1]])
def test_ends_of_groups_never_reach_outside(ends):
    """The ends are data that the host does not read: rows outside of a must be neither read nor written."""
    cast = Cast.of("mxfp8")
    left, right = (reference.encode(torch.randn(size, device=DEVICE), cast) for size in ((40, 128), (2, 16, 128)))
    ends = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    codes = left.data, left.scale, right.data, right.scale, "mxfp8_e4m3", "mxfp8_e4m3", 128
    with in_bounds() as checked:
        dot_scaled.eager_dot_scaled(*codes, None, None, None, ends, 1.0, 1.0, torch.float32)
    assert checked.accesses > 0
