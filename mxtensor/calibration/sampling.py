"""Calibration data without a text: the model samples it, so that it covers every kind of text that the model knows.

Source: Liu et al., "LLM-QAT: Data-Free Quantization Aware Training for Large Language Models", 2023.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, INTEGER, MODULE, check, optional
from ..core.called_layers import in_evaluation
from ..core.progress import with_progress

BATCH = 32
"""Sequences that are sampled at once, unless a call says otherwise."""


@torch.no_grad()
def sampled_data(
    model: nn.Module, sequences: int = 64, length: int = 256, *, start: int | Tensor | None = None, seed: int = 0,
    batch: int = 8, at_once: int = BATCH,
) -> list[Tensor]:  # fmt: skip
    """Sample token ids from a causal language model of transformers, as batches for ``mx.calibrate``.

    Each of the ``sequences`` begins with the token ``start`` (None: the model's ``bos_token_id``; a tensor
    (sequences,): one token for each) and has ``length`` tokens, drawn from the model's own probabilities in evaluation
    mode. Returns a list of int64 tensors (``batch``, ``length``); the last one has the remaining sequences. ``at_once``
    sequences are sampled in parallel: a GPU takes thousands. The same ``seed`` and ``at_once`` give the same tokens on
    the same device. Raises ValueError if the model has no ``bos_token_id`` and ``start`` is None, or if ``start`` is a
    tensor of another shape.
    """
    check("sampled_data", "model", model, MODULE)
    for name, value in (("sequences", sequences), ("length", length), ("batch", batch), ("at_once", at_once)):
        check("sampled_data", name, value, COUNT)
    check("sampled_data", "seed", seed, INTEGER)
    if not isinstance(start, Tensor):
        check("sampled_data", "start", start, optional(INTEGER))
    elif tuple(start.shape) != (sequences,):
        raise ValueError(
            f"sampled_data: start has the shape {tuple(start.shape)}; pass one token, or one for each of the "
            f"{sequences} sequences"
        )
    first = getattr(getattr(model, "config", None), "bos_token_id", None) if start is None else start
    if first is None:
        raise ValueError(
            f"sampled_data: {type(model).__name__} has no bos_token_id; pass start, a token that texts begin with"
        )
    device = next(model.parameters()).device
    firsts = first.to(device) if isinstance(first, Tensor) else torch.full((sequences,), first, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    total = -(-sequences // at_once) * (length - 1)
    steps = iter(with_progress(range(total), "sampling", "token"))
    rows = []
    with in_evaluation(model):
        for begin in range(0, sequences, at_once):
            tokens = [firsts[begin : begin + at_once, None]]
            cache: Any = None
            for _ in range(length - 1):
                out = model(input_ids=tokens[-1], past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                tokens.append(torch.multinomial(out.logits[:, -1].float().softmax(-1), 1, generator=generator))
                next(steps)
            rows.append(torch.cat(tokens, 1))
    next(steps, None)  # closes the bar
    return list(torch.cat(rows).split(batch))
