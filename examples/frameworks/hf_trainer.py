"""transformers' Trainer: quantize the model, then train it as any other.

    python -m examples.frameworks.hf_trainer --folder out/trainer --recipe mxfp8
    torchrun --nproc-per-node 2 -m examples.frameworks.hf_trainer --folder out/trainer --recipe float8-delayed

The Trainer saves and loads what a quantized layer needs, amax histories included: they are in the model's state dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from .common import SIZE, Windows, kill_at, llama, parsed, share_scales, write_result


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
    args = parsed(__doc__ or "", argv)
    model = llama(args.recipe)
    options = TrainingArguments(
        str(args.folder), max_steps=args.steps, save_steps=args.save, per_device_train_batch_size=SIZE.batch,
        learning_rate=1e-2, logging_steps=1, report_to=[], disable_tqdm=True, seed=0,
        use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, options, train_dataset=Windows(256), callbacks=[Steps(args)])
    trainer.train(resume_from_checkpoint=args.resume)
    write_result(args, model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])


if __name__ == "__main__":
    main()
