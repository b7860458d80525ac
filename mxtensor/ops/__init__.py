"""One rule for each aten op or torch function of an MXTensor. Importing this package fills OP_TABLE and FUNCTION_TABLE.

Start with ``functional.py`` (``F.linear`` and ``einsum``, before torch decomposes them), ``matmul.py`` (products) and
``fallback.py`` (ops without a rule). ``layout.py`` maps dimensions of the outer tensor to those of its operands.
"""

from ..ops import (
    attention,
    bodies,
    collectives,
    conversions,
    fallback,
    functional,
    grouped,
    inplace,
    lookup,
    matmul,
    slice,
    strided,
    structure,
    view,
)

__all__ = [
    "attention",
    "bodies",
    "collectives",
    "conversions",
    "fallback",
    "functional",
    "grouped",
    "inplace",
    "lookup",
    "matmul",
    "slice",
    "strided",
    "structure",
    "view",
]
