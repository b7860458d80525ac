"""Every op that writes a tensor, called on an MXTensor, on views of it, and on the values that they stand for.

Ops come from three places: the in-place variants in torch's operator database, with torch's samples; every aten schema
that writes an argument, with generated arguments; ``nn.init``. A call counts if the dense call works. Then the MXTensor
must be what quantizing the dense result gives, or the call must have raised a sentence and changed nothing.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import nn
from torch.utils._pytree import tree_map

import mxtensor as mx
from tests.helpers.opinfo import op_database, samples

LAYOUTS = [
    ("mxfp8", "rowwise"), ("mxfp8", "columnwise"), ("mxfp4", "both"), ("mxfp8[32x32]", "rowwise"), ("nvfp4", "both"),
    ("nvfp4", "rowwise"), ("float8_row", "rowwise"),
]  # fmt: skip
SHAPES = ((8, 8), (8,), (2, 3, 8))
SEVERAL = (
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.feature_alpha_dropout", "nn.init.dirac_",
    "nn.init.orthogonal_", "nn.init.sparse_", "nn.init.trunc_normal_",
)  # fmt: skip
"""Beginnings of the names of composites of several writes, each of which is rounded: that the view is written, and
nothing else, is all that is compared."""


def _flat(shape):
    return torch.Size(shape).numel()


VIEWS = {
    "itself": (lambda s: s, lambda t, s: t),
    "alias": (lambda s: s, lambda t, s: t.data),
    "transposed": (lambda s: (*s[:-2], *reversed(s[-2:])), lambda t, s: t.transpose(-1, -2) if len(s) > 1 else t),
    "rows": (lambda s: (s[0] + 3, *s[1:]), lambda t, s: t[2 : 2 + s[0]]),
    "columns": (lambda s: (*s[:-1], s[-1] + 5), lambda t, s: t[..., 3 : 3 + s[-1]]),
    "every other": (lambda s: (*s[:-1], 2 * s[-1] + 1), lambda t, s: t[..., 1::2].narrow(-1, 0, s[-1])),
    "flat": (lambda s: (_flat(s) + 40,), lambda t, s: t.view(-1)[7 : 7 + _flat(s)].view(s)),
    "one of many": (lambda s: (3, *s), lambda t, s: t.unbind(0)[1]),
    "last index": (lambda s: (*s, 3), lambda t, s: t.select(-1, 1)),
    "split": (lambda s: (*s[:-1], 2 * s[-1] + 1), lambda t, s: t.split(s[-1], -1)[1]),
    "view of a view": (
        lambda s: (2, *s[:-1], s[-1] + 5),
        lambda t, s: t.transpose(0, -1)[2:].transpose(0, -1)[1].data.narrow(-1, 1, s[-1]),
    ),
    "window": (lambda s: (*s[:-1], s[-1] + 4), lambda t, s: t.unfold(-1, s[-1], 2).select(-2, 1)),
}  # fmt: skip
"""Name -> (the shape of the base for a view of a shape, the view)."""


@dataclass
class Tally:
    """What became of the calls; keys of ``refused`` and ``wrong`` are (op, view, layout)."""

    ops: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[tuple[str, ...], str] = field(default_factory=dict)
    wrong: dict[tuple[str, ...], str] = field(default_factory=dict)

    def line(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        return f"{len(self.ops)} ops: {counts}"


class _Write:
    """One call that writes a view of an MXTensor, beside the same call on the values that it stands for."""

    def __init__(self, name, call, shape, layout, view):
        self.name, self.call, self.shape, self.view = name, call, tuple(shape), view
        base, format, orientation = VIEWS[view][0](self.shape), *layout
        self.w = None
        """None if there is no such view: the layout needs more dimensions, or the view others."""
        if (len(base) < 2 and orientation != "rowwise") or 0 in base:
            return
        try:
            self.w = mx.quantize(torch.randn(base), format, orientation=orientation)
            self.target = self.part_of(self.w)
            self.values = self.w.dequantize()
            self.dense = self.part_of(self.values)
        except (RuntimeError, IndexError, ValueError):
            self.w = None
            return
        self.before, self.old = self.values.clone(), []

    def part_of(self, base):
        """The view of a tensor like the base."""
        return VIEWS[self.view][1](base, self.shape)

    def dense_works(self):
        """Call with the values, first: whether that works, and is a write and no change of memory."""
        shape, pointer = self.dense.shape, self.dense.data_ptr()
        try:
            torch.manual_seed(1)
            self.call(self.dense)
        except Exception:
            return False
        same_memory = self.dense.shape == shape and self.dense.data_ptr() == pointer
        return same_memory and self.dense.layout is torch.strided

    def run(self):
        """Call with the MXTensor."""
        self.old = _copies(self.w)
        torch.manual_seed(1)
        self.call(self.target)

    def changes(self):
        """Whether the values have changed."""
        return not _equal(self.values, self.before)

    def is_unchanged(self):
        """Whether the MXTensor is what it was before the call."""
        return all(_equal(a, b) for a, b in zip(_copies(self.w), self.old, strict=True))

    def difference(self):
        """What is wrong with the MXTensor after the call; None if it has what was written."""
        got = _copies(self.w)
        has = self._has_several_writes if self.name.startswith(SEVERAL) else self._has_write
        if not (has(got) or self._has_write_in_order(got) or self._is_near(got)):
            if _equal(got[0], self.old[0]) and self.changes():
                return "the write vanished"
            return f"{(got[0] - self._expected()[0]).abs().max()} {got[0]}"
        if not _equal(self.target.dequantize(), self.part_of(self.w).dequantize()):
            return "the view does not read what was written"
        return None

    def _expected(self):
        """The copies of the written values, quantized."""
        return _copies(mx.quantize(self.values, self.w.format, orientation=self.w.orientation))

    def _has_write(self, got):
        return self._are_written(got, self._expected()) or (not self.changes() and self.is_unchanged())

    def _has_write_in_order(self, got):
        """Whether it has the write of a contiguous view: random numbers come in the order of strides."""
        in_order = self._in_order()
        if _equal(self.values, in_order):
            return False
        self.values = in_order
        return self._are_written(got, self._expected())

    def _is_near(self, got):
        """Whether it is near the write of an inexact op."""
        if not self.name.startswith(INEXACT) or _equal(got[0], self.old[0]):
            return False
        columnwise = self.w.orientation == mx.Orientation.COLUMNWISE
        return are_near(got[0], self._expected()[0], self.w.format, columnwise)

    def _has_several_writes(self, got):
        """Whether the view has changed if it should, and the rest is near what it was."""
        outside = torch.ones_like(self.values)
        self.part_of(outside).zero_()
        rest = ((got[0] - self.before) * outside).norm()
        return _equal(got[0], self.old[0]) != self.changes() and bool(rest <= 0.3 * self.before.norm())

    def _are_written(self, got, expected):
        """Whether every copy has the written values. Outside of the view the second copy may keep its codes, which were
        rounded once, from the high-precision values."""
        if not _equal(got[0], expected[0]):
            return False
        if len(got) < 2:
            return True
        inside = torch.zeros_like(got[0])
        self.part_of(inside).fill_(1)
        blockwise = torch.where(inside.bool().mT, expected[1], self.old[1])
        return _equal(got[1], expected[1]) or _equal(got[1], blockwise)

    def _in_order(self):
        """The values after the call on a contiguous copy of the view."""
        values = self.before.clone()
        part = self.part_of(values)
        copy = part.contiguous().clone()
        torch.manual_seed(1)
        self.call(copy)
        part.copy_(copy)
        return values


def _copies(w):
    return [w.dequantize()] + ([w.transpose(-1, -2).dequantize()] if len(w.operands) > 1 else [])


def _equal(a, b):
    return torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))


INEXACT = ("aten.linalg_", "linalg.")
"""The beginning of the names of ops by LAPACK, whose last bits depend on where the memory begins."""


def _block_amax(x, block):
    """The largest magnitude in the block (rows, columns) of each value; -1 is the whole extent."""
    if block[0] < 0:
        return x.abs().amax().expand_as(x)
    whole = x if x.dim() > 1 else x[None]
    sizes = [n if n > 0 else size for n, size in zip(block, whole.shape[-2:], strict=True)]
    rows, columns = whole.shape[-2:]
    padded = nn.functional.pad(whole.abs(), (0, -columns % sizes[1], 0, -rows % sizes[0]))
    blocks = padded.unflatten(-1, (-1, sizes[1])).unflatten(-3, (-1, sizes[0]))
    amax = blocks.amax((-3, -1), keepdim=True).expand_as(blocks).flatten(-4, -3).flatten(-2, -1)
    return amax[..., :rows, :columns].reshape(x.shape)


def are_near(got, expected, format, columnwise=False):
    """Whether two dequantized copies differ by at most one step of the element, the largest step of each block.

    LAPACK's own rounding, 1e-5 of the largest value, is allowed as well: in blocks of nothing but such errors.
    """
    got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
    if columnwise:
        got, expected = got.mT, expected.mT
    amax = torch.maximum(_block_amax(got, format.block), _block_amax(expected, format.block))
    step = torch.ldexp(torch.ones(()), amax.frexp().exponent - 1 - format.element.mantissa_bits)
    return bool(((got - expected).abs() <= 1.0001 * step + 1e-5 * expected.abs().max()).all())


def run_call(tally, name, call, shape, layout, view):
    """``call(target)`` of a view of the shape in the layout; ``call`` writes ``target``."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        torch.manual_seed(2)
        write = _Write(name, call, shape, layout, view)
        if write.w is None or not write.dense_works():
            return
    tally.ops.add(name)
    tally.counts["calls"] += 1
    key = (name, view, " ".join(layout))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            write.run()
        except (NotImplementedError, ValueError, TypeError) as refusal:
            said = str(refusal)
            if len(said.split()) < 9 or "MXTensor" not in said or not write.is_unchanged():
                tally.wrong[key] = f"{type(refusal).__name__}: {said}; unchanged: {write.is_unchanged()}"
            else:
                tally.refused[key] = said
                tally.counts["refused"] += 1
            return
        except Exception as error:
            tally.wrong[key] = f"{type(error).__name__}: {error}"
            return
    if write.values.isnan().any() and write.w.format.block[0] < 0:
        return
    difference = write.difference()
    if difference is None:
        tally.counts["written" if write.changes() else "no change"] += 1
    else:
        tally.wrong[key] = difference


# ---------------------------------------------------------------------------------------------- torch's samples


def from_database(part, slices):
    """(name, call, shape) of each in-place variant in torch's operator database, two samples of each."""
    for name, op in islice(op_database().items(), part, None, slices):
        inplace = op.get_inplace()
        if inplace is None:
            continue
        usable = (s for s in samples(op, 6) if isinstance(s.input, torch.Tensor) and not s.broadcasts_input)
        for sample in islice(usable, 2):

            def call(target, inplace=inplace, sample=sample):
                fresh = tree_map(
                    lambda t: t.clone() if isinstance(t, torch.Tensor) else t, (sample.args, sample.kwargs)
                )
                inplace(target, *fresh[0], **fresh[1])

            yield name, call, sample.input.shape


# ---------------------------------------------------------------------------------------------- aten schemas

INTEGERS = {"dim": -1, "dim0": 0, "dim1": -1, "diagonal": 0, "k": 0, "N": 3, "n": 2, "high": 5, "low": 1, "to": 9}
FLOATS = {
    "p": 0.4,
    "lambd": 1.3,
    "sigma": 0.7,
    "std": 0.7,
    "eps": 1e-3,
    "to": 2.0,
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
}
NOT_WRITES = {"set_", "resize_", "resize_as_", "_resize_output_", "requires_grad_", "detach_", "rename_", "retain_grad"}
"""They change the tensor and not its values; tests of their own refuse them."""


def _is_written(argument):
    return argument.alias_info is not None and argument.alias_info.is_write


def _argument(argument, target, shape, variant, written):
    """A value for one argument of a schema."""
    kind, name = str(argument.type), argument.name
    like = torch.randn(shape)
    if kind == "Tensor":
        if written:
            return target
        if name in ("mask", "condition"):
            return like > 0
        if name in ("index", "indices"):
            return torch.zeros(shape, dtype=torch.int64)
        return [like, like.abs() + 0.5, (like > 0), (like * 3).long().abs()][variant]
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        if written:
            return [target]
        return [like.abs()] if "step" not in name else [torch.tensor(1.0)]
    if kind in ("Scalar", "number", "float"):
        return FLOATS.get(name, 0.5 + variant)
    if kind == "int":
        return INTEGERS.get(name, 1)
    if kind in ("List[int]", "List[SymInt]"):
        return list(shape) if name in ("size", "shape", "sizes") else [-1] if name.startswith("dim") else [1]
    if kind == "bool":
        return variant % 2 == 1
    if kind == "List[Scalar]" or kind == "List[number]":
        return [0.5]
    if kind == "str":
        return "none"
    raise LookupError(kind)


def schemas():
    """Every public overload of aten that writes an argument; private ones do not check their other arguments."""
    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    for packet in sorted({name.partition(".")[0] for name in names}):  # dir(torch.ops.aten) lists only what was used
        found = getattr(torch.ops.aten, packet, None)
        if not isinstance(found, torch._ops.OpOverloadPacket) or packet in NOT_WRITES:
            continue
        if "empty" in packet:  # its values are whatever the memory contained before
            continue
        if packet.startswith("_") and not packet.startswith(("_foreach_", "_fused_")):
            continue
        for overload in found.overloads():
            op = getattr(found, overload)
            if any(map(_is_written, op._schema.arguments)) and torch.Tag.inplace_view not in op.tags:
                yield op


def from_schemas(part, slices):
    """(name, call, shape) of each overload of aten that writes, with the first arguments that a tensor takes."""
    for op in islice(schemas(), part, None, slices):
        for shape in SHAPES:
            call = _callable(op, shape)
            if call is not None:
                yield str(op), call, shape
                break


def _callable(op, shape):
    for variant in range(4):

        def call(target, variant=variant):
            torch.manual_seed(5)
            if op._schema.name.removeprefix("aten::").startswith("_fused_") and not target.is_contiguous():
                raise ValueError("torch's fused optimizers write elsewhere if a parameter is not contiguous")
            args, kwargs = [], {}
            first = next(a for a in op._schema.arguments if _is_written(a))
            for a in op._schema.arguments:
                wanted = not a.has_default_value() or _is_written(a)
                if wanted and a.kwarg_only:
                    kwargs[a.name] = _argument(a, target, shape, variant, a is first)
                elif wanted:
                    args.append(_argument(a, target, shape, variant, a is first))
                elif not a.kwarg_only:
                    args.append(a.default_value)
            with torch.no_grad():
                op(*args, **kwargs)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                target = torch.randn(shape)
                pointer = target.data_ptr()
                call(target)
                if target.shape == torch.Size(shape) and target.data_ptr() == pointer:
                    return call
            except Exception:
                continue
    return None


# ---------------------------------------------------------------------------------------------- nn.init


def from_init(part, slices):
    """(name, call, shape) of each function of nn.init."""
    values = {"val": 0.3, "sparsity": 0.2}
    for name, function in islice(inspect.getmembers(nn.init, inspect.isfunction), part, None, slices):
        if not name.endswith("_") or name.startswith("_"):
            continue
        parameters = list(inspect.signature(function).parameters.values())[1:]
        given = {p.name: values[p.name] for p in parameters if p.name in values}
        shape = (4, 3, 8) if name == "dirac_" else (8, 8)
        yield f"nn.init.{name}", lambda t, function=function, given=given: function(t, **given), shape


SOURCES = {"database": from_database, "schemas": from_schemas, "init": from_init}


def run(source, part=0, slices=1, views=VIEWS, layouts=LAYOUTS):
    """Every call of one source; of several slices, one."""
    tally = Tally()
    for name, call, shape in SOURCES[source](part, slices):
        for layout in layouts:
            for view in views:
                run_call(tally, name, call, shape, layout, view)
    return tally
