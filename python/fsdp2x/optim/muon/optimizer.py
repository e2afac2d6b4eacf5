"""Muon: momentum whose matrices are orthogonalized by Newton-Schulz iterations, each by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2x.base.arguments import checked
from fsdp2x.optim.adamw import AdamW, count_on_host
from fsdp2x.optim.clip import scaled
from fsdp2x.optim.engine_step import EngineStep
from fsdp2x.optim.local import dense_gradient, local_tensor, number
from fsdp2x.optim.moments import zeros_like_all
from fsdp2x.optim.muon.newton_schulz import METHODS, orthogonalize
from fsdp2x.optim.muon.plan import Matrices, MatrixBlock, MatrixJob, MuonPlan, Piece, make_plan, part_of
from fsdp2x.optim.muon.split import SPLIT_SETTINGS, split_of

# Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; as torch.optim.Muon.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Factors of the learning rate for a matrix of m x n.
_LR_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral_unclamped": lambda m, n: math.sqrt(m / n),
}
_MUON_SETTINGS = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "ns_method", "adjust_lr_fn", *SPLIT_SETTINGS)
_OWN_SETTINGS = ("use_muon", "ns_method", *SPLIT_SETTINGS)  # groups of torch's Muon and AdamW lack them
_ADAMW_SETTINGS = ("betas", "amsgrad", "maximize")
_ADAMW_EPS = 1e-8


class Muon(EngineStep):
    """Steps matrices like ``torch.optim.Muon`` over shards, and other parameters by AdamW, in one optimizer.

        groups = fsdp2x.optim.muon_param_groups(model)
        optimizer = fsdp2x.optim.Muon(groups, lr=2e-4, adjust_lr_fn="match_rms_adamw")

    One rank orthogonalizes each matrix. The bits are those of ``torch.optim.Muon`` on the unsharded model for any
    number of ranks, if the gradients' bits are.

    A group of parameters has matrices, or with ``use_muon=False`` anything else. ``fsdp2x.optim.AdamW`` steps the
    latter with its settings (``betas`` (0.9, 0.999), ``eps`` 1e-8). Unless such a group sets ``lr`` and
    ``weight_decay``, it takes those of Muon. A parameter [num, m, n] is a stack of ``num`` matrices. ``state_dict`` is
    torch's: a ``momentum_buffer`` for each matrix, AdamW's state for the others.

    If a group's parameters fuse matrices, it sets their blocks. Each block is orthogonalized, and has the learning
    rate, of a separate matrix. ``muon_param_groups`` sets blocks for known families:

    - ``split_sizes``: sizes of the blocks along ``split_dim`` (-2: rows, the default; -1: columns).
    - ``split_repeats``: repeats the sizes if blocks alternate (``(d, d, d)`` for each head of GPT-NeoX).
    - ``num_heads``: cuts blocks further into equal parts, a number or one for each block.

    Parameters may be sharded along any dim, over meshes of any number of axes, or be plain tensors. Steps are
    collective. All ranks of a mesh must step the same parameters in the same order. If a matrix has no gradient on one
    rank, it should have none on all ranks.

    Args:
        params: parameters, all of them matrices, or groups.
        lr, weight_decay, momentum, nesterov, eps, ns_steps: see ``torch.optim.Muon``.
        ns_coefficients: (a, b, c) of all steps, or ``ns_steps`` such triples.
        adjust_lr_fn: factor of ``lr`` for an m x n matrix. "original" (and None): Keller Jordan's
            ``sqrt(max(1, m / n))``. "match_rms_adamw": Moonlight's ``0.2 sqrt(max(m, n))``, which works with AdamW's
            ``lr`` and ``weight_decay``. "spectral_unclamped": ``sqrt(m / n)``. Use "match_rms_adamw" for weights that
            are stored as (in, out), such as gpt-oss's experts and GPT-2's, because the others take m for the output.
        ns_method: "standard" for torch's iteration. "gram" computes the same polynomial on the smaller Gram matrix if
            this takes fewer operations (Zhang, Amsel, Chen, and Dao, "Gram Newton-Schulz", 2026).
        ns_dtype: dtype of the iterations and of communication. ``torch.bfloat16`` as in torch, or ``torch.float32``.
            float32 is much faster on CPUs that emulate bfloat16 (those without AVX-512 BF16 or AMX).
        max_grad_norm, error_if_nonfinite: as in ``fsdp2x.optim.AdamW``, over all groups.
        moments_dtype, stochastic_rounding, seed: settings of groups without ``use_muon``, as in
            ``fsdp2x.optim.AdamW``. Momentum has the dtype of its gradient.

    Raises:
        ValueError: a setting is out of range or belongs to the other kind of group. A group with ``use_muon`` has a
            parameter that is not a matrix. Blocks do not cover a parameter. In ``step``, a gradient is sharded
            otherwise than its parameter. Parameters are from before ``fully_shard`` or gathered, see ``AdamW``.
        NotImplementedError: complex parameters.
        RuntimeError: in ``step``, ranks with different parameters, a sparse gradient, or momentum that would have to be
            in host memory (``HostOffloadPolicy(mode="optimizer")``).
    """

    _name = "Muon"

    @checked
    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Any = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_method: str = "standard",
        ns_dtype: torch.dtype = torch.bfloat16,
        max_grad_norm: float | None = None,
        error_if_nonfinite: bool = False,
        moments_dtype: torch.dtype | str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.moments_dtype, self.stochastic_rounding, self.seed = moments_dtype, stochastic_rounding, seed
        self._prepare({}, max_grad_norm, error_if_nonfinite)
        if ns_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"fsdp2x.optim.Muon: ns_dtype must be torch.bfloat16 or torch.float32, got {ns_dtype}")
        self.ns_dtype = ns_dtype
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "ns_method": ns_method,
                "adjust_lr_fn": adjust_lr_fn,
                "use_muon": True,
                **SPLIT_SETTINGS,
            },
        )

    _kept = ("ns_dtype", "moments_dtype", "stochastic_rounding", "seed", *EngineStep._kept)

    def _begin_afresh(self) -> None:
        super()._begin_afresh()
        self._plan: MuonPlan | None = None
        # Steps the groups without use_muon, which belong to this optimizer, with this optimizer's state.
        self._adamw = AdamW(
            [torch.empty(0, requires_grad=True, device="cpu")],
            moments_dtype=self.moments_dtype,
            stochastic_rounding=self.stochastic_rounding,
            seed=self.seed,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # groups that torch's Muon or AdamW saved have no such key
            group.setdefault("use_muon", "betas" not in group)
            for name, value in {"ns_method": METHODS[0], **SPLIT_SETTINGS}.items() if group["use_muon"] else ():
                group.setdefault(name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        uses_muon = param_group.get("use_muon", True)
        foreign = [name for name in (_ADAMW_SETTINGS if uses_muon else _MUON_SETTINGS) if name in param_group]
        if foreign:
            raise ValueError(
                f"fsdp2x.optim.Muon: a group with use_muon={uses_muon} has {', '.join(foreign)}, which only groups "
                f"with use_muon={not uses_muon} support"
            )
        if not uses_muon:
            param_group.setdefault("eps", _ADAMW_EPS)
            for name, value in self._adamw.defaults.items():
                if name not in self.defaults:
                    param_group.setdefault(name, value)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if uses_muon:
                _check_matrices(group)
            else:
                for name in _MUON_SETTINGS:
                    group.pop(name, None)
                settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
                AdamW([torch.empty(0, requires_grad=True, device="cpu")], **settings)  # checks them
        except Exception:
            del self.param_groups[-1]
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads like torch, with moments in ``moments_dtype``. Settings that torch's groups lack stay.

        Raises:
            ValueError: a group was saved by an optimizer of another kind.
        """
        saved_groups = state_dict["param_groups"]
        if len(self.param_groups) == len(saved_groups):  # torch raises for others
            for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
                _check_kind(number, group, saved)
            kept = [{name: group[name] for name in _OWN_SETTINGS if name in group} for group in self.param_groups]
            groups = [{**own, **saved} for own, saved in zip(kept, saved_groups, strict=True)]
            state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)
        self._adamw.state = self.state
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for param, index in zip(group["params"], saved["params"], strict=True):
                if not group["use_muon"] and param in self.state:
                    self._adamw.take_moments(param, state_dict["state"][index])
        count_on_host(self.state)

    def step_scaled(self, grad_scale: Tensor | None) -> None:
        groups = [group for group in self.param_groups if group["use_muon"]]
        owners = [group for group in groups for _ in group["params"]]
        matrices = [one for group in groups for one in _matrices_of(group)]
        params = [one.param for one in matrices]
        if self._plan is None or not self._plan.is_for(matrices, self.ns_dtype):
            self._plan = make_plan(matrices, self.ns_dtype)
        self._adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adamw.state = self.state
        fresh = [param for param in params if param.grad is not None and "momentum_buffer" not in self.state[param]]
        dtypes = [dense_gradient("optim.Muon", param).dtype for param in fresh]
        for param, zeros in zip(fresh, zeros_like_all(zip(fresh, dtypes, strict=True)), strict=True):
            self.state[param]["momentum_buffer"] = zeros
        steps = [
            _MatrixStep(one, group, self.state[one.param], grad_scale, pieces)
            for one, group, pieces in zip(matrices, owners, self._plan.pieces, strict=True)
        ]
        _run(self._plan, steps, lambda: self._adamw.step_scaled(grad_scale))


class _MatrixStep:
    """The step of one parameter of matrices on this rank's part of it."""

    def __init__(
        self,
        matrices: Matrices,
        group: dict[str, Any],
        state: dict[str, Any],
        factor: Tensor | None,
        pieces: list[Piece],
    ) -> None:
        param = matrices.param
        self._group, self._factor, self._pieces, self._split = group, factor, pieces, matrices.split
        self.has_gradient = param.grad is not None
        if not self.has_gradient:
            return
        grad, momentum = dense_gradient("optim.Muon", param), state["momentum_buffer"]
        if isinstance(param, DTensor):
            for name, tensor in (("gradient", grad), ("momentum_buffer", momentum)):
                if not isinstance(tensor, DTensor) or tensor.placements != param.placements:
                    raise ValueError(
                        f"fsdp2x.optim.Muon: the {name} of a parameter of shape {tuple(param.shape)} has placements "
                        f"{getattr(tensor, 'placements', None)}, but its parameter {param.placements}. Redistribute it."
                    )
        self._lr = number(group["lr"])
        rows, columns = param.shape[-2:]
        self._lr_scales = self._split.factors(rows, columns, _LR_SCALES[group["adjust_lr_fn"] or "original"])
        # The local parts as [num, rows, columns].
        locals_ = [local_tensor(tensor) for tensor in (param, grad, momentum)]
        self._param, self._grad, self._momentum = (t.unsqueeze(0) if t.ndim == 2 else t for t in locals_)

    def write_update(self, job: MatrixJob, block: MatrixBlock, target: Tensor | None) -> None:
        """Updates the momentum of this rank's block, and writes the input of the orthogonalization, if wanted."""
        if not self.has_gradient:
            if target is not None:
                target.zero_()
            return
        grad = scaled(self._part(self._grad, block), self._factor).to(self._momentum.dtype)
        momentum, rate = self._part(self._momentum, block), self._group["momentum"]
        momentum.lerp_(grad, 1 - rate)
        if target is not None:
            target.copy_(grad.lerp(momentum, rate) if self._group["nesterov"] else momentum)

    def orthogonalize(self, whole: Tensor) -> Tensor:
        """Computes the result on the owner. Returns zeros if the owner has no gradient."""
        if not self.has_gradient:
            return whole.zero_()
        settings = _triples(self._group), self._group["eps"], self._group["ns_method"]

        def run(matrices: Tensor) -> Tensor:
            if matrices.size(0) == 1:
                return orthogonalize(matrices[0], *settings).unsqueeze(0)
            return orthogonalize(matrices, *settings)

        return self._split.orthogonalize(whole, run)

    def apply(self, block: MatrixBlock, update: Tensor) -> None:
        if not self.has_gradient:
            return
        param, update = self._part(self._param, block), update.to(self._param.device)
        param.mul_(1 - self._lr * self._group["weight_decay"])
        dim = self._split.dim
        first, size = block.start[dim], block.shape[dim]
        for begin, end, scale in self._lr_scales:
            begin, end = max(begin - first, 0), min(end - first, size)
            if begin < end:
                lines = update.narrow(dim, begin, end - begin)
                param.narrow(dim, begin, end - begin).add_(lines, alpha=-self._lr * scale)

    def _part(self, local: Tensor, block: MatrixBlock) -> Tensor:
        """A block is as wide and high as a piece of this rank, of some of its matrices."""
        piece = next(
            one
            for one in self._pieces
            if one.start[1:] == block.start[1:] and 0 <= block.start[0] - one.start[0] < one.shape[0]
        )
        first, row, column = piece.local_start
        first += block.start[0] - piece.start[0]
        num, rows, columns = block.shape
        return local[first : first + num, row : row + rows, column : column + columns]


def _run(plan: MuonPlan, steps: list[_MatrixStep], meanwhile: Callable[[], None]) -> None:
    """Runs a round's exchanges while computing the round before. Local matrices and ``meanwhile`` come first."""

    def write(job: MatrixJob, block: MatrixBlock, target: Tensor | None) -> None:
        steps[job.param].write_update(job, block, target)

    def apply(arrive: Callable[[], Iterable]) -> None:
        for job, block, update in arrive():
            steps[job.param].apply(block, update)

    arriving = plan.rounds[0].send(write) if plan.rounds else list
    meanwhile()
    for job in plan.local:
        whole = torch.empty(job.shape, dtype=plan.dtype, device=plan.params[job.param].param.device)
        step = steps[job.param]
        if step.has_gradient:
            for block in job.blocks:
                step.write_update(job, block, part_of(whole, job, block))
            update = step.orthogonalize(whole)
            for block in job.blocks:
                step.apply(block, part_of(update, job, block))
    returning: Callable[[], Iterable] = list
    for index, current in enumerate(plan.rounds):
        wholes = arriving()
        arriving = plan.rounds[index + 1].send(write) if index + 1 < len(plan.rounds) else list
        done = [(job, steps[job.param].orthogonalize(whole)) for job, whole in wholes]
        apply(returning)
        returning = current.give_back(done)
    apply(returning)


def _triples(group: dict[str, Any]) -> list[tuple[float, float, float]]:
    coefficients = group["ns_coefficients"]
    return list(coefficients) if isinstance(coefficients[0], (tuple, list)) else [coefficients] * group["ns_steps"]


def _matrices_of(group: dict[str, Any]) -> list[Matrices]:
    """The parameters of a group with ``use_muon``; raises ValueError for blocks that do not cover one."""
    names = group.get("param_names") or [f"a matrix of shape {tuple(param.shape)}" for param in group["params"]]
    found = []
    for param, name in zip(group["params"], names, strict=True):
        split = split_of(group, param.shape, name)
        found.append(Matrices(param, name, split, group["ns_steps"], group["ns_method"]))
    return found


def _check_kind(number: int, group: dict[str, Any], saved: dict[str, Any]) -> None:
    """Raises ValueError if ``saved`` is of Muon and ``group`` of AdamW, or the other way round."""
    wanted = "ns_steps" if group["use_muon"] else "betas"
    if saved.get("use_muon", group["use_muon"]) != group["use_muon"] or wanted not in saved:
        raise ValueError(
            f"fsdp2x.optim.Muon.load_state_dict: group {number} has use_muon={group['use_muon']}, but was saved by "
            "another optimizer or with the other value. Build the groups that were saved."
        )


def _check_matrices(group: dict[str, Any]) -> None:
    """Raises ValueError for settings or parameters that do not fit matrices."""

    def refuse(what: str) -> None:
        raise ValueError(f"fsdp2x.optim.Muon: {what}")

    for name, lowest in (("lr", 0), ("momentum", 0), ("weight_decay", 0), ("ns_steps", 1)):
        if not group[name] >= lowest:
            refuse(f"{name} is {group[name]}, expected at least {lowest}")
    if group["adjust_lr_fn"] not in (None, *_LR_SCALES):
        refuse(f"adjust_lr_fn is {group['adjust_lr_fn']!r}, expected None or one of {', '.join(_LR_SCALES)}")
    if group["ns_method"] not in METHODS:
        refuse(f"ns_method is {group['ns_method']!r}, expected one of {', '.join(METHODS)}")
    triples = _triples(group)
    if len(triples) != group["ns_steps"] or any(len(triple) != 3 for triple in triples):
        refuse(f"ns_coefficients are {group['ns_coefficients']}, expected three numbers, or three for each of ns_steps")
    for param in group["params"]:
        if param.is_complex():
            raise NotImplementedError(f"fsdp2x.optim.Muon: a parameter of shape {tuple(param.shape)} is complex")
        if param.ndim not in (2, 3):
            refuse(
                f"a parameter has shape {tuple(param.shape)}, expected a matrix or a stack of matrices [num, m, n]. "
                "Put it into a group with use_muon=False, as fsdp2x.optim.muon_param_groups(model) does."
            )
    _matrices_of(group)
