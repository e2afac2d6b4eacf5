"""One GPU: a step that is cut short by an exception, or by memory that is not there, leaves the next one as it was."""

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
from reference import only_fsdp2x, same, shard

pytestmark = pytest.mark.shows("failures")

WORLD, BLOCKS = 4, 6
# A device's allocator takes memory by megabytes; the search for races in a record looks at every 16 bytes.
# A unit's weights are more than the 10 MiB below which it cuts up larger pieces, so that it gives them back whole.
WIDTHS = {"cuda": 2048, "cpu": 16}
UNITS = tuple(f"blocks.{i}" for i in range(BLOCKS))
# Where a step ends: in the n-th block, on its way in or back.
PLACES = [(way, block) for way in ("forward", "backward") for block in (0, 3, 5)]
# Of what a step needs above what rests, so much may be taken before the device has no more.
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
    """Until it is closed the model's steps end there with the error."""

    def hook(module, args):
        if way == "forward":
            raise error
        return (Fail.apply(args[0], error),)

    stack = contextlib.ExitStack()
    stack.callback(model.blocks[block].register_forward_pre_hook(hook).remove)
    return stack


class Trainer:
    """Steps of a sharded model with clipping and AdamW, as many as are asked for."""

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
    """Both train; the second one is disturbed before each step but the first two."""
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
    only_fsdp2x(ctx)
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
    """Until it is left this process has no more of the device than that; all that is cached is given back before."""
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
    """Wherever the device runs out of it: in a gather, in autograd, in a reduction."""
    only_fsdp2x(ctx)
    if place != "cuda":
        pytest.skip("the CPU has no limit of its memory; test_exceptions_in_mid_step raises the same error there")
    device = device_of(place)
    with alike.world_of(device, backend, (WORLD,)) as (mesh, _):
        undisturbed, disturbed = twins(ctx, place, device, mesh, policy)
        failed, needs = [], []

        def disturb(number: int) -> None:
            # The first of two measured steps gives back the gradients of the step before, which a next one needs not.
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
            if number not in failed:  # the step was whole: the other one takes it as well
                undisturbed.step(9)

        compare(undisturbed, disturbed, disturb, len(SHARES), policy)
        assert len(failed) >= 2, f"memory ran out in {failed}, where a step needed {needs}"
