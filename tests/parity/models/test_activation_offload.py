"""``offload_activations``: the bits of torch's ``save_on_cpu``, in the order of its streams, and prefetched by unit."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2x
import streams
from harness import distributed
from models import Stack, inputs
from reference import shard
from streams import WIDTH, results_of_steps, same_bits

NUM = 4


class Blocks(Stack):
    """Blocks that checkpoint themselves, and whose ReLU saves an output."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__(num=NUM, width=WIDTH, hidden=20)
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
            x = torch.relu(x + x.transpose(0, 1).contiguous().transpose(0, 1))
        return self.head(self.norm(x))


def sharded(ctx, model: nn.Module, **options) -> nn.Module:
    return shard(ctx, model, [f"blocks.{i}" for i in range(NUM)], transport="streams", **options)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("reshard", [False, True])
def test_bits_are_those_of_save_on_cpu(ctx, checkpoints, reshard):
    """Also if all copies are late; and without the wait for them, other bits come out."""
    recorder = streams.install()
    make = lambda: sharded(ctx, Blocks(checkpoints), reshard_after_forward=reshard)  # noqa: E731
    expected = results_of_steps(ctx, make(), torch.autograd.graph.save_on_cpu)

    def equals_with(*delays) -> bool:
        model = make()
        assert fsdp2x.offload_activations(model, min_bytes=1) == NUM + 1
        recorder.clear()
        if delays:
            recorder.delay(*delays)
        return same_bits(results_of_steps(ctx, model), expected)

    assert equals_with()
    entries = [entry for entry in recorder.entries if entry[0] == "transfer"]
    lanes = {lane: [e for e in entries if e[1] == lane] for lane in ("copy_out", "copy_in")}
    # Of six forwards. A checkpoint saves the block's input. The last unit's group stays.
    assert len(lanes["copy_out"]) >= 6 * (NUM - 1) and 0 < len(lanes["copy_in"]) <= len(lanes["copy_out"])
    assert all(equals_with(seed) for seed in range(4))
    assert not all(equals_with(seed, "compute", "activations") for seed in range(4))


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_a_unit_arrives_while_the_one_behind_it_is_used(ctx):
    """Each tensor leaves once, whichever number of operations has saved it, and weights never do."""
    recorder = streams.install()
    model = sharded(ctx, Blocks())
    fsdp2x.offload_activations(model, min_bytes=1)
    model(inputs(ctx.rank, width=WIDTH)).sum().backward()
    recorder.clear()
    loss = model(inputs(ctx.rank, width=WIDTH)).sum()
    groups: list[list[int]] = []  # the addresses of what leaves together
    for operation, lane, _, reads, _ in recorder.entries:
        if (operation, lane) == ("wait", "copy_out"):
            groups.append([])
        elif (operation, lane) == ("transfer", "copy_out"):
            groups[-1].append(reads[0][0])
    # Inputs of two products and of GELU, and the output of ReLU. The last block's stay.
    assert [len(group) for group in groups] == [len(set(group)) for group in groups] == [4] * (NUM - 1)
    gathered = [one for entry in recorder.entries if entry[0] == "all_gather" for one in entry[4]]
    for source in (address for group in groups for address in group):
        assert not any(start <= source < start + size for start, size in gathered)
    recorder.clear()
    loss.backward()
    arrived, seen = 0, {}
    for operation, lane, subject, *_ in recorder.entries:
        arrived += (operation, lane) == ("transfer", "copy_in")
        if operation == "use" and subject.startswith("blocks"):
            seen.setdefault(subject, arrived)
    # The last two groups are still on the device. When a backward begins, the group of the next one is on its way.
    assert seen == {"blocks.3": 0, "blocks.2": 4, "blocks.1": 8, "blocks.0": 8}


@distributed(world_sizes=(1,), only_fsdp2x=True)
def test_what_is_not_offloaded(ctx):
    """Small tensors, forwards without gradients, forwards inside of others' hooks; and memory goes with the graph."""
    recorder = streams.install()
    model = sharded(ctx, Blocks())
    x = inputs(0, width=WIDTH)

    def num_copies(run) -> int:
        recorder.clear()
        run()
        return sum(entry[0] == "transfer" for entry in recorder.entries)

    def within_hooks() -> None:
        with torch.autograd.graph.save_on_cpu():
            model(x).sum().backward()

    fsdp2x.offload_activations(model)
    assert num_copies(lambda: model(x).sum().backward()) == 0
    fsdp2x.offload_activations(model, min_bytes=1)
    assert num_copies(within_hooks) == num_copies(lambda: torch.no_grad()(model)(x)) == 0
    assert num_copies(lambda: model(x)) > 0  # its graph is gone without a backward
    model.zero_grad()
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    first = [param.grad.to_local().clone() for param in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert same_bits([param.grad.to_local() for param in model.parameters()], first)


@distributed(world_sizes=(1,), only_fsdp2x=True)
@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_models(ctx, compiled):
    recorder, found = streams.install(), []
    for offloads in (False, True):
        torch._dynamo.reset()
        model = sharded(ctx, Blocks())
        if offloads:
            fsdp2x.offload_activations(model, min_bytes=1)
        for module in [model] if compiled == "model" else model.blocks:
            module.compile(backend="aot_eager")
        recorder.clear()
        found.append(results_of_steps(ctx, model))
    assert same_bits(*found) and any(entry[0] == "transfer" for entry in recorder.entries)


class Mistaken(nn.Module):
    def __init__(self, in_place: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM))
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            y = x.square()
            if number == (0 if self.in_place == "first" else NUM - 1):
                x.add_(1)
            x = y
        return x


@distributed(world_sizes=(1,), only_fsdp2x=True)
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_a_saved_tensor_that_is_modified_is_an_error(ctx, where, min_bytes):
    """As without offload: autograd does not check what hooks have packed."""
    streams.install()
    model = sharded(ctx, Mistaken(where))
    fsdp2x.offload_activations(model, min_bytes=min_bytes)
    with pytest.raises(RuntimeError, match="modified in place after autograd"):
        model(inputs(0, width=WIDTH)).sum().backward()


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_calls_that_change_nothing(ctx):
    model = shard(ctx, Stack(), ["blocks.0"])
    assert fsdp2x.offload_activations(model) == 0
    with pytest.raises(ValueError, match="min_bytes must be at least 0, got -1"):
        fsdp2x.offload_activations(model, -1)
    with pytest.raises(ValueError, match="offload_activations: nothing in this Linear is sharded"):
        fsdp2x.offload_activations(nn.Linear(2, 2))
    hook = lambda *_: fsdp2x.offload_activations(model)  # noqa: E731
    model.blocks[1].register_forward_hook(hook)
    with pytest.raises(RuntimeError, match="a forward or backward of this model is running"):
        model(inputs(ctx.rank))
