"""Lightning: quantize the model inside a LightningModule; checkpoints and resuming are Lightning's own.

    python -m examples.frameworks.lightning_fit --folder out/lightning --recipe mxfp8
    torchrun --nproc-per-node 2 -m examples.frameworks.lightning_fit --folder out/lightning --recipe float8-delayed

after ``pip install 'mxtensor[frameworks]'``. Amax histories are in the state dict that Lightning saves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import mxtensor as mx

try:
    import lightning.pytorch as lightning
except ImportError:  # the package that has Lightning's trainer alone
    import pytorch_lightning as lightning  # type: ignore[no-redef]

from ..gpt import GPT, paper_layers
from ..ranks import leave
from .common import SIZE, Windows, kill_at, made, parsed, random_state, set_random_state, share_scales, write_result


class Module(lightning.LightningModule):
    """The GPT of ``examples.gpt`` with quantized linear layers."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.args, self.losses = args, list[float]()
        self.random: dict[str, Tensor] | None = None
        self.model = mx.quantize_(GPT(SIZE), made(args.recipe), paper_layers)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        loss = self.model.loss(batch["input_ids"])
        mean: Any = self.all_gather(loss.detach())
        self.losses.append(mean.mean().item())
        return loss

    def on_after_backward(self) -> None:
        """Before the update."""
        share_scales(self)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """This rank's windows, after those that a run has seen that this one continues. Lightning skips none by itself:
        it asks a loader for its state, and torch's has none."""
        rank, world = self.trainer.global_rank, self.trainer.world_size
        seen = self.trainer.global_step * SIZE.batch * world
        return DataLoader(Subset(Windows(256), range(seen + rank, 256, world)), SIZE.batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, as for a model that is not quantized."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The losses so far, and the random numbers, which stochastic rounding draws: Lightning saves none."""
        checkpoint["losses"], checkpoint["random"] = self.losses, random_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The same; loaders draw random numbers too, so that those of the checkpoint wait for the first batch."""
        self.losses, self.random = list(checkpoint["losses"]), checkpoint["random"]

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        """Before a step."""
        if self.random is not None:
            set_random_state(self.random)
            self.random = None


class Kill(lightning.Callback):
    """Ends the process where ``--kill`` says; after ModelCheckpoint, which Lightning calls last."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """Before a step, when the one before it has been saved."""
        kill_at(trainer.global_step, module.args)


def main(argv: Sequence[str] | None = None) -> None:
    """Train; the result is in ``--folder``."""
    args = parsed(__doc__ or "", argv)
    module = Module(args)
    saver = lightning.callbacks.ModelCheckpoint(
        args.folder, "{step}", every_n_train_steps=args.save, save_top_k=-1, save_last=True
    )
    trainer = lightning.Trainer(
        max_steps=args.steps, accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("WORLD_SIZE", 1)), callbacks=[saver, Kill()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, ckpt_path="last" if args.resume else None)
    write_result(args, module.model, module.losses)
    leave()


if __name__ == "__main__":
    main()
