"""What the four programs share: their arguments, the text, a small model, and a digest of its weights."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import mxtensor as mx
from mxtensor.core.compat import local_of
from mxtensor.recipe import Recipe

from ..gpt import SIZES, load_text
from ..ranks import started_by_torchrun
from ..recipes import RECIPES, recipe_of

STEPS: set[int] = set()
"""The steps of this process."""
SIZE = replace(SIZES["tiny"], width=64)  # parts of two ranks are whole blocks


def parsed(
    doc: str, argv: Sequence[str] | None, *switches: tuple[str, str], by_torchrun: bool = False
) -> argparse.Namespace:
    """The arguments of every program, and the switches of this one, each with its help. ``by_torchrun``: the program
    needs the ranks that torchrun starts, also if there is only one."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="where checkpoints and the result go")
    add("--recipe", choices=[name for name in RECIPES if name not in ("none", "bf16")], default="mxfp8")
    add("--steps", type=int, default=8, metavar="N", help="the number of steps (8)")
    add("--save", type=int, default=4, metavar="N", help="save every N steps (4)")
    add("--kill", type=int, metavar="N", help="kill this process after step N, as a machine that fails would")
    add("--kill-rank", type=int, metavar="R", help="kill rank R only (all ranks)")
    add("--resume", action="store_true", help="continue from the last checkpoint in the folder")
    for name, what in switches:
        add(name, action="store_true", help=what)
    args = parser.parse_args(argv)
    if by_torchrun and not started_by_torchrun():
        module = f"examples.frameworks.{Path(parser.prog).stem}"
        parser.error(f"torchrun starts its ranks: torchrun --nproc-per-node 2 -m {module} --folder {args.folder}")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)  # runs are compared bit for bit
    args.folder.mkdir(parents=True, exist_ok=True)
    return args


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of the text at fixed places: item i is always the same."""

    def __init__(self, count: int) -> None:
        text, self.count = load_text(None).long(), count
        starts = torch.randint(len(text) - SIZE.context, (count,), generator=torch.Generator().manual_seed(0))
        self.windows = torch.stack([text[start : start + SIZE.context] for start in starts.tolist()])

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def made(recipe: str) -> Recipe:
    """The recipe with this name."""
    found = recipe_of(recipe)
    assert found is not None, "none and bf16 are not choices"
    return found


def llama(recipe: str) -> Any:
    """A tiny Llama of transformers over bytes, which trains by a recipe.

    Its attention is plain products: on a GPU torch's fused one adds float32 gradients up in any order, so that no two
    runs are equal.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    sizes["attn_implementation"] = "eager"
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=SIZE.context, **sizes))
    return mx.quantize_(model, made(recipe))


def share_scales(model: nn.Module) -> None:
    """After a backward pass: with delayed scaling all ranks scale by what any of them has seen."""
    if dist.is_initialized():
        mx.parallel.share_amax(model)


def kill_at(step: int, args: argparse.Namespace) -> None:
    """Called once in each step. At ``--kill`` the process ends as if the machine had failed: no handler runs."""
    STEPS.add(step)
    if step == args.kill and args.kill_rank in (None, int(os.environ.get("RANK", 0))):
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def random_state() -> dict[str, Tensor]:
    """The random numbers of this process, on the CPU and on its GPU, which stochastic rounding draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Continue with the random numbers of ``random_state``."""
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu())


def digest(model: nn.Module) -> str:
    """A hash of all parameters of this rank, and of all buffers and histories in its state dict."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            value = local_of(value)
            found.update(name.encode() + value.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def write_result(args: argparse.Namespace, model: nn.Module, losses: Sequence[float]) -> None:
    """``result-RANK.json``: the losses of all steps, the digest of the final weights, the first step run here."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    result: dict[str, Any] = {"losses": list(losses), "digest": digest(model), "first": min(STEPS)}
    (args.folder / f"result-{rank}.json").write_text(json.dumps(result))
    if rank == 0:
        print(f"{len(losses)} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, {result['digest'][:12]}")
