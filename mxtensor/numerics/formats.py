"""Number formats as rows: what one element is, what one scale is, and which elements share a scale.

Source: OCP Microscaling Formats (MX) v1.0, sections 5 and 6; NVFP4 as published for Blackwell. Nothing in the
package asks a format for its name to decide what to do: every difference between two formats is a field here.

A new element, scale or block format is a row here and nowhere else; ``element_format`` has the fields of an element.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ..core import names
from ..core.arguments import Kind, check, described
from ..core.tracing import make_constant
from .choices import Orientation as Orientation
from .choices import Rounding as Rounding
from .choices import ScaleCalculationMode as ScaleCalculationMode
from .elements import ElementFormat, ScaleFormat

FULL = -1
"""A block extent that covers the whole dimension (FULL rows: every leading dimension too)."""

E4M3 = ElementFormat("e4m3", 4, 3, bias=7, max=448.0, dtype=torch.float8_e4m3fn, nan_code=0x7F)
E5M2 = ElementFormat("e5m2", 5, 2, bias=15, max=57344.0, dtype=torch.float8_e5m2, nan_code=0x7F)
E3M2 = ElementFormat("e3m2", 3, 2, bias=3, max=28.0, dtype=torch.uint8, packing=(4, 3))
E2M3 = ElementFormat("e2m3", 2, 3, bias=1, max=7.5, dtype=torch.uint8, packing=(4, 3))
E2M1 = ElementFormat("e2m1", 2, 1, bias=1, max=6.0, dtype=torch.uint8, packing=(2, 1))
INT8 = ElementFormat("int8", 0, 6, bias=0, max=127 / 64, dtype=torch.int8)

E8M0 = ScaleFormat("e8m0", torch.uint8, torch.float8_e8m0fnu, significant_bits=1)
UE4M3 = ScaleFormat("ue4m3", torch.uint8, torch.float8_e4m3fn, significant_bits=4)
FP32 = ScaleFormat("float32", torch.float32, torch.float32, significant_bits=24)
FP32_POW2 = ScaleFormat("float32_pow2", torch.float32, torch.float32, significant_bits=1)

BLOCK_SIZES = (16, 32, 64, 128)


def _ceil_div(dim: int, block: int) -> int:
    return min(dim, 1) if block == FULL else -(-dim // block)


@dataclass(frozen=True)
class Format:
    """A block-scaled format: ``block`` = (rows, cols) elements of ``element`` share one ``scale``.

    An operand is blocked along its last dimension. With rows > 1 a block is a tile that also covers rows of the
    dimension before it. With a square block (32x32, per tensor) the same bytes serve both orientations.
    """

    name: str
    element: ElementFormat
    scale: ScaleFormat
    block: tuple[int, int]
    global_scale: bool = False
    """Whether a second, float32 scale belongs to the whole matrix (NVFP4); of a stack, each matrix has its own."""
    signed_zero: bool = True
    """Whether a scaled value of -0.0 keeps its sign. False: it gets code 0, as in TransformerEngine's NVFP4 reference;
    a negative value that rounds to zero keeps its sign in both."""
    row_scaled: bool = False
    """Whether each row has a global scale of its own, from its own amax (TransformerEngine's row-scaled NVFP4)."""

    def __post_init__(self) -> None:
        if not make_constant(self, "block", "global_scale", "signed_zero", "row_scaled"):
            return
        extents = self.block if isinstance(self.block, tuple) else ()
        if len(extents) != 2 or not all(isinstance(n, int) and (n == FULL or n > 0) for n in extents):
            raise ValueError(f"{self.name}: block is {self.block!r}; pass (rows, columns), for example (1, 32)")
        values = self.element.packing[0]
        if extents[1] != FULL and extents[1] % values:
            raise ValueError(
                f"{self.name}: {extents[1]} columns are not a multiple of {values}, the number of values of "
                f"{self.element.name} that are packed together"
            )

    @property
    def square(self) -> bool:
        return self.block[0] == self.block[1]

    @property
    def rows_are_blocked(self) -> bool:
        return self.block[0] != 1

    @property
    def exact_in_bfloat16(self) -> bool:
        """Whether element times block scale fits the 8 significant bits of bfloat16 (without the global scale)."""
        element, scale = self.element.significant_bits, self.scale.significant_bits
        return (element if scale == 1 else element + scale) <= 8

    @property
    def bits_per_value(self) -> float:
        """Bits of data and scale for one value of a large tensor (the scale of a FULL extent counts as 0)."""
        rows, cols = self.block
        shared = 0.0 if FULL in (rows, cols) else self.scale.bits / (rows * cols)
        return self.element.bits + shared

    def data_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of ``data`` for values of ``shape`` (last dimension blocked)."""
        return (*shape[:-1], self.element.data_cols(shape[-1]))

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of ``scale``: ceil(dim / block) in the last two dimensions; FULL rows: 1 in the leading ones."""
        rows, cols = self.block
        scales_per_row = _ceil_div(shape[-1], cols)
        if rows == FULL:
            return (*(min(d, 1) for d in shape[:-1]), scales_per_row)
        if rows == 1 or len(shape) == 1:
            return (*shape[:-1], scales_per_row)
        return (*shape[:-2], _ceil_div(shape[-2], rows), scales_per_row)

    def global_scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the global scale for values of ``shape``: (..., rows, 1) if each row has one; else () for a
        matrix, and (..., 1, 1) for a stack, of which each matrix has one."""
        if self.row_scaled:
            return (*shape[:-1], 1)
        return () if len(shape) <= 2 else (*shape[:-2], 1, 1)

    @property
    def scales_matrices(self) -> bool:
        """Whether each matrix has a global scale."""
        return self.global_scale and not self.row_scaled

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a scale depends on values of many blocks: a global scale, or one block of the whole tensor."""
        return self.global_scale or self.block[0] == FULL

    def why_not_split(self, dim: int, *cuts: int, scales_differ: bool = False) -> str | None:
        """Why an operand cannot be split at the indices ``cuts`` of its dimension ``dim`` without rounding again.

        None if every part consists of whole blocks. ``dim``: -1 is the blocked dimension, -2 the one before it. Parts
        of one operand may share a FULL scale or a global scale. ``scales_differ``: each part is quantized on its own,
        so no scale may depend on the values of two parts. Slices, shards and ranks all ask this method.
        """
        block = self.block[dim] if dim >= -2 else 1
        if scales_differ and self.has_tensor_scale:
            return f"{self} has one scale for the whole tensor"
        if block == FULL:
            if scales_differ:
                return f"{self} has one scale for all values of this dimension"
            block = self.element.packing[0] if dim == -1 else 1
        cut = None if block == 1 else next((cut for cut in cuts if cut % block), None)
        if cut is None:
            return None
        return f"{self} has blocks of {block} values in this dimension, and {cut} is not a multiple of {block}"

    def with_block(self, block: int | tuple[int, int]) -> Format:
        """The same element and scale with another block: a size along the contraction, or a square ``(n, n)``.

        Raises ValueError for sizes other than 16, 32, 64 and 128.
        """
        check(f"{self}.with_block", "block", block, BLOCK)
        rows, cols = (1, block) if isinstance(block, int) else tuple(block)
        if self.row_scaled:
            raise ValueError(
                f"{self}: only blocks of one row can have a global scale for each row; call with_block({block!r}) on "
                f"the format {self.name.split('[')[0]}"
            )
        if cols not in BLOCK_SIZES or rows not in (1, cols):
            raise ValueError(
                f"block {block!r} is not available; choose one of {', '.join(map(str, BLOCK_SIZES))} along the "
                "contraction, or a square tile of one of these, like (32, 32)"
            )
        base = self.name.split("[")[0]
        home = FORMATS.get(base)
        if home is not None and home.block == (rows, cols):
            return home
        return replace(self, name=f"{base}[{rows}x{cols}]", block=(rows, cols))

    def with_row_scales(self) -> Format:
        """The same elements and blocks with a global scale for each row: ``"nvfp4[row_scaled]"``.

        Such a format is for activations: a stored tensor has one global scale. Raises ValueError for a format without
        a global scale or with another block.
        """
        if not self.global_scale or FORMATS.get(self.name) is not self:
            raise ValueError(f"{self} has no global scale for each row; choose nvfp4")
        return replace(self, name=f"{self.name}{_ROW_SCALED}", row_scaled=True)

    def without_global_scale(self) -> Format:
        """The format with the same elements, block scales and blocks, and no global scale."""
        same = self.element, self.scale
        found = next(f for f in FORMATS.values() if (f.element, f.scale) == same and not f.global_scale)
        return found.with_block(self.block)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def __str__(self) -> str:
        return self.name


class _Formats(Mapping[str, Format]):
    """Read-only rows by name. Lookups accept aliases; iteration lists rows only."""

    def __init__(self, rows: list[Format], aliases: dict[str, str]) -> None:
        self._rows = {row.name: row for row in rows}
        self.aliases = aliases

    def __getitem__(self, name: str) -> Format:
        return self._rows[self.aliases.get(name, name)]

    def __setitem__(self, name: str, format: Format) -> None:
        raise TypeError(
            f"FORMATS is read-only, and {name!r} is not stored; a Format needs no name there: pass it itself, as in "
            "mx.quantize(x, mx.FORMATS['mxfp8_e4m3'].with_block(64)). A row of mxtensor/numerics/formats.py adds a name"
        )

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"FORMATS is read-only, and {name!r} stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


FORMATS = _Formats(
    [
        Format("mxfp8_e4m3", E4M3, E8M0, (1, 32)),
        Format("mxfp8_e5m2", E5M2, E8M0, (1, 32)),
        Format("mxfp6_e3m2", E3M2, E8M0, (1, 32)),
        Format("mxfp6_e2m3", E2M3, E8M0, (1, 32)),
        Format("mxfp4_e2m1", E2M1, E8M0, (1, 32)),
        Format("mxint8", INT8, E8M0, (1, 32)),
        Format("nvfp4", E2M1, UE4M3, (1, 16), global_scale=True, signed_zero=False),
        Format("nvfp4_single_level", E2M1, UE4M3, (1, 16)),
        Format("float8_e4m3_tensor", E4M3, FP32, (FULL, FULL)),
        Format("float8_e4m3_row", E4M3, FP32, (1, FULL)),
        Format("float8_e4m3_1x128", E4M3, FP32, (1, 128)),
        Format("float8_e4m3_128x128", E4M3, FP32, (128, 128)),
        Format("float8_e5m2_tensor", E5M2, FP32, (FULL, FULL)),
        Format("float8_e5m2_row", E5M2, FP32, (1, FULL)),
        Format("float8_e5m2_1x128", E5M2, FP32, (1, 128)),
        Format("float8_e5m2_128x128", E5M2, FP32, (128, 128)),
        Format("float8_e4m3_tensor_pow2", E4M3, FP32_POW2, (FULL, FULL)),
        Format("float8_e4m3_row_pow2", E4M3, FP32_POW2, (1, FULL)),
        Format("float8_e4m3_1x128_pow2", E4M3, FP32_POW2, (1, 128)),
        Format("float8_e4m3_128x128_pow2", E4M3, FP32_POW2, (128, 128)),
        Format("float8_e5m2_tensor_pow2", E5M2, FP32_POW2, (FULL, FULL)),
        Format("float8_e5m2_row_pow2", E5M2, FP32_POW2, (1, FULL)),
        Format("float8_e5m2_1x128_pow2", E5M2, FP32_POW2, (1, 128)),
        Format("float8_e5m2_128x128_pow2", E5M2, FP32_POW2, (128, 128)),
    ],
    aliases={
        "mxfp8": "mxfp8_e4m3",
        "mxfp6": "mxfp6_e2m3",
        "mxfp4": "mxfp4_e2m1",
        "fp6_e3m2": "mxfp6_e3m2",
        "fp6_e2m3": "mxfp6_e2m3",
        "float8_tensor": "float8_e4m3_tensor", "float8_tensor_pow2": "float8_e4m3_tensor_pow2",
        "float8_row": "float8_e4m3_row", "float8_row_pow2": "float8_e4m3_row_pow2",
        "float8_1x128": "float8_e4m3_1x128", "float8_1x128_pow2": "float8_e4m3_1x128_pow2",
        "float8_128x128": "float8_e4m3_128x128", "float8_128x128_pow2": "float8_e4m3_128x128_pow2",
        "torch.float8_e4m3fn": "mxfp8_e4m3",
        "torch.float8_e5m2": "mxfp8_e5m2",
        "torch.float4_e2m1fn_x2": "mxfp4_e2m1",
        "torch.int8": "mxint8",
    },
)  # fmt: skip
"""Every format by name. ``FORMATS.aliases`` maps other names (``mxfp8``, torch dtypes) to rows."""

DTYPE_FP6_E2M3 = "fp6_e2m3"
"""torchao's name for the element of mxfp6_e2m3; torch has no dtype for it."""
DTYPE_FP6_E3M2 = "fp6_e3m2"
"""torchao's name for the element of mxfp6_e3m2."""

BLOCK = Kind(
    "a block size, 16, 32, 64 or 128, or a square tile of one of these, like (32, 32)",
    lambda block: all(type(n) is int for n in (block if isinstance(block, (tuple, list)) else (block,))),
    lambda block: isinstance(block, int) or len(block) == 2,
)


def get_mx_format(name: Format | str | torch.dtype, block_size: int) -> Format:
    """``get_format`` with ``block_size``. It applies to MX formats only: NVFP4 and float8 have blocks of their own."""
    format = get_format(name)
    return format.with_block(block_size) if format.scale is E8M0 else format


_ROW_SCALED = "[row_scaled]"
_BLOCK_SUFFIX = re.compile(r"(.+)\[(\d+)x(\d+)\]")


def _with_block(format: Format, match: re.Match[str]) -> Format:
    rows, cols = int(match[2]), int(match[3])
    return format.with_block(cols if rows == 1 else (rows, cols))


def get_format(name: Format | str | torch.dtype) -> Format:
    """The format called ``name``: a row or alias of FORMATS, ``"mxfp8[32x32]"`` with a block, or a torch dtype.

    Case, hyphens, underscores and spaces do not matter: ``"MX-FP8"`` is ``"mxfp8"``. Raises ValueError for an unknown
    name and for one that could be several, like ``"fp8"``, with similar names first and then the known formats.
    """
    if isinstance(name, Format):
        return name
    text = str(name) if isinstance(name, (str, torch.dtype)) else ""
    if text in FORMATS:
        return FORMATS[text]
    match = _BLOCK_SUFFIX.fullmatch(text.strip().lower())
    if match and match[1] in FORMATS:
        return _with_block(FORMATS[match[1]], match)
    if text.endswith(_ROW_SCALED):
        return get_format(text.removesuffix(_ROW_SCALED)).with_row_scales()
    # Dynamo of torch 2.11 traces what is above, and not what follows: another spelling, and an unknown name.
    known = [*FORMATS, *(a for a in FORMATS.aliases if "." not in a)]
    row = names.find(match[1] if match else text, known)
    if row is not None:
        return _with_block(FORMATS[row], match) if match else FORMATS[row]
    weight, activation = names.operands_of(text)
    base = None if activation == text else names.find(weight, known)
    if base is not None:
        raise ValueError(f"{name!r} names a recipe of quantize_, not a format; did you mean {base!r}?")
    instead = names.OF_PEERS.get(names.key(text)) or names.OF_PEERS.get(names.key(weight))
    if instead is not None:
        raise ValueError(f"unknown format {described(name)}; {instead}")
    choices = names.choices("formats", match[1] if match else text, known)
    raise ValueError(f"unknown format {described(name)}; {choices}")
