"""The reference of grouped linear layers: ``linear`` of each group of rows with its own weight."""

import torch

from mxtensor.training.linear import linear


def separate_layers(x, weights, biases, splits, options):
    """x (..., K), weights (N, K) and biases (N,), or None for no biases, one for each of ``splits`` -> (..., N)."""
    biases = [None] * len(weights) if biases is None else biases
    rows = torch.split(x.reshape(-1, x.shape[-1]), splits)
    y = torch.cat([linear(group, w, b, options) for group, w, b in zip(rows, weights, biases, strict=True)])
    return y.view(*x.shape[:-1], y.shape[-1])
