"""What ``torch.compile`` is told: a pass that merges products of one input, and when kernels may start early."""
