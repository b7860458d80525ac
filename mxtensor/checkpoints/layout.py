"""Layout: one way in which checkpoints store quantized tensors, as a row: name, detect, read, write.

A layout maps names of the model to entries, which say from which stored tensors one is made. Reading and converting go
through entries one by one, so that a model larger than the memory can be converted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, Format, Orientation
from ..numerics.validate import check_components
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .known import Known
from .matrices import matrix_orientation
from .source import Checkpoint, Entry, named_dtype, plain

NAMED = 5
"""Tensors that a message names."""
LARGEST_WEIGHT = 65504.0
"""The largest float16. A decoded amax above it comes from a global scale that was read the wrong way round."""
MERGES = (("MergeModulelist",), ("MergeModulelist", "Concatenate"))
"""How transformers stacks experts that a checkpoint stores one by one."""
SPLITS = (("Chunk",), ("Split",))
"""How it splits a fused projection by rows."""
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a matrix of one expert."""
Unchanged = Callable[[Checkpoint, str], tuple[dict[str, Tensor], dict[str, str]]]
"""(checkpoint, name of a tensor) -> its stored tensors, its entries of the header."""


@dataclass
class Written:
    """What a layout has written so far, for its configuration."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.json`` of the model, if there is one."""
    known: Known = field(default_factory=lambda: Known(None))
    """The model, as far as it is known."""
    weights: dict[str, LinearRecipe] = field(default_factory=dict)
    """Name of a quantized tensor -> its recipe."""
    others: list[str] = field(default_factory=list)
    """Names of matrices that stay in high precision."""
    values: Counter[torch.dtype] = field(default_factory=Counter)
    """Outer dtype of quantized tensors -> how many values they have."""
    stacks: list[str] = field(default_factory=list)
    """Names of stacked experts that stay in high precision."""

    def note_plain(self, name: str, value: Tensor) -> None:
        """Note a tensor that is stored in high precision, if it is a matrix or a stack of matrices."""
        if not value.is_floating_point():
            return
        if value.dim() == 2 and name.endswith(".weight"):
            self.others.append(name)
        elif value.dim() == 3 and self.orientation(name, value.shape) is not None:
            self.stacks.append(name)

    def orientation(self, name: str, shape: Sequence[int]) -> Orientation | None:
        """Which dimension of a tensor products contract; None: no product has it. The model decides if it is known."""
        return self.known.orientation(name) or matrix_orientation(name, shape, self.config)

    def is_expert(self, name: str) -> bool:
        """Whether a matrix is one expert of many, which the model stacks."""
        loaded = self.known.loaded(name)
        return "MergeModulelist" in loaded.operations or (not loaded.parameters and EXPERT.search(name) is not None)

    def modules(self, names: Iterable[str]) -> list[str]:
        """The modules of tensors: their names in the files, and those in transformers, which its reader compares."""
        names = list(names)
        every = [name.removesuffix(".weight") for name in names]
        return list(dict.fromkeys([*every, *(module for name in names for module in self.known.modules(name))]))

    @property
    def skipped_stacks(self) -> list[str]:
        """The modules of ``stacks``."""
        modules = [name.rpartition(".")[0] for name in self.stacks]
        return list(dict.fromkeys([*modules, *(m for name in self.stacks for m in self.known.modules(name))]))

    @property
    def dtype(self) -> str:
        """The outer dtype of most quantized values, by its name."""
        return str(self.values.most_common(1)[0][0]).removeprefix("torch.")

    @property
    def skipped(self) -> list[str]:
        """The modules of ``others`` and ``stacks``, without those that have a quantized weight too."""
        quantized = set(self.modules(self.weights))
        every = dict.fromkeys([*self.modules(self.others), *self.skipped_stacks])
        return [module for module in every if module not in quantized]


@dataclass(frozen=True)
class Layout:
    """A row of the registry."""

    name: str
    producers: str
    """Who writes it, for the table of the documentation."""
    detect: Callable[[Checkpoint], bool]
    """Whether an opened checkpoint has this layout."""
    read: Callable[[Checkpoint], dict[str, Entry]]
    """Name of a tensor of the model -> how it is made of stored tensors. Values are not loaded."""
    write: Callable[[str, MXTensor], dict[str, Tensor]] | None = None
    """(name, tensor) -> stored tensors; None: this layout is only read. Raises NotImplementedError for a format that
    the layout cannot hold."""
    unchanged: Unchanged | None = None
    """(a checkpoint of this layout, name) -> the stored tensors and the entries of the header of a tensor that
    ``convert`` leaves as it is; None: what ``write`` and ``metadata`` make of its values."""
    config: Callable[[Written], dict[str, Any]] | None = None
    """JSON files to write: file name -> what is merged into it."""
    metadata: Callable[[str, Tensor], dict[str, str]] | None = None
    """Entries of the header for a tensor, quantized or not."""
    header: Callable[[Mapping[str, str]], dict[str, str]] | None = None
    """The header of a shard, of the entries of all tensors up to its end; None: the entries of its own tensors."""
    static_scales: bool = True
    """Whether scales of static activations are stored, as tensors of their own name."""
    sink: Callable[..., Any] | None = None
    """What writes the file, as ``Sink`` does; None: safetensors."""
    dims: tuple[int, ...] = (2,)
    """Dimensions of the tensors that ``convert`` quantizes: 2 for matrices, 3 for stacked experts."""
    whole: Callable[[Format], tuple[int, int]] = lambda format: (1, 1)
    """Format -> the rows and the columns of which a matrix must have multiples."""
    embeddings: bool = False
    """Whether readers decode embeddings: the table of one that is shared with a quantized head."""
    operations: tuple[tuple[str, ...], ...] | None = None
    """The operations of transformers that its reader does on codes, or on what it has decoded, each as ``Loaded`` has
    them; None: transformers does not read the layout."""
    stacks_scales: bool = True
    """Whether its reader in transformers applies the global scales of the matrices that it stacks."""
    row_operations: tuple[tuple[str, ...], ...] = ()
    """Those that it does on codes and on scales, one by one: right for scales that belong to rows."""
    shared: bool = True
    """Whether readers take a quantized weight that two layers share, and that is stored by one name."""
    columnwise: bool = False
    """Whether it holds matrices (in, out), with blocks along their first dimension."""
    parameter_names: bool = False
    """Whether the reader of transformers looks for entries of the header by the names of its parameters."""
    any_name: bool = False
    """Whether it holds matrices of any name (``in_proj_weight``); the others hold those called ``weight``."""
    empty: bool = False
    """Whether it holds codes of tensors without values; the others hold these in high precision."""
    one_file: bool = False
    """Whether a file says all without a configuration beside it."""
    formats: str = ""
    """The formats it holds, for the table."""
    exact: str = "bit for bit"
    """What is exact, for the table."""

    @property
    def experts(self) -> bool:
        """Whether readers take matrices of experts that are stored one by one, although their models stack them."""
        return self.operations is None or self.stacks

    @property
    def stacks(self) -> bool:
        """Whether readers stack the codes of such matrices, which then need equal global scales."""
        return self.operations is not None and set(MERGES) <= set(self.operations)

    def takes(self, operations: tuple[str, ...], format: Format) -> bool:
        """Whether readers take a tensor in ``format`` that transformers changes by ``operations`` while it loads it."""
        rows = format.block[0] == 1 and not format.global_scale
        every = self.operations if not rows or self.operations is None else (*self.operations, *self.row_operations)
        return not operations or every is None or operations in every

    def entries(self, checkpoint: Checkpoint) -> dict[str, Entry]:
        """``read``. Raises ValueError or NotImplementedError that names the file or folder."""
        try:
            return self.read(checkpoint)
        except (ValueError, NotImplementedError) as error:
            if str(checkpoint.path) in str(error):
                raise
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            raise kind(f"{checkpoint.path}: {error}") from error

    def files(self, written: Written, config: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON files to write beside ``config``, the ``config.json`` of the model: with its dtype, which most
        layouts store with no tensor."""
        files = {} if self.config is None else self.config(written)
        if "config.json" in files and written.values and named_dtype(config) is None:
            files["config.json"]["dtype"] = written.dtype
        return files


def weight(
    data: Tensor,
    scale: Tensor,
    format: Format | str,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
    activation: Cast | str | None = None,
    shape: tuple[int, ...] | None = None,
    columnwise: bool = False,
) -> MXTensor:
    """An MXTensor of stored codes and scales, which are checked. ``columnwise``: they belong to the transpose.

    Raises TypeError or ValueError for tensors that do not fit the format or each other.
    """
    row = FORMATS[format] if isinstance(format, str) else format
    if global_scale is not None:
        global_scale = global_scale.reshape(()) if global_scale.numel() == 1 else global_scale
    operand = check_components(data, scale, row, shape, global_scale)
    if operand.global_scale is not None:
        check_global_scale(operand.scale_view, operand.global_scale, row)
    recipe = LinearRecipe.inference(Cast(row), activation)
    return MXTensor(None, operand, recipe, dtype) if columnwise else MXTensor(operand, None, recipe, dtype)


def check_global_scale(scale: Tensor, global_scale: Tensor, format: Format) -> None:
    """Raise ValueError for a global scale that is not positive, or that makes the largest value no weight."""
    value = float(global_scale)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{format}: the global scale decodes to {value}, and must be positive and finite")
    largest = float(scale.to(torch.float32).nan_to_num().max()) if scale.numel() else 0.0
    amax = largest * value * format.element.max
    if amax > LARGEST_WEIGHT:
        raise ValueError(
            f"{format}: with the global scale {value:.6g} the values reach {amax:.6g}, beyond {LARGEST_WEIGHT:.0f}: "
            "the scale is probably inverted (some layouts divide by it, others multiply)"
        )


def joined(module: str, leaf: str) -> str:
    """The name of a tensor of a module; ``module`` is empty for the model itself."""
    return f"{module}.{leaf}" if module else leaf


def companions(
    checkpoint: Checkpoint, data: str, required: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, stored names) of every tensor called ``MODULE.data`` that has companions; those required come first.

    Raises ValueError if only some of the required companions exist.
    """
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        if leaf != data:
            continue
        names = [joined(module, other) for other in required]
        found = [other in checkpoint.tensors for other in names]
        if not all(found):
            if any(found):
                lacks = ", ".join(other for other, there in zip(names, found, strict=True) if not there)
                raise ValueError(f"{checkpoint.place(name)}: the checkpoint lacks {lacks}")
            continue
        more = [joined(module, other) for other in optional]
        yield module, (name, *names, *(other for other in more if other in checkpoint.tensors))


def with_others(checkpoint: Checkpoint, entries: dict[str, Entry], scales: Iterable[str] = ()) -> dict[str, Entry]:
    """``entries`` in the order of the file, and all other tensors as they are.

    Raises ValueError for a left-over tensor whose name ends in one of ``scales``: its weight is missing.
    """
    used = {source for entry in entries.values() for source in entry.sources}
    endings = tuple(scales)
    for name in checkpoint.tensors:
        if name not in used:
            if endings and name.endswith(endings):
                raise ValueError(f"{checkpoint.place(name)}: the checkpoint lacks the weight of this scale")
            entries[name] = plain(name)
    return entries


def columns_of_blocks(format: Format) -> tuple[int, int]:
    """``Layout.whole`` of layouts without parts of blocks."""
    return 1, max(format.block[-1], 1)


def check_shapes(
    function: str, layout: Layout, tensors: Mapping[str, tuple[Sequence[int], Format]], way_out: str
) -> None:
    """Raise NotImplementedError that names the tensors, each with its shape and its format, that do not have the whole
    blocks that the layout needs. ``way_out``: what to do, with the last parts of their modules in the place of ``{}``.
    """
    unfit: dict[tuple[int, int], dict[str, Sequence[int]]] = {}
    for name, (shape, format) in tensors.items():
        rows, columns = layout.whole(format)
        if len(shape) > 1 and (shape[-2] % rows or shape[-1] % columns):
            unfit.setdefault((rows, columns), {})[name] = tuple(shape)
    for (rows, columns), shapes in unfit.items():
        ends = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in shapes)
        block = f"{rows}x{columns}" if rows > 1 else columns
        raise NotImplementedError(
            f"{function}: the layout {layout.name} holds whole blocks of {block} values, unlike "
            f"{_listed([f'{name} {shape}' for name, shape in shapes.items()])}; "
            f"{way_out.format(_listed(list(ends)))}, or use the layout native"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def rowwise(
    name: str, t: MXTensor, layout: str, formats: Mapping[str, Any], whole_blocks: bool = True, stacks: bool = False
) -> Any:
    """The operand of a matrix, and the row of ``formats`` for its format. ``stacks``: or of matrices in a stack.

    Raises NotImplementedError for a tensor that the layout cannot hold.
    """
    operand, block = t.rowwise, t.format.block[-1]
    if t.format.name not in formats:
        raise NotImplementedError(
            f"{name} is {t.format.name}, and the layout {layout} holds {', '.join(formats)}: pass format=, which "
            "quantizes again"
        )
    if operand is None or t.dim() not in ((2, 3) if stacks else (2,)) or name.rpartition(".")[2] != "weight":
        raise NotImplementedError(
            f"{name} has the orientation {t.orientation.label} and the shape {tuple(t.shape)}, and the layout {layout} "
            "holds rowwise matrices called weight; skip it, or use the layout native"
        )
    if whole_blocks and block > 0 and t.shape[-1] % block:
        raise NotImplementedError(
            f"{name} has {t.shape[-1]} columns, and the layout {layout} holds whole blocks of {block} values"
        )
    return operand, formats[t.format.name]
