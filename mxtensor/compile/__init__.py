"""Extensions of ``torch.compile``: a pass that merges products of one input, and early starts of kernels."""
