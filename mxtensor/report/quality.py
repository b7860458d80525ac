"""How well a language model predicts a text, and how far its predictions are from those of another model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WINDOW = 256
"""Tokens of text that a model sees at once."""
LARGEST_LOSS = 709.0
"""Above it, exp is not a float."""


@dataclass(frozen=True)
class Quality:
    """How well a model predicts a text, and how far its predictions are from those of another model."""

    perplexity: float
    kl: float
    """Mean Kullback-Leibler divergence from the other model, in nats per token."""
    kl_error: float
    """The standard error of that mean."""
    same_token: float
    """How often both models find the same token the most likely one, 0 to 1."""
    tokens: int
    """Predicted tokens."""
    reference_perplexity: float | None = None
    """Of the other model."""


def windows(tokenizer: Any, text: str, count: int | None = None, window: int = WINDOW) -> Tensor:
    """The first ``count`` tokens of ``text`` (None: all) as rows of ``window`` tokens; what is left over is dropped.

    ``tokenizer``: one of transformers. Raises ValueError if the text is shorter than that, or than one window.
    """
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[0]
    if count is not None and len(ids) < count:
        raise ValueError(
            f"the text has {len(ids)} tokens; {count} were asked for: pass a longer text, or count={len(ids)}"
        )
    count = len(ids) if count is None else count
    if count < 2:
        raise ValueError(f"the text has {len(ids)} tokens, and at least 2 are needed: pass a longer text")
    if count < window:
        raise ValueError(f"{count} tokens of the text are less than a window of {window}: pass more, or window={count}")
    return ids[: count // window * window].view(-1, window)


@torch.no_grad()
def log_probabilities(model: Any, rows: Tensor, done: Callable[[], object] = lambda: None) -> Tensor:
    """The logarithms of the probabilities of each next token, (rows, window - 1, vocabulary), in float32.

    ``rows``: token ids, (rows, window), on the device of the model. ``done`` is called after each row.
    """
    out = []
    for row in rows:
        out.append(model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1))
        done()
    return torch.stack(out)


def _tokens(found: Tensor, reference: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Four numbers for each predicted token: the negative logarithm of the probability of the token that follows, the
    same of the other model, the KL divergence, and whether both find the same token the most likely one."""
    loss, other = (-model.gather(-1, rows[:, 1:, None]).flatten() for model in (found, reference))
    terms = reference.exp() * (reference - found)
    kl = terms.masked_fill(reference.isneginf(), 0.0).sum(-1)  # what cannot follow, by its mask, adds nothing
    same = found.argmax(-1) == reference.argmax(-1)
    return loss, other, kl.flatten().double(), same.flatten().float()


def _quality(tokens: Sequence[tuple[Tensor, ...]]) -> Quality:
    loss, other, kl, same = map(torch.cat, zip(*tokens, strict=True))
    means = (x.mean().item() for x in (loss, other))
    perplexity, reference = (math.exp(x) if x < LARGEST_LOSS else math.inf for x in means)
    error = (kl.std() / len(kl) ** 0.5).item() if len(kl) > 1 else math.nan
    return Quality(perplexity, kl.mean().item(), error, same.mean().item(), len(kl), reference)


def quality(found: Tensor, reference: Tensor, rows: Tensor) -> Quality:
    """Compare two results of ``log_probabilities`` of the same ``rows``."""
    return _quality([_tokens(found, reference, rows)])


def evaluate(model: Any, rows: Tensor, reference: Any = None, done: Callable[[], object] = lambda: None) -> Quality:
    """The quality of ``model`` on ``rows`` of token ids, compared with the model ``reference`` (None: with itself).

    One row is in memory at a time: (window, vocabulary) values of each model. ``done`` is called after each row.
    Raises ValueError if the two models have vocabularies of different sizes.
    """
    tokens = []
    for row in rows.split(1):
        found = log_probabilities(model, row)
        other = found if reference is None else log_probabilities(reference, row)
        if other.shape != found.shape:
            raise ValueError(
                f"the model has a vocabulary of {found.shape[-1]} tokens, the reference one of {other.shape[-1]}; "
                "compare a model with its own high-precision version"
            )
        tokens.append(_tokens(found, other, row))
        done()
    return _quality(tokens)
