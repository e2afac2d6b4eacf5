"""One GPU: a step that an exception or missing memory interrupts does not change the next one."""

import contextlib
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import alike
import fsdp2x
from harness import distributed
from models import Stack, inputs
from one_gpu import CLOSE, POLICIES, device_of, each_backend
from reference import same, shard

pytestmark = pytest.mark.shows("failures")

WORLD, BLOCKS = 4, 6
# A device's allocator takes memory by megabytes. The race detector checks every 16 bytes of a record.
# The allocator splits blocks below 10 MiB. A unit's weights are larger, so it returns them completely.
WIDTHS = {"cuda": 2048, "cpu": 16}
UNITS = tuple(f"blocks.{i}" for i in range(BLOCKS))
# Steps end in the n-th block, in forward or in backward.
PLACES = [(way, block) for way in ("forward", "backward") for block in (0, 3, 5)]
# The device may give a step this share of its usual extra memory.
SHARES = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(_, x, error: Exception):
        _.error = error
        return x.clone()

    @staticmethod
    def backward(context, grad):
        raise context.error


def failing_at(model: nn.Module, way: str, block: int, error: Exception) -> contextlib.ExitStack:
    """While open, makes the model's steps end there with the error."""

    def hook(module, args):
        if way == "forward":
            raise error
        return (Fail.apply(args[0], error),)

    stack = contextlib.ExitStack()
    stack.callback(model.blocks[block].register_forward_pre_hook(hook).remove)
    return stack


class Trainer:
    """Runs any number of steps of a sharded model with clipping and AdamW."""

    def __init__(self, ctx, place: str, device: str, mesh, model: nn.Module, **options) -> None:
        transport = place if place == "streams" else "auto"
        self.model = shard(ctx, model, UNITS, mesh=mesh, transport=transport, **options)
        self.optimizer = fsdp2x.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.device = device

    def step(self, number: int) -> torch.Tensor:
        x = inputs(0, number, rows=16, width=WIDTHS[self.device]).to(self.device)
        x.requires_grad_()  # every block has a backward
        loss = self.model(x).float().square().mean()
        loss.backward()
        fsdp2x.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def begin_again(self) -> None:
        self.optimizer.zero_grad()
        self.model.reset_iter_state()

    def results(self, numbers) -> list[torch.Tensor]:
        return [self.step(number) for number in numbers]

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().to_local().clone() for param in self.model.parameters()]


def owned(model: nn.Module) -> dict[str, int]:
    stats = model._get_fsdp_state().root.stats()
    return {key: stats[key] for key in ("gather_slots_owned", "scratch_slots_owned")}


def twins(ctx, place: str, device: str, mesh, policy: str) -> tuple[Trainer, Trainer]:
    model = Stack(num=BLOCKS, width=WIDTHS[device], hidden=WIDTHS[device])
    options = {"mp_policy": POLICIES[policy]}
    return tuple(Trainer(ctx, place, device, mesh, copy.deepcopy(model), **options) for _ in range(2))


def compare(undisturbed: Trainer, disturbed: Trainer, disturb: Callable[[int], object], num: int, policy: str) -> None:
    """Trains both, and disturbs the second one before each step except the first two."""
    same(disturbed.results(range(2)), undisturbed.results(range(2)), "before", **CLOSE[policy])
    for number in range(num):
        disturb(number)
        disturbed.begin_again()
        assert owned(disturbed.model) == {"gather_slots_owned": 0, "scratch_slots_owned": 0}
        same(disturbed.step(2 + number), undisturbed.step(2 + number), f"loss behind {number}", **CLOSE[policy])
    same(disturbed.weights(), undisturbed.weights(), "weights", **CLOSE[policy])


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_exceptions_in_mid_step(ctx, place, backend, policy, kind):
    device = device_of(place)
    with alike.world_of(device, backend, (WORLD,)) as (mesh, _):
        undisturbed, disturbed = twins(ctx, place, device, mesh, policy)

        def disturb(number: int) -> None:
            way, block = PLACES[number]
            with failing_at(disturbed.model, way, block, kind("on purpose")), pytest.raises(kind, match="on purpose"):
                disturbed.step(9)

        compare(undisturbed, disturbed, disturb, len(PLACES), policy)


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Limits this process to that much device memory, after it frees all cached memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    # The fraction is of all memory, and what is reserved counts.
    torch.cuda.set_per_process_memory_fraction(num_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@distributed(world_sizes=(1,), timeout=180, fresh=True)
@each_backend
@pytest.mark.parametrize("policy", POLICIES)
def test_no_memory_in_mid_step(ctx, place, backend, policy):
    """The device runs out of memory in a gather, in autograd, or in a reduction."""
    if place != "cuda":
        pytest.skip("the CPU has no limit of its memory; test_exceptions_in_mid_step raises the same error there")
    device = device_of(place)
    with alike.world_of(device, backend, (WORLD,)) as (mesh, _):
        undisturbed, disturbed = twins(ctx, place, device, mesh, policy)
        failed, needs = [], []

        def disturb(number: int) -> None:
            # The first of two measured steps frees the earlier gradients, which the next one does not need.
            for _ in range(2):
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                resting = torch.cuda.memory_reserved()
                torch.cuda.reset_peak_memory_stats()
                with failing_at(disturbed.model, "backward", 0, ValueError("measured")), pytest.raises(ValueError):
                    disturbed.step(9)
                needed = torch.cuda.max_memory_reserved() - resting
                disturbed.begin_again()
            needs.append(needed)
            with memory_limit(resting + int(SHARES[number] * needed)):
                try:
                    disturbed.step(9)
                except torch.OutOfMemoryError:
                    failed.append(number)
            if number not in failed:  # the step succeeded, so the other model takes it too
                undisturbed.step(9)

        compare(undisturbed, disturbed, disturb, len(SHARES), policy)
        assert len(failed) >= 2, f"memory ran out in {failed}, where a step needed {needs}"
