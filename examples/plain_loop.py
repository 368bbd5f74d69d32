"""MARS in a loop of your own: routing, a schedule, clipping, and a checkpoint that resumes exactly.

    python examples/plain_loop.py --out runs/plain
    python examples/plain_loop.py --out runs/plain --resume runs/plain/step-20.pt

Both end with the same digest: parameters and optimizer state are equal to the bit.
"""

from __future__ import annotations

import torch

import mars
from shared import BATCH, arguments, digest, gpt, rows, warmup_cosine


def main(argv: list[str] | None = None) -> str:
    """Train; returns the digest of parameters and optimizer state at the end."""
    args = arguments(__doc__).parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    data, model = rows(), gpt()

    # Matrices by MARS-Shampoo; embeddings, head, norms and biases by AdamW at lr_1d.
    groups = mars.param_groups(model, mars_type="mars-shampoo")
    optimizer = mars.MARS(groups, lr=0.032, lr_1d=0.016, weight_decay=0.1, max_grad_norm=1.0)
    scheduler = warmup_cosine(optimizer, args.steps)

    start = 0
    if args.resume:
        saved = torch.load(args.resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["rng"])  # dropout goes on where it was
        start = saved["step"]

    for step in range(start, args.steps):
        batch = data[step * BATCH : (step + 1) * BATCH]  # a function of the step: nothing to save
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()  # clips by max_grad_norm inside
        optimizer.zero_grad()
        scheduler.step()
        print(f"step {step + 1}  loss {loss.item():.4f}")
        if (step + 1) % args.save_every == 0:
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state(),
                "step": step + 1,
            }  # fmt: skip
            torch.save(state, args.out / f"step-{step + 1}.pt")
            print(f"saved {args.out / f'step-{step + 1}.pt'}")
    print(f"digest {(found := digest(model, optimizer))}")
    return found


if __name__ == "__main__":
    main()
