"""transformers' Trainer: quantize the model, then train it as any other.

    python -m examples.frameworks.hf_trainer --folder out/trainer --recipe mxfp8
    torchrun --nproc-per-node 2 -m examples.frameworks.hf_trainer --folder out/trainer --recipe float8-delayed

The Trainer saves and loads what a quantized layer needs, amax histories included: they are in the model's state dict.
``--experts`` trains a mixture of experts. ``save_pretrained`` splits its stacks into the tensors of the published
checkpoint. To resume, the Trainer of transformers 5.23 loads these by ``load_state_dict``, which does not know their
names. Without ``keep_names`` the experts of such a model, quantized or not, would start again from initial values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainerCallback, TrainingArguments

import mxtensor as mx

from ..ranks import leave
from .common import SIZE, Windows, kill_at, llama, made, parsed, share_scales, write_result


def keep_names(model: Any) -> Any:
    """The model; what it saves from now on has the names and shapes of its state dict. ``from_pretrained`` reads it."""
    model.save_pretrained = partial(model.save_pretrained, save_original_format=False)
    return model


def mixture(recipe: str) -> Any:
    """A tiny Qwen3-MoE of transformers over bytes, whose experts train by a recipe, too."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=64, moe_intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, attn_implementation="eager")
    config = Qwen3MoeConfig(vocab_size=256, max_position_embeddings=SIZE.context, **sizes)
    return keep_names(mx.quantize_(Qwen3MoeForCausalLM(config), made(recipe)))


class Steps(TrainerCallback):
    """Shares the scales of delayed scaling between ranks, and ends the process where ``--kill`` says."""

    def __init__(self, args: Any) -> None:
        self.args = args

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After the backward pass."""
        share_scales(given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After the update, before a checkpoint is written."""
        kill_at(state.global_step, self.args)


def main(argv: Sequence[str] | None = None) -> None:
    """Train; the result is in ``--folder``."""
    args = parsed(__doc__ or "", argv, ("--experts", "train a mixture of experts instead of a Llama"))
    model = mixture(args.recipe) if args.experts else llama(args.recipe)
    options = TrainingArguments(
        str(args.folder), max_steps=args.steps, save_steps=args.save, per_device_train_batch_size=SIZE.batch,
        learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True, seed=0,
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=Windows(256), callbacks=[Steps(args)])
    trainer.train(resume_from_checkpoint=args.resume)
    write_result(args, model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    leave()


if __name__ == "__main__":
    main()
