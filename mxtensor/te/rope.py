"""Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864): the angles, and the rotation of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.arguments import COUNT, FLAG, POSITIVE, SIZE, Kind, check, checked, is_dense_float, optional
from .arguments import one_of
from .context_parallel import of_chunks
from .dot_product_attention import QKV_FORMATS
from .extra_state import ignore_keys


class RotaryPositionEmbedding(nn.Module):
    """The angles ``position * base^(-2i / dim)`` of the first ``dim * rotary_percent`` channels of a head.

    ``interleaved``: channels 2i and 2i + 1 form a pair, otherwise i and i + half. ``seq_len_interpolation_factor``
    divides positions (arXiv:2306.15595). With ``pretrained_max_position_embeddings``, sequences longer than that number
    times ``seq_len_interpolation_factor`` are scaled to ``pretrained_max_position_embeddings`` positions instead.
    ``inv_freq`` stays float32 whatever dtype the model is converted to: bfloat16 cannot distinguish positions beyond
    256.

    Raises ValueError for a rotary dimension that is not even and positive.
    """

    inv_freq: Tensor

    @checked(
        dim=COUNT, rotary_percent=POSITIVE, seq_len_interpolation_factor=optional(POSITIVE),
        pretrained_max_position_embeddings=optional(COUNT), rotary_base=POSITIVE,
    )  # fmt: skip
    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        *,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = int(dim * rotary_percent)
        if not 0 < self.dim <= dim or self.dim % 2:
            raise ValueError(
                f"RotaryPositionEmbedding: dim={dim} and rotary_percent={rotary_percent} give {self.dim} rotary "
                f"channels, which rotate in pairs; choose them so that the number is even and from 2 to {dim}"
            )
        self.rotary_base, self.interleaved = rotary_base, interleaved
        self.interpolation, self.pretrained = seq_len_interpolation_factor, pretrained_max_position_embeddings
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        ignore_keys(self, "inv_freq")  # TransformerEngine saves it; here the arguments determine it

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim
        return 1.0 / self.rotary_base**exponents

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> RotaryPositionEmbedding:
        super()._apply(fn, recurse)
        self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """The angles of the positions offset ... offset + max_seq_len - 1: (max_seq_len, 1, 1, dim) float32."""
        check("RotaryPositionEmbedding", "max_seq_len", max_seq_len, SIZE)
        check("RotaryPositionEmbedding", "offset", offset, SIZE)
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.inv_freq.device) + offset
        if self.interpolation is not None:
            divisor = self.interpolation
            if self.pretrained is not None and max_seq_len > self.pretrained * self.interpolation:
                divisor = max_seq_len / self.pretrained
            positions = positions / divisor
        angles = positions[:, None] * self.inv_freq
        pairs = angles.repeat_interleave(2, -1) if self.interleaved else torch.cat((angles, angles), -1)
        return pairs[:, None, None, :]


ROTATED = Kind(
    "a dense floating-point torch.Tensor of 4 dimensions",
    lambda t: isinstance(t, Tensor) and is_dense_float(t),
    lambda t: t.dim() == 4,
)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, tensor_format: str = "sbhd", *, interleaved: bool = False, fused: bool = False,
    cp_size: int = 1, cp_rank: int = 0,
) -> Tensor:  # fmt: skip
    """``t`` (s, b, h, d), or (b, s, h, d) for ``bshd``, with its first ``freqs.shape[-1]`` channels rotated.

    ``freqs`` (s or more, 1, 1, d or fewer): angles from ``RotaryPositionEmbedding`` with the same ``interleaved``.
    Computed in float32 (float64 for float64) and rounded once to the dtype of ``t``. ``fused`` has no effect. With
    ``cp_size`` ranks of context parallelism ``t`` has the two chunks of rank ``cp_rank``, and ``freqs`` the angles of
    the whole sequence. Raises ValueError for an unknown format, and for angles of too few positions or too many
    channels.
    """
    one_of("apply_rotary_pos_emb: tensor_format", tensor_format, QKV_FORMATS)
    check("apply_rotary_pos_emb", "t", t, ROTATED)
    check("apply_rotary_pos_emb", "freqs", freqs, ROTATED)
    check("apply_rotary_pos_emb", "interleaved", interleaved, FLAG)
    check("apply_rotary_pos_emb", "fused", fused, FLAG)
    if t.device != freqs.device:
        raise ValueError(f"apply_rotary_pos_emb: t is on {t.device}, freqs on {freqs.device}; move one with .to()")
    length, channels = t.shape[tensor_format.index("s")], freqs.shape[-1]
    check("apply_rotary_pos_emb", "cp_size", cp_size, COUNT)
    check("apply_rotary_pos_emb", "cp_rank", cp_rank, SIZE)
    if cp_size > 1:
        freqs = of_chunks(freqs, length, cp_size, cp_rank)
    if length > freqs.shape[0] or channels > t.shape[-1] or channels % 2 or freqs.shape[1:3] != (1, 1):
        raise ValueError(
            f"apply_rotary_pos_emb: angles {tuple(freqs.shape)} do not cover {tensor_format} {tuple(t.shape)}; "
            f"make them by RotaryPositionEmbedding(dim={t.shape[-1]})({length})"
        )
    freqs = freqs[:length] if tensor_format == "sbhd" else freqs[:length].transpose(0, 1)
    x = t[..., :channels].to(torch.promote_types(t.dtype, torch.float32))
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    rotated = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
    x = x * freqs.cos() + rotated * freqs.sin()
    return torch.cat((x.to(t.dtype), t[..., channels:]), -1)
