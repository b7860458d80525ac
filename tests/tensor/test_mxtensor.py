"""MXTensor itself: the outer tensor, the operands it stores, and the functions that make it and read it."""

import pytest
import torch
from expecttest import assert_expected_inline

import mxtensor as mx
from mxtensor.numerics.choices import ScaleCalculationMode
from mxtensor.numerics.formats import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from tests.helpers.compare import same_bytes

FORMATS = list(mx.FORMATS)
SQUARE = [name for name in FORMATS if mx.FORMATS[name].square]
ONE_SIDED = [name for name in FORMATS if not mx.FORMATS[name].square]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWWISE, COLUMNWISE, BOTH = mx.Orientation.ROWWISE, mx.Orientation.COLUMNWISE, mx.Orientation.BOTH


# ---------------------------------------------------------------------------------------------- the outer tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_looks_like_the_dense_tensor_it_stands_for(format, dtype):
    x = torch.randn(3, 40, 72).to(dtype)
    w = mx.quantize(x, format)
    assert isinstance(w, mx.MXTensor) and isinstance(w, torch.Tensor)
    assert (w.dtype, w.shape, w.stride(), w.device) == (x.dtype, x.shape, x.stride(), x.device)
    assert (w.dim(), w.numel(), w.is_contiguous(), w.requires_grad) == (3, x.numel(), True, False)
    plain = w.dequantize()
    assert type(plain) is torch.Tensor
    assert (plain.dtype, plain.shape, plain.stride()) == (x.dtype, x.shape, x.stride())


def test_a_quantized_tensor_is_as_contiguous_as_a_fresh_one_whatever_its_source():
    x = torch.randn(64, 96)
    w, transposed = mx.quantize(x, "mxfp8"), mx.quantize(x.t().contiguous().t(), "mxfp8")
    assert transposed.stride() == w.stride() and same_bytes(transposed, w)


def test_quantizing_carries_no_gradient_and_does_not_change_the_source():
    x = torch.randn(8, 64, requires_grad=True)
    before = x.detach().clone()
    assert not mx.quantize(x, "mxfp8").requires_grad
    assert torch.equal(x, before) and x.grad is None


def test_the_source_rounds_from_its_own_dtype():
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    assert same_bytes(mx.quantize(x, "mxfp4"), mx.quantize(x.float(), "mxfp4"))


def test_quantizing_again_gives_another_format_of_the_same_values():
    w = mx.quantize(torch.randn(8, 64), "mxfp8")
    short = mx.quantize(w, "mxfp4")
    assert short.format.name == "mxfp4_e2m1" and same_bytes(short, mx.quantize(w.dequantize(), "mxfp4"))


# ---------------------------------------------------------------------------------------------- repr


def test_repr_shows_the_stored_operands_and_never_a_value():
    x = torch.randn(64, 4096)
    tensors = [
        mx.quantize(x, "mxfp8"),
        mx.quantize(x.bfloat16(), "mxfp4", orientation="both"),
        mx.quantize(x.half(), "nvfp4").t(),
        mx.quantize(x[:, :40].double(), "mxfp6_e3m2[1x16]", orientation="columnwise"),
        mx.quantize(x[0], "mxint8"),
        mx.quantize(x.to("meta"), "float8_128x128"),
        mx.quantize(x, "float8_tensor"),
    ]
    assert_expected_inline(
        "\n".join(map(repr, tensors)).replace(" dtype=", "\n  dtype="),
        """\
MXTensor(shape=(64, 4096), format=mxfp8_e4m3, orientation=rowwise,
  dtype=float32, size=264 KiB (8.25 bits/value))
MXTensor(shape=(64, 4096), format=mxfp4_e2m1, orientation=both,
  dtype=bfloat16, size=272 KiB (8.5 bits/value))
MXTensor(shape=(4096, 64), format=nvfp4, orientation=columnwise,
  dtype=float16, size=144 KiB (4.5 bits/value))
MXTensor(shape=(64, 40), format=mxfp6_e3m2[1x16], orientation=columnwise,
  dtype=float64, size=2.031 KiB (6.5 bits/value))
MXTensor(shape=(4096,), format=mxint8, orientation=rowwise,
  dtype=float32, size=4.125 KiB (8.25 bits/value))
MXTensor(shape=(64, 4096), format=float8_e4m3_128x128, orientation=both,
  dtype=float32, device=meta, size=256.1 KiB (8.004 bits/value))
MXTensor(shape=(64, 4096), format=float8_e4m3_tensor, orientation=both,
  dtype=float32, size=256 KiB (8 bits/value))""",
    )


def test_repr_of_a_parameter_names_the_activation_format():
    linear = torch.nn.Linear(64, 32)
    mx.quantize_(linear, "mxfp8")
    linear.weight.requires_grad_()
    assert_expected_inline(
        repr(linear.weight).replace(" size=", "\n  size="),
        """\
MXTensor(shape=(32, 64), format=mxfp8_e4m3, orientation=rowwise, dtype=float32,
  size=2.062 KiB (8.25 bits/value), activation=mxfp8_e4m3, requires_grad=True)""",
    )


def test_str_and_format_are_the_repr():
    w = mx.quantize(torch.randn(4, 64), "mxfp8")
    assert str(w) == f"{w}" == repr(w)


# ---------------------------------------------------------------------------------------------- orientation


@pytest.mark.parametrize("format", ONE_SIDED)
def test_an_orientation_is_a_copy_blocked_along_its_own_dimension(format):
    x = torch.randn(2, 96, 160)
    row, col = (mx.quantize(x, format, orientation=o) for o in ("rowwise", "columnwise"))
    both = mx.quantize(x, format, orientation="both")
    assert (row.orientation, col.orientation, both.orientation) == (ROWWISE, COLUMNWISE, BOTH)
    assert col.rowwise is None and row.columnwise is None
    assert both.nbytes == row.nbytes + col.nbytes
    assert torch.equal(both.rowwise.data.view(torch.uint8), row.rowwise.data.view(torch.uint8))
    assert torch.equal(both.columnwise.scale, col.columnwise.scale)
    # the columnwise copy is the rowwise copy of the transposed values
    assert col.columnwise.shape == (2, 160, 96)
    transposed = mx.quantize(x.mT.contiguous(), format)
    assert torch.equal(col.dequantize(), transposed.dequantize().mT)
    assert torch.equal(both.dequantize(), row.dequantize())


@pytest.mark.parametrize("format", [*SQUARE, "mxfp8[32x32]", "mxfp6[16x16]", "mxfp4[32x32]", "mxint8[64x64]"])
def test_a_square_block_serves_both_orientations_with_one_copy(format):
    x = torch.randn(2, 96, 160)
    for asked in ("rowwise", "columnwise", "both"):
        w = mx.quantize(x, format, orientation=asked)
        assert w.orientation is BOTH and len(w.operands) == 1
        assert w.rowwise.shape == (2, 96, 160) and w.columnwise.shape == (2, 160, 96)
    transposed = w.replace(w.columnwise, None, size=(2, 160, 96))
    assert torch.equal(transposed.dequantize(), w.dequantize().mT)
    # transposed, and not rounded again: quantizing the transposed values gives the same codes
    assert same_bytes(transposed, mx.quantize(x.mT.contiguous(), format))


def test_orientation_is_a_flag_and_takes_its_own_members():
    w = mx.quantize(torch.randn(32, 32), "mxfp8", orientation=mx.Orientation.BOTH)
    assert ROWWISE | COLUMNWISE is BOTH and w.orientation & COLUMNWISE


# ---------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        *(("mxfp8", 8.25), ("mxfp8_e5m2", 8.25), ("mxint8", 8.25), ("mxfp6_e3m2", 6.25), ("mxfp6_e2m3", 6.25)),
        *(("mxfp4", 4.25), ("nvfp4_single_level", 4.5), ("float8_1x128", 8.25), ("mxfp8[32x32]", 8 + 8 / 1024)),
        *(("float8_128x128", 8 + 32 / 128**2), ("mxfp4[1x16]", 4.5)),
    ],
)
def test_bits_per_value_of_whole_blocks(format, bits):
    w = mx.quantize(torch.randn(256, 512), format)
    assert w.bits_per_value == w.format.bits_per_value == bits
    assert w.nbytes * 8 == bits * w.numel()


def test_bits_per_value_counts_global_scales_tails_and_both_copies():
    x = torch.randn(64, 128)
    assert mx.quantize(x, "nvfp4").nbytes == 64 * 128 // 2 + 64 * 128 // 16 + 4
    assert mx.quantize(x, "mxfp8", orientation="both").bits_per_value == 16.5
    assert mx.quantize(x[:, :33], "mxfp8").nbytes == 64 * (33 + 2)
    assert mx.quantize(x[:, :33], "mxfp6").nbytes == 64 * (9 * 3 + 2)  # nine groups of four values in three bytes


@pytest.mark.parametrize("shape", [(0,), (0, 64), (64, 0), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("format", ["mxfp8", "mxfp6", "nvfp4", "float8_tensor", "float8_row", "float8_128x128"])
def test_a_tensor_without_values_is_a_tensor(format, shape):
    w = mx.quantize(torch.randn(shape), format)
    assert w.dequantize().shape == w.clone().shape == shape and f"shape={shape}" in repr(w)
    if len(shape) == 2:
        rows, cols = shape
        assert w.t().dequantize().shape == (cols, rows)
        assert torch.equal(torch.nn.functional.linear(torch.randn(5, cols), w), torch.zeros(5, rows))


# ---------------------------------------------------------------------------------------------- operands


@pytest.mark.parametrize(
    ("format", "data", "scale", "view"),
    [
        ("mxfp8_e4m3", torch.float8_e4m3fn, torch.uint8, torch.float8_e8m0fnu),
        ("mxfp8_e5m2", torch.float8_e5m2, torch.uint8, torch.float8_e8m0fnu),
        ("mxfp6_e3m2", torch.uint8, torch.uint8, torch.float8_e8m0fnu),
        ("mxfp6_e2m3", torch.uint8, torch.uint8, torch.float8_e8m0fnu),
        ("mxfp4_e2m1", torch.uint8, torch.uint8, torch.float8_e8m0fnu),
        ("mxint8", torch.int8, torch.uint8, torch.float8_e8m0fnu),
        ("nvfp4", torch.uint8, torch.uint8, torch.float8_e4m3fn),
        ("nvfp4_single_level", torch.uint8, torch.uint8, torch.float8_e4m3fn),
        ("float8_e4m3_row", torch.float8_e4m3fn, torch.float32, torch.float32),
        ("float8_e5m2_128x128", torch.float8_e5m2, torch.float32, torch.float32),
    ],
)
def test_an_operand_is_codes_and_scales_in_documented_dtypes(format, data, scale, view):
    operand = mx.quantize(torch.randn(4, 96), format).rowwise
    assert isinstance(operand, mx.Operand) and operand.format is mx.FORMATS[format]
    assert operand.data.dtype is data and operand.data.shape == operand.format.data_shape((4, 96))
    assert operand.scale.dtype is scale and operand.scale.shape == operand.format.scale_shape((4, 96))
    assert operand.scale_view.dtype is view and operand.scale_view.data_ptr() == operand.scale.data_ptr()
    if format == "nvfp4":
        assert operand.global_scale.dtype is torch.float32 and operand.global_scale.shape == ()
    else:
        assert operand.global_scale is None


# ---------------------------------------------------------------------------------------------- torchao's names


@pytest.mark.parametrize(
    ("elem_dtype", "format"),
    [
        (torch.float8_e4m3fn, "mxfp8_e4m3"),
        (torch.float8_e5m2, "mxfp8_e5m2"),
        (torch.float4_e2m1fn_x2, "mxfp4_e2m1"),
        (torch.int8, "mxint8"),
        (DTYPE_FP6_E2M3, "mxfp6_e2m3"),
        (DTYPE_FP6_E3M2, "mxfp6_e3m2"),
    ],
)
def test_to_mx_and_to_dtype_are_torchaos_names(elem_dtype, format):
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    w = mx.MXTensor.to_mx(x, elem_dtype, 32, ScaleCalculationMode.FLOOR)
    assert w.format is mx.FORMATS[format] and same_bytes(w, mx.quantize(x, elem_dtype, scaling="floor"))
    assert w.to_dtype(torch.float32).dtype is torch.float32
    assert torch.equal(w.to_dtype(torch.bfloat16), w.dequantize())


def test_to_mx_takes_a_block_size_and_defaults_to_mxfp8():
    x = torch.randn(8, 64)
    assert mx.MXTensor.to_mx(x).format is mx.FORMATS["mxfp8_e4m3"]
    assert mx.MXTensor.to_mx(x, torch.float8_e4m3fn, 16).rowwise.scale.shape == (8, 4)


def test_dequantize_in_another_dtype_rounds_once_from_float32():
    w = mx.quantize(torch.randn(8, 64), "nvfp4")
    for dtype in DTYPES:
        assert torch.equal(w.dequantize(dtype), w.dequantize(torch.float32).to(dtype))
    assert w.dequantize(torch.int32).dtype is torch.int32


# ---------------------------------------------------------------------------------------------- from components


@pytest.mark.parametrize("as_views", [False, True], ids=["stored", "viewed"])
@pytest.mark.parametrize("format", FORMATS)
def test_from_components_is_the_inverse_of_reading_the_components(format, as_views):
    w = mx.quantize(torch.randn(3, 40, 100, dtype=torch.bfloat16), format)
    operand = w.rowwise
    data = operand.data.view(torch.uint8) if as_views else operand.data
    scale = operand.scale_view if as_views else operand.scale
    rebuilt = mx.MXTensor.from_components(data, scale, format, shape=(3, 40, 100), global_scale=operand.global_scale)
    assert (rebuilt.shape, rebuilt.dtype, rebuilt.format) == (w.shape, torch.bfloat16, w.format)
    assert torch.equal(rebuilt.dequantize(), w.dequantize())
    assert rebuilt.rowwise.data.data_ptr() == operand.data.data_ptr()  # nothing is copied


def test_from_components_reads_the_shape_from_whole_groups_of_codes():
    for format in FORMATS:
        operand = mx.quantize(torch.randn(4, 128), format).rowwise
        rebuilt = mx.MXTensor.from_components(
            operand.data, operand.scale, format, global_scale=operand.global_scale, dtype=torch.half
        )
        assert rebuilt.shape == (4, 128) and rebuilt.dtype is torch.half


def test_from_components_takes_a_global_scale_of_one_element_in_any_shape():
    w = mx.quantize(torch.randn(4, 64), "nvfp4")
    operand = w.rowwise
    rebuilt = mx.MXTensor.from_components(
        operand.data, operand.scale, "nvfp4", global_scale=operand.global_scale.reshape(1, 1)
    )
    assert rebuilt.rowwise.global_scale.shape == () and torch.equal(rebuilt.dequantize(torch.float32), w.dequantize())
