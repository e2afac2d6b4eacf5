"""Random programs of which one rank runs another version: drawn from a seed, run on every rank, and judged.

A program trains a small model for a few steps. In one step, one rank does something else (`KINDS`). Either all ranks
raise the same error, which names that rank, or none raises. The weights must be those of an unsharded model after the
steps without an error.
"""

import copy
import random
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import fsdp2x
from fsdp2x.base.failures import exchange
from reference import full

WIDTH = 6
NUM_STEPS = 4
LIMIT_S = 20.0  # of a step, on a busy machine
KINDS = (
    "swap",
    "skip",
    "repeat",
    "setting",
    "freeze",
    "prefetch",
    "unshard",
    "evaluate",
    "accumulate",
    "raise in forward",
    "raise in backward",
    "two models",
    "convert",
    "no optimizer step",
)
# Over shared memory, these end by the timeout.
TIME_OUT = ("two models", "convert")
SHORT_LIMIT_S = 2.0  # of those
SETTINGS = {
    "set_reshard_after_forward": (True, False),
    "set_reshard_after_backward": (True, False),
    "set_requires_gradient_sync": (True, False),
    "set_gradient_divide_factor": (0.5, 7.0),
    "set_reduce_scatter_unused_params": (True, False),
}


class Caught(Exception):
    pass


@dataclass(frozen=True)
class Program:
    seed: int
    transport: str
    widths: tuple[int, ...]  # of the units' inner layers; equal ones have equal sizes
    keeps: bool  # reshard_after_forward=False
    kind: str
    step: int
    rank: int
    unit: int
    other: int
    setting: str
    value: object

    @property
    def limit_s(self) -> float:
        return SHORT_LIMIT_S if self.transport == "shm" and self.kind in TIME_OUT else LIMIT_S


def draw(seed: int, world: int, transport: str, kinds: tuple[str, ...]) -> Program:
    rng = random.Random(seed)
    num_units = rng.randint(2, 4)
    widths = [rng.choice((4, 5, 8)) for _ in range(num_units)]
    if rng.random() < 0.6:
        widths = [widths[0]] * num_units
    unit, other = rng.sample(range(num_units), 2)
    setting = rng.choice(tuple(SETTINGS))
    return Program(
        seed,
        transport,
        tuple(widths),
        rng.random() < 0.3,
        kinds[seed % len(kinds)],
        rng.randrange(NUM_STEPS),
        rng.randrange(world),
        unit,
        other,
        setting,
        rng.choice(SETTINGS[setting]),
    )


class Net(nn.Module):
    """Blocks in an order that a step may change; one may raise."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH)) for width in widths]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)
        self.order = list(range(len(widths)))
        self.raises_before = self.raises_behind = -1

    def forward(self, x):
        for i in self.order:
            if i == self.raises_before:
                raise Caught("a bad sample, on this rank only")
            x = self.blocks[i](x)
            if i == self.raises_behind and x.requires_grad:
                x.register_hook(self.fail)
        return self.head(x)

    def fail(self, grad):
        raise Caught("a bad gradient, on this rank only")


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def make(program: Program) -> Net:
    torch.manual_seed(program.seed)
    return Net(program.widths)


def sharded(program: Program) -> Net:
    model = make(program)
    options = {"transport": program.transport, "timeout": timedelta(seconds=program.limit_s)}
    for block in model.blocks:
        fsdp2x.fully_shard(block, reshard_after_forward=not program.keeps, **options)
    return fsdp2x.fully_shard(model, **options)


def diverge(program: Program, model: Net, other: Net) -> None:
    """Changes the program of the one rank before its step."""
    block = model.blocks[program.unit]
    match program.kind:
        case "swap":
            order = model.order
            order[program.unit], order[program.other] = order[program.other], order[program.unit]
        case "skip":
            model.order.remove(program.unit)
        case "repeat":
            model.order.insert(program.other, program.unit)
        case "setting":
            getattr(block, program.setting)(program.value)
        case "freeze":
            block.requires_grad_(False)
        case "prefetch":
            block.set_modules_to_forward_prefetch([model.blocks[program.other]])
        case "unshard":
            block.unshard()
        case "evaluate":
            with torch.no_grad():
                model(batch(program.rank, 50))
        case "accumulate":
            with fsdp2x.accumulate(model, last=False):
                model(batch(program.rank, 50)).square().mean().backward()
        case "raise in forward":
            model.raises_before = program.unit
        case "raise in backward":
            model.raises_behind = program.unit
        case "two models":
            other(batch(program.rank, 51))
        case "convert":
            model.double()


def undo(program: Program, model: Net, plain: Net) -> None:
    """After its step, whether it raised or not: all ranks run the same again."""
    model.order[:] = plain.order
    model.raises_before = model.raises_behind = -1
    block = model.blocks[program.unit]
    if program.kind == "setting":
        undone = {"set_reshard_after_forward": not program.keeps, "set_reshard_after_backward": True}
        undone |= {"set_requires_gradient_sync": True, "set_reduce_scatter_unused_params": False}
        if program.setting == "set_gradient_divide_factor":
            block.set_gradient_divide_factor(float(dist.get_world_size()))
        else:
            getattr(block, program.setting)(undone[program.setting])
    if program.kind == "freeze":
        block.requires_grad_(True)
    if program.kind == "prefetch":
        block.set_modules_to_forward_prefetch([])
    if program.kind == "unshard":
        block.reshard()


def run(program: Program) -> list[str]:
    """Runs the program and returns what is wrong on this rank. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, other, plain = sharded(program), sharded(program), make(program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gold_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wrong = []
    for step in range(NUM_STEPS):
        error, began = "", time.monotonic()
        try:
            if step == program.step and rank == program.rank:
                diverge(program, model, other)
            if program.kind == "two models" and step == program.step:
                for one in (model, other) if rank != program.rank else (model,):
                    loss = one(batch(rank, step)).square().mean()
                    if one is model:
                        loss.backward()
            else:
                model(batch(rank, step)).square().mean().backward()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        seconds = time.monotonic() - began
        if step == program.step and rank == program.rank:
            undo(program, model, plain)
        outcomes = [None] * world
        dist.all_gather_object(outcomes, (error, seconds))
        wrong += judge_step(program, step, outcomes)
        if any(told for told, _ in outcomes):
            if program.transport == "shm":  # these ranks never reset their counts, and restart from a checkpoint
                wrong += judge_next_step(model, step, [told for told, _ in outcomes])
                if program.kind in TIME_OUT:
                    meet_again()
                return wrong
            if program.kind in ("convert", "no optimizer step"):
                meet_again()
                return wrong  # to continue, the others would have to convert or this one to step
            optimizer.zero_grad()
            if program.kind in ("setting", "raise in backward", "accumulate", "two models"):
                model.reset_iter_state()
            continue
        is_missed = program.kind == "no optimizer step" and step + 1 == program.step
        if not is_missed or rank != program.rank:
            optimizer.step()
        optimizer.zero_grad()
        train_gold(program, step, plain, gold_optimizer, world)
        if not is_missed:  # else the next forward raises
            wrong += compare(program, step, model, plain)
    return wrong


def judge_step(program: Program, step: int, outcomes: list[tuple[str, float]]) -> list[str]:
    told = [error for error, _ in outcomes]
    limit = LIMIT_S if program.limit_s == LIMIT_S else 3 * program.limit_s
    if slow := [f"rank {r} took {s:.1f} s" for r, (_, s) in enumerate(outcomes) if s > limit]:
        return [f"step {step}: {slow}: {told}"]
    if not any(told):
        return []
    if step != program.step and (program.transport == "process_group" or step < program.step):
        return [f"step {step} raised, not {program.step}: {told}"]
    if not all(error or (program.transport == "shm" and rank == program.rank) for rank, error in enumerate(told)):
        return [f"step {step}: only some ranks raised: {told}"]
    peers = [error for rank, error in enumerate(told) if rank != program.rank]
    if not all(f"rank {program.rank}" in error for error in peers):
        return [f"step {step}: rank {program.rank} is not named: {told}"]
    if program.transport == "process_group" and len(set(peers)) > 1:
        return [f"step {step}: peers raised different errors: {told}"]
    return []


def meet_again() -> None:
    """Returns once all ranks know of the last failure."""
    while True:
        try:
            exchange(None, None)
            return
        except RuntimeError:
            continue


def judge_next_step(model: Net, step: int, told: list[str]) -> list[str]:
    """Returns what is wrong if a rank without an error can run another forward. Collective."""
    error = told[dist.get_rank()]
    began = time.monotonic()
    if not error:
        try:
            model(batch(dist.get_rank(), step + 1))
        except RuntimeError as raised:
            error = str(raised)
    outcomes = [None] * len(told)
    dist.all_gather_object(outcomes, (error, time.monotonic() - began))
    if all(error for error, _ in outcomes) and max(seconds for _, seconds in outcomes) < LIMIT_S:
        return []
    return [f"the step after {step}: {outcomes}"]


def train_gold(program: Program, step: int, plain: Net, optimizer, world: int) -> None:
    """The step on the unsharded model, for all ranks, each with what it ran."""
    sums = [torch.zeros_like(param) for param in plain.parameters()]
    touched = [False] * len(sums)
    for rank in range(world):
        mine = copy.deepcopy(plain)
        if step == program.step and rank == program.rank and program.kind in ("swap", "skip", "repeat", "freeze"):
            diverge(program, mine, mine)
        mine(batch(rank, step)).square().mean().backward()
        for i, param in enumerate(mine.parameters()):
            if param.grad is not None:
                sums[i] += param.grad / world
                touched[i] = True
    for param, total, was_touched in zip(plain.parameters(), sums, touched, strict=True):
        param.grad = total if was_touched else None
    optimizer.step()
    optimizer.zero_grad()


def compare(program: Program, step: int, model: Net, plain: Net) -> list[str]:
    wrong = []
    for (name, _), value in zip(model.named_parameters(), full(list(model.parameters())), strict=True):
        expected = plain.get_parameter(name)
        if not torch.allclose(value, expected, rtol=1e-4, atol=1e-5):
            wrong.append(f"step {step}: {name} is off by {(value - expected).abs().max().item():.3g}")
    return wrong
