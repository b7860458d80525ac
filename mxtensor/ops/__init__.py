"""One rule for each aten op or torch function of an MXTensor. Importing this package fills OP_TABLE and FUNCTION_TABLE.

Start with ``functional.py`` (``F.linear``, before torch decomposes it), ``matmul.py`` (products) and ``fallback.py``
(ops without a rule). ``layout.py`` maps dimensions of the outer tensor to those of its operands.
"""

from ..ops import (
    attention,
    bodies,
    collectives,
    convert,
    einsum,
    fallback,
    functional,
    grouped,
    inplace,
    lookup,
    matmul,
    plain_copies,
    slice,
    strided,
    structure,
    torchscript,
    view,
    view_writes,
)

__all__ = [
    "attention",
    "bodies",
    "collectives",
    "convert",
    "einsum",
    "fallback",
    "functional",
    "grouped",
    "inplace",
    "lookup",
    "matmul",
    "plain_copies",
    "slice",
    "strided",
    "structure",
    "torchscript",
    "view",
    "view_writes",
]
