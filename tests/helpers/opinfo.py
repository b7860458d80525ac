"""torch's own samples for every op it tests (``op_db``), run on an MXTensor and on the values that it stands for.

Three ways to call an op count: the op itself, its in-place variant and its ``out=`` variant. Each ends in one of four
outcomes: a quantized result, a dequantized one, a refusal, or a mismatch, which is a bug. Where the dense op raises,
the call does not count. ``python -m tests.helpers.opinfo`` prints the counts of all ops.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.utils._pytree import tree_flatten, tree_map

import mxtensor as mx
from mxtensor.core.select import KERNEL_NAMES

CHUNKS = 8
FORMATS = {("mxfp8", "rowwise"): 6, ("mxfp4", "both"): 3, ("mxfp8[32x32]", "rowwise"): 3, ("nvfp4", "columnwise"): 3}
"""(format, orientation) -> how many of an op's first usable samples are run in it."""
UNDEFINED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_",
}  # fmt: skip
"""Ops whose values are whatever the memory contained before."""
INEXACT = (
    "cdist", "cholesky", "corrcoef", "cov", "geqrf", "linalg.", "logdet", "lu", "matrix_exp", "norm.nuc", "ormqr",
    "pca_lowrank", "pinverse", "qr", "svd", "triangular_solve",
)  # fmt: skip
"""Beginnings of the names of ops that BLAS or LAPACK computes: their last bits depend on the alignment of a buffer,
and torch takes another routine for a tensor subclass (``eigvalsh``, ``svdvals``)."""
FREE_STRIDES = {"einsum"}
"""Ops whose strides follow from the order of the products, which torch does not promise."""
ROUNDED_TWICE = {
    "nn.functional.alpha_dropout in place": "writes twice, mul_ and add_, and each write is rounded",
    "nn.functional.feature_alpha_dropout.with_train in place": "writes twice, mul_ and add_, and each write is rounded",
    "nn.functional.embedding": "max_norm= writes the weight before the lookup, and that write is rounded",
}
"""Calls that write the MXTensor on the way to their result: shape, strides and dtype are compared, values are not."""
MIXED = {"gradient"}
"""Ops that join parts, of which some cut the blocks of one copy and some those of the other: not compared with both."""


@dataclass
class Tally:
    """What became of the calls; keys of ``refused`` and ``mismatched`` are op names, "in place" or "out=" added."""

    tried: set[str] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)
    mismatched: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        counts = ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
        return f"{len(self.tried)} ops: {counts}; calls refused: {len(self.refused)}, wrong: {len(self.mismatched)}"


def op_database():
    """Every OpInfo by name, in order of name."""
    flags, dtype = torch.backends.__allow_nonbracketed_mutation_flag, torch.get_default_dtype()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    torch.backends.__allow_nonbracketed_mutation_flag = flags  # importing torch's test tools freezes torch.backends
    torch.set_default_dtype(dtype)
    names = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}
    return dict(sorted(names.items()))


def _first(value):
    """The tensor that is to be quantized, or None."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    usable = type(value) is torch.Tensor and value.layout is torch.strided and value.dtype is torch.float32
    return value if usable and value.dim() > 0 and value.numel() > 0 else None


def _with_first(value, t):
    return type(value)((t, *value[1:])) if isinstance(value, (list, tuple)) else t


def samples(op, count):
    """The first samples of ``op`` that begin with a float tensor."""
    if not op.supports_dtype(torch.float32, "cpu"):
        return
    torch.manual_seed(0)
    try:
        generated = op.sample_inputs("cpu", torch.float32)
        yield from islice((s for s in islice(generated, 40) if _first(s.input) is not None), count)
    except (RuntimeError, ImportError):
        return  # needs a library or a device that is not here


def _fresh(tree):
    """A deep copy, so that no call sees what another wrote."""
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, tree)


def _strides(t):
    """Strides of dimensions that have more than one index; nothing depends on the others."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def _difference(ours, dense, rounded, defined, strides):
    """Why the two trees are not the same result, or None."""
    ours, theirs = tree_flatten(ours), tree_flatten(dense)
    if ours[1] != theirs[1] or len(ours[0]) != len(theirs[0]):
        return f"structure {ours[1]} instead of {theirs[1]}"
    for a, b in zip(ours[0], theirs[0], strict=True):
        if not isinstance(b, torch.Tensor):
            if a != b and not (a != a and b != b):
                return f"{a!r} instead of {b!r}"
            continue
        if not isinstance(a, torch.Tensor):
            return f"{a!r} instead of a tensor"
        if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return f"{a.dtype} {tuple(a.shape)} {a.layout} instead of {b.dtype} {tuple(b.shape)} {b.layout}"
        if strides and b.layout is torch.strided and b.numel() and _strides(a) != _strides(b):
            return f"strides {a.stride()} instead of {b.stride()} of shape {tuple(b.shape)}"
        if not defined:
            continue
        a = a.dequantize() if isinstance(a, mx.MXTensor) else a
        scale = b.abs().nan_to_num(0, 0, 0).max().item() if rounded and b.dtype.is_floating_point and b.numel() else 0
        tolerance = {"rtol": 2e-5 if scale else 0, "atol": 2e-6 * scale}
        try:
            torch.testing.assert_close(a, b, **tolerance, equal_nan=True, check_stride=False)
        except AssertionError as error:
            return " ".join(str(error).split())
    return None


def _outcome(tally, name, ours, dense, sources, defined):
    """Enter in ``tally`` what became of ``ours()``, which is to equal ``dense()`` of one of ``sources``."""
    try:
        expected = [dense(source) for source in sources]
    except Exception:
        return
    defined = defined and name not in ROUNDED_TWICE
    try:
        with mx.explain() as log:
            got = ours()
        computed = any(e.kernel in {*KERNEL_NAMES, "high precision"} for e in log.entries)
        rounded = computed or name.startswith(INEXACT)
        differences = [_difference(got, e, rounded, defined, name not in FREE_STRIDES) for e in expected]
        difference = None if None in differences else differences[0]
    except NotImplementedError as refusal:
        if "MXTensor" in str(refusal):
            tally.refused[name] = str(refusal)
            tally.counts["refused"] += 1
            return
        difference = f"NotImplementedError: {refusal}"
    except Exception as error:
        difference = f"{type(error).__name__}: {error}"
    if difference is not None:
        tally.mismatched.setdefault(name, difference)
        return
    quantized = any(isinstance(t, mx.MXTensor) for t in tree_flatten(got)[0])
    tally.counts["quantized" if quantized else "dequantized"] += 1


def run_sample(tally, name, op, sample, format, orientation):
    """The op, its in-place variant and its ``out=`` variant on one sample in one format."""
    first = _first(sample.input)
    if first.dim() == 1:
        orientation = "rowwise"
    w = mx.quantize(first, format, orientation=orientation)
    sources = [w]
    if None not in (w._rowwise, w._columnwise):  # two copies: a view may leave the one or the other to read
        sources.append(w.replace(None, w._columnwise, tuple(w.shape), w.stride()))
    defined = op.name not in UNDEFINED and not (op.name in MIXED and len(sources) > 1)

    def call(fn, t, **more):
        args, kwargs = _fresh((sample.args, sample.kwargs))
        torch.manual_seed(1)
        return fn(_with_first(_fresh(sample.input), t), *args, **kwargs, **more)

    def rewritten(fn, source):
        """What ``fn`` of the values gives; where it writes into them, rounded to the format as a write is."""
        values = source.dequantize()
        result = call(fn, values)
        if result is not values or (values.shape, values.stride()) != (w.shape, w.stride()):
            return result
        return mx.quantize(values, format, orientation=orientation).dequantize()

    tally.tried.add(name)
    tally.counts["samples"] += 1
    _outcome(tally, name, lambda: call(op, w.clone()), lambda source: rewritten(op, source), sources, defined)

    inplace = op.get_inplace()
    if inplace is not None and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:

        def write():
            target = w.clone()
            assert call(inplace, target) is target
            return target

        _outcome(tally, f"{name} in place", write, lambda source: rewritten(inplace, source), sources, defined)

    if op.supports_out:

        def out_of(t):
            out = tree_map(lambda r: torch.full_like(r, 7), call(op, w.dequantize()))
            call(op, t, out=out)
            return out

        def dense_out_of(source):
            out, result = out_of(source.dequantize()), call(op, source.dequantize())
            if defined and _difference(out, result, rounded=True, defined=True, strides=False):
                raise RuntimeError(f"torch's own {name} does not write its out=")  # a few do not
            return out

        _outcome(tally, f"{name} out=", lambda: out_of(w.clone()), dense_out_of, sources, defined)


def run(chunk, chunks=CHUNKS, formats=FORMATS):
    """Every op of one chunk."""
    tally = Tally()
    for name, op in list(op_database().items())[chunk::chunks]:
        for i, sample in enumerate(samples(op, max(formats.values()))):
            for (format, orientation), count in formats.items():
                if i < count:
                    run_sample(tally, name, op, sample, format, orientation)
    return tally


def main():
    warnings.simplefilter("ignore")
    total = Tally()
    for chunk in range(CHUNKS):
        tally = run(chunk)
        print(f"chunk {chunk}: {tally.line()}", file=sys.stderr)
        total.tried |= tally.tried
        total.counts += tally.counts
        total.refused |= tally.refused
        total.mismatched |= tally.mismatched
    print(total.line())
    for what, rows in (("refused", total.refused), ("wrong", total.mismatched)):
        for name, why in sorted(rows.items()):
            print(f"{what}: {name}: {why}")


if __name__ == "__main__":
    main()
