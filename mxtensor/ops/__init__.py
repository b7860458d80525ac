"""Above the tensor: one rule per aten op. Importing this package fills OP_TABLE and FUNCTION_TABLE."""

from . import attention, convert, einsum, inplace, matmul, slice, view

__all__ = ["attention", "convert", "einsum", "inplace", "matmul", "slice", "view"]
