"""What one rank does in a distributed test, and the same on one process to compare with."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import warnings
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mars import MARS
from mars.state import LOW_HALF

STEPS, ROWS = 5, 24
OPTIONS = {"lr": 0.02, "gamma": 0.3, "weight_decay": 0.1, "ns_dtype": "float64"}


def make_model(dtype: str = "float64") -> nn.Sequential:
    """First dimensions 7, 5, 3 and 1: uneven on 2 ranks, and empty for the last one."""
    torch.manual_seed(1)
    sizes = (6, 7, 5, 3, 1)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(getattr(torch, dtype))


def loss_of(model: nn.Module, step: int, dtype: torch.dtype, world: int, half: int | None = None):
    """The mean over this rank's rows of the step's batch; ``half``: of one half of them."""
    batch = torch.randn(ROWS, 6, dtype=dtype, generator=torch.Generator().manual_seed(step))
    if half is not None:
        batch = batch[half * ROWS // 2 : (half + 1) * ROWS // 2]
    rank = dist.get_rank() if world > 1 else 0
    size = len(batch) // world
    out = model(batch[rank * size : (rank + 1) * size])
    return 8.0 * (out.square().mean() + out.mean())  # c of some tensors is clipped, of others not


def backward(model: nn.Module, step: int, dtype: torch.dtype, world: int, halves: bool = False):
    if not halves:
        loss = loss_of(model, step, dtype, world)
        loss.backward()
        return loss
    quiet = model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext()
    with quiet:
        (loss_of(model, step, dtype, world, 0) / 2).backward()
    last = loss_of(model, step, dtype, world, 1) / 2
    last.backward()
    return last


def train(
    model: nn.Module, optimizer: Any, mode: str, dtype: torch.dtype, world: int, halves: bool
) -> None:
    protocol = getattr(optimizer, "optim", optimizer)  # what ZeRO wraps has the protocol
    for step in range(STEPS):
        if mode == "protocol":
            optimizer.zero_grad()
            backward(model, step + 1, dtype, world, halves)
            protocol.update_previous_grad()
        if mode == "closure":

            def closure(step=step):
                optimizer.zero_grad()
                return backward(model, step, dtype, world, halves)

            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        backward(model, step, dtype, world, halves)
        optimizer.step()
        if mode == "protocol":
            protocol.update_last_grad()


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def furthest(first: Any, second: Any) -> float:
    """The largest difference of two lists of tensors; NaN if there is one."""
    pairs = zip(first, second, strict=True)
    return float(torch.stack([(full(a) - full(b)).abs().max() for a, b in pairs]).max())


@cache
def mesh(*shape: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def gpu_mesh(world: int) -> DeviceMesh:
    os.environ["LOCAL_RANK"] = "0"  # all on the first GPU
    return init_device_mesh("cuda", (world,))


def shard(model: nn.Sequential, over: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=over, **options)
    return fully_shard(model, mesh=over, **options)


def spread(model: nn.Sequential, strategy: str, world: int) -> nn.Module:
    if strategy == "fsdp":
        return shard(model, mesh(world))
    if strategy == "hsdp":
        return shard(model, mesh(2, world // 2))
    extra = {"ddp-view": {"gradient_as_bucket_view": True}, "ddp-static": {"static_graph": True}}
    return DistributedDataParallel(model, **extra.get(strategy, {}))


def alone(options: dict[str, Any], mode: str, dtype: str, halves: bool) -> list[Tensor]:
    model = make_model(dtype)
    optimizer = MARS(model.parameters(), **options)
    train(model, optimizer, mode, getattr(torch, dtype), 1, halves)
    return [full(p) for p in model.parameters()]


_alone: dict[Any, list[Tensor]] = {}


def compare(
    strategy: str, options: dict[str, Any], mode: str = "approximate", dtype: str = "float64"
) -> float:
    """max |x − x₁| / max |x₁ − x₀|, where x₁ comes from one process and x₀ is the start."""
    options = {**OPTIONS, "is_approx": mode == "approximate", **options}
    world, halves = dist.get_world_size(), strategy == "ddp-no-sync"
    key = (str(options), mode, dtype, halves)
    if key not in _alone:
        _alone[key] = alone({**options, "fused": False}, mode, dtype, halves)
    expected = _alone[key]
    start = [full(p) for p in make_model(dtype).parameters()]
    model = spread(make_model(dtype), strategy, world)
    if strategy == "zero":
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), MARS, ranks="partition", **options
        )
    else:
        if strategy == "ddp-shared":
            options["ranks"] = "replicate"
        optimizer = MARS(model.parameters(), **options)
    train(model, optimizer, mode, getattr(torch, dtype), world, halves)
    got = [full(p) for p in model.parameters()]
    moved = furthest(expected, start)
    assert moved > 0.01
    return furthest(got, expected) / moved


def compare_many(cases: list[tuple]) -> list[float]:
    return [compare(*case) for case in cases]


def given_gradients(
    placements: tuple, shape: tuple[int, ...], options: dict[str, Any], ranks_shape: tuple[int, ...]
) -> float:
    """Parameters cut as said, with gradients that are set by hand; two of them."""
    over = mesh(*ranks_shape)
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2)]
    plain = [nn.Parameter(v.clone()) for v in values]
    cut = [nn.Parameter(distribute_tensor(v.clone(), over, placements)) for v in values]
    first, second = (MARS(p, **{**OPTIONS, **options}) for p in (plain, cut))
    for _ in range(3):
        for p, q in zip(plain, cut, strict=True):
            p.grad = torch.randn(shape, dtype=torch.float64, generator=generator)
            q.grad = distribute_tensor(p.grad.clone(), over, placements)
        first.step()
        second.step()
    return furthest(plain, cut)


def summed_gradient() -> float:
    """A replicated weight whose gradient is a sum over ranks, as sequence parallelism gives it."""
    from torch.distributed.tensor import Partial

    over, rank, world = mesh(dist.get_world_size()), dist.get_rank(), dist.get_world_size()
    worst = 0.0
    for consume in (False, True):
        plain = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
        p = nn.Parameter(distribute_tensor(plain.detach().clone(), over, [Replicate()]))
        both = [MARS([q], consume_grads=consume, max_grad_norm=1.0, **OPTIONS) for q in (plain, p)]
        for step in range(3):
            total = torch.arange(12.0, dtype=torch.float64).view(3, 4) + step
            own = total * (rank + 1) / sum(range(1, world + 1))
            plain.grad = total
            p.grad = DTensor.from_local(own, over, [Partial()])
            for optimizer in both:
                optimizer.step()
        worst = max(furthest([p], [plain]), worst)
    return worst


def exact_after_approximate() -> float:
    """A gradient laid out otherwise than its parameter, in the step without correction."""
    from torch.distributed.tensor import Partial

    over, rank, world = mesh(dist.get_world_size()), dist.get_rank(), dist.get_world_size()
    plain = nn.Parameter(torch.ones(4, 3, dtype=torch.float64))
    p = nn.Parameter(distribute_tensor(plain.detach().clone(), over, [Shard(0)]))
    both = [MARS([q], **OPTIONS) for q in (plain, p)]
    for step in range(4):
        total = torch.arange(12.0, dtype=torch.float64).view(4, 3) + step
        own = total * (rank + 1) / sum(range(1, world + 1))

        def closure(total=total, own=own) -> None:
            plain.grad, p.grad = total.clone(), DTensor.from_local(own, over, [Partial()])

        for optimizer in both:
            optimizer.param_groups[0]["is_approx"] = step < 2
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that one step is taken without correction
                optimizer.step(closure)
    return furthest([p], [plain])


def exact_with_validation() -> float:
    """Exact mode by closure, with a forward pass alone between steps, resharded after it: FSDP2
    stays gathered otherwise, and does not see the previous parameters (docs/distributed.md).
    """
    ends = []
    for way in ("fsdp", "alone"):
        model = make_model()
        if way == "fsdp":
            fully_shard(model, mesh=mesh(dist.get_world_size()))
        optimizer = MARS(model.parameters(), is_approx=False, **OPTIONS)
        for step in range(STEPS):

            def closure(step=step, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = model(rows_of(step)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
            with torch.no_grad():
                model(rows_of(0))
            if way == "fsdp":
                model.reshard()
        ends.append([full(p) for p in model.parameters()])
    return furthest(*ends)


def rows_of(step: int) -> Tensor:
    """The same on all ranks."""
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def empty_replicas() -> None:
    """A matrix of no rows, that ranks share: a step changes nothing."""
    p = nn.Parameter(torch.zeros(0, 3))
    p.grad = torch.zeros(0, 3)
    MARS([p], mars_type="mars-m", ranks="replicate").step()


def grad_norms(strategy: str) -> tuple[float, float]:
    """`optimizer.grad_norm` of this strategy and of one process."""
    options = {**OPTIONS, "max_grad_norm": 0.5, "mars_type": "mars-m"}
    out = []
    for way in (strategy, "alone"):
        model = make_model()
        world = 1 if way == "alone" else dist.get_world_size()
        spreaded = model if way == "alone" else spread(model, way, world)
        if way == "zero":
            wrapped = ZeroRedundancyOptimizer(
                spreaded.parameters(), MARS, ranks="partition", **options
            )
            optimizer: Any = wrapped.optim
        else:
            wrapped = optimizer = MARS(spreaded.parameters(), **options)
        train(spreaded, wrapped, "approximate", torch.float64, world, False)
        out.append(float(optimizer.grad_norm))
    return out[0], out[1]


def one_rank_is_not_finite(value: float, options: dict[str, Any]) -> list[list[bool]]:
    """Which whole tensors are finite after a step where one rank's part of one gradient is not.

    First here, then on one process with the same gradients.
    """
    model, plain = spread(make_model(), "fsdp", dist.get_world_size()), make_model()
    backward(model, 0, torch.float64, dist.get_world_size())
    if dist.get_rank() == 1:
        next(model.parameters()).grad._local_tensor[0, 0] = value
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        q.grad = full(p.grad)
    for each in (model, plain):
        MARS(each.parameters(), **{**OPTIONS, **options}).step()
    return [[bool(full(p).isfinite().all()) for p in m.parameters()] for m in (model, plain)]


def scaler_skips_everywhere() -> list[float]:
    """GradScaler, Inf on one rank: nobody steps, and no state is made or changed."""
    model = spread(make_model("float32"), "fsdp", dist.get_world_size())
    optimizer = MARS(model.parameters(), **{**OPTIONS, "ns_dtype": "float32"})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    counts = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, torch.float32, dist.get_world_size())).backward()
        if step == 1 and dist.get_rank() == 1:
            next(model.parameters()).grad._local_tensor[0, 0] = float("inf")
        before = [full(p) for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        moved = [
            not torch.equal(a, full(p)) for a, p in zip(before, model.parameters(), strict=True)
        ]
        assert all(moved) == any(moved) == (step != 1)
        counts.append(float(optimizer.state[next(model.parameters())]["step"]))
    return counts


def state_is_sharded(mars_type: str) -> None:
    """Every buffer is a DTensor laid out as its parameter, from the first step on."""
    model = spread(make_model(), "fsdp", dist.get_world_size())
    optimizer = MARS(model.parameters(), **{**OPTIONS, "mars_type": mars_type, "amsgrad": True})
    names = []
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step, torch.float64, dist.get_world_size())
        optimizer.step()
        names.append([sorted(optimizer.state[p]) for p in model.parameters()])
    assert names[0] == names[1]
    for p in model.parameters():
        for name, value in optimizer.state[p].items():
            if name == "step":
                assert type(value) is Tensor
                continue
            assert isinstance(value, DTensor)
            assert (value.placements, value.shape) == (p.placements, p.shape)


def save(path: str, mars_type: str, strategy: str = "fsdp") -> list[Tensor]:
    """Train, save by torch.distributed.checkpoint, go on; return where that leads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    world = dist.get_world_size()
    model = spread(make_model(), strategy, world)
    optimizer = MARS(model.parameters(), **{**OPTIONS, "mars_type": mars_type})
    train(model, optimizer, "approximate", torch.float64, world, False)
    optimizer.zero_grad()
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=path)
    train(model, optimizer, "approximate", torch.float64, world, False)
    return [full(p) for p in model.parameters()]


def load(path: str, mars_type: str, strategy: str = "fsdp") -> list[Tensor]:
    """Load what `save` has written, on however many ranks there are, and go on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    world = dist.get_world_size() if dist.is_initialized() else 1
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model = spread(model, strategy, world) if world > 1 else model
    optimizer = MARS(model.parameters(), **{**OPTIONS, "mars_type": mars_type})
    parameters, state = get_state_dict(model, optimizer)  # a step with lr = 0 makes the state
    assert all(float(full(p).abs().max()) == 0 for p in model.parameters())
    both = {"model": parameters, "optimizer": state}
    dcp.load(both, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"]
    )
    train(model, optimizer, "approximate", torch.float64, world, False)
    return [full(p) for p in model.parameters()]


def gathered(dtype: str, broadcast: bool, strategy: str) -> float:
    """All of the state on one rank, and back: how far that leads from going on."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    world, kind, ends = dist.get_world_size(), getattr(torch, dtype), []
    model = spread(make_model(dtype), strategy, world)
    optimizer = MARS(model.parameters(), **OPTIONS)
    train(model, optimizer, "approximate", kind, world, False)
    optimizer.zero_grad()
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
    start = [p.detach().clone() for p in model.parameters()]
    for again in (False, True):
        if again:
            optimizer = MARS(model.parameters(), **OPTIONS)
            with torch.no_grad():
                for p, x in zip(model.parameters(), start, strict=True):
                    p.copy_(x)
            held = {} if broadcast and dist.get_rank() else state
            set_optimizer_state_dict(model, optimizer, held, options=whole)
            low = [optimizer.state[p][LOW_HALF[kind]] for p in model.parameters()]
            assert {half.dtype for half in low} == {torch.int16}
        train(model, optimizer, "approximate", kind, world, False)
        ends.append([full(p) for p in model.parameters()])
        optimizer.zero_grad()
    return furthest(*ends)


def closure_state(strategy: str, path: str) -> float:
    """Exact mode by closure, saved and loaded: how far that leads from going on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    world, options, ends = dist.get_world_size(), {**OPTIONS, "is_approx": False}, []
    for again in (False, True):
        model = spread(make_model(), strategy, world)
        optimizer = MARS(model.parameters(), **options)
        if again:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step(lambda: None)
        else:
            train(model, optimizer, "closure", torch.float64, world, False)
        optimizer.zero_grad()
        parameters, state = get_state_dict(model, optimizer)
        both = {"model": parameters, "optimizer": state}
        (dcp.load if again else dcp.save)(both, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)
        train(model, optimizer, "closure", torch.float64, world, False)
        ends.append([full(p) for p in model.parameters()])
    return furthest(*ends)


def compiled(options: dict[str, Any]) -> float:
    """How far a compiled step leads from the same step."""
    world, ends = dist.get_world_size(), []
    for compile_it in (False, True):
        model = spread(make_model(), "fsdp", world)
        optimizer = MARS(model.parameters(), **{**OPTIONS, "lr": torch.tensor(0.02), **options})
        if compile_it:
            torch._dynamo.reset()
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        train(model, optimizer, "approximate", torch.float64, world, False)
        ends.append([full(p) for p in model.parameters()])
    return furthest(*ends)


def raises(function: str) -> str:
    """The message of the error that this function of this module raises."""
    try:
        globals()[function]()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def unprepared_closure() -> None:
    """Exact state by closure, for an optimizer in which torch has made that of the protocol."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, whole = shard(make_model(), mesh(dist.get_world_size())), StateDictOptions(True)
    first, second = (MARS(model.parameters(), is_approx=False, **OPTIONS) for _ in range(2))
    train(model, first, "closure", torch.float64, dist.get_world_size(), False)
    first.zero_grad()
    state = get_optimizer_state_dict(model, first, options=whole)
    set_optimizer_state_dict(model, second, state, options=whole)


def partial_parameter() -> None:
    from torch.distributed.tensor import Partial

    over = mesh(dist.get_world_size())
    p = nn.Parameter(DTensor.from_local(torch.ones(2, 2), over, [Partial()]))
    p.grad = torch.zeros_like(p)
    MARS([("blocks.0.weight", p)]).step()


def plain_state() -> None:
    """The state of one process, loaded by load_state_dict itself."""
    p = nn.Parameter(torch.ones(4, 2))
    p.grad = torch.ones(4, 2)
    one = MARS([("w", p)])
    one.step()
    q = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh(dist.get_world_size()), [Shard(0)]))
    q.grad = torch.zeros_like(q)
    other = MARS([("w", q)])
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    other.step()


def zero_closure() -> None:
    model = spread(make_model(), "ddp", dist.get_world_size())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), MARS, ranks="partition", is_approx=False, **OPTIONS
    )
    train(model, optimizer, "closure", torch.float64, dist.get_world_size(), False)


def plan() -> str:
    import mars

    model = spread(make_model(), "fsdp", dist.get_world_size())
    return mars.explain(MARS(model.parameters(), mars_type="mars-m"))


def plan_of_one() -> str:
    """Each rank has a mesh, and with it the whole of every DTensor, for itself."""
    import mars

    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("each", "one"))
    model = fully_shard(make_model(), mesh=mesh["one"])
    return mars.explain(MARS(model.parameters(), mars_type="mars-m"))


def begin_anew(store: str) -> float:
    """A step, then all processes leave and meet again, and the same step; how far they differ."""
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        values = torch.randn(6, 4), torch.randn(6, 4)
        over = mesh(dist.get_world_size())
        p, p_grad = (distribute_tensor(value, over, [Shard(0)]) for value in values)
        p = p.requires_grad_()
        p.grad = p_grad
        MARS([p], mars_type="mars-m").step()
        ends.append(full(p).detach())
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        name = f"file://{store}-{len(ends)}"
        dist.init_process_group("gloo", init_method=name, rank=rank, world_size=world)
        mesh.cache_clear()
    return float((ends[0] - ends[1]).abs().max())


def rank_without_gradients() -> float:
    p = nn.Parameter(torch.ones(4, 4))
    optimizer = MARS([p], max_grad_norm=1.0, ranks="partition")
    if dist.get_rank() == 0:
        p.grad = torch.ones(4, 4)
    optimizer.step()
    assert optimizer.grad_norm is not None
    return float(optimizer.grad_norm)


def copied_group() -> bool:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    p = torch.zeros(3, 3, requires_grad=True)
    optimizer = MARS([p], ranks="replicate", process_group=group)
    try:
        pickle.dumps(optimizer)
    except TypeError:
        return copy.deepcopy(optimizer)._ranks.group is group
    return False


def consumed(strategy: str) -> bool:
    model = spread(make_model(), strategy, dist.get_world_size())
    optimizer = MARS(model.parameters(), consume_grads=True, **OPTIONS)
    backward(model, 0, torch.float64, dist.get_world_size())
    kept = [full(p.grad) for p in model.parameters()]
    optimizer.step()
    held = [optimizer.state[p].get("last_grad") for p in model.parameters()]
    same = [h is None or torch.equal(full(h), g) for h, g in zip(held, kept, strict=True)]
    return all(same) and all(p.grad is None for p in model.parameters())


def diagnosed() -> tuple[list[float], list[float]]:
    """Readings of sharded tensors and of the same on one process."""
    import mars

    out = []
    for world in (dist.get_world_size(), 1):
        model = make_model() if world == 1 else spread(make_model(), "fsdp", world)
        optimizer = MARS(model.parameters(), **{**OPTIONS, "mars_type": "mars-m"})
        with mars.diagnose(optimizer) as d:
            train(model, optimizer, "approximate", torch.float64, world, False)
        (r,) = d.readings
        out.append([r.clipped, r.c_norm, r.cosine, r.update_rms])
    return out[0], out[1]


def lean_state(engine: dict[str, Any], mars_type: str, path: str) -> tuple[float, float]:
    """With moments of 16 bits: how far from one process, and, saved and loaded, from going on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    options = {"mars_type": mars_type, "state_dtype": "bfloat16", "ns_dtype": "float32", **engine}
    away = compare("fsdp", options, "approximate", "float32")
    world, ends = dist.get_world_size(), []
    model = spread(make_model("float32"), "fsdp", world)
    optimizer = MARS(model.parameters(), **{**OPTIONS, **options})
    train(model, optimizer, "approximate", torch.float32, world, False)
    optimizer.zero_grad()
    held = get_state_dict(model, optimizer)
    dcp.save(dict(zip(("model", "optimizer"), held, strict=True)), checkpoint_id=path)
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.bfloat16 for p in model.parameters())
    for again in (False, True):
        if again:
            model = spread(make_model("float32"), "fsdp", world)
            optimizer = MARS(model.parameters(), **{**OPTIONS, **options})
            parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(parts, checkpoint_id=path)
            set_state_dict(
                model, optimizer, model_state_dict=parts["model"],
                optim_state_dict=parts["optimizer"],
            )  # fmt: skip
        train(model, optimizer, "approximate", torch.float32, world, False)
        ends.append([full(p) for p in model.parameters()])
    return away, furthest(*ends)


def eight_bits() -> None:
    q = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh(dist.get_world_size()), [Shard(0)]))
    q.grad = torch.zeros_like(q)
    MARS([q], state_dtype="8bit").step()


def other_part() -> None:
    """A gradient that is cut elsewhere than its parameter, and says that it is not."""
    over, rank = mesh(dist.get_world_size()), dist.get_rank()
    q = nn.Parameter(distribute_tensor(torch.ones(4, 3), over, [Shard(0)]))
    own = torch.ones(1 if rank == 0 else 3, 3)
    q.grad = DTensor.from_local(
        own, over, [Shard(0)], run_check=False, shape=torch.Size((4, 3)), stride=(3, 1)
    )
    MARS([q], fused=True, clip=None, second_moment="raw").step()


def fused_parts(options: dict[str, Any]) -> tuple[str, int]:
    """What `explain` says of shards, and how many of them the plan has."""
    import mars

    model = spread(make_model("float32"), "fsdp", dist.get_world_size())
    optimizer = MARS(model.parameters(), fused=True, **{**OPTIONS, **options})
    train(model, optimizer, "approximate", torch.float32, dist.get_world_size(), False)
    plan = optimizer._plan
    assert plan is not None
    assert plan.complete
    return mars.explain(optimizer), sum(len(b.x) for _, own in plan.outside for b in own)


def parts_on_a_gpu(options: dict[str, Any], dtype: str = "float32") -> float:
    """Parameters cut by rows on one GPU that all ranks share; how far from one process on a CPU.

    Gloo can only sum there, so nothing is gathered: a rank compares its own part.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    over = gpu_mesh(world)
    generator = torch.Generator().manual_seed(3)
    shapes = [(64, 48), (7, 40), (33,), (1, 5), (8, 4, 3), (300, 300)]
    kind = getattr(torch, dtype)
    plain = [nn.Parameter(torch.randn(s, generator=generator).to(kind)) for s in shapes]

    def part(whole: Tensor) -> Tensor:
        pieces = whole.detach().chunk(world)
        return pieces[rank].clone() if rank < len(pieces) else whole.detach()[:0].clone()

    def cut(whole: Tensor) -> DTensor:
        return DTensor.from_local(
            part(whole).cuda(), over, [Shard(0)], run_check=False, shape=whole.shape,
            stride=whole.stride(),
        )  # fmt: skip

    parts = [nn.Parameter(cut(p)) for p in plain]
    first = MARS(plain, foreach=False, **{**OPTIONS, **options, "ns_dtype": "float32"})
    second = MARS(parts, **{**OPTIONS, **options, "ns_dtype": "float32"})
    torch.backends.cuda.matmul.allow_tf32 = False
    for _ in range(4):
        for p, q in zip(plain, parts, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(kind) / 8
            q.grad = cut(p.grad)
        first.step()
        second.step()
    assert second._plan is not None
    assert bool(second._plan.outside) == (world > 1)
    pairs = [(q.to_local().cpu(), part(p)) for p, q in zip(plain, parts, strict=True)]
    return max(float((a - b).abs().max()) for a, b in pairs if a.numel())


def engines_differ(options: dict[str, Any]) -> float:
    """On one rank some gradients do not lie as kernels read them: foreach steps those there."""
    over, world = mesh(dist.get_world_size()), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    shapes = [(4, 6), (8, 2), (3,), (6, 4)]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    plain = [nn.Parameter(v.clone()) for v in values]
    cut = [nn.Parameter(distribute_tensor(v.clone(), over, [Shard(0)])) for v in values]
    first = MARS(plain, **{**OPTIONS, **options})
    second = MARS(cut, fused=True, **{**OPTIONS, **options})
    for _ in range(3):
        for i, (p, q) in enumerate(zip(plain, cut, strict=True)):
            p.grad = torch.randn(shapes[i], generator=generator)
            part = distribute_tensor(p.grad.clone(), over, [Shard(0)]).to_local()
            if i % 3 == 0 and dist.get_rank() == 0:
                part = part.t().contiguous().t()
            q.grad = DTensor.from_local(part, over, [Shard(0)], shape=p.shape, stride=p.stride())
        first.step()
        second.step()
    assert second._plan is not None
    assert second._plan.complete == (dist.get_rank() != 0 or world == 1)
    return furthest(plain, cut)


def with_norms_of_parts(kind: str) -> float:
    """The table's measure for the usual mistake: clipping by the norm of the part that is here."""
    from mars import clipping

    right = clipping.whole_norms
    clipping.whole_norms = lambda norms, *_: [n.double() for n in norms]
    try:
        return compare("fsdp", {"mars_type": kind})
    finally:
        clipping.whole_norms = right


def zero_state() -> float:
    """ZeRO's consolidated state, loaded by MARS in one process, which goes on alike."""
    options = {**OPTIONS, "mars_type": "mars-m", "max_grad_norm": 0.5}
    world = dist.get_world_size()
    model = spread(make_model(), "ddp", world)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), MARS, ranks="partition", **options)
    train(model, optimizer, "approximate", torch.float64, world, False)
    plain = make_model()
    plain.load_state_dict(model.module.state_dict())
    optimizer.consolidate_state_dict(to=0)
    saved = [copy.deepcopy(optimizer.state_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    one = MARS(plain.parameters(), **options)
    one.load_state_dict(saved[0])
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})  # carries `ranks`
    train(model, optimizer, "approximate", torch.float64, world, False)
    train(plain, one, "approximate", torch.float64, 1, False)
    return furthest(model.parameters(), plain.parameters())
