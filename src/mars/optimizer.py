"""`MARS`, the torch.optim shell: options, groups, state, dispatch. No arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _get_scalar_dtype,
    _use_grad_for_differentiable,
)

from mars import exact, loading, options, state
from mars.advice import warn, warn_about_their_decay
from mars.collect import advance, advance_untraced, may_scale, needs_ranks
from mars.dispatch import LEFT_OUT, capturing, steps_now, why_not_fused
from mars.groups import resolve
from mars.plan import Plan
from mars.sharding import Ranks, gradient, is_sharded, layout_of, local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Group = dict[str, Any]


class MARS(Optimizer):
    """MARS: AdamW, Lion, Shampoo or Muon on a gradient corrected by the last one.

    With κ = γ·β₁/(1−β₁), gradient g and last gradient h (0 before the first step):

        c = g + κ·(g − h),   c̃ = c / max(1, ‖c‖₂)
        m ← β₁·m + (1−β₁)·c̃
        x ← x − lr·(u(m) + λ·x)

    In approximate mode h is the gradient of the previous step. In exact mode it is the
    gradient of the current batch at the previous parameters: ``step(closure)`` evaluates both.
    Tensors that are not matrices are trained by AdamW with the ``*_1d`` options.

    The positional order and the defaults are those of the authors' code (arXiv 2411.10438).
    Every option may be set per group, is read from the group at each step (so that schedulers
    can move it) and is saved in ``state_dict``.

    Args:
        params: tensors, named parameters or groups, as for any torch optimizer; or the result of
            ``mars.param_groups``.
        lr: learning rate of what MARS trains (matrices), a float or a one-element tensor. A little
            more than that of a tuned AdamW (see ``from_adamw``).
        betas: decay of the first and of the second moment. Tensors are read once, here,
            unless ``differentiable``.
        eps: added to the root of the second moment (AdamW) or to the norm (Shampoo).
        weight_decay: decoupled: x shrinks by lr·weight_decay a step.
        amsgrad: divide by the largest second moment so far.
        gamma: strength of the correction; 0 is none.
        is_approx: approximate mode (one gradient a step) or exact mode (two).
        mars_type: ``"mars-adamw"``, ``"mars-lion"``, ``"mars-shampoo"``, ``"mars-m"``, or
            ``"plain-adamw"`` for a group that AdamW shall train outright.
        optimize_1d: train tensors that are not matrices with MARS too (for Shampoo and M:
            MARS-AdamW), with ``lr``, ``betas`` and ``weight_decay``.
        lr_1d: AdamW's rate (3e-3) for tensors that are not matrices, as long as ``lr`` has its
            initial value (``base_lr`` of a group); it moves in proportion to ``lr``.
        betas_1d: AdamW's betas for these tensors.
        weight_decay_1d: AdamW's decay of them, 0.1 unless given, also if ``weight_decay`` is 0; but
            a group dict with ``weight_decay=0`` decays nothing, unless it has this, too.
        maximize: ascend.
        foreach: multi-tensor engine; None leaves the choice to ``fused`` and torch.optim's rule.
        fused: the engine of Triton kernels: None picks it on CUDA for the tensors that it takes
            (``mars.explain`` says which), True insists, False is without it, and torch's on CPUs.
        capturable: keep step counts on the device, so that CUDA graphs can capture a step.
        differentiable: let autograd run through the step.
        clip: ``"tensor"`` (each corrected tensor to norm 1), ``"global"`` (one norm over all of
            them) or None. Without clip, Lion, Shampoo and M store no last gradient.
        second_moment: ``"corrected"`` (of c̃, the authors' code) or ``"raw"`` (of g, their text).
        matrix_rule: a matrix has two dimensions (``"2d"``); or more, as (first, rest), for
            convolutions (``"flatten"``); or more, its last two one each, for experts (``"stack"``).
        ns_steps: steps of the Newton–Schulz iteration.
        ns_coefficients: its coefficients, ``"muon"`` or ``"polar-express"``.
        ns_dtype: the dtype it runs in.
        consume_grads: the step takes the gradients as its last gradients (``p.grad`` becomes
            None), which saves a copy.
        max_grad_norm: clip gradients by their norm over all groups that set it, as
            ``torch.nn.utils.clip_grad_norm_`` would before the step, without touching ``p.grad``;
            the norm is ``grad_norm``.
        ranks: what plain tensors are on many processes (DTensors say it themselves): None, each
            process steps all it has; ``"replicate"``, all have the same (DDP), and share out
            Newton–Schulz; ``"partition"``, each has others (ZeroRedundancyOptimizer), and norms
            over all tensors are summed over processes. Not saved: see docs/distributed.md.
        process_group: the processes meant by ``ranks``; None: all of them.
        state_dtype: keep moments and last gradients in ``"bfloat16"`` (6 bytes a parameter instead
            of 12) or ``"8bit"`` (3 bytes); or a dict by buffer, as ``{"last_grad": "bfloat16"}``.

    Examples:
        >>> import torch, mars
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = mars.MARS(model.parameters(), lr=1e-2)
        >>> model(torch.ones(3, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.weight])
        ['exp_avg', 'exp_avg_sq', 'last_grad', 'step']

    Reference: Yuan et al., "MARS: Unleashing the Power of Variance Reduction for Training Large
    Models", arXiv 2411.10438; Liu et al., "MARS-M: When Variance Reduction Meets Matrices".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        gamma: float | Tensor = 0.025,
        is_approx: bool = True,
        mars_type: str = "mars-adamw",
        optimize_1d: bool = False,
        lr_1d: float = 3e-3,
        betas_1d: tuple[float, float] = (0.9, 0.95),
        weight_decay_1d: float | None = None,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        clip: str | None = "tensor",
        second_moment: str = "corrected",
        matrix_rule: str = "2d",
        ns_steps: int = 5,
        ns_coefficients: str = "muon",
        ns_dtype: str = "bfloat16",
        consume_grads: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: str | dict[str, str] | None = None,
        ranks: str | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        self._ranks = Ranks.checked(ranks, process_group)
        defaults: Group = options.with_names({
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "gamma": gamma, "is_approx": is_approx, "mars_type": mars_type,
            "optimize_1d": optimize_1d, "lr_1d": lr_1d, "betas_1d": betas_1d,
            "weight_decay_1d": 0.1 if weight_decay_1d is None else weight_decay_1d,
            "maximize": maximize, "foreach": foreach, "state_dtype": state_dtype,
            "fused": fused, "capturable": capturable, "differentiable": differentiable,
            "clip": clip, "second_moment": second_moment, "matrix_rule": matrix_rule,
            "ns_steps": ns_steps, "ns_coefficients": ns_coefficients, "ns_dtype": ns_dtype,
            "consume_grads": consume_grads, "max_grad_norm": max_grad_norm,
        })  # fmt: skip
        options.check_values(defaults)
        options.check_captured(defaults)
        defaults = options.plain_numbers(defaults, differentiable)
        # What lr_1d is measured against, whatever lr becomes.
        defaults["base_lr"] = options.as_float(lr)
        self._unsaid_decay = weight_decay_1d is None
        super().__init__(params, defaults)
        self._reset_private()
        warn(self.param_groups, self.defaults["base_lr"], lr_1d, weight_decay)

    def _reset_private(self) -> None:
        self._observer: Any = getattr(self, "_observer", None)  # see mars.diagnostics
        self._plan: Plan | None = None  # what a fused step leaves for the next
        self._captured: list[Plan] = getattr(self, "_captured", [])  # graphs replay on these
        self._checked: dict[int, Group] = {}  # of each group, the values that were found right
        self._grad_norm: Tensor | None = None  # one buffer, that every step writes to
        self._exact = exact.Memory(self)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its options are checked before anything is changed."""
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        group = options.with_names(self._ranks.without(resolve(param_group, self.defaults)))
        options.check_known(group, f"parameter group {len(self.param_groups)}")
        whole = {**self.defaults, **group}
        options.check_values(whole)
        options.check_captured(whole)
        differentiable = whole["differentiable"]
        options.check_differentiable(group, self.defaults)
        if group.get("weight_decay", 1.0) == 0.0:
            group.setdefault("weight_decay_1d", 0.0)
        own_rate = group.get("lr", self.defaults["lr"])
        if group.get("mars_type", self.defaults["mars_type"]) == "plain-adamw":
            group.setdefault("lr_1d", options.as_float(own_rate))  # AdamW outright: lr is its rate
        if "lr_1d" in group:
            group.setdefault("base_lr", options.as_float(own_rate))
        super().add_param_group(options.plain_numbers(group, differentiable))
        added = self.param_groups[-1]
        for p in added["params"]:  # of a group that was here before: they are no longer the last
            for name in ("last_param", "previous_grad"):
                self.state.get(p, {}).pop(name, None)
        for p in added["params"] if added["fused"] else ():
            reason = why_not_fused(added, p, self._ranks)
            if reason not in (None, *LEFT_OUT):
                del self.param_groups[-1]
                text = f"`fused=True` is not possible for a parameter: {reason}"
                raise RuntimeError(f"{text}; fused=None takes what is fastest where it is")
        unsaid = getattr(self, "_unsaid_decay", False)
        if unsaid and warn_about_their_decay(added, param_group, self.defaults):
            self._unsaid_decay = False  # once is enough

    def __getstate__(self) -> dict[str, Any]:
        if self._ranks.group is not None:
            raise TypeError("a process group cannot be pickled: save optimizer.state_dict()")
        return {**super().__getstate__(), "_ranks": self._ranks}

    def __deepcopy__(self, memo: dict[int, Any]) -> MARS:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        parts = copy.deepcopy(super().__getstate__(), memo)
        made.__setstate__({**parts, "_ranks": self._ranks})
        return made

    def __setstate__(self, state_: dict[str, Any]) -> None:
        super().__setstate__(state_)
        self._reset_private()
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)  # options younger than the state
            for p in group["params"]:
                count = self.state.get(p, {}).get("step")
                if count is not None and not isinstance(count, Tensor):
                    self.state[p]["step"] = self._new_step(p, group, float(count))

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the buffers that the next step will begin with."""
        return loading.save(self, super().state_dict)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned. A wrong one is refused before anything is changed.

        Buffers keep their own dtype (float32 moments beside bfloat16 parameters), which
        torch.optim would cast to that of the parameter.
        """
        loading.load(self, state_dict, super().load_state_dict)

    @classmethod
    def from_adamw(
        cls, optimizer: torch.optim.AdamW, *, rule: str = "step-size", verbose: bool = True,
        **options: Any,
    ) -> MARS:  # fmt: skip
        """The MARS that replaces a configured AdamW, groups kept.

        ``rule="step-size"`` keeps the size of AdamW's step, its betas and its training of vectors;
        ``rule="published"`` is the authors' recipe (lr × 10). ``options`` are options of MARS.
        Says what it chose if ``verbose``. See ``mars.convert.from_adamw``.
        """
        from mars.convert import from_adamw

        return from_adamw(optimizer, cls, rule=rule, verbose=verbose, **options)

    @torch.no_grad()
    def update_previous_grad(self) -> None:
        """Exact mode, the authors' protocol: keep p.grad as the last gradient of the next step.

        Call it before ``step``, with the gradients of the *next* batch. Harmless in approximate
        mode.
        """
        exact.store_previous(self)

    @torch.no_grad()
    def update_last_grad(self) -> None:
        """Exact mode, the authors' protocol: call after ``step``, before a checkpoint is saved."""
        exact.promote_previous(self)

    @overload
    def step(self, closure: None = None, *, bs: object = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], Any], *, bs: object = None) -> Any: ...
    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None, *, bs: object = None) -> Any:
        """Take one step.

        Args:
            closure: clears the gradients, evaluates the loss, calls ``backward`` and returns the
                loss. In exact mode it is evaluated twice, with the same random numbers: draw the
                batch outside of it, and note that batch norm counts both.
            bs: accepted because the authors' snippets pass it; unused.
        """
        self._check_capture()
        if not torch.compiler.is_compiling():
            options.check_changed(self.param_groups, self._checked)
            if capturing():  # whoever has set `capturable` since
                for group in self.param_groups:
                    options.check_captured(group)
        loss = None
        if closure is not None:
            # Named here and not in evaluate: dynamo compiles only frames that mention torch.
            with torch.enable_grad():
                loss = exact.evaluate(self, closure)
        if torch.compiler.is_compiling() and needs_ranks(self):
            advance_untraced(self, closure is not None)
        else:
            advance(self, closure is not None)
        return loss

    def _renewed_plan(self) -> Plan | None:
        """The plan of the last step with this step's gradients, if it still fits."""
        if torch.compiler.is_compiling() or self._observer is not None or self._plan is None:
            return None
        if not self._plan.renew(self):
            self._plan = None
        elif capturing() and not self._plan.ready():
            return None  # a graph cannot capture an upload: foreach
        return self._plan

    @property
    def grad_norm(self) -> Tensor | None:
        """With max_grad_norm: the gradients' norm before the last step's clip, on the device."""
        if self._grad_norm is None or all(g["max_grad_norm"] is None for g in self.param_groups):
            return None
        return self._grad_norm.clone()  # the next step writes it again

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler may leave unscaling and skipping to the step: if all is fused."""
        return may_scale(self)

    def _check_capture(self) -> None:
        """torch's check that a CUDA graph capture and ``capturable`` agree (renamed in 2.12)."""
        if hasattr(self, "_accelerator_graph_capture_health_check"):
            self._accelerator_graph_capture_health_check()
        else:
            self._cuda_graph_capture_health_check()

    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _check_gradients(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state.check_gradient(p, group)
                    layout_of(p, group)  # refuses what cannot be
            if not torch.compiler.is_compiling():
                state.check_group(group, self.state)

    def _new_step(self, p: Tensor, group: Group, value: float = 0.0, fused: bool = False) -> Tensor:
        on_device = group["capturable"] or group["fused"] or fused
        device = p.device if on_device else "cpu"
        dtype = torch.float32 if fused else _get_scalar_dtype()
        return torch.tensor(value, dtype=dtype, device=device)

    def _init_group(
        self, group: Group, may_fuse: bool, kinds: list[str], fused: list[bool],
        layouts: list[Any], *columns: list[Any],
    ) -> None:  # fmt: skip
        """Fill the lists for the parameters that have a gradient; make the state they miss.

        The columns are those of Batch.add. The name and the flat lists are torch's convention:
        torch.compile runs this method at trace time, so that a compiled step is one graph.
        """
        needed: dict[Any, dict[str, torch.dtype]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            if group["max_grad_norm"] is not None and self._grad_norm is None:
                self._grad_norm = torch.zeros((), dtype=torch.float32, device=p.device)
            sharded = is_sharded(p)
            kind = state.kind_of(p, group)
            own = self.state.get(p, {})
            if (kind, p.dtype) not in needed:
                needed[kind, p.dtype] = state.buffers(kind, p, group)
            names = needed[kind, p.dtype]
            fuse = may_fuse and steps_now(group, p, self._ranks)
            state.drop_unused(own, kind, group, names)
            if "step" not in own:
                own["step"] = self._new_step(p, group, fused=fuse)
            state.complete(own, p, names)
            self.state[p] = own  # whole, or not at all
            if fuse:
                state.straighten(own, p)
            g = gradient(p, group) if sharded else p.grad.resolve_conj().resolve_neg()
            if group["consume_grads"] and not sharded and (g is not p.grad or 0 in g.stride()):
                p.grad = g = g.contiguous()  # as it can be written to, and kept
            row = (p, g, own["step"], *(own[n] if n in names else None for n in state.ROW))
            low = own.get(state.LOW_HALF.get(p.dtype, ""))
            for column, value in zip(columns, (*row, low), strict=True):
                column.append(local(p, value, group) if sharded else value)
            layouts.append(layout_of(p, group) if sharded else None)
            kinds.append(kind)
            fused.append(fuse)
