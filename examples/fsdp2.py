"""MARS on shards: FSDP2, routing, clipping, and a checkpoint that any number of processes loads.

    torchrun --nproc_per_node=2 examples/fsdp2.py --out runs/fsdp2
    torchrun --nproc_per_node=1 examples/fsdp2.py --out runs/fsdp2 --resume runs/fsdp2/step-20

Without GPUs it runs on CPUs, by gloo.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import mars
from shared import BATCH, arguments, gpt, rows, warmup_cosine


def main(argv: list[str] | None = None) -> None:
    args = arguments(__doc__).parse_args(argv)
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)  # FSDP2 moves its shards to the current one
    torch.manual_seed(0)  # the same initial weights everywhere
    data, model = rows(), gpt(dropout=0.0).to(device)

    # Shard first, then make the optimizer: it takes the parameters that there are now.
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    groups = mars.param_groups(model, mars_type="mars-shampoo")
    optimizer = mars.MARS(groups, lr=0.032, lr_1d=0.016, weight_decay=0.1, max_grad_norm=1.0)
    scheduler = warmup_cosine(optimizer, args.steps)

    start = 0
    if args.resume:
        own, theirs = get_state_dict(model, optimizer)  # makes the state that is then loaded
        saved = {"model": own, "optimizer": theirs, "scheduler": scheduler.state_dict(), "step": 0}
        dcp.load(saved, checkpoint_id=args.resume)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        scheduler.load_state_dict(saved["scheduler"])
        start = saved["step"]

    for step in range(start, args.steps):
        batch = data[step * BATCH : (step + 1) * BATCH][rank::world].to(device)  # this one's rows
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()  # norms are those of whole tensors, over all processes
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            print(f"step {step + 1}  loss {mean.item():.4f}", flush=True)
        if (step + 1) % args.save_every == 0:
            own, theirs = get_state_dict(model, optimizer)
            saved = {
                "model": own, "optimizer": theirs, "scheduler": scheduler.state_dict(),
                "step": step + 1,
            }  # fmt: skip
            dcp.save(saved, checkpoint_id=args.out / f"step-{step + 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
