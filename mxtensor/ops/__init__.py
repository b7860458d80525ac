"""Above the tensor: one rule per aten op. Importing this package fills OP_TABLE and FUNCTION_TABLE."""

from ..ops import (
    attention,
    collectives,
    convert,
    einsum,
    fallback,
    functional,
    grouped,
    inplace,
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
    "collectives",
    "convert",
    "einsum",
    "fallback",
    "functional",
    "grouped",
    "inplace",
    "matmul",
    "plain_copies",
    "slice",
    "strided",
    "structure",
    "torchscript",
    "view",
    "view_writes",
]
