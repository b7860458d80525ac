"""What all cases run under."""

import os

import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms ask for
if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):  # under compute-sanitizer
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # this kernel of torch reads past the end of its float32 mask
