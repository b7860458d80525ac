"""How kernels are compiled, cached and launched: NVRTC, Triton, native C++; and reasons why they cannot be."""
