"""Below the tensor: kernels know operands, never MXTensor. Each file holds one ``KERNEL``."""
