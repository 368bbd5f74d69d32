"""A plan in words: tables, the answer, the assumptions; and the table of errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mars.lab.planner import gpus
from mars.lab.planner.predict import Job, Prediction, fits_from
from mars.lab.planner.steps import OPTIMIZERS
from mars.lab.planner.validate import LARGE, Compared
from mars.lab.report import fit, units


def table(rows: fit.Rows, left: int = 1, room: int | None = None) -> str:
    """Aligned columns under a head; the first ``left`` ones to the left, and in every part."""
    parts = fit.blocks(rows, room, left)
    return "\n\n".join(fit.aligned(part, left) for part in parts)


def describe(job: Job, predictions: Sequence[Prediction], room: int | None = None) -> str:
    """The whole text, for a terminal with this many columns."""
    assumed = "assumptions\n" + "\n".join(f"- {line}" for line in assumptions(job))
    parts = [
        headline(job),
        f"memory of the fullest rank (peak: of forward, backward or step, not the sum)\n"
        f"{_memory(job, predictions, room)}",
        f"the optimizer's step\n{_optimizer(predictions, room)}",
        f"a training step\n{_step(job, predictions, room)}",
        *([fit.fold(host_bound(job), room)] if job.host_bound else []),
        fit.fold(answer(job, predictions), room),
        fit.fold(assumed, room),
    ]
    return "\n\n".join(parts)


def headline(job: Job) -> str:
    model, cluster = job.model, job.cluster
    nodes = f" in {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    way = f" by {cluster.strategy}" if cluster.gpus > 1 else ""
    passes = f"{job.passes} pass{'es' if job.passes > 1 else ''} of {job.micro_batch}"
    return (
        f"{model.name}: {units.tokens(model.elements)} parameters on {cluster.gpus} x "
        f"{cluster.gpu.name}{nodes}{way}\n"
        f"{units.tokens(job.tokens)} tokens a step: {passes} x {model.run.gpt.block_size} "
        f"tokens on each GPU{_rounded(job)}"
    )


def _rounded(job: Job) -> str:
    """A line on a default that is not what is planned."""
    default, gpus = job.default_batch, job.cluster.gpus
    if default is None:
        return ""
    why = f"{gpus} GPUs cannot share evenly"
    if default % gpus == 0:
        why = f"passes of {job.micro_batch} do not divide"
    return f"\n{job.batch} sequences a step, not {default} as by default, which {why}"


def _memory(job: Job, predictions: Sequence[Prediction], room: int | None) -> str:
    head = ("", "parameters", "gradients", "state", "activations", "other", "step", "peak", "")
    rows: list[Sequence[str]] = [head]
    for p in predictions:
        m = p.memory
        held = (m.parameters, m.gradients, m.state, m.activations, m.logits + m.gathered)
        sizes = map(units.size, (*held, m.work_space, m.peak))
        rows.append((p.label, *sizes, verdict(job, p)))
    return table(rows, room=room)


def verdict(job: Job, p: Prediction) -> str:
    if p.fits and refused(job) and p.name.startswith("mars"):
        return f"would fit, {units.size(p.room_bytes)} left, but is refused: see below"
    if p.fits:
        return f"fits, {units.size(p.room_bytes)} left"
    return f"does not fit: {units.size(-p.room_bytes)} too much"


def refused(job: Job) -> bool:
    """Whether the library would not have the state in this form there."""
    return job.cluster.shards > 1 and job.setting.state == "8bit"


def _optimizer(predictions: Sequence[Prediction], room: int | None) -> str:
    head = (
        "", "engine", "moves", "Newton–Schulz", "repeated", "owned", "max/mean", "sends", "step",
        "naive",
    )  # fmt: skip
    rows: list[Sequence[str]] = [head]
    for p in predictions:
        work = p.iteration
        if work is None:
            cells = ("–",) * 5
        elif p.name == "muon":
            cells = (_flops(work.flops), units.seconds(work.naive_seconds), "–", "–",
                     units.size(work.naive_sent_bytes))  # fmt: skip
        else:
            cells = (_flops(work.flops), units.seconds(work.naive_seconds),
                     units.seconds(work.owned_seconds), f"{work.max_over_mean:.2f}",
                     units.size(work.owned_sent_bytes))  # fmt: skip
        rows.append((
            p.label, p.engine, units.size(p.step_bytes), *cells, units.seconds(p.optimizer_seconds),
            units.seconds(p.naive_optimizer_seconds),
        ))  # fmt: skip
    return table(rows, left=2, room=room)


def _flops(count: float) -> str:
    return f"{count / 1e12:.3g} TFLOP"


def host_bound(job: Job) -> str:
    """Why times of so short passes are not to be believed."""
    return (
        f"Passes of {units.seconds(job.compute_seconds / job.passes)} are bound by the host, whose "
        f"time is not modelled (at least {units.seconds(job.launch_seconds)} to launch one): steps "
        "take longer than this, and the optimizer's share of them is not known."
    )


def _step(job: Job, predictions: Sequence[Prediction], room: int | None) -> str:
    rows: list[Sequence[str]] = [
        ("", "compute", "sent", "not hidden", "optimizer", "step", "tokens/s", "optimizer's share")
    ]
    for p in predictions:
        rows.append((
            p.label, units.seconds(p.compute_seconds), units.size(p.traffic.sent_bytes),
            units.seconds(p.exposed_seconds), units.seconds(p.optimizer_seconds),
            units.seconds(p.step_seconds), units.tokens(p.tokens_per_second),
            "–" if job.host_bound else units.share(p.optimizer_share),
        ))  # fmt: skip
    return table(rows, room=room)


def answer(job: Job, predictions: Sequence[Prediction]) -> str:
    """Will it fit, and what does MARS cost there."""
    gpu = f"{job.cluster.gpus} x {job.cluster.gpu.name}"
    fitting = [p for p in predictions if p.fits]
    if len(fitting) == len(predictions):
        text = f"{job.model.name} fits on {gpu}"
        text += " with every one of these optimizers" if len(predictions) > 1 else ""
    elif fitting:
        names = ", ".join(p.label for p in fitting)
        text = f"{job.model.name} fits on {gpu} with {names} only"
    else:
        text = f"{job.model.name} does not fit on {gpu}"
    sentences = [text + "."]
    if refused(job):
        sentences.append("But shards with 8-bit state are refused by MARS: take bfloat16.")
    wanting = [p for p in predictions if not p.fits]
    if wanting:
        sentences.append(_remedy(job, wanting))
    base = next((p for p in predictions if p.name == "adamw"), None)
    if base is not None:
        sentences += [_cost(p, base, not job.host_bound) for p in predictions if p is not base]
    return "\n".join(sentences)


def _remedy(job: Job, wanting: Sequence[Prediction]) -> str:
    ways = []
    now = _enough([p.fits_from_gpus for p in wanting])
    if now is not None:
        ways.append(f"{now} GPUs by fsdp2 hold it with each of them")
    if job.micro_batch > 1:
        ways.append("--micro-batch 1 needs less for activations")
    if not job.recompute:
        again = dataclasses.replace(job, recompute=True)
        then = _enough([fits_from(again, OPTIMIZERS[p.name]) for p in wanting])
        if then is not None and then != now:
            ways.append(f"with --recompute {then} GPUs do")
    if job.setting.state == "float32":
        ways.append("--state bfloat16 halves MARS's state")
    return "Otherwise: " + ("; ".join(ways) or "a smaller model") + "."


def _enough(counts: Sequence[int | None]) -> int | None:
    """GPUs that are enough for all; None if for some no number is."""
    found = [count for count in counts if count is not None]
    return max(found) if found and len(found) == len(counts) else None


def _cost(p: Prediction, base: Prediction, timed: bool) -> str:
    more = p.memory.peak - base.memory.peak
    memory = f"{units.size(abs(more))} {'more' if more >= 0 else 'less'} a GPU"
    memory = "the same memory" if abs(more) < 2**20 else memory
    text = f"{p.label} costs {memory} than AdamW".replace("memory than", "memory as")
    return f"{text} and {_time(p, base)}." if timed else f"{text}."


def _time(p: Prediction, base: Prediction) -> str:
    time = p.step_seconds / base.step_seconds - 1
    text = f"takes {_longer(time)}" if abs(time) >= 5e-4 else "no time"
    if p.iteration is not None and p.naive_optimizer_seconds > 1.02 * p.optimizer_seconds:
        naive = p.step_seconds - p.optimizer_seconds + p.naive_optimizer_seconds
        again = _longer(naive / base.step_seconds - 1)
        text += f" ({again} if every rank repeats Newton–Schulz)"
    return text


def _longer(share: float) -> str:
    """Of a step's time.

    >>> _longer(0.035), _longer(-0.759)
    ('3.5 % more time', '75.9 % less time')
    """
    return f"{100 * abs(share):.1f} % {'more' if share >= 0 else 'less'} time"


def assumptions(job: Job) -> list[str]:
    """What a reader must believe."""
    g, setting = job.cluster.gpu, job.setting
    measured = "measured" if g.name == "h200" else "measured on an H200, the same share assumed"
    lines = [
        f"forward and backward at {job.model_flops_utilization:.1%} of "
        f"{g.peak_flops_per_second / 1e12:.0f} TFLOP/s"
        + ("" if job.mfu else f" (from rates that were {measured})"),
        f"memory at {g.copy_bytes_per_second / 1e12:.2f} TB/s, products at "
        f"{g.product_flops_per_second / 1e12:.0f} TFLOP/s ({measured})",
        f"parameters of {setting.param_bytes} bytes, MARS's state {setting.state}; "
        f"gradients clipped to a norm (by "
        "clip_grad_norm_ for torch's, whose state has the parameters' dtype)",
        "activations: 17 numbers of 16 bits a block, token and unit of width; head and loss in "
        "chunks; 2 GiB for context and fragments",
    ]
    if job.model.run.loop.fp8_head:
        lines.append("loop.fp8_head: its memory is counted, its time as in 16 bits")
    if job.cluster.gpus > 1:
        lines += [
            f"links {g.link_bytes_per_second / 1e9:.0f} GB/s a GPU in a node, "
            f"{g.node_bytes_per_second / 1e9:.3g} GB/s out of it, at {gpus.LINK_SHARE:.0%}: "
            "assumed, not measured",
            f"gradients sent in {job.reduce_bytes} bytes; traffic hidden behind computing; what "
            "Newton–Schulz sends (16 bits an element) is not hidden",
        ]
        if job.cluster.strategy == "ddp":
            lines.append(
                'MARS-M and MARS-Shampoo have ranks="replicate", which mars train sets; the '
                "library's default is that every rank repeats Newton–Schulz (naive)"
            )
        if refused(job):
            lines.append("the library refuses 8-bit state for shards (DTensor)")
        lines.append("consume_grads saves nothing: gradients are views of buckets and are copied")
    return [*lines, f"{g.name}: {g.source}"]


def errors(compared: Sequence[Compared], unmodelled: Sequence[str]) -> str:
    """Predicted against measured, worst of each sort first told."""
    rows: list[Sequence[str]] = [("measured on", "what", "quantity", "predicted", "was", "error")]
    for c in compared:
        mark = (" fitted" if c.fitted else "") + (" !" if abs(c.error) > LARGE else "")
        rows.append((c.where, c.name, c.quantity, f"{c.predicted:.4g}", f"{c.measured:.4g}",
                     f"{c.error:+.1%}{mark}"))  # fmt: skip
    summary = error_summary(compared)
    return "\n".join([table(rows, left=3), "", *summary, "not modelled: " + "; ".join(unmodelled)])


def error_summary(compared: Sequence[Compared]) -> list[str]:
    """Of every quantity the median and the worst error."""
    lines = []
    for quantity in dict.fromkeys(c.quantity for c in compared):
        for fitted in (False, True):
            some = sorted(abs(c.error) for c in compared
                          if c.quantity == quantity and c.fitted == fitted)  # fmt: skip
            if some:
                far = sum(error > LARGE for error in some)
                lines.append(
                    f"{quantity}, {'rows with fitted constants' if fitted else 'predicted'}: "
                    f"{len(some)} rows, median {some[len(some) // 2]:.1%}, worst {some[-1]:.1%}, "
                    f"{far} off by more than {LARGE:.0%}"
                )
    return lines
