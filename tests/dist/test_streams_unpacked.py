"""Gradients that a device reduces from where autograd made them: the bits of the packed way, and memory that waits."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import streams
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import grads, only_fsdp2x, params, same, shard

# Rows of every weight but the head's are even over two and three ranks, and chunks multiples of 16 bytes in bf16.
WIDTH, HIDDEN = 24, 36
POLICIES = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "sums of fp32": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fp16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)},
}


def twins(ctx, model: nn.Module, units=STACK_UNITS, **options) -> list[nn.Module]:
    """The same model twice: packed, and not."""
    packed, unpacked = (
        shard(ctx, copy.deepcopy(model), units, transport="streams", **{"reshard_after_forward": True, **options})
        for _ in range(2)
    )
    unpacked.set_reduce_scatter_unpacked()
    return [packed, unpacked]


def stack(num: int = 3) -> Stack:
    return Stack(num, WIDTH, HIDDEN)


def backward(model: nn.Module, ctx, number: int = 0) -> None:
    model(inputs(ctx.rank, number, width=WIDTH)).square().mean().backward()


def reductions(entries: list[tuple], unit: str = "blocks.1") -> list[list[int]]:
    """Bytes of what each reduction of a unit reads."""
    found = [entry for entry in entries if entry[0].startswith("reduce_scatter") and entry[2] == unit]
    return [[size for _, size in entry[3]] for entry in found]


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("pack_below", [0, 1200])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("with_twins", [True, False])
@pytest.mark.each_value
def test_bits_are_those_of_the_packed_way(ctx, pack_below, policy, with_twins):
    """Steps, and backwards that add to gradients, with averages and with sums that are divided afterwards."""
    only_fsdp2x(ctx)
    recorder = streams.install(pack_below, with_twins=with_twins)
    models = twins(ctx, stack(), **POLICIES[policy])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for model in models:
        model.blocks[1].set_gradient_divide_factor(3.0)
    for number in range(3):
        for micro in range(1 + number % 2):
            for model in models:
                recorder.clear()
                backward(model, ctx, 10 * number + micro)
                assert streams.races(recorder.entries) == []
        same(grads(models[1]), grads(models[0]), f"gradients of step {number}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(models[1]), params(models[0]), "parameters")
    ((_, *direct),) = reductions(recorder.entries)
    item = 4 if policy == "fp32" else 2
    weights = [WIDTH * HIDDEN * item] * 2
    # Biases, too, where nothing is small and their chunks are aligned.
    assert sorted(direct, reverse=True)[:2] == (weights if policy in ("fp32", "bf16") else [])


@distributed(world_sizes=(2, 3))
def test_gradients_stay_until_their_reduction_has_ended(ctx):
    """Each wait is needed: without it the record has a race over the gradients' memory."""
    only_fsdp2x(ctx)
    recorder = streams.install(1200)
    names = [f"blocks.{i}" for i in range(4)]
    _, model = twins(ctx, stack(4), names)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if number == 1:
            recorder.clear()
        backward(model, ctx, number)
        optimizer.step()
        optimizer.zero_grad()
    entries = recorder.entries
    assert streams.races(entries) == []
    given_back = [index for index, entry in enumerate(entries) if entry[:3] == ("give_back", "compute", "gradients")]
    assert len(given_back) == 2 * len(names)
    faults = {
        ("reduce", "compute"): "take gradients",
        ("compute", "reduce buffer"): "give_back gradients",
    }
    # Without what is packed, which waits for the same events.
    gradients_alone = [
        (*entry[:3], entry[3][1:], entry[4]) if entry[0].startswith("reduce_scatter") else entry for entry in entries
    ]
    for (lane, event), race in faults.items():
        found = streams.races(streams.without_waits(gradients_alone, lane, event))
        assert any(race in one for one in found), (lane, event, found[:3])
    # An engine that lets go of a gradient as soon as its reduction is enqueued.
    early = list(entries)
    for index in given_back:
        mark = entries[index]
        start = max(
            i for i in range(index) if entries[i][0].startswith("reduce_") and set(mark[4]) <= set(entries[i][3])
        )
        early.remove(mark)
        early.insert(start + 1, mark)
    assert any("give_back gradients" in one for one in streams.races(early))


class Branches(nn.Module):
    """Each rank uses one of three layers; the gradient of one is what its neighbour's backward was given, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(3))
        self.table = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.same = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.turned = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.layers[chosen](x) @ (self.table + self.same).square() + self.turned.t().sum(0).square()


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("with_twins", [True, False])
def test_missing_shared_and_turned_gradients(ctx, zeros, with_twins):
    """What is not there is zeros to the others; one memory of two parameters, and strided ones, are as good as any."""
    only_fsdp2x(ctx)
    recorder = streams.install(2000, with_twins=with_twins)
    models = twins(ctx, Branches(), ())
    for chosen in ((0, 1, 0), (1, 1, 1), (2, 0, 1)):
        for model in models:
            model.set_reduce_scatter_unused_params(zeros)
            recorder.clear()
            model.zero_grad()
            model(inputs(ctx.rank, width=WIDTH), chosen[ctx.rank]).square().mean().backward()
            assert streams.races(recorder.entries) == []
        got, expected = map(grads, models)
        assert {name for name, one in got.items() if one is None} == {n for n, one in expected.items() if one is None}
        same(got, expected, "gradients")
    ((_, *direct),) = reductions(recorder.entries, "<root>")
    assert len(direct) == 6


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.each_value
def test_accumulation_without_gradient_sync(ctx, policy):
    """Sums of several backwards are the engine's own memory: autograd's may be written to behind a backward."""
    only_fsdp2x(ctx)
    recorder = streams.install(1200)
    models = twins(ctx, stack(), **POLICIES[policy])
    for round_ in range(2):
        for model in models:
            recorder.clear()
            for micro in range(3):
                model.set_requires_gradient_sync(micro == 2)
                backward(model, ctx, 10 * round_ + micro)
            assert streams.races(recorder.entries) == []
            assert len(reductions(recorder.entries)) == 1
        same(grads(models[1]), grads(models[0]), f"gradients of round {round_}")
        # And on top of what is there, of a model that has not synchronized in between.
    assert len(reductions(recorder.entries)[0]) == 3


@distributed(world_sizes=(2,))
def test_gradients_of_the_users_may_change_behind_a_backward(ctx):
    """The gradient of a backward without sync is the memory that the user handed to it."""
    only_fsdp2x(ctx)
    streams.install(64)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self):
            return self.weight + 0.0

    model = shard(ctx, Plain(), (), transport="streams")
    model.set_reduce_scatter_unpacked()
    gradient = torch.ones(WIDTH, WIDTH)
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        model().backward(gradient)
        gradient.fill_(5.0)
    same(model.weight.grad.full_tensor(), torch.full((WIDTH, WIDTH), 6.0), "1 + 5")


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("accumulate", ["no_sync", "no_all_reduce", "nothing"])
def test_replicas(ctx, accumulate):
    only_fsdp2x(ctx)
    recorder = streams.install(1200)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = twins(ctx, stack(), mesh=mesh)
    for model in models:
        recorder.clear()
        for micro in range(3):
            if accumulate == "no_sync":
                model.set_requires_gradient_sync(micro == 2)
            elif accumulate == "no_all_reduce":
                model.set_requires_all_reduce(micro == 2)
            backward(model, ctx, micro)
        assert streams.races(recorder.entries) == []
    same(grads(models[1]), grads(models[0]), "gradients")
    assert all(len(one) == 3 for one in reductions(recorder.entries))


@distributed(world_sizes=(2,))
def test_freezing_and_switching_between_steps(ctx):
    """Another set of trained parameters, and another answer, mean other plans."""
    only_fsdp2x(ctx)
    recorder = streams.install(1200)
    models = twins(ctx, stack())
    unpacked = models[1]
    for number, (frozen, enabled, num) in enumerate(((False, True, 3), (True, True, 2), (False, False, 1))):
        unpacked.set_reduce_scatter_unpacked(enabled)
        for model in models:
            model.zero_grad()
            model.blocks[1].up.weight.requires_grad_(not frozen)
            recorder.clear()
            backward(model, ctx, number)
            assert streams.races(recorder.entries) == []
        assert [len(one) for one in reductions(recorder.entries)] == [num]
        same(grads(models[1]), grads(models[0]), "gradients")
    # What users reduce themselves they read in one piece.
    unpacked.set_reduce_scatter_unpacked()
    unpacked.blocks[1].set_all_reduce_hook(lambda rows: rows.mul_(2.0))
    unpacked.zero_grad()
    recorder.clear()
    backward(unpacked, ctx, 2)
    assert [len(one) for one in reductions(recorder.entries)] == [1]
    assert [len(one) for one in reductions(recorder.entries, "blocks.0")] == [3]


@distributed(world_sizes=(2,))
def test_an_exception_lets_go_of_gradients(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install(1200)
    models = twins(ctx, stack())
    alive = []

    def fail(gradient):
        raise ValueError("on purpose")

    for model in models:
        backward(model, ctx)
        expected = grads(model)
        model.zero_grad()
        handle = model.blocks[0].register_forward_pre_hook(
            lambda module, args: args[0].register_hook(fail) and None if args[0].requires_grad else None
        )
        x = inputs(ctx.rank, 0, width=WIDTH).requires_grad_(True)
        with pytest.raises(ValueError, match="on purpose"):
            model(x).square().mean().backward()
        handle.remove()
        model.reset_iter_state()
        assert model._get_fsdp_state().root.stats()["scratch_slots_owned"] == 0
        model.zero_grad()
        backward(model, ctx)
        same(grads(model), expected, "gradients")
    assert streams.races(recorder.entries) == [] and not alive


@distributed(world_sizes=(2,))
def test_a_group_for_reductions_has_them_in_one_launch_too(ctx):
    only_fsdp2x(ctx)
    recorder = streams.install(1200)
    models = twins(ctx, stack())
    for model in models:
        model.set_separate_reduce_scatter_group(True)
        backward(model, ctx)
    same(grads(models[1]), grads(models[0]), "gradients")
    assert [len(one) for one in reductions(recorder.entries)] == [1, 3]


@distributed(world_sizes=(1, 2))
def test_refused_by_name(ctx):
    """On the CPU, beside memory of the collectives' own, and while a backward runs."""
    only_fsdp2x(ctx)
    plain = shard(ctx, stack(), STACK_UNITS, transport="process_group")
    for enable in (True, False):
        with pytest.raises(NotImplementedError, match="set_reduce_scatter_unpacked: on the CPU"):
            plain.set_reduce_scatter_unpacked(enable)
    streams.install(1200)
    model = shard(ctx, stack(), STACK_UNITS, transport="streams")
    model.set_reduce_scatter_unpacked()
    with pytest.raises(ValueError, match="choose one"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    backward(model, ctx)
    with pytest.raises(ValueError, match="choose one"):
        model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    model.set_reduce_scatter_unpacked(False)
    model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match="choose one"):
        model.set_reduce_scatter_unpacked()
    model.set_allocate_memory_from_process_group_for_comm(False)

    def late(gradient):
        with pytest.raises(RuntimeError, match="during forward or backward"):
            model.set_reduce_scatter_unpacked()

    x = inputs(ctx.rank, 0, width=WIDTH).requires_grad_(True)
    x.register_hook(late)
    model(x).square().mean().backward()
