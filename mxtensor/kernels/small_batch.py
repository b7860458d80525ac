"""Products of few rows, on any GPU since sm_80: the codes of the weight are read once and decoded in registers.

With so few rows the time is that of reading the weight, so that 8 bits take half of bfloat16's and 4 bits a quarter.
``cuda/product.cu`` multiplies, by one weight or, rows in groups, by a stack of them. Activations come as bfloat16 or
float16 and are multiplied as float16 (``cuda/activations.cuh``), cast on the way if the weight wants that: in the same
launch for a row or two, else in one before it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codec import Operand
from ..dispatch import Kernel, Spec
from ..formats import E8M0, UE4M3, ElementFormat, Format, Rounding, ScaleCalculationMode, get_format
from ..roles import Cast
from . import nvrtc, triton_host
from .cast import dequantize_operand, round_trip
from .gemm_spec import Factor, GemmArgs, Rounded, Uncast, flat_bias, not_a_bias_of_groups, not_rows_by_matrix
from .refusals import exported, other_build
from .small_batch_plan import (
    ELEMENTS,
    SCALES,
    TYPES,
    Facts,
    Plan,
    Room,
    can_multiply_together,
    cast_constants,
    clusters,
    constants,
    copy_size,
    room_of,
)
from .small_batch_table import choose_plan, gpu_of, most_rows

PRODUCT = struct.Struct("11Q7I4x2Q2I2f")
ACTIVATIONS = struct.Struct("4Q5I4x")
HEADERS = ("machine.cuh", "elements.cuh", "activations.cuh")
SOURCES = (*HEADERS, "stages.cuh", "sums.cuh", "result.cuh")
TOGETHER_SOURCES = (*HEADERS, "stages.cuh", "result.cuh", "words.cuh", "together.cu")
WHOLE_ROWS = 8
"""Up to so many rows each block looks at the whole tensor, where a cast wants the largest of it."""
HALVES = (torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------------------------------- refusals


def _refuses(spec: Spec, a: Factor, b: Factor, args: GemmArgs) -> str | None:
    reason = other_build()
    if reason is not None:
        return reason
    if spec.capability < nvrtc.OLDEST:
        return f"needs sm80, this device is sm{spec.capability[0]}{spec.capability[1]}"
    library = nvrtc.library()
    if isinstance(library, str):
        return library
    reason = exported(spec)
    if reason is not None:
        return reason
    if not isinstance(b, Operand):
        return "reads the codes of a quantized right factor, which has none"
    f = b.format
    if f.element not in ELEMENTS or (f.scale, f.block[1]) not in SCALES:
        return f"has no decoder for {f.scale.name} scales of {f.block[0]}x{f.block[1]} blocks"
    if args.out_dtype not in TYPES:
        return f"writes bfloat16, float16 or float32, not {str(args.out_dtype).removeprefix('torch.')}"
    x = a.values if isinstance(a, Rounded) else a
    if isinstance(x, Tensor) and x.dtype not in HALVES:
        name = str(x.dtype).removeprefix("torch.")
        return f"multiplies bfloat16 or float16 by bfloat16 or float16, the activations are {name}"
    if not isinstance(a, Tensor) and not a.format.exact_in_bfloat16:
        return f"{a.format} has {a.format.scale.name} scales: its values are not exact in bfloat16"
    if 0 in (*spec.shapes[0], *spec.shapes[1]):
        return "no values"
    return None


def refuses(spec: Spec, a: Factor, b: Factor, args: GemmArgs) -> str | None:
    reason = not_rows_by_matrix(spec, a) or _refuses(spec, a, b, args)
    if reason is None:
        assert isinstance(b, Operand)
        x, cast = (a.x, a.cast) if isinstance(a, Uncast) else (a, None)
        half = torch.bfloat16 if not isinstance(x, Tensor) else x.dtype  # values that are rounded are bfloat16
        together = can_multiply_together(b.format, half, cast, b.shape[-1], 0, (0, 0))
        rows, most = math.prod(spec.shapes[0][:-1]), most_rows(spec.capability, together)
        if rows > most:
            return f"for at most {most} rows, where reading the weight is what takes the time; these are {rows}"
    return reason


def refuses_grouped(spec: Spec, a: Factor, b: Factor, ends: Tensor, args: GemmArgs) -> str | None:
    reason = not_a_bias_of_groups(args) or _refuses(spec, a, b, args)
    if reason is None:
        assert isinstance(b, Operand)
        if b.format.rows_are_blocked and b.scale.shape[0] != b.shape[0]:
            return f"{b.format} has one scale for all groups"
        most = most_rows(spec.capability, False) * b.shape[0]
        if spec.shapes[0][0] > most:
            return f"for at most {most} rows in {b.shape[0]} groups; these are {spec.shapes[0][0]}"
    return reason


# ---------------------------------------------------------------------------------------------- the launch


class Cut(NamedTuple):
    """What is launched for products of one kind."""

    plan: Plan
    room: Room
    kernel: Any
    blocks: tuple[int, int]
    """along N; along M, or groups"""


def kernel_of(plan: Plan) -> str:
    """Its kernel, in the source of that name."""
    return "resident" if plan.resident else "together" if plan.together else "product"


def sources_of(plan: Plan) -> tuple[str, ...]:
    """The sources of its kernel."""
    return TOGETHER_SOURCES if plan.together else (*SOURCES, f"{kernel_of(plan)}.cu")


@cache
def cut(
    device: torch.device, format: Format, types: tuple[torch.dtype, torch.dtype, torch.dtype],
    sizes: tuple[int, int, int, int], lie: tuple[int, int, int], cast: Cast | None, given: Plan | None,
) -> Cut:  # fmt: skip
    """How products of these types (x, result, bias) and sizes (M, N, K, groups or 0) are cut up, or by ``given``.

    ``lie``: of codes, scales and x, what address and bytes of a row leave over from a multiple of 16, or'ed.
    """
    rows, width, cols, groups = sizes
    copies = copy_size(lie[0]), copy_size(lie[1]), copy_size(lie[2])
    gpu, together = gpu_of(device), can_multiply_together(format, types[0], cast, cols, groups, lie)

    def allowed(plan: Plan) -> bool:
        alone = cast is None or cast.format.scale is E8M0  # where no block has to look at all activations
        return together and (alone or not plan.whole_x) if plan.together else not (plan.resident and groups)

    plan = given or choose_plan(device, format, -(-rows // (groups or 1)), width, cols, rows, allowed)
    room = room_of(format, plan, rows, width, cols, gpu)
    if room is None:
        raise RuntimeError(f"a product of {rows}x{width}x{cols} by {plan} has no room on this device")
    even = width % plan.rows == 0 and cols % plan.depth == 0
    if plan.together and not allowed(plan):
        raise RuntimeError(f"{plan} is for whole chunks of aligned weights and activations that are bfloat16")
    if plan.whole_x:
        facts = Facts(format, types[0], types[1], types[2], *copies, even, cast)
    else:
        facts = Facts(format, torch.float16, types[1], types[2], copies[0], copies[1], 16, even)
    row = constants(facts, plan)
    grid = plan.split, not plan.apart
    kernel = nvrtc.function(device, sources_of(plan), row, kernel_of(plan), PRODUCT, plan.threads, *grid)
    tiles, columns = -(-width // plan.rows), groups or -(-rows // plan.cols)
    return Cut(plan, room, kernel, (min(tiles, clusters(plan, gpu)), 1) if plan.resident else (tiles, columns))


@cache
def _activations_kernel(
    device: torch.device, element: ElementFormat, dtype: torch.dtype, copy: int, cast: Cast | None, tiles: int
) -> Any:
    row = (
        ("ELEMENT", ELEMENTS[element]),
        ("X", TYPES[dtype]),
        ("X_COPY", copy),
        ("TILES", tiles),
        *cast_constants(cast),
    )
    return nvrtc.function(device, HEADERS, row, *activations_of(tiles, cast))


def activations_of(tiles: int, cast: Cast | None) -> tuple[str, struct.Struct, int]:
    """The kernel that prepares activations, its arguments, and the threads of a block: of a row, or of eight values
    each."""
    alone = tiles > 0 and (cast is None or cast.format.scale is E8M0)
    return ("tiles", ACTIVATIONS, 256) if alone else ("activations", ACTIVATIONS, 512)


def _prepared(
    x: Tensor, format: Format, cast: Cast | None, plan: Plan, counters: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A matrix, cast, as the kernel of ``plan`` reads it, in the order in which codes of ``format`` are decoded, and
    what scales each row: bfloat16 in tiles of 128 columns, or rows of float16.

    What fills the last tile, or as many rows after the last one, nobody has written. ``counters`` become zeros.
    """
    rows, k = x.shape
    width, tiles = -(-k // 256) * 256, plan.cols if plan.together else 0
    shape = (-(-rows // tiles) * tiles, k) if tiles else (rows + plan.cols, width)
    out = x.new_empty(shape, dtype=torch.bfloat16 if tiles else torch.float16)
    scale = x.new_empty(rows, dtype=torch.float32)
    copy = copy_size(x.data_ptr(), 2 * x.stride(0))
    kernel = _activations_kernel(x.device, format.element, x.dtype, copy, cast, tiles)
    name, _, threads = activations_of(tiles, cast)
    blocks = rows if name == "activations" else -(-rows * k // (8 * threads))
    count = (0, 0) if counters is None else (counters.data_ptr(), counters.numel())
    pointers = x.data_ptr(), out.data_ptr(), scale.data_ptr(), count[0]
    kernel(blocks, 1, 4 * WHOLE_ROWS, (*pointers, k, width, x.stride(0), rows, count[1]))
    return out, scale


def launch(
    x: Tensor, data: Tensor, scale: Tensor, format: Format, cols: int, x_global: Tensor | None,
    last: Tensor | None, bias: Tensor | None, ends: Tensor | None, alpha: float, beta: float,
    out_dtype: torch.dtype, cast: Cast | None, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """The product as ``small_batch`` has it, cut up by ``plan`` where one is given."""
    device, rows, (*_, width, bytes_a_row), (*_, scale_rows, scale_cols) = x.device, x.shape[0], data.shape, scale.shape
    groups = 0 if ends is None else data.shape[0]
    out = x.new_zeros(rows, width, dtype=out_dtype) if groups else x.new_empty(rows, width, dtype=out_dtype)
    codes, scales, values, stride = data.data_ptr(), scale.data_ptr(), x.data_ptr(), x.stride()[0]
    scale_bytes = scale_cols * scale.element_size()
    lie = (codes | bytes_a_row) & 15, (scales | scale_bytes) & 15, (values | 2 * stride) & 15
    types = (x.dtype, out_dtype, out_dtype if bias is None else bias.dtype)
    with triton_host.on(device):
        plan, room, kernel, blocks = cut(device, format, types, (rows, width, cols, groups), lie, cast, plan)
        x_scale = parts = counters = None
        if plan.apart:
            parts = x.new_empty(blocks[0] * blocks[1] * plan.split * plan.rows * plan.cols, dtype=torch.float32)
            counters = x.new_empty(blocks[0] * blocks[1], dtype=torch.int32)
        if not plan.whole_x:
            x, x_scale = _prepared(x, format, cast, plan, counters)
            values, stride = x.data_ptr(), x.stride()[0]
        kernel(
            *blocks, room.bytes,
            (
                codes, scales, values, out.data_ptr(),
                0 if x_scale is None else x_scale.data_ptr(), 0 if last is None else last.data_ptr(),
                0 if x_global is None else x_global.data_ptr(),
                0 if bias is None else bias.data_ptr(), 0 if ends is None else ends.data_ptr(),
                width * bytes_a_row, scale_rows * scale_bytes, bytes_a_row, scale_bytes,
                stride, rows, width, cols, width if bias is not None and bias.dim() == 2 else 0,
                0 if parts is None else parts.data_ptr(), 0 if counters is None else counters.data_ptr(),
                room.x_width, room.round, alpha, beta,
            ),
        )  # fmt: skip
    return out


@torch.library.custom_op("mxtensor::small_batch", mutates_args=())
def small_batch(
    x: Tensor, data: Tensor, scale: Tensor, format: str, cols: int, x_global: Tensor | None, last: Tensor | None,
    bias: Tensor | None, ends: Tensor | None, alpha: float, beta: float, out_dtype: torch.dtype, cast: str,
    scaling: str,
) -> Tensor:  # fmt: skip
    """``alpha * global scales * x @ decode(data, scale)^T + beta * bias``: summed in float32, rounded once; (M, N).

    x (M, K) bfloat16 or float16, cast to the format ``cast`` first unless that is empty; data and scale of an (N, K)
    operand, ``cols`` = K. ``bias`` is (N,) or (M, N). With ``ends`` (G,) they are of a stack (G, N, K), and row
    ``ends[g - 1]`` to ``ends[g]`` of x meets matrix g; later rows give zeros.
    """
    to = Cast(get_format(cast), ScaleCalculationMode(scaling)) if cast else None
    return launch(x, data, scale, get_format(format), cols, x_global, last, bias, ends, alpha, beta, out_dtype, to)


@small_batch.register_fake
def _(x, data, scale, format, cols, x_global, last, bias, ends, alpha, beta, out_dtype, cast, scaling):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], data.shape[-2], dtype=out_dtype)


# ---------------------------------------------------------------------------------------------- the kernels


def _is_cast_here(cast: Cast, x: Tensor) -> bool:
    """Whether this file casts: to 32 values under a power of two, or few rows to nvfp4, from 16 bits."""
    f = cast.format
    if cast.rounding is not Rounding.NEAREST or x.dtype not in HALVES:
        return False
    if f.scale is E8M0:
        return f.block == (1, 32)
    return f.scale is UE4M3 and f.block == (1, 16) and math.prod(x.shape[:-1]) <= WHOLE_ROWS


def _activations(a: Factor) -> tuple[Tensor, Tensor | None, Cast | None]:
    """Values of 16 bits, their global scale, and the cast that they still have to go through."""
    if isinstance(a, Uncast):
        if _is_cast_here(a.cast, a.x):
            return a.x, None, a.cast
        return *round_trip(a.x, a.cast, torch.bfloat16), None
    if isinstance(a, Rounded):
        return a.values, a.global_scale, None
    if isinstance(a, Operand):
        return dequantize_operand(replace(a, global_scale=None), torch.bfloat16), a.global_scale, None
    return a, None, None


def _call(a: Factor, b: Factor, ends: Tensor | None, args: GemmArgs, work: Callable[..., Tensor]) -> Tensor:
    """``work`` of the arguments that ``launch`` takes."""
    assert isinstance(b, Operand)
    x, x_global, cast = _activations(a)
    shape = (*x.shape[:-1], b.shape[-2])
    if len(shape) != 2:
        x = x.reshape(-1, x.shape[-1])
    if not x.is_contiguous() and (x.stride(1) != 1 or x.stride(0) < x.shape[1]):
        x = x.contiguous()
    bias = flat_bias(args, shape)
    if bias is not None and bias.dtype not in TYPES:
        bias = bias.float()
    if ends is not None:
        ends = ends.contiguous()
    out = work(
        x, b.data.contiguous(), b.scale.contiguous(), b.format, b.shape[-1], x_global, b.global_scale, bias, ends,
        float(args.alpha), float(args.beta), args.out_dtype, cast,
    )  # fmt: skip
    return out if len(shape) == 2 else out.view(shape)


def _op(x: Tensor, data: Tensor, scale: Tensor, format: Format, *rest: Any) -> Tensor:
    """``launch`` as the op that graphs hold."""
    *others, cast = rest
    words = ("", "") if cast is None else (cast.format.name, cast.scaling.value)
    return small_batch(x, data, scale, format.name, *others, *words)  # type: ignore[no-any-return]


def run(a: Factor, b: Factor, args: GemmArgs) -> Tensor:
    return _call(a, b, None, args, launch)


def run_traced(a: Factor, b: Factor, args: GemmArgs) -> Tensor:
    return _call(a, b, None, args, _op)


def run_grouped(a: Factor, b: Factor, ends: Tensor, args: GemmArgs) -> Tensor:
    return _call(a, b, ends, args, launch)


def run_grouped_traced(a: Factor, b: Factor, ends: Tensor, args: GemmArgs) -> Tensor:
    return _call(a, b, ends, args, _op)


KERNEL = Kernel("small_batch", refuses, run, "cuda", run_traced)
GROUPED = Kernel("small_batch", refuses_grouped, run_grouped, "cuda", run_grouped_traced)
