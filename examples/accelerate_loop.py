"""MARS with Accelerate: gradient accumulation, a schedule, clipping, and exact resumption.

    python examples/accelerate_loop.py --out runs/accelerate
    python examples/accelerate_loop.py --out runs/accelerate --resume runs/accelerate/step-20

Both end with the same digest: parameters and optimizer state are equal to the bit.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import mars
from shared import BATCH, arguments, digest, gpt, rows, warmup_cosine

MICRO_BATCHES = 2


def main(argv: list[str] | None = None) -> str:
    """Train; returns the digest of parameters and optimizer state at the end."""
    args = arguments(__doc__).parse_args(argv)
    torch.manual_seed(0)
    # The schedule below counts optimizer steps; by default Accelerate would move it once a process.
    accelerator = Accelerator(
        gradient_accumulation_steps=MICRO_BATCHES, step_scheduler_with_optimizer=False, cpu=True
    )
    model = gpt()
    groups = mars.param_groups(model, mars_type="mars-shampoo")
    optimizer = mars.MARS(groups, lr=0.032, lr_1d=0.016, weight_decay=0.1, max_grad_norm=1.0)
    scheduler = warmup_cosine(optimizer, args.steps)
    loader = DataLoader(
        TensorDataset(rows()[: args.steps * BATCH]), batch_size=BATCH // MICRO_BATCHES,
        generator=torch.Generator(),  # of its own, or opening it would draw from dropout's numbers
    )  # fmt: skip
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    step = 0
    if args.resume:
        accelerator.load_state(str(args.resume))
        step = int(args.resume.name.removeprefix("step-"))
        loader = accelerator.skip_first_batches(loader, step * MICRO_BATCHES)
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(batch[:, :-1], batch[:, 1:])
            accelerator.backward(loss)  # divides by the number of micro-batches
            optimizer.step()  # does nothing until the last of them; clips inside
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        scheduler.step()
        step += 1
        accelerator.print(f"step {step}  loss {loss.item():.4f}")
        if step % args.save_every == 0:
            accelerator.save_state(str(args.out / f"step-{step}"))
            accelerator.print(f"saved {args.out / f'step-{step}'}")
    accelerator.print(f"digest {(found := digest(model, optimizer))}")
    return found


if __name__ == "__main__":
    main()
