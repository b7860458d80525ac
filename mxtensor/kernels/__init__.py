"""Cast and product kernels. They take and return operands and plain tensors, never an MXTensor."""
