"""Which tensors of a checkpoint are matrices of products, by name and shape, if no model is there to ask.

A mixture of experts often stores the experts of a layer as one tensor of three dimensions. Convolutions have three
dimensions, too, so that names decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..convert.weights import ATTENTION, EXPERTS
from ..numerics.formats import Orientation

TRANSPOSED = ("gpt_oss", "llama4", "llama4_text", "aria", "aria_text", "openai_privacy_filter")
"""``model_type`` of transformers' models whose experts are (experts, in, out); those of all others are
(experts, out, in)."""
STACKED = tuple(sorted({name for names in EXPERTS for name in names}))
"""Parameters of a module ``experts`` that are stacks, of transformers."""
PARALLEL = ("input_linear", "output_linear")
"""Modules of transformers' ParallelExperts."""


def matrix_orientation(name: str, shape: Sequence[int], config: Mapping[str, Any]) -> Orientation | None:
    """How a product contracts the tensor called ``name``; None: no product has it.

    ``config``: the model's ``config.json``. Two dimensions: any ``weight`` (out, in), and the projections of
    nn.MultiheadAttention. Three: stacked experts of transformers, GGUF (``ffn_up_exps.weight``) and MLX
    (``experts.up_proj.weight``, ``switch_mlp.up_proj.weight``).
    """
    module, _, leaf = name.rpartition(".")
    if len(shape) == 2:
        return Orientation.ROWWISE if leaf in ("weight", *ATTENTION) else None
    if len(shape) != 3:
        return None
    parent, _, last = module.rpartition(".")
    if leaf in STACKED and last == "experts":
        nested = config.get("text_config")
        types = {c.get("model_type") for c in (config, nested) if isinstance(c, Mapping)}
        return Orientation.COLUMNWISE if types & {*TRANSPOSED} else Orientation.ROWWISE
    in_experts = parent.rpartition(".")[2] in ("experts", "switch_mlp") and last in STACKED
    if leaf == "weight" and (in_experts or last.endswith("_exps") or last in PARALLEL):
        return Orientation.ROWWISE
    return None
