"""Layout: one way in which checkpoints store quantized tensors, as a row: name, detect, read, write.

A layout maps names of the model to entries, which say from which stored tensors one is made. Reading and converting go
through entries one by one, so that a model larger than the memory can be converted. Below the row is what the files of
layouts share: how a stored weight becomes an MXTensor, and which tensors a layout can hold.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import described
from ..core.names import dtype_name
from ..numerics.cast import Cast
from ..numerics.formats import FORMATS, Format
from ..numerics.operand import Operand
from ..numerics.validate import check_components
from ..recipe.linear_recipe import LinearRecipe
from ..tensor.mxtensor import MXTensor
from .global_scale import STORED, Combine, decoded, multiplies, stored_for
from .names import Known
from .reading import Checkpoint, Entry
from .writing import Header, Sink

NAMED = 5
"""Tensors that a message names."""
LARGEST_WEIGHT = 65504.0
"""The largest float16. A decoded amax above it comes from a global scale that was read the wrong way round."""
MERGES = (("MergeModulelist",), ("MergeModulelist", "Concatenate"))
"""How transformers stacks experts that a checkpoint stores one by one."""
SPLITS = (("Chunk",), ("Split",))
"""How it splits a fused projection by rows."""
STATIC = (
    "input_scale", "input_global_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale",
    "prob_scale",
)  # fmt: skip
"""Scales of static activations, which another layout names and defines in another way."""
SCALE = re.compile(r"(^|[_.])(scales?|scb|absmax|qzeros|zero_points?|zeros)([_.]|$)", re.IGNORECASE)
"""In the name of a scale or of a zero point, of any library: ``weight_scale_inv``, ``SCB``, ``weight.absmax``."""
FLOATS = re.compile(r"F(4|6|8)|float(4|6|8)", re.IGNORECASE)
"""The beginning of the dtype of codes that are numbers by themselves, as safetensors or torch names it."""
BYTES = frozenset(("U8", "I8", "I32", "U32", "uint8", "int8", "int32", "uint32"))
"""dtypes of codes that other tensors have, too."""
PACKED = ("weight", "qweight", "weight_packed", "weight_quant")
"""Names of tensors whose bytes are codes if a scale is stored beside them."""
ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""dtype of codes in float8 -> its name in those of formats."""
E8M0 = (torch.uint8, torch.float8_e8m0fnu)
Activation = Callable[[LinearRecipe, Collection[LinearRecipe]], str | None]
"""(recipe of a weight, those of all weights of a checkpoint) -> the format to which readers cast its activations."""
Described = Mapping[str, tuple[str, Sequence[int]]]
"""Name of a stored tensor -> its dtype and its shape."""
Unchanged = Callable[[Checkpoint, str], tuple[dict[str, Tensor], dict[str, str]]]
"""(checkpoint, name of a tensor) -> its stored tensors, its entries of the header."""


def format_of_inputs(recipe: LinearRecipe) -> str | None:
    """The format to which a recipe casts activations; None leaves them as they are."""
    return None if recipe.activation is None else recipe.activation.format.name


@dataclass
class Written:
    """What a layout has written so far, for its configuration."""

    known: Known = field(default_factory=lambda: Known(None))
    """The model, as far as it is known."""
    weights: dict[str, LinearRecipe] = field(default_factory=dict)
    """Name of a quantized tensor -> its recipe."""
    others: list[str] = field(default_factory=list)
    """Names of matrices that stay in high precision."""
    stacks: list[str] = field(default_factory=list)
    """Names of stacked experts that stay in high precision."""
    values: Counter[torch.dtype] = field(default_factory=Counter)
    """Outer dtype of quantized tensors -> how many values they have."""
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Name of a quantized tensor -> its outer dtype."""
    static: set[str] = field(default_factory=set)
    """Modules whose inputs have a static scale, which is stored beside the weight."""
    stepped: list[str] = field(default_factory=list)
    """Names of quantized tensors whose global scale is read back as another float32: ``global_scale.steps``."""

    def modules(self, names: Iterable[str]) -> list[str]:
        """The modules of tensors: their names in the files, and those in transformers, which its reader compares."""
        every = [(name, *self.known.loaded(name).parameters) for name in names]
        in_order = [name for name, *_ in every] + [parameter for _, *parameters in every for parameter in parameters]
        return list(dict.fromkeys(name.rpartition(".")[0] for name in in_order))

    @property
    def skipped(self) -> list[str]:
        """The modules of ``others`` and ``stacks``, without those that have a quantized weight too."""
        quantized = set(self.modules(self.weights))
        every = dict.fromkeys([*self.modules(self.others), *self.modules(self.stacks)])
        return [module for module in every if module not in quantized]

    def other_casts(self, activation: Activation) -> tuple[list[str], dict[str, str]]:
        """Weights whose cast of activations readers of a layout do not make, and those whose activations they cast
        to another format than the recipe does: name -> that format. ``activation``: that of the layout."""
        unquantized, cast = [], {}
        for name, recipe in self.weights.items():
            own, theirs = format_of_inputs(recipe), activation(recipe, self.weights.values())
            static = own is not None and name.rpartition(".")[0] in self.static
            if theirs is None:
                unquantized += [] if own is None else [name]
            elif theirs != own and not (static and f"{theirs}_single_level" == own):  # that scale is the first level
                cast[name] = theirs
        return unquantized, cast


@dataclass(frozen=True)
class Layout:
    """A row of the registry."""

    name: str
    producers: str
    """Who writes it, for the table of the documentation."""
    detect: Callable[[Checkpoint], bool]
    """Whether an opened checkpoint has this layout."""
    read: Callable[[Checkpoint], dict[str, Entry]]
    """Name of a quantized tensor of the model -> how it is made of stored tensors. Values are not loaded."""
    scales: tuple[str, ...]
    """The names of scales that it reads, or their ends; others beside codes are refused. ``()``: its metadata says
    what belongs together, and float8 without a scale is an ordinary tensor."""
    write: Callable[[str, MXTensor], dict[str, Tensor]] | None = None
    """(name, tensor) -> stored tensors; None: this layout is only read. Raises NotImplementedError for a format that
    the layout cannot hold."""
    unchanged: Unchanged | None = None
    """(a checkpoint of this layout, name) -> the stored tensors and the entries of the header of a tensor that
    ``convert`` leaves as it is; None: what ``write`` and ``metadata`` make of its values."""
    config: Callable[[Written], dict[str, Any]] | None = None
    """JSON files to write for quantized tensors: file name -> what is merged into it."""
    metadata: Callable[[str, Tensor], dict[str, str]] | None = None
    """Entries of the header for a tensor, quantized or not."""
    header: Header | None = None
    """The header of a shard, of the entries of all tensors up to its end; None: the entries of its own tensors."""
    activation: Activation = lambda recipe, every: None
    """(recipe of a weight, those of all weights of a checkpoint) -> the format to which its readers cast activations;
    None: they multiply with activations in high precision."""
    combine: Combine | None = None
    """How its readers combine the global scale that they find with the scale of a block; None: as this package."""
    decodes: bool = False
    """Whether it stores the values of quantized tensors, rounded to their dtype, and no codes."""
    own_dtypes: bool = False
    """Whether it stores the outer dtype of each tensor; otherwise ``config.json`` has one for all."""
    orphans: tuple[str, ...] | None = None
    """Ends of the names of tensors that are never by themselves: the codes of one that is left are missing. None: those
    of ``scales``."""
    static_scales: bool = True
    """Whether scales of static activations are stored, as tensors of their own name."""
    input_scales: bool = False
    """Whether ``M.input_scale`` beside ``M.weight`` is there what it is in a model with static scales."""
    sink: Callable[..., Any] = Sink
    """What writes the files: a context manager with ``add`` and ``finish``."""
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
        """Whether readers stack the codes of such matrices; those that they join to one matrix of the stack then need
        equal global scales."""
        return self.operations is not None and set(MERGES) <= set(self.operations)

    def takes(self, operations: tuple[str, ...], format: Format) -> bool:
        """Whether readers take a tensor in ``format`` that transformers changes by ``operations`` while it loads it."""
        rows = format.block[0] == 1 and not format.global_scale
        every = self.operations if not rows or self.operations is None else (*self.operations, *self.row_operations)
        return not operations or every is None or operations in every

    def entries(self, checkpoint: Checkpoint) -> dict[str, Entry]:
        """``read``, and all other tensors as they are. Raises ValueError or NotImplementedError that names the file or
        folder, also for codes whose scales the layout does not read, and for scales whose codes are missing."""
        try:
            found = self.read(checkpoint)
            taken = {source for entry in found.values() for source in entry.sources}
            for name in checkpoint.tensors:
                if name not in taken:
                    if name.endswith(self.scales if self.orphans is None else self.orphans):
                        raise ValueError(f"{checkpoint.place(name)}: the checkpoint lacks the weight of this scale")
                    found[name] = Entry((name,))
            used = {s for entry in found.values() if len(entry.sources) > 1 for s in entry.sources}
            described = {name: (stored.dtype, stored.shape) for name, stored in checkpoint.tensors.items()}
            check_scales(self.name, described, used, self.scales, checkpoint.place)
            return found
        except (ValueError, NotImplementedError) as error:
            if str(checkpoint.path) in str(error):
                raise
            kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
            raise kind(f"{checkpoint.path}: {error}") from error


# ---------------------------------------------------------------------------------------------- reading


def weight(
    data: Tensor,
    scale: Tensor,
    format: Format | str,
    dtype: torch.dtype,
    activation: Cast | str | None = None,
    shape: tuple[int, ...] | None = None,
    columnwise: bool = False,
    whole: Tensor | None = None,
    combine: Combine = multiplies,
) -> MXTensor:
    """An MXTensor of stored codes and scales, which are checked. ``columnwise``: they belong to the transpose.
    ``whole``: the stored global scale, which other readers put to the scale of a block by ``combine``.

    Raises TypeError or ValueError for tensors that do not fit the format or each other.
    """
    row = FORMATS[format] if isinstance(format, str) else format
    global_scale = None if whole is None else decoded(whole, combine, dtype)
    operand = check_components(data, scale, row, shape, global_scale)
    recipe = LinearRecipe.inference(Cast(row), activation)
    out = MXTensor(None, operand, recipe, dtype) if columnwise else MXTensor(operand, None, recipe, dtype)
    if whole is not None and operand.global_scale is not None:
        check_global_scale(operand.scale_view, operand.global_scale, row)
        if not columnwise:
            setattr(out, STORED, (operand.global_scale.clone(), combine, whole.clone()))
    return out


def check_global_scale(scale: Tensor, global_scale: Tensor, format: Format) -> None:
    """Raise ValueError for a global scale that is not positive, or that makes the largest value no weight.

    ``global_scale``: one, or one for each matrix of a stack of scales.
    """
    bad = global_scale[~(global_scale.isfinite() & (global_scale > 0))]
    if bad.numel():
        raise ValueError(f"{format}: the global scale decodes to {float(bad[0])}, and must be positive and finite")
    if not scale.numel():
        return
    each = (scale.to(torch.float32).nan_to_num() * global_scale).flatten()
    place = int(each.argmax())
    value = float(global_scale.expand(scale.shape).flatten()[place])
    amax = float(each[place]) * format.element.max
    if amax > LARGEST_WEIGHT:
        raise ValueError(
            f"{format}: with the global scale {value:.6g} the values reach {amax:.6g}, beyond {LARGEST_WEIGHT:.0f}: "
            "the scale is probably inverted (some layouts divide by it, others multiply)"
        )


def float8_weight(
    data: Tensor, scale: Tensor, dtype: torch.dtype, activation: str | None = None, block: int | None = None
) -> MXTensor:
    """A float8 matrix, or a stack, with MX scales, or float scales for a row, the tensor or a square tile.

    Scales multiply. ``block``: the size of the tiles by the configuration; without it the shape of the scales decides.
    Raises ValueError for scales of another shape or dtype.
    """
    if data.dtype not in ELEMENTS:
        raise NotImplementedError(f"the weight is {dtype_name(data.dtype)}, and only float8 (e4m3, e5m2) is supported")
    element, shape = ELEMENTS[data.dtype], tuple(data.shape)
    if data.dim() not in (2, 3) or 0 in shape:
        raise ValueError(f"a float8 weight needs two dimensions (three: stacked) and values, got shape {shape}")
    stack, matrix = shape[:-2], shape[-2:]
    tiles = (block,) if block else (128, 64, 32, 16)
    if block is None and scale.dtype in E8M0 and tuple(scale.shape) == (*shape[:-1], -(-shape[-1] // 32)):
        return weight(data, scale, f"mxfp8_{element}", dtype, activation=activation)
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if not scale.is_floating_point():
        raise ValueError(f"the scale is {scale.dtype}; it must be a float dtype, or E8M0 bytes")
    scale = scale.to(torch.float32)
    if block is None and scale.numel() == 1 and (math.prod(shape[:-1]) > 1 or not scale.dim()):
        return weight(data, scale.reshape((1,) * len(shape)), f"float8_{element}_tensor", dtype, activation=activation)
    if block is None and tuple(scale.shape) in (shape[:-1], (*shape[:-1], 1)):
        return weight(data, scale.reshape(*shape[:-1], 1), f"float8_{element}_row", dtype, activation=activation)
    for n in tiles:
        if tuple(scale.shape) == (*stack, *(-(-size // n) for size in matrix)):
            format: Format = FORMATS[f"float8_{element}_128x128"].with_block((n, n))
            return weight(data, scale, format, dtype, activation=activation)
    what = f"tiles of {block}x{block}" if block else "rows, the tensor or square tiles of 16, 32, 64 or 128"
    raise ValueError(f"the scales {tuple(scale.shape)} of a weight {shape} are not those of {what}")


def nvfp4_weight(
    data: Tensor,
    scale: Tensor,
    stored: Sequence[Tensor],
    name: str,
    combine: Combine,
    dtype: torch.dtype,
    activation: str | None = None,
) -> MXTensor:
    """An NVFP4 matrix with the global scale ``stored``, which the layout calls ``name`` and combines by ``combine``.

    Raises ValueError for none, or for another one than a float32.
    """
    if len(stored) != 1 or stored[0].numel() != 1 or stored[0].dtype != torch.float32:
        got = [(str(t.dtype), tuple(t.shape)) for t in stored]
        raise ValueError(f"NVFP4 needs {name}, one float32; got {got or 'none'}")
    return weight(data, scale, "nvfp4", dtype, activation, whole=stored[0], combine=combine)


def tile_size(sizes: object) -> int | None:
    """The size of square tiles that a configuration names; None if it names none or others.

    Raises NotImplementedError for tiles without a format.
    """
    if not isinstance(sizes, list) or len(sizes) != 2 or sizes == [1, 32]:
        return None
    if sizes[0] != sizes[1] or type(sizes[0]) is not int or sizes[0] not in (16, 32, 64, 128):
        raise NotImplementedError(
            f"tiles of {described(sizes)} values are not supported; use square tiles of 16, 32, 64 or 128"
        )
    return sizes[0]


def companions(checkpoint: Checkpoint, data: str, scale: str, *others: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, stored names) of every ``MODULE.data`` with ``MODULE.scale``; those of ``others`` that exist follow."""
    for name in checkpoint.tensors:
        module, _, leaf = name.rpartition(".")
        prefix = name.removesuffix(data)
        if leaf == data and prefix + scale in checkpoint.tensors:
            more = [prefix + other for other in others]
            yield module, (name, prefix + scale, *(other for other in more if other in checkpoint.tensors))


def is_float_code(dtype: str, shape: Sequence[int]) -> bool:
    """Whether a tensor of this dtype can be the codes of a matrix: float8 or less."""
    return FLOATS.match(dtype) is not None and len(shape) > 1 and "e8m0" not in dtype.lower()


def _is_scale_of(leaf: str, other: str, dtype: str, shape: Sequence[int], decoded: bool) -> bool:
    """Whether ``other``, the name of a scale in the module of ``leaf``, can be a scale of these stored values; of codes
    that are ``decoded`` by other scales, one more."""
    if decoded:
        base = "weight" if leaf in PACKED else leaf
        return other not in STATIC and (other.startswith((f"{base}_", f"{base}.")) or other in ("scale", "scales"))
    if is_float_code(dtype, shape):
        return True
    return dtype in BYTES and len(shape) > 1 and (other.startswith(leaf) or (leaf in PACKED and other not in STATIC))


def check_scales(
    layout: str, tensors: Described, used: Collection[str], knows: Sequence[str], place: Callable[[str], str]
) -> None:
    """Raise NotImplementedError that names codes whose scales the layout does not read: without them, codes are never
    values.

    Refused are codes that would be ordinary tensors although a scale is stored beside them, and codes that are decoded
    without one of their scales. ``used``: tensors that are parts of quantized ones. ``knows``: ``Layout.scales``;
    without any, only codes that nothing uses are looked at.
    """
    scales: dict[str, list[str]] = defaultdict(list)
    """Module -> the scales in it that nothing uses, and those of its parameters (``weight.absmax``)."""
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if name not in used and SCALE.search(leaf):
            scales[module].append(name)
            parent, _, parameter = module.rpartition(".")
            if parameter in PACKED:
                scales[parent].append(name)
    for name, (dtype, shape) in tensors.items():
        module, _, leaf = name.rpartition(".")
        others = {other: other.removeprefix(f"{module}.") for other in scales.get(module, ()) if other != name}
        if name in used and (not knows or SCALE.search(leaf)):
            others = {}
        scale = next((o for o, end in others.items() if _is_scale_of(leaf, end, dtype, shape, name in used)), None)
        lost = knows and name not in used and is_float_code(dtype, shape)  # float8, and the layout has scales
        if scale is None and not lost:
            continue
        reads = f"it reads {', '.join(knows)}" if knows else "it reads no scales by their names"
        beside = f"with {scale}" if scale is not None else "without a scale"
        raise NotImplementedError(
            f"{place(name)}: codes in {dtype} {beside}, and the layout {layout} does not know them so "
            f"({reads}): without their scales, codes are not values; put the "
            "config.json of the library that wrote them beside the file, or dequantize them with that library"
        )


# ---------------------------------------------------------------------------------------------- writing


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
    name: str,
    t: MXTensor,
    layout: Layout,
    formats: Collection[str],
    dims: tuple[int, ...] | None = None,
    any_name: bool = False,
) -> Operand:
    """The operand of a matrix, or of stacked ones, that a layout holds in one of ``formats``.

    ``dims``: of the tensors that it holds; None: ``layout.dims``. ``any_name``: also others than those called weight.
    Raises NotImplementedError for a tensor that the layout cannot hold.
    """
    if t.format.name not in formats:
        raise NotImplementedError(
            f"{name} is {t.format.name}, and the layout {layout.name} holds {', '.join(formats)}: pass format=, which "
            "quantizes again"
        )
    rows, columns = layout.whole(t.format)
    operand, fits = t.rowwise, t.dim() in (dims or layout.dims) and (any_name or name.rpartition(".")[2] == "weight")
    if operand is None or not fits or t.shape[-1] % columns or t.shape[-2] % rows:
        what = "rowwise matrices" if any_name else "rowwise matrices called weight"
        raise NotImplementedError(
            f"{name} has the orientation {t.orientation.label} and the shape {tuple(t.shape)}, and the layout "
            f"{layout.name} holds {what}, in whole blocks of {rows}x{columns} values; skip it, or use the layout native"
        )
    return operand


def beside(name: str, t: MXTensor, layout: Layout, formats: Collection[str], *ends: str) -> dict[str, Tensor]:
    """What a layout stores of a matrix in one of ``formats``: codes, scales and a global scale, called by ``ends`` in
    the place of ``weight``. Raises as ``rowwise``."""
    operand, module = rowwise(name, t, layout, formats), name.removesuffix("weight")
    stored = [operand.data, operand.scale]
    if operand.global_scale is not None and layout.combine is not None:
        stored = [operand.data, operand.scale_view, stored_for(t, layout.combine)]
    return {f"{module}{end}": tensor for end, tensor in zip(ends, stored, strict=False)}
