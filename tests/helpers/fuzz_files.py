"""Load made-up files of MXTensors: ``python -m tests.helpers.fuzz_files FIRST END`` loads files FIRST to END - 1.

File number n is made from a saved MXTensor by random changes with seed n: of the arguments that ``rebuild`` gets, of
the bytes of the pickle in the file, or of the bytes of the file. Loading it with ``weights_only=True`` must raise, or
give an MXTensor whose tensors fit each other and that dequantizes. The last line is the counts as JSON. The number of
each file is written to standard error first, so that a crash names it.
"""

import copy
import io
import json
import pickle
import pickletools
import random
import resource
import struct
import sys
import warnings
import zipfile
from collections import Counter

import torch

import mxtensor as mx
from mxtensor.tensor.pickles import rebuild
from tests.helpers.compare import components_of

PREFIX = "this file or pickle holds no valid MXTensor: "
MEMORY = 8 << 30
"""Bytes of address space: a file that claims a large tensor must not take the machine's memory."""
FORMATS = (
    "mxfp8", "mxfp4", "nvfp4", "mxfp6", "mxint8", "mxfp8[32x32]", "nvfp4_single_level", "float8_tensor", "float8_row",
    "float8_128x128", "mxfp6_e3m2[1x16]", "float8_1x128",
)  # fmt: skip
SHAPES = ((24, 64), (3, 8, 36), (40,), (2, 128), (33, 100), (0, 32))


class Call:
    """Pickled as a call of ``rebuild`` with any arguments."""

    def __init__(self, arguments):
        self.arguments = tuple(arguments)

    def __reduce__(self):
        return rebuild, self.arguments


def a_tensor(rng):
    """A quantized tensor of any format, shape, orientation and layout."""
    shape = rng.choice(SHAPES)
    orientation = rng.choice(("rowwise", "columnwise", "both")) if len(shape) > 1 else "rowwise"
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16, torch.float64))
    w = mx.quantize(torch.randn(shape).to(dtype), rng.choice(FORMATS), orientation=orientation)
    if len(shape) > 1 and rng.random() < 0.3:
        view = rng.choice((lambda w: w.mT, lambda w: w[1:], lambda w: w.unsqueeze(0)))(w)
        w = view if isinstance(view, mx.MXTensor) else w  # a view that cuts blocks is plain values
    return torch.nn.Parameter(w, requires_grad=False) if rng.random() < 0.3 else w


# ---------------------------------------------------------------------------------------------- arguments


def _sized(t, rng):
    """``t`` with another number of entries."""
    flat, count = t.reshape(-1), rng.choice((0, 1, max(t.numel() // 2, 0), max(t.numel() - 1, 0), t.numel() + 7))
    return torch.cat([flat, flat.new_zeros(max(count - flat.numel(), 0))])[:count]


TENSORS = (
    _sized,
    lambda t, rng: t[..., : rng.randrange(t.shape[-1] + 1)] if t.dim() else t,
    lambda t, rng: t[: rng.randrange(t.shape[0] + 1)] if t.dim() else t,
    lambda t, rng: t.reshape(-1),
    lambda t, rng: t.unsqueeze(rng.randrange(t.dim() + 1)),
    lambda t, rng: t.mT.contiguous() if t.dim() > 1 else t.reshape(1, -1),
    lambda t, rng: t.to(rng.choice((torch.float32, torch.int8, torch.uint8, torch.int64, torch.complex64, torch.bool))),
    lambda t, rng: t.to("meta"),
    lambda t, rng: t.to_sparse() if t.dim() else t.reshape(1).to_sparse(),
    lambda t, rng: t.reshape(-1)[:1].expand(t.shape) if t.numel() else t,
    lambda t, rng: t.as_strided(t.shape, (1,) * t.dim()) if t.numel() else t,
    lambda t, rng: t.as_strided(t.shape, (0,) * t.dim()) if t.numel() else t,
    lambda t, rng: torch.nn.Parameter(t.float()),
    lambda t, rng: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    lambda t, rng: torch.randn(t.shape),
    lambda t, rng: rng.choice((None, 3, "data", b"data", [1, 2], {}, t.tolist())),
)
NUMBERS = (0, 1, -1, 2, 7, 31, 33, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 1.5, "4", None, True, [3])


def _numbers(old, rng):
    """Sizes or strides with a change."""
    out = list(old)
    change = rng.randrange(6)
    if change == 0 and out:
        out[rng.randrange(len(out))] = rng.choice(NUMBERS)
    elif change == 1:
        out.insert(rng.randrange(len(out) + 1), rng.choice(NUMBERS))
    elif change == 2 and out:
        out.pop(rng.randrange(len(out)))
    elif change == 3:
        rng.shuffle(out)
    elif change == 4 and out:
        place = rng.randrange(len(out))
        out[place] = out[place] + rng.choice((-1, 1, 32, -32))
    else:
        return rng.choice(((), None, "size", 5, [8, 64], torch.Size(out), (10**6,) * 3))
    return tuple(out)


DTYPES = (
    "int8", "load", "complex64", "__class__", "float8_e4m3fn", "bool", "os", "float64", "float16", "", None, 5, b"half",
)  # fmt: skip
VALUES = (None, 0, 1, "", "rowwise", [], (), {}, 2.5, torch.ones(3), b"x")
WORDS = (
    "mxfp8", "nvfp4", "mxfp4[32x32]", "float8_tensor", "mxfp8[7x7]", "__class__", "auto", "stochastic", "-1", "x" * 99,
    "", None, 7,
)  # fmt: skip


def _change(arguments, rng):
    """One change of one argument of ``rebuild``, in place."""
    components, row, outer, _ = arguments
    kind = rng.randrange(9)
    if kind < 4 and isinstance(components, dict) and components:
        side = rng.choice(list(components))
        tensors = list(components[side]) if isinstance(components[side], (tuple, list)) else []
        change = rng.randrange(10)
        if change < 7 and tensors:
            place = rng.randrange(len(tensors))
            if isinstance(tensors[place], torch.Tensor):
                tensors[place] = rng.choice(TENSORS)(tensors[place], rng)
        elif change == 7:
            tensors.reverse()
        elif change == 8:
            tensors = tensors[:-1] if rng.random() < 0.5 else [*tensors, rng.choice((torch.ones(()), torch.ones(0)))]
        components[side] = tuple(tensors) if change < 9 else rng.choice(VALUES)
    elif kind == 4 and isinstance(components, dict):
        other = rng.choice(("_rowwise", "_columnwise", "rowwise", 3))
        if components:
            side = rng.choice(list(components))
            components[other] = components[side] if rng.random() < 0.5 else components.pop(side)
    elif kind == 5 and isinstance(row, dict):
        row[rng.choice((*row, "weight_seed", "other"))] = rng.choice(WORDS)
        if rng.random() < 0.3:
            del row[rng.choice(list(row))]
    elif kind in (6, 7) and isinstance(outer, tuple) and len(outer) == 4:
        values, place = list(outer), rng.randrange(4)
        if place == 0:
            values[0] = rng.choice(DTYPES)
        elif place in (1, 2):
            values[place] = _numbers(values[place] if isinstance(values[place], tuple) else (8, 64), rng)
        else:
            values[3] = rng.choice(VALUES)
        arguments[2] = tuple(values[: rng.choice((4, 4, 4, 3))])
    else:
        arguments[rng.randrange(4)] = rng.choice(VALUES)


def changed_arguments(w, rng):
    _, (components, row, outer, is_parameter) = w.__reduce_ex__(2)
    arguments = [dict(components), dict(row), copy.copy(outer), is_parameter]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        try:
            _change(arguments, rng)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            continue  # torch cannot make that tensor
    buffer = io.BytesIO()
    torch.save(Call(arguments), buffer)
    return buffer.getvalue()


# ---------------------------------------------------------------------------------------------- bytes


def _bytes(payload, rng):
    """``payload`` with a few bytes changed, removed or put in."""
    out = bytearray(payload)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place, change = rng.randrange(len(out)), rng.randrange(5)
        if change == 0:
            out[place] ^= 1 << rng.randrange(8)
        elif change == 1:
            out[place] = rng.randrange(256)
        elif change == 2:
            del out[place : place + rng.choice((1, 2, 16))]
        elif change == 3:
            out[place:place] = rng.randbytes(rng.choice((1, 2, 4)))
        else:
            other = rng.randrange(len(out))
            out[place : place + 4] = out[other : other + 4]
        if not out:
            return b""
    return bytes(out)


def _values(payload, rng):
    """``payload``, a pickle, with other integers, strings, booleans or references in it: it stays a pickle."""
    for _ in range(rng.choice((1, 1, 2))):
        ops = list(pickletools.genops(payload))
        ends = [position for *_, position in ops[1:]] + [len(payload)]
        texts = [arg for _, arg, _ in ops if isinstance(arg, str)]
        named = [i for i, (op, _, _) in enumerate(ops) if op.name in ENCODED]
        chosen = rng.choice(named)
        op, arg, start = ops[chosen]
        if isinstance(arg, str):
            new = rng.choice((*texts, *(word for word in WORDS if isinstance(word, str))))
            put = b"X" + struct.pack("<I", len(new.encode())) + new.encode()
        elif op.name.endswith("BINGET"):
            put = b"j" + struct.pack("<I", rng.randrange(len(ops)))
        elif isinstance(arg, int) and not isinstance(arg, bool):
            new = rng.choice((arg + 1, arg - 1, arg * 2, 0, 1, 2**31, 2**62, -1, arg // 2, rng.randrange(100)))
            put = b"\x8a\x08" + struct.pack("<q", max(min(new, 2**63 - 1), -(2**63)))
        else:
            put = rng.choice((b"\x88", b"\x89", b"N"))
        payload = payload[:start] + put + payload[ends[chosen] :]
    return payload


ENCODED = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "NEWTRUE", "NEWFALSE", "NONE", "BINGET",
    "LONG_BINGET",
}  # fmt: skip


def saved(w):
    buffer = io.BytesIO()
    torch.save(w, buffer)
    return buffer.getvalue()


def changed_pickle(w, rng):
    """The file with other bytes in its pickle, or in the bytes of a tensor that it may have cut short."""
    out, place = io.BytesIO(), rng.random()
    with zipfile.ZipFile(io.BytesIO(saved(w))) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("data.pkl") and place < 0.85:
                content = (_bytes if place < 0.25 else _values)(content, rng)
            elif "/data/" in name and place >= 0.85:
                content = content[: rng.randrange(len(content) + 1)]
            new.writestr(name, content)
    return out.getvalue()


def changed_file(w, rng):
    content = saved(w)
    return content[: rng.randrange(len(content))] if rng.random() < 0.2 else _bytes(content, rng)


# ---------------------------------------------------------------------------------------------- the check


def check(w):
    """Assert that an MXTensor is whole, by the format's own shapes, and use it."""
    assert type(w) is mx.MXTensor and w.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    swapped = (*w.shape[:-2], *w.shape[:-3:-1])
    found = [(o, s) for o, s in ((w._rowwise, tuple(w.shape)), (w._columnwise, swapped)) if o is not None]
    assert found
    for operand, shape in found:
        format = operand.format
        assert format == w.format and operand.shape == shape
        assert operand.data.shape == format.data_shape(shape) and operand.data.dtype is format.element.dtype
        assert operand.scale.shape == format.scale_shape(shape) and operand.scale.dtype is format.scale.dtype
        assert (operand.global_scale is not None) == format.global_scale
        for t in operand.tensors:
            last = t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) + 1
            assert t.device == w.device and t.layout is torch.strided
            assert not t.numel() or w.device.type == "meta" or last * t.itemsize <= t.untyped_storage().nbytes()
        if format.global_scale:
            assert operand.global_scale.shape == format.global_scale_shape(shape)
            assert operand.global_scale.dtype is torch.float32
    values = w.dequantize()
    assert values.shape == w.shape and values.dtype is w.dtype
    copied = w.detach().clone()
    assert copied.shape == w.shape and len(components_of(copied)) == len(components_of(w)) and repr(copied)
    if w.dim() == 2 and w.dtype is not torch.float64:
        assert torch.nn.functional.linear(torch.ones(2, w.shape[1], dtype=w.dtype), w).shape == (2, w.shape[0])


WAYS = (("arguments", changed_arguments), ("pickle", changed_pickle), ("file", changed_file))


def run(number):
    """The kind of change of file ``number`` and what became of it."""
    rng = random.Random(number)
    torch.manual_seed(number)
    way, change = WAYS[(0, 0, 1, 2)[number % 4]]
    content = change(a_tensor(rng), rng)
    try:
        loaded = torch.load(io.BytesIO(content), weights_only=True)
    except (ValueError, pickle.UnpicklingError) as error:
        if way == "arguments" and not isinstance(error, pickle.UnpicklingError):
            assert str(error).startswith(PREFIX), error
        return way, "refused by us" if str(error).startswith(PREFIX) else "refused by torch"
    except Exception as error:
        assert way != "arguments", f"{type(error).__name__}: {error}"
        return way, "refused by torch"
    if not isinstance(loaded, mx.MXTensor):
        return way, "another object"
    if not loaded.is_meta:
        check(loaded)
    return way, "consistent"


def main(first, end):
    warnings.simplefilter("ignore")  # torch warns of kinds of tensors and of pickles that it will drop
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    counts = Counter()
    for number in range(first, end):
        print(number, file=sys.stderr, flush=True)
        way, result = run(number)
        counts[f"{way}: {result}"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
