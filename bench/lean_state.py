"""Does training notice that the state is kept in fewer bits? Trains a small GPT with each format.

    python bench/lean_state.py               # characters of Shakespeare, two CPU cores, 10 minutes
    python bench/lean_state.py --train T.bin --valid V.bin --device cuda --size gpu

MARS-AdamW as `MARS.from_adamw` makes it, the same weights and batches for each format, several
seeds. On a GPU it also counts in how many tensor-steps the norm had to read the last gradient.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from convert_rates import DECAY, SIZES, Lab, adamw, arguments

from mars import MARS

FORMATS = (None, "bfloat16", "8bit")
RATE = {"cpu": 1e-2, "gpu": 1.5e-3}  # AdamW's best, from convert_rates.py


class Counting(MARS):
    """Counts the tensors whose clip had to be computed, by the fused engine's own counters."""

    seen = exact = 0

    def step(self, closure=None, *, bs=None):
        result = super().step(closure, bs=bs)
        if self._plan is not None:
            from mars.engines.fused import layout as at

            for launch, _ in self._plan.launches:
                done = launch.counters[at.CONTROL.value :].view(-1, at.COUNTERS.value)
                Counting.exact += (done[:, at.EXACT_DONE.value] > 0).sum()
                Counting.seen += launch.counts[1]
        return result


def main() -> None:
    args = arguments(__doc__, 3, "runs/lean_state.json").parse_args()
    lab = Lab(args)
    rows = []
    for form in FORMATS:
        made: list[MARS] = []

        def make(model, form=form, made=made):
            made[:] = [
                MARS.from_adamw.__func__(
                    Counting, adamw(model, RATE[args.size]), verbose=False, state_dtype=form
                )
            ]
            return made[0]

        Counting.seen = Counting.exact = 0
        point = lab.point(f"MARS-AdamW, state {form or 'float32'}", RATE[args.size], make)
        state = made[0].state.values()
        held = sum(v.numel() * v.element_size() for own in state for v in own.values() if v.ndim)
        point["bytes"] = held / sum(p.numel() for p in lab.model.parameters())
        point["exact_norms"] = int(Counting.exact) / max(1, Counting.seen)
        spared = f", h read for the norm in {point['exact_norms']:.1%}" if Counting.seen else ""
        print(f"    {point['bytes']:.2f} bytes of state a parameter{spared}")
        rows.append({"state_dtype": form, **point})
        lab.model.zero_grad()
    device = (
        torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({
        "command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "device": device,
        "corpus": lab.corpus, "size": SIZES[args.size], "seeds": args.seeds, "decay": DECAY,
        "rate_of_adamw": RATE[args.size], "tokens": lab.batch * lab.context * lab.steps,
        "parameters": sum(p.numel() for p in lab.model.parameters()), "rows": rows,
    }, indent=1))  # fmt: skip
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
