"""Data without a text: what a language model writes itself is of every kind that it knows.

Source: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, INTEGER, MODULE, check, optional
from ..core.progress import with_progress

BATCH = 32
"""Sequences that are sampled at once."""


@torch.no_grad()
def sampled_data(
    model: nn.Module, sequences: int = 64, length: int = 256, *, start: int | None = None, seed: int = 0, batch: int = 8
) -> list[Tensor]:
    """Token ids that a causal language model of transformers samples, as batches for ``mx.calibrate``.

    Each of the ``sequences`` begins with the token ``start`` (None: the model's ``bos_token_id``) and has ``length``
    tokens, each drawn from the model's own probabilities. Returns int64 tensors (``batch``, ``length``), the last one
    with what is left. The same ``seed`` gives the same tokens on the same device. Raises ValueError if the model has no
    ``bos_token_id`` and ``start`` is None.
    """
    check("sampled_data", "model", model, MODULE)
    for name, value in (("sequences", sequences), ("length", length), ("batch", batch)):
        check("sampled_data", name, value, COUNT)
    check("sampled_data", "seed", seed, INTEGER)
    check("sampled_data", "start", start, optional(INTEGER))
    first = getattr(getattr(model, "config", None), "bos_token_id", None) if start is None else start
    if first is None:
        raise ValueError(
            f"sampled_data: {type(model).__name__} has no bos_token_id; pass start, a token that texts begin with"
        )
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    total = -(-sequences // BATCH) * (length - 1)
    steps = iter(with_progress(range(total), "sampling", "token"))
    rows = []
    for begin in range(0, sequences, BATCH):
        tokens = [torch.full((min(BATCH, sequences - begin), 1), first, device=device)]
        cache: Any = None
        for _ in range(length - 1):
            out = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens.append(torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=generator))
            next(steps)
        rows.append(torch.cat(tokens, 1))
    next(steps, None)  # closes the bar
    return list(torch.cat(rows).split(batch))
