"""Kernels of casts, products, attention and permutations. They take operands and plain tensors, never an MXTensor."""
