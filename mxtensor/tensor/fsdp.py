"""FSDP2 gathers operands: which operands a shard stores, what is gathered, and how it becomes operands again.

A shard holds whole rows of the weight. Blocks along a row never cross shards; tiles and columnwise blocks do not if
shards end on a block. Then the gathered codes and scales are those of the whole weight, to the bit: 8.25 bits per value
for MXFP8 with blocks of 1x32 and 8.01 with tiles of 32x32, where bfloat16 has 16.

Two kinds of parameters use this file. An ``MXTensor`` stores operands in its shard and gathers them
(``GatheredByFSDP2``). A ``TrainingWeight`` stores high-precision values and casts its rows before each gather:
``training/gathered_weight.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.compat import no_torch_function
from ..core.explain import record
from ..core.kernel import Spec
from ..core.shapes import contiguous_stride, swapped
from ..numerics.formats import FULL, Format
from ..numerics.operand import Operand
from ..recipe.linear_recipe import LinearRecipe

Copies = tuple[Operand | None, Operand | None]
"""The rowwise and the columnwise operand of one tensor; None for a copy that is not stored."""


class Shard(NamedTuple):
    """The position of a rank's rows in the whole weight."""

    whole: tuple[int, ...]
    """The shape of the whole weight."""
    padded: tuple[int, ...]
    """The shape of the largest shard; every rank gathers this shape."""


def shard_of(known: Shard | None, whole: tuple[int, ...], padded: tuple[int, ...]) -> Shard:
    """The Shard of a buffer of shape ``padded`` that ``new_zeros`` makes from a tensor of shape ``whole``.

    FSDP2 also makes such a buffer from a shard; then the Shard stays the same (``known``).
    """
    return known if known is not None and known.padded == padded else Shard(whole, padded)


def pad_rows(t: Tensor, rows: int) -> Tensor:
    """``t`` with rows of zeros after it, ``rows`` in all; contiguous."""
    missing = rows - t.shape[0]
    return (F.pad(t, (0, 0) * (t.dim() - 1) + (0, missing)) if missing else t).contiguous()


@cache
def _signature_without(function: Callable[..., Any], given: int) -> Signature:
    """The named parameters of ``function`` without the first ``given``."""
    named = [p for p in signature(function).parameters.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    return Signature(named[given:])


def hook(function: Callable[..., Any], *given: Any) -> Callable[..., Any]:
    """``function`` with its first arguments bound. One that counts as a hook of ``mesh`` also takes FSDP2's other four.

    FSDP2 counts the parameters at each gather. Without the stored signature that takes as long as a cast.
    """
    call = partial(function, *given)
    call.__signature__ = _signature_without(function, len(given))  # type: ignore[attr-defined]
    return call


# ---------------------------------------------------------------------------------------------- operands


@dataclass(frozen=True)
class Gathered:
    """What the gathered tensors are. FSDP2 passes it from the hook before the gather to the one after it."""

    whole: tuple[int, ...]
    """The shape of the whole weight."""
    rowwise: Format | None = None
    columnwise: Format | None = None
    """The formats of the gathered operands; without any, the tensor is high-precision values."""
    rest: tuple[Tensor, ...] = ()
    """If each rank stores the whole weight, all tensors but the first: torch passes on only that one."""

    @property
    def quantized(self) -> bool:
        return (self.rowwise or self.columnwise) is not None


def _rows_first(operand: Operand, columnwise: bool) -> tuple[Tensor, ...]:
    """Codes (as bytes) and scales with the rows of the outer tensor first (columnwise operands are transposed)."""

    def rows_first(t: Tensor) -> Tensor:
        t = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        return t.t() if columnwise else t

    return operand.map(rows_first).tensors


def _row_counts(format: Format, columnwise: bool, size: tuple[int, ...]) -> tuple[int, int]:
    """The number of rows that ``_rows_first`` gives codes and scales of an outer tensor of shape ``size``."""
    dim, shape = (-1, swapped(size)) if columnwise else (0, size)
    return format.data_shape(shape)[dim], format.scale_shape(shape)[dim]


def ranks_of(mesh: Any) -> int:
    """The ranks that gather, 1 without a mesh."""
    return 1 if mesh is None else mesh.size()


def gather_inputs(operands: Copies, shard: Shard) -> tuple[tuple[Tensor, ...], Gathered]:
    """The tensors of a shard to gather: codes and scales of each operand, rows first, padded to the largest shard."""
    inputs: list[Tensor] = []
    for operand, columnwise in zip(operands, (False, True), strict=True):
        if operand is not None:
            counts = _row_counts(operand.format, columnwise, shard.padded)
            inputs += map(pad_rows, _rows_first(operand, columnwise), counts)
    row_format, column_format = (None if operand is None else operand.format for operand in operands)
    rest = tuple(inputs[1:]) if shard.padded == shard.whole else ()  # a mesh of replicas has many ranks, and no gather
    return tuple(inputs), Gathered(shard.whole, row_format, column_format, rest)


def gathered_operands(outputs: tuple[Tensor, ...], gathered: Gathered) -> Copies:
    """The operands of the whole weight, as views of the gathered tensors."""
    tensors = iter((*outputs, *gathered.rest))
    rowwise = _whole_operand(tensors, gathered.rowwise, False, gathered.whole)
    return rowwise, _whole_operand(tensors, gathered.columnwise, True, gathered.whole)


def _whole_operand(
    tensors: Iterator[Tensor], format: Format | None, columnwise: bool, size: tuple[int, ...]
) -> Operand | None:
    if format is None:
        return None
    data, scale = (next(tensors)[:count] for count in _row_counts(format, columnwise, size))
    if columnwise:
        data, scale, size = data.t(), scale.t(), swapped(size)
    return Operand.from_tensors((data.view(format.element.dtype), scale), format, size)


def local_part(out: Any) -> Any:
    """The tensor that ``fsdp_post_all_gather`` has made, of the parameter that FSDP2 has made of it: with tensor
    parallelism, a DTensor has it inside."""
    return out._local_tensor if hasattr(out, "_local_tensor") else out


def refilled(operands: Copies, outputs: tuple[Tensor, ...], gathered: Gathered) -> Copies:
    """The operands of a gathered weight after FSDP2 has filled ``outputs``, the memory under them, again.

    They are new tensors over the same memory: kernels cache results by scale tensor and version, and FSDP2's write does
    not raise the version. On a single rank the tensors that FSDP2 does not fill are copied here, through ``data``,
    because autograd may have saved them for backward.
    """
    if gathered.rest:
        fresh = gathered_operands(outputs, gathered)
        pairs = [
            (mine, theirs)
            for old, new in zip(operands, fresh, strict=True)
            if old is not None and new is not None
            for mine, theirs in zip(old.tensors, new.tensors, strict=True)
        ]
        for mine, theirs in pairs[1:]:  # FSDP2 has filled the first
            mine.data.copy_(theirs)
    rowwise, columnwise = (None if operand is None else operand.map(Tensor.detach) for operand in operands)
    return rowwise, columnwise


# ---------------------------------------------------------------------------------------------- MXTensor


class GatheredByFSDP2(Tensor):
    """The part of MXTensor that FSDP2 calls: shards of whole rows store codes and scales, and gathers move them.

    FSDP2 shards a parameter by ``split``, ``new_zeros`` in the padded shape and ``copy_``. Its ``new_zeros`` is
    ``zeros_of_rows``, an MXTensor with a Shard, and each of its views and copies has the Shard too.
    """

    _rowwise: Operand | None
    _columnwise: Operand | None
    recipe: LinearRecipe
    replace: Callable[..., Any]
    _shard: Shard | None = None
    """Set on the shards that FSDP2 makes; None for any other tensor."""

    def _why_not_sharded(self, rows: int) -> str | None:
        """Why shards of ``rows`` rows cannot store the operands of this tensor; None if they can."""
        if self.dim() != 2:
            return f"it has {self.dim()} dimensions, and FSDP2 shards quantized matrices"
        cuts = () if rows == self.shape[0] else (rows,)
        for operand, dim in ((self._rowwise, -2), (self._columnwise, -1)):
            reason = None if operand is None else operand.format.why_not_split(dim, *cuts, scales_differ=True)
            if reason is not None:
                return f"{'columnwise' if dim == -1 else 'rowwise'} {reason}"
            if operand is not None and FULL in operand.format.block and rows and self.shape[0] % rows:
                return f"{self.shape[0]} rows of {operand.format} do not divide into shards of {rows}"
        return None

    def zeros_of_rows(self, rows: int) -> Any:
        """Zeros (rows, columns) in the format of this tensor (any rows, columns): the buffer for a shard of it.

        Raises NotImplementedError, on every rank alike, if shards of that many rows would cut blocks.
        """
        reason = self._why_not_sharded(rows)
        if reason is not None:
            raise NotImplementedError(
                f"an MXTensor of shape {tuple(self.shape)} cannot be sharded into {rows} rows: {reason}; shard it in "
                "high precision and quantize_ it for training, or store it rowwise in 1xN blocks"
            )
        size = (rows, self.shape[1])
        rowwise = None if self._rowwise is None else self._rowwise.new_zeros(size)
        columnwise = None if self._columnwise is None else self._columnwise.new_zeros(swapped(size))
        out = self.replace(rowwise, columnwise, size, contiguous_stride(size))
        out._shard = shard_of(self._shard, tuple(self.shape), size)
        return out

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """FSDP2 calls it for the tensors to gather. With one parameter, shards of any length are allowed."""
        if self._shard is None:
            return hook(_refuse_without_shard, self)
        return hook(_stored_inputs, self)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], gathered: Gathered, dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Any, tuple[Tensor, ...]] | None:
        """The whole tensor over the gathered ones, and those that FSDP2 frees and fills between uses."""
        if out is not None:
            out = local_part(out)
            out._rowwise, out._columnwise = refilled((out._rowwise, out._columnwise), outputs, gathered)
            return None
        whole = gathered.whole
        operands, made = gathered_operands(outputs, gathered), type(self)
        return made(*operands, self.recipe, dtype, whole, checked=True), outputs  # type: ignore[call-overload]


def _stored_inputs(w: Any, mesh: Any, *ignored: Any, **others: Any) -> tuple[tuple[Tensor, ...], Gathered]:
    record(Spec("all-gather", (w._shard.whole,), (w.format,), w.dtype, w.device), "codes", {})
    return gather_inputs((w._rowwise, w._columnwise), w._shard)


def _refuse_without_shard(w: Tensor, mesh: Any, *ignored: Any, **others: Any) -> Any:
    raise RuntimeError(
        f"FSDP2 gathers a shard of shape {tuple(w.shape)} that does not know its place in the whole MXTensor; load "
        "state dicts without assign=True"
    )


class FlatValues(Tensor):
    """The values of a shard in one dimension, where blocks that end with each row are not possible.

    FSDP2 stores what ``view(-1)`` of a shard returns, and asks for its storage if it is a plain tensor.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]


def flat_values(w: Tensor) -> Tensor:
    """``w.view(-1)``, dequantized."""
    return w.dequantize().reshape(-1).as_subclass(FlatValues)
