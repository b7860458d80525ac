"""Names that users write: case, hyphens, underscores and spaces do not matter, nor "float" for "fp"."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

import torch

WEIGHT_ONLY = ("weightonly", "wo")
"""The ends of a name, as ``key`` writes it, that leave activations in high precision."""
MOST = 5
"""Candidates that a message lists."""

_INTEGERS_OF_4 = "quantize_ takes 'mxfp4-weight-only' or 'nvfp4-weight-only': integers of 4 bits are not here"
_ROWS = "'float8_row' has a scale for each row, of weights and of tokens"
OF_PEERS = {
    "nvfp4a16": "quantize_ takes 'nvfp4-weight-only'", "mxfp4a16": "quantize_ takes 'mxfp4-weight-only'",
    "mxfp8a16": "quantize_ takes 'mxfp8-weight-only'", "mxfp6a16": "quantize_ takes 'mxfp6-weight-only'",
    "w8a16": "quantize_ takes 'mxfp8-weight-only', 'mxint8-weight-only' or 'float8_row-weight-only'",
    "fp8a16": "quantize_ takes 'float8_row-weight-only'",
    **dict.fromkeys(("w4a4", "nvfp4a4", "mxfp4a4"), "'nvfp4' or 'mxfp4' is the format of weights and activations"),
    **dict.fromkeys(("w4a8", "w4afp8", "mxfp4a8", "mxfp4mxfp8"), "quantize_ takes 'mxfp4-weight-mxfp8-activation'"),
    **dict.fromkeys(("w8a8", "w8a8fp8", "w8a8int8"), "'float8_row', 'mxfp8' or 'mxint8' is for both operands"),
    **dict.fromkeys(("fp8dynamic", "fp8perchannel", "ptpc", "rowwise", "perrow", "ptpcfp8"), _ROWS),
    **dict.fromkeys(("fp8block", "fp8blockwise", "blockwise"), "quantize_ takes "
                    "'float8_128x128-weight-float8_1x128-activation'"),
    **dict.fromkeys(("tensorwise", "pertensor"), "'float8_tensor' has one scale for a tensor"),
    **dict.fromkeys(("w4a16", "w4a16asym", "int4", "uint4", "nf4", "awq", "gptq", "hqq", "q4k", "q4km", "q4ks", "q40",
                     "q41"), _INTEGERS_OF_4),
    "q80": "quantize_ takes 'mxint8-weight-only'",
    **dict.fromkeys(("bf16", "fp16", "bfp16", "fp32", "half", "torch.bfp16", "torch.fp16", "torch.fp32",
                     "torch.fp64"), "it is not quantized: leave the layer out by filter_fn, and use .to(dtype)"),
    **dict.fromkeys(("mxfp8rceil", "mxfp8floor", "mxfp8cublas", "mxfp8cublasrceil", "mxfp8emulated", "mxfp4cutlass"),
                    "mx.ao.MXLinearConfig.from_recipe_name takes such names of torchao, for training"),
    **dict.fromkeys(("mxfp8defaultcfg", "mxfp8cfg"), "'mxfp8' is the format"),
}  # fmt: skip
"""Name of a format or a scheme in other libraries, as ``key`` writes it -> what to do here."""


def key(text: str) -> str:
    """``text`` in the form in which names are compared: ``"MX-FP8 e4m3"`` and ``"mxfloat8_E4M3"`` are one name."""
    for mark in "-_ \t\n":  # not by a regular expression, which Dynamo of torch 2.11 cannot trace
        text = text.replace(mark, "")
    return text.lower().replace("float", "fp")


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without ``torch.``: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def find(text: str, names: Iterable[str]) -> str | None:
    """The one of ``names`` that ``text`` is, but for its spelling; None if there is none."""
    return next((name for name in names if key(name) == key(text)), None)


def operands_of(text: str) -> tuple[str, str | None]:
    """The formats of weights and activations in the name of an inference recipe; None leaves activations as they are.

    ``"mxfp8"`` is both, ``"mxfp8-weight-only"`` and ``"mxfp8_wo"`` are ``("mxfp8", None)``, and
    ``"mxfp4-weight-mxint8-activation"`` is ``("mxfp4", "mxint8")``, spelt as ``key`` spells names.
    """
    short = key(text)
    for end in WEIGHT_ONLY:
        if short.endswith(end) and short != end:
            return short.removesuffix(end), None
    weight, found, activation = short.removesuffix("activation").partition("weight")
    if found and weight and activation and short.endswith("activation"):
        return weight, activation
    return text, text


def suggestion(text: str, names: Iterable[str]) -> str:
    """``"did you mean 'a' or 'b'?"``: the names that contain ``text``, else the two most similar; "" if none is."""
    names, short = list(names), key(text)
    found = [name for name in names if len(short) > 2 and short in key(name)]
    # of names that continue another one, the short one: float8_row of float8_row_pow2
    found = [name for name in found if not any(name != other and name.startswith(f"{other}_") for other in found)]
    found.sort(key=len)
    if not found:
        keys = {key(name): name for name in names}
        found = [keys[close] for close in get_close_matches(short, keys, 2)]
    shown = " or ".join(map(repr, found[:MOST]))
    return f"did you mean {shown}?" if found else ""


def has_part(name: str, part: str) -> bool:
    """Whether consecutive components of ``name`` are ``part``: ``model.layers.0.mlp`` has the parts ``mlp``,
    ``layers.0`` and the whole name, and not ``layers.0.m``.
    """
    return f".{part}." in f".{name}."


def choices(kind: str, text: str, names: Iterable[str]) -> str:
    """What an error says after an unknown name: the similar names first, then all. ``kind``: ``"formats"`` ..."""
    names = list(names)
    hint, listed = suggestion(text, names), f"he {kind} are {', '.join(names)}"
    return f"{hint} T{listed}" if hint else f"t{listed}"
