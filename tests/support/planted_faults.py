"""A small training program, and faults of real kinds to plant in it. Each fault says where it shows first.

The program has what faults need: attention with positions, dropout, a router with experts, tied weights, frozen
parameters, buffers, accumulation over micro-batches, clipping, two optimizer groups, and recomputation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fsdp2x
from fsdp2x.compare import trace
from fsdp2x.compare.engines import ENGINES
from fsdp2x.compare.judge import Run
from fsdp2x.compare.recorder import Recorder

WIDTH, VOCABULARY, LENGTH, HEADS = 16, 48, 8, 2


@dataclass(frozen=True)
class Case:
    """How the program trains."""

    engine: str = "fsdp2x"  # or fsdp2, ddp
    half: bool = False  # bf16 compute
    dropout: float = 0.1
    recompute: bool = True
    num_micro_batches: int = 2
    experts: bool = True
    num_steps: int = 2
    compiled: bool = False
    seed: int = 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leak, self.scale = 0, (WIDTH // HEADS) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) * self.scale
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(self.leak)
        mixed = scores.masked_fill(~mask, -1e4).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Experts(nn.Module):
    """Two of four experts for each token, all computed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(MLP() for _ in range(4))
        self.normalizes, self.drops = True, 0
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        top = shares * (shares >= shares.topk(2, -1).values[..., -1:])
        weights = top / top.sum(-1, keepdim=True) if self.normalizes else top
        if self.drops:
            weights = torch.cat([torch.zeros_like(weights[:, : self.drops]), weights[:, self.drops :]], 1)
        self.balance = shares.mean((0, 1)).square().sum()
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    def __init__(self, experts: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(dropout)
        self.mlp = Experts() if experts else MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(case.experts and i == 1, case.dropout) for i in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("seen", torch.zeros(()))
        self.recomputes, self.preserves, self.shift, self.skips, self.cuts = case.recompute, True, 0, None, False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(LENGTH) + self.shift)
        for i, block in enumerate(self.blocks):
            if i == self.skips:
                continue
            if self.recomputes and i == 0:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserves)
            else:
                x = block(x)
            x = x.detach() if self.cuts and i == 0 else x
        self.seen += 1
        return self.head(self.norm(x))


@dataclass
class Program:
    """The training program. Faults change its parts: the model, its options, or a function of a stage."""

    case: Case
    model: Any = field(init=False)
    optimizer: Any = field(init=False)
    divisor: float = field(init=False)
    reduces_last: bool = True
    clears: bool = True
    max_norm: float | None = 0.05
    router_weight: float = 0.01
    label_shift: int = 1
    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    ignored: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ("positions.weight",)
    groups: tuple[str, ...] = ("decayed", "plain")
    decayed: Callable[[Tensor], bool] = staticmethod(lambda param: param.dim() > 1)
    rows_of: Callable[[int, int, int], int] = staticmethod(lambda step, micro, rank: 100 * step + 10 * micro + rank)
    weigh: Callable[[Tensor], Tensor] = staticmethod(lambda losses: losses.mean())
    clip: Callable[..., Any] | None = None
    on_model: list[Callable[[Program], None]] = field(default_factory=list)
    on_sharded: list[Callable[[Program], None]] = field(default_factory=list)
    on_optimizer: list[Callable[[Program], None]] = field(default_factory=list)
    on_forward: list[Callable[[Program, int, int], None]] = field(default_factory=list)
    on_backward: list[Callable[[Program, int], None]] = field(default_factory=list)
    on_clipped: list[Callable[[Program, int], None]] = field(default_factory=list)
    on_step: list[Callable[[Program, int], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.divisor = self.case.num_micro_batches

    def parameter(self, name: str) -> Tensor:
        """The model's own parameter, under every engine."""
        return self.inner.get_parameter(name)

    @property
    def inner(self) -> Model:
        return getattr(self.model, "module", self.model)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def train(self) -> None:
        case = self.case
        torch.manual_seed(case.seed)
        self.model = Model(case)
        for name in self.frozen:
            self.parameter(name).requires_grad_(False)
        _call(self.on_model, self)
        if self.case.compiled:
            torch.compiler.reset()  # earlier models count for its limit of compilations
            for block in self.model.blocks:
                block.compile(backend="aot_eager")
        self._shard()
        _call(self.on_sharded, self)
        trained = [one for one in self.inner.parameters() if one.requires_grad]
        groups = {
            "decayed": {"params": [one for one in trained if self.decayed(one)], "weight_decay": 0.1},
            "plain": {"params": [one for one in trained if not self.decayed(one)], "weight_decay": 0.0},
        }
        chosen = [groups[name] for name in self.groups]
        self.optimizer = torch.optim.AdamW(chosen, lr=self.rate, betas=self.betas)
        _call(self.on_optimizer, self)
        for step in range(case.num_steps):
            for micro in range(case.num_micro_batches):
                self._backward(step, micro)
            _call(self.on_backward, self, step)
            if self.max_norm is not None:
                (self.clip or torch.nn.utils.clip_grad_norm_)(trained, self.max_norm)
            _call(self.on_clipped, self, step)
            self.optimizer.step()
            _call(self.on_step, self, step)
            if self.clears:
                self.optimizer.zero_grad()

    def _shard(self) -> None:
        case, ignored = self.case, {self.parameter(name) for name in self.ignored}
        if case.engine == "ddp":
            if ignored:
                wrapper = nn.parallel.DistributedDataParallel
                wrapper._set_params_and_buffers_to_ignore_for_model(self.model, list(self.ignored))
            self.model = nn.parallel.DistributedDataParallel(self.model, find_unused_parameters=True)
            return
        shard = fsdp2x.fully_shard if case.engine == "fsdp2x" else torch_fsdp.fully_shard
        policy = torch_fsdp.MixedPrecisionPolicy(torch.bfloat16 if case.half else None)
        more = {"ignored_params": ignored} if ignored else {}
        for block in self.inner.blocks:
            shard(block, mp_policy=policy, **more)
        shard(self.model, mp_policy=policy, **more)

    def _backward(self, step: int, micro: int) -> None:
        _call(self.on_forward, self, step, micro)
        generator = torch.Generator().manual_seed(self.rows_of(step, micro, self.rank))
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        is_last = self.reduces_last and micro == self.case.num_micro_batches - 1
        with self._synchronized(is_last):
            logits = self.model(ids).float()
            labels = ids.roll(-self.label_shift, 1).flatten()
            loss = self.weigh(F.cross_entropy(logits.flatten(0, 1), labels, reduction="none"))
            if self.case.experts:
                loss = loss + self.router_weight * self.inner.blocks[1].mlp.balance
            (loss / self.divisor).backward()

    @contextlib.contextmanager
    def _synchronized(self, is_last: bool):
        if self.case.engine == "ddp":
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(is_last)
            yield


def _call(functions: list[Callable], *arguments: Any) -> None:
    for function in functions:
        function(*arguments)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- faults


@dataclass(frozen=True)
class Fault:
    """``plant`` changes a program. The first difference has one of ``phases`` and a name that begins with ``name``."""

    plant: Callable[[Program], None]
    phases: tuple[str, ...]
    name: str = ""
    step: int = 0
    engines: tuple[str, ...] = ("fsdp2", "ddp", "fsdp2x")


FAULTS: dict[str, Fault] = {}


def planted(*phases: str, name: str = "", **more: Any) -> Callable:
    def register(plant: Callable[[Program], None]) -> Callable[[Program], None]:
        FAULTS[plant.__name__] = Fault(plant, phases, name, **more)
        return plant

    return register


def in_model(change: Callable[..., None], *arguments: Any) -> Callable[[Program], None]:
    return lambda program: program.on_model.append(lambda running: change(running.model, *arguments))


def _add(name: str, plant: Callable[[Program], None], *phases: str, place: str = "", **more: Any) -> None:
    FAULTS[name] = Fault(plant, phases, place, **more)


def _scale_gradient(program: Program, name: str, factor: Callable[[int], float], first_step: int = 0) -> None:
    def scale(running: Program, step: int) -> None:
        gradient = running.parameter(name).grad
        if step >= first_step:
            local(gradient).mul_(factor(running.rank))

    program.on_backward.append(scale)


UP, DOWN, TIED = "blocks.0.mlp.up.weight", "blocks.0.mlp.down.weight", "tokens.weight"

# Models that differ: name -> the place, the module whose attribute differs, its name, and its value.
CHANGES: dict[str, tuple[str, str, str, Any]] = {
    "mask_leaks": ("blocks.1.attention.o", "blocks.1.attention", "leak", 1),
    "attention_scale": ("blocks.0.attention.o", "blocks.0.attention", "scale", 1.0),
    "dropout_rate": ("blocks.1.dropout", "blocks.1.dropout", "p", 0.3),
    "dropout_off": ("blocks.0.dropout", "blocks.0.dropout", "training", False),
    "norm_epsilon": ("blocks.1.norm", "blocks.1.norm", "eps", 1e-3),
    "activation_tanh": ("blocks.0.mlp.act", "blocks.0.mlp", "act", nn.GELU("tanh")),
    "layer_skipped": ("blocks.1", "", "skips", 1),
    "graph_cut": ("blocks.0", "", "cuts", True),
    "router_not_normalized": ("blocks.1.mlp", "blocks.1.mlp", "normalizes", False),
    "tokens_dropped": ("blocks.1.mlp", "blocks.1.mlp", "drops", 1),
    "recomputed_dropout": ("blocks.0.dropout", "", "preserves", False),
}
PHASES = {
    "graph_cut": (trace.OUTPUT_GRADIENT, trace.LOCAL_GRADIENT, trace.RECOMPUTED),
    "recomputed_dropout": (trace.RECOMPUTED,),
}
for _name, (_place, *_change) in CHANGES.items():
    _plant = in_model(lambda m, path, *change: setattr(m.get_submodule(path), *change), *_change)
    _add(_name, _plant, *PHASES.get(_name, (trace.FORWARD,)), place=_place)
_add("positions_restart", in_model(lambda m: setattr(m, "shift", dist.get_rank())), trace.FORWARD, place="positions")


def _cut_tie(model: Model) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


_add("tied_weights_cut", in_model(_cut_tie), trace.INITIAL, place="head.weight")


class _Rounded(nn.LayerNorm):
    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__(WIDTH)
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).bfloat16().to(x.dtype)


_add(
    "norm_in_bf16",
    in_model(lambda m: setattr(m.blocks[1], "norm", _Rounded(m.blocks[1].norm))),
    trace.FORWARD,
    place="blocks.1.norm",
)

# Weights that differ at the start.


def _write(p: Program, name: str, change: Callable[[Tensor], Tensor]) -> None:
    local(p.parameter(name)).data.copy_(change(local(p.parameter(name)).data))


_add(
    "stale_weights_after_load",
    lambda p: p.on_model.append(lambda q: _write(q, UP, lambda w: 1.01 * w)),
    trace.INITIAL,
    place=UP,
)
_add("loaded_in_bf16", lambda p: p.on_model.append(lambda q: _write(q, UP, Tensor.bfloat16)), trace.INITIAL, place=UP)
_add(
    "rank_1_not_broadcast",
    lambda p: p.on_sharded.append(lambda q: _write(q, DOWN, lambda w: w + 0.01 * q.rank)),
    trace.INITIAL,
    place=DOWN,
)


@planted(trace.INITIAL, name=UP, engines=("fsdp2", "fsdp2x"))
def shards_swapped(program: Program) -> None:
    def swap(p: Program) -> None:
        part = local(p.parameter(UP)).detach()
        parts = [torch.empty_like(part) for _ in range(2)]
        dist.all_gather(parts, part.contiguous())
        part.copy_(parts[1 - p.rank])

    program.on_sharded.append(swap)


# Data.
_add("same_data_on_all_ranks", lambda p: setattr(p, "rows_of", lambda s, m, r: 100 * s + 10 * m), trace.INPUT)
_add("epoch_not_set", lambda p: setattr(p, "rows_of", lambda s, m, r: 10 * m + r), trace.INPUT, step=1)
_add("micro_batch_repeated", lambda p: setattr(p, "rows_of", lambda s, m, r: 100 * s + r), trace.INPUT)

# Losses.
_add("labels_shifted_twice", lambda p: setattr(p, "label_shift", 2), trace.LOSS)
_add("router_loss_twice", lambda p: setattr(p, "router_weight", 0.02), trace.LOSS)
_add("accumulation_not_divided", lambda p: setattr(p, "divisor", 1), trace.LOSS)
_add("divided_by_ranks", lambda p: setattr(p, "divisor", 2 * p.divisor), trace.LOSS)
_add("padding_counts", lambda p: setattr(p, "weigh", lambda losses: losses[1:].sum() / losses.numel()), trace.LOSS)
_add("sum_for_mean", lambda p: setattr(p, "weigh", lambda losses: losses.sum()), trace.LOSS)

# Gradients.
_add("gradient_times_ranks", lambda p: _scale_gradient(p, UP, lambda rank: 2.0), trace.GRADIENT, place=UP)
_add("gradient_of_tied_twice", lambda p: _scale_gradient(p, TIED, lambda rank: 2.0), trace.GRADIENT, place=TIED)
_add("gradient_zero_on_rank_1", lambda p: _scale_gradient(p, UP, lambda rank: 1.0 - rank), trace.GRADIENT, place=UP)
_add("gradient_one_percent", lambda p: _scale_gradient(p, DOWN, lambda rank: 1.01), trace.GRADIENT, place=DOWN)
_add("gradient_late", lambda p: _scale_gradient(p, DOWN, lambda rank: 0.5, 1), trace.GRADIENT, place=DOWN, step=1)
_add("never_reduced", lambda p: setattr(p, "reduces_last", False), trace.GRADIENT)
_add("not_cleared", lambda p: setattr(p, "clears", False), trace.LOCAL_GRADIENT, trace.GRADIENT, step=1)
_add("frozen_trains", lambda p: setattr(p, "frozen", ()), trace.OUTPUT_GRADIENT, trace.GRADIENT, place="positions")
_add("trained_is_frozen", lambda p: setattr(p, "frozen", ("positions.weight", UP)), trace.GRADIENT, place=UP)


@planted(trace.GRADIENT, name=UP)
def one_parameter_not_reduced(program: Program) -> None:
    program.ignored, program.max_norm = (UP,), None  # torch cannot clip shards and other tensors together


@planted(trace.GRADIENT, name=DOWN)
def reduced_in_bf16(program: Program) -> None:
    def round_gradient(p: Program, step: int) -> None:
        gradient = local(p.parameter(DOWN).grad)
        gradient.copy_(gradient.bfloat16())

    program.on_backward.append(round_gradient)


# Clipping.
_add("not_clipped", lambda p: setattr(p, "clip", lambda params, limit: None), trace.NORM)
_add("clipped_twice_as_high", lambda p: setattr(p, "max_norm", 0.1), trace.CLIPPED)


@planted(trace.NORM, engines=("fsdp2", "fsdp2x"))
def clipped_by_local_norm(program: Program) -> None:
    def clip(params: list[Tensor], limit: float) -> None:
        torch.nn.utils.clip_grad_norm_([_Shard(one) for one in params], limit)

    program.clip = clip


class _Shard:
    """A parameter as its local shard."""

    def __init__(self, param: Tensor) -> None:
        self.grad = local(param.grad)


@planted(trace.CLIPPED)
def clipped_except_one(program: Program) -> None:
    def unclip(p: Program, step: int) -> None:
        local(p.parameter(UP).grad).mul_(1.5)

    program.on_clipped.append(unclip)


# The optimizer.
_add("group_left_out", lambda p: setattr(p, "groups", ("decayed",)), trace.CLIPPED)
_add("wrong_rate", lambda p: setattr(p, "rate", 1.1e-2), trace.WEIGHT)
_add("wrong_betas", lambda p: setattr(p, "betas", (0.9, 0.999)), trace.WEIGHT, step=1)
_add("norms_decay", lambda p: setattr(p, "decayed", lambda param: True), trace.WEIGHT)


def _after_step(change: Callable[[Program, Tensor], None], name: str) -> Callable[[Program], None]:
    """Changes a weight before the recorder sees it, as a wrong optimizer does."""

    def plant(program: Program) -> None:
        def wrap(p: Program) -> None:
            p.optimizer.register_step_post_hook(lambda *_: change(p, local(p.parameter(name)).data))

        program.on_optimizer.append(wrap)

    return plant


_add("bf16_master_weights", _after_step(lambda p, w: w.copy_(w.bfloat16()), UP), trace.WEIGHT, place=UP)
_add("weight_rolled_back", _after_step(lambda p, w: w.mul_(0.999), UP), trace.WEIGHT, place=UP)
_add("rank_1_steps_elsewhere", _after_step(lambda p, w: w.add_(0.01 * p.rank), DOWN), trace.WEIGHT, place=DOWN)


_add("state_lost", lambda p: p.on_step.append(lambda q, step: q.optimizer.state.clear()), trace.WEIGHT, step=1)


@planted(trace.FORWARD, name="blocks.1.norm", step=1)
def stale_gather(program: Program) -> None:
    """The second step does not compute with the weights that the first one ended with."""
    program.on_step.append(lambda p, step: local(p.parameter("blocks.1.norm.bias")).data.add_(0.05))


def _count_more(num: Callable[[Program], int]) -> Callable[[Program], None]:
    return lambda program: program.on_forward.append(lambda p, step, micro: p.inner.seen.add_(num(p)))


# Buffers.
_add("buffer_per_rank", _count_more(lambda p: p.rank), trace.BUFFER, place="seen")
_add("buffer_not_updated", _count_more(lambda p: -1), trace.BUFFER, place="seen")


def plant(case: Case, name: str = "") -> Program:
    """Returns the program of a case with a fault, or without."""
    program = Program(case)
    if name:
        FAULTS[name].plant(program)
    return program


def is_right_place(fault: Fault, key: trace.Key) -> bool:
    return key.phase in fault.phases and key.name.startswith(fault.name) and key.step == fault.step


def record(case: Case, fault: str = "", engine: str = "script", noise_seed: int | None = None) -> Run:
    """Returns the run of all ranks, on each."""
    recorder = Recorder(ENGINES[engine](), noise_seed=noise_seed)
    with recorder:
        plant(case, fault).train()
    traces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(traces, recorder.finish())
    return Run(traces)


def references(case: Case) -> tuple[Run, Run]:
    """The unsharded run of a case, and the same with noise."""
    unsharded = replace(case, engine="fsdp2")
    return record(unsharded, engine="unsharded"), record(unsharded, engine="unsharded", noise_seed=1)


def clean_cases() -> list[Case]:
    """Cases without a fault, of all kinds and ten seeds."""
    kinds = [Case(), Case(dropout=0.0), Case(half=True), Case(recompute=False), Case(num_micro_batches=1)]
    kinds += [Case(experts=False), Case(half=True, experts=False, dropout=0.0), Case(half=True, recompute=False)]
    kinds += [Case(compiled=True, recompute=False)]
    return [replace(kind, seed=seed) for seed in range(10) for kind in kinds]
