"""accelerate with FSDP2: quantize the model, then let ``prepare`` shard it.

    torchrun --nproc-per-node 2 -m examples.frameworks.accelerate_fsdp --folder out/accelerate --recipe mxfp8

``--replicate`` trains the same without sharding: every rank has the whole model, and the losses are equal to the bit.
With recipes that allow it (``two_dimensional_weights``, ``single_weight_copy``) FSDP2 gathers codes. ``save_state``
writes the shards by ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from ..ranks import leave
from .common import SIZE, Windows, kill_at, llama, parsed, share_scales, write_result


def accelerator(replicate: bool) -> Accelerator:
    """An Accelerator with FSDP2, or one that replicates the model. accelerate turns FSDP2 on for accelerators only; on
    a CPU the same fields are set."""
    if replicate:
        return Accelerator(cpu=not torch.cuda.is_available())
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False,
    )  # fmt: skip
    made = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if made.device.type == "cpu":
        for state in (PartialState(), AcceleratorState()):  # the second copies the first whenever it is asked for
            state.distributed_type = DistributedType.FSDP
        made.state.fsdp_plugin = plugin
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Train; the result is in ``--folder``."""
    replicate = ("--replicate", "replicate the model instead of sharding it")
    args = parsed(__doc__ or "", argv, replicate, by_torchrun=True)
    engine, model = accelerator(args.replicate), llama(args.recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(Windows(256), SIZE.batch, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, data = engine.prepare(model, optimizer, data)
    losses: list[float] = []
    if args.resume:
        last = max(args.folder.glob("step-*"), key=lambda path: int(path.name[5:]))
        engine.load_state(str(last))
        losses = json.loads((last / "losses.json").read_text())
        data = engine.skip_first_batches(data, len(losses))
    for batch in data:
        if len(losses) == args.steps:
            break
        loss = model(**batch).loss
        engine.backward(loss)
        share_scales(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.reduce(loss.detach(), "mean").item())
        if len(losses) % args.save == 0:
            folder = args.folder / f"step-{len(losses)}"
            engine.save_state(str(folder))
            if engine.is_main_process:
                (folder / "losses.json").write_text(json.dumps(losses))
            engine.wait_for_everyone()
        kill_at(len(losses), args)
    write_result(args, model, losses)
    leave()
    engine.end_training()


if __name__ == "__main__":
    main()
