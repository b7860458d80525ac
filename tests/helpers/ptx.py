"""Some instructions of PTX on arrays, so that the text of a kernel is tested without a GPU."""

import re

import numpy as np
import torch

from .float8_instructions import rounded

KINDS = {"e4m3x2": torch.float8_e4m3fn, "e5m2x2": torch.float8_e5m2}


def halves(word, bits):
    """The low and the high half of unsigned words of so many bits."""
    half = bits // 2
    return word & ((1 << half) - 1), word >> half


def joined(low, high, bits):
    """The inverse of ``halves``."""
    return low | (high << (bits // 2))


def two_float16(word):
    """A word of two float16 as numbers of float64, the low half first."""
    return [half.astype(np.uint16).view(np.float16).astype(np.float64) for half in halves(word, 32)]


def word_of(low, high):
    """Two numbers rounded to float16, to nearest, in a word."""
    return joined(*(n.astype(np.float16).view(np.uint16).astype(np.uint32) for n in (low, high)), 32)


def run(text, *inputs):
    """What ``$0`` holds after the instructions; ``$1`` and the next ones are ``inputs``, arrays of uint32.

    Raises ValueError for an instruction that is not known here.
    """
    registers = {f"${i}": np.asarray(x, np.uint32) for i, x in enumerate(inputs, 1)}

    def value(name):
        return registers[name] if name in registers else np.uint32(int(name, 0) & 0xFFFFFFFF)

    for line in re.findall(r"([a-z][^;{}]*(?:\{[^}]*\}[^;]*)?);", text):
        name, rest = line.split(maxsplit=1)
        to, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if name == "mov.b32" and to.startswith("{"):
            for register, half in zip(re.findall(r"\w+", to), halves(value(sources[0]), 32), strict=True):
                registers[register] = half
        elif name == "mov.b32" and sources[0].startswith("{"):
            registers[to] = joined(*(registers[r] for r in re.findall(r"\w+", sources[0])), 32)
        elif name == "mov.b32":
            registers[to] = value(sources[0])
        elif kind := re.fullmatch(r"cvt\.rn\.f16x2\.(e\dm\dx2)", name):
            codes = (torch.from_numpy(half.astype(np.uint8)) for half in halves(value(sources[0]), 16))
            registers[to] = word_of(*(c.view(KINDS[kind[1]]).double().numpy() for c in codes))
        elif kind := re.fullmatch(r"cvt\.rn\.satfinite\.(e\dm\dx2)\.f16x2", name):
            codes = (rounded(torch.from_numpy(n), KINDS[kind[1]]) for n in two_float16(value(sources[0])))
            registers[to] = joined(*(c.numpy().astype(np.uint32) for c in codes), 16)
        elif name == "setp.eq.s32":
            registers[to] = value(sources[0]) == value(sources[1])
        elif name in ("selp.b32", "selp.b16"):
            registers[to] = np.where(registers[sources[2]], value(sources[0]), value(sources[1]))
        elif name == "mul.rn.f16x2":
            pairs = zip(*(two_float16(value(part)) for part in sources), strict=True)
            with np.errstate(over="ignore", invalid="ignore"):
                registers[to] = word_of(*(a * b for a, b in pairs))
        elif name != "reg":
            raise ValueError(f"{line!r} is not known here")
    return registers["$0"]
