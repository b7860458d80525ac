"""TransformerEngine's quantizers and ``general_gemm``, by its names and arguments."""
