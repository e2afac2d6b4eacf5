"""memory_report before the first forward agrees with the engine's statistics and the allocator after some steps."""

import copy
import math
import mmap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp2x
import memory
import models
import streams
from fsdp2x.lifecycle.tree import unit_states
from fsdp2x.memory import plan_memory
from harness import distributed
from memory import LEDGER, POLICIES, run_stack
from models import STACK_UNITS, Stack
from reference import TRANSPORTS, both_transports, mesh_of, only_fsdp2x, shard, shard_auto
from user_collectives import UserGather, UserScatter

NUM_STEPS = 4
# Step counters, flags of gradients, activations that autograd still holds: small tensors of the step itself.
SLACK_BYTES = 8192

UNITS = [f"blocks.{i}" for i in range(4)]

all_policies = pytest.mark.parametrize("policy", POLICIES)


def check(model, run, *, optimizer=None, late_ranks: bool = False, num: int = 1, before_last="nothing") -> None:
    """Predicts, runs some steps, and compares. `late_ranks`: scratches are those of the worst order of ranks.

    `num`: backwards of a step, which reduce by `before_last` but for the last one.
    """
    micro_batches = {"micro_batches": num, "before_last": before_last}
    plan = fsdp2x.memory_report(model, optimizer, **micro_batches)
    assert plan.measured is None
    steps = []

    def step() -> None:
        for index in range(num):
            with fsdp2x.accumulate(model, last=index == num - 1, before_last=before_last):
                run(model)
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        steps.append(dict(fsdp2x.describe(model).stats))

    kept = memory.held(lambda: [step() for _ in range(NUM_STEPS)])
    after = fsdp2x.memory_report(model, optimizer, **micro_batches)
    stats = fsdp2x.describe(model).stats
    assert after.measured == {name: stats[name] for name in LEDGER}
    for name in LEDGER:
        planned, real = getattr(plan, name), after.measured[name]
        assert real <= planned if late_ranks and name == "scratch_bytes" else real == planned, f"{plan}\n{stats}"
    assert {**after.to_dict(), "measured": None} == plan.to_dict()
    counts = {name: steps[-1][name] - steps[-2][name] for name in ("gathers", "reductions")}
    assert counts == {name: getattr(plan.traffic, name) for name in counts}, f"{plan}\n{counts}"

    groups = [group for state in unit_states(model) for group in state.groups]
    assert plan.shard_bytes == sum(group.engine.shard_pool_bytes for group in groups)
    resting = [group for group in groups if group.engine.has_resting_shards]
    assert all(group in resting or group.engine.shard_pool_bytes == group.pool.numel() for group in groups)
    assert plan.shard_bytes - plan.pad_bytes == sum(
        param.to_local().numel() * param.itemsize for param in model.parameters()
    )
    trained = [group for group in groups if any(param.param.requires_grad for param in group.params)]
    bounds = [memory.least_gradient_bytes(group) for group in trained]
    flags = [64 * math.ceil(8 * len(group.params) / 64) * group.engine.has_streams for group in trained]
    assert sum(bounds) <= plan.gradient_bytes <= sum(bounds) + sum(flags)
    pools = [group.engine.gradient_pool_bytes for group in trained]
    assert 0 in pools or sum(pools) == plan.gradient_bytes
    # Over process groups nothing is kept; shared memory is not the allocator's.
    slots = 0 if plan.transport == "shm" else plan.gather_slot_bytes + plan.scratch_bytes
    kept_for_next = 0 if plan.transport in ("process_group", "device") else plan.gradient_bytes + slots
    expected = kept_for_next + plan.after_forward_bytes + (plan.optimizer_bytes or 0)
    assert expected <= kept, f"{kept} instead of {expected}\n{plan}"
    # gloo frees what it takes for itself in threads that are not watched.
    if plan.transport not in ("process_group", "device"):
        assert kept <= expected + SLACK_BYTES, f"{kept} instead of {expected}\n{plan}"
    assert plan.resting_bytes < plan.peak_bytes
    str(plan)


def run_text(model) -> None:
    model(**models.batch("any", seed=1)).loss.backward()


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
@both_transports
@all_policies
@pytest.mark.parametrize("reshard", [True, False])
def test_like_units(ctx, transport, policy, reshard):
    options = {"mp_policy": POLICIES[policy], "reshard_after_forward": reshard}
    check(shard(ctx, Stack(num=4, width=48, hidden=80), UNITS, transport=transport, **options), run_stack)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@both_transports
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mixtral", *(pytest.param(name, marks=pytest.mark.full) for name in ("gpt2", "t5"))]
)
def test_huggingface_models_with_adamw(ctx, transport, name):
    model = shard_auto(ctx, models.build(name), transport=transport)
    check(model, run_text, optimizer=fsdp2x.optim.AdamW(model.parameters()))


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("transport", [*TRANSPORTS, "streams"])
def test_frozen_weights_under_adapters(ctx, transport):
    model = models.build("llama")
    for name, param in model.named_parameters():
        param.requires_grad_("q_proj" in name)
    check(shard_auto(ctx, model, transport=transport), run_text, late_ranks=transport == "shm")


@distributed(world_sizes=(4,), only_fsdp2x=True)
@both_transports
@pytest.mark.parametrize("num", [1, 3])
@pytest.mark.parametrize("before_last", ["nothing", "reduce_scatter"])
def test_replicas_and_several_backwards(ctx, transport, num, before_last):
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport, mesh=mesh_of("2d", ctx.world))
    check(model, run_stack, num=num, before_last=before_last)


@distributed(world_sizes=(4,), only_fsdp2x=True)
@both_transports
def test_rows_in_a_smaller_world_after_forward(ctx, transport):
    check(shard(ctx, Stack(), STACK_UNITS, transport=transport, reshard_after_forward=2), run_stack)


@distributed(world_sizes=(1, 3), only_fsdp2x=True)
@pytest.mark.parametrize("mode", ["optimizer", "gradients", "all"])
@all_policies
def test_offloaded_units(ctx, mode, policy):
    """Uploads or copies on top; reduced rows have a segment of their own until they are on the host, maybe a block."""
    offload = fsdp2x.HostOffloadPolicy(mode, pin_memory=False)
    options = {"transport": "streams", "offload_policy": offload, "mp_policy": POLICIES[policy]}
    model = shard(ctx, Stack(num=4, width=24), UNITS, **options)
    optimizer = fsdp2x.optim.AdamW(model.parameters())
    check(model, run_stack, optimizer=optimizer)
    plan = fsdp2x.memory_report(model, optimizer)
    pools = plan.shard_bytes + plan.gradient_bytes
    assert plan.host_bytes == plan.optimizer_bytes + (0 if mode == "optimizer" else pools + plan.landing_bytes)
    assert (plan.resident_shard_bytes > 0) == (mode == "gradients")
    assert (plan.optimizer_step_bytes > 0) == (mode == "optimizer")
    assert plan.device_peak_bytes == plan.peak_bytes - plan.host_bytes < plan.peak_bytes
    assert plan.device_resting_bytes < plan.resting_bytes


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_blocks_of_the_host_in_which_gradients_arrive(ctx):
    """Gradients that are not summed in their own dtype: as many units as may be on their way have a block."""
    offload = CPUOffloadPolicy(pin_memory=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = shard(ctx, Stack(num=4, width=32), UNITS, transport="streams", offload_policy=offload, mp_policy=policy)
    plan = fsdp2x.memory_report(model)
    for _ in range(3):
        run_stack(model)
        model.zero_grad()
    blocks = fsdp2x.describe(model).stats["gradient_block_allocations"]
    groups = [group for state in unit_states(model) for group in state.groups]
    rows = {group.pool.numel() // 2 for group in groups}
    assert plan.landing_bytes <= 2 * max(rows) + 64 * 8 and plan.landing_bytes >= max(rows)
    assert len(groups) < blocks <= len(groups) + 3


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_gradients_that_are_added_to_on_the_host(ctx):
    """A gradient that arrives on the host has a separate block until it is added."""
    offload = CPUOffloadPolicy(pin_memory=False)
    model = shard(ctx, Stack(num=4, width=48), UNITS, transport="streams", offload_policy=offload)
    assert fsdp2x.memory_report(model).landing_bytes == 0
    plan = fsdp2x.memory_report(model, micro_batches=3, before_last="reduce_scatter")
    check(model, run_stack, num=3, before_last="reduce_scatter")
    groups = [group for state in unit_states(model) for group in state.groups]
    blocks = fsdp2x.describe(model).stats["gradient_block_allocations"] - len(groups)  # without flat buffers
    largest = max(group.pool.numel() for group in groups)
    assert 0 < plan.landing_bytes <= blocks * largest and blocks <= 3


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("setting", ["all_gather", "reduce_scatter", "hook", "buffers", "divisor"])
def test_settings_that_move_memory(ctx, setting):
    offload = fsdp2x.CPUOffloadPolicy(pin_memory=False) if setting == "divisor" else fsdp2x.OffloadPolicy()
    model = shard(ctx, Stack(num=4, width=48), UNITS, transport="streams",
                  offload_policy=offload)  # fmt: skip
    plain = fsdp2x.memory_report(model).to_dict()
    if setting == "all_gather":
        model.blocks[0].set_custom_all_gather(UserGather())
    elif setting == "reduce_scatter":
        model.blocks[0].set_custom_reduce_scatter(UserScatter())
    elif setting == "hook":
        for module in (model, *model.blocks):
            module.set_all_reduce_hook(lambda rows: None)
    elif setting == "buffers":
        model.set_reduce_scatter_max_input_buffers(3)
    else:
        model.set_gradient_divide_factor(3.0)
    assert fsdp2x.memory_report(model).to_dict() != plain
    check(model, run_stack)


def check_plan(ctx, mode: str, mesh: str = "1d", **options) -> None:
    """Every number planned for a device equals the one measured on rank 0 after some steps."""
    only_fsdp2x(ctx)
    streams.install(pack_below_bytes=3000)
    model = Stack(num=4, width=48, hidden=80)
    replicas = 2 if mesh == "2d" else 1
    plan = plan_memory(model, ctx.world, device="cuda", offload=mode, replicas=replicas, auto_wrap=True, **options)
    policy = fsdp2x.HostOffloadPolicy(mode, pin_memory=False)
    where = {"mesh": mesh_of(mesh, ctx.world), "transport": "streams", "offload_policy": policy}
    trained = shard(ctx, copy.deepcopy(model), UNITS, **where, **options)
    optimizer = fsdp2x.optim.AdamW(trained.parameters())
    check(trained, run_stack, optimizer=optimizer)
    report = fsdp2x.memory_report(trained, optimizer)
    assert {name: getattr(plan, name) for name in LEDGER} == report.measured or report.rank != 0, f"{plan}\n{report}"
    if report.rank == 0:
        assert plan.to_dict() == {**report.to_dict(), "measured": None}


@distributed(world_sizes=(1, 3))
@pytest.mark.parametrize("mode", ["none", "optimizer", "gradients", "all"])
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"mp_policy": POLICIES["bf16"]}])
def test_the_plan_of_a_device(ctx, mode, options):
    check_plan(ctx, mode, **options)


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("mode", ["none", "gradients"])
@pytest.mark.parametrize("options", [{"mesh": "2d"}, {"reshard_after_forward": 2}])
def test_the_plan_of_replicas_and_of_a_smaller_world(ctx, mode, options):
    check_plan(ctx, mode, **options)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_pages_of_the_replicas(ctx):
    """Two scratches in turn, on top of what waits for the all-reduce."""
    before = set(memory.shared_files())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = shard(ctx, Stack(num=4, width=256, hidden=512), UNITS, mesh=mesh)
    plan = fsdp2x.memory_report(model)
    for _ in range(3):
        run_stack(model)
    dist.barrier()
    assert fsdp2x.memory_report(model).replica_bytes == plan.replica_bytes
    (pages,) = [size for inode, size in memory.shared_files().items() if inode not in before]
    segments = plan.traffic.all_reduce_bytes  # every rank writes each of them once
    planned = ctx.world * (plan.replica_bytes - segments)
    assert 0 < planned and abs(pages - planned) <= 131072, (pages, planned)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@all_policies
def test_bytes_on_the_wire_are_those_of_the_collectives(ctx, policy):
    """The plan counts the bytes of one step's collectives. In each, a rank sends all segments but one."""
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group", mp_policy=POLICIES[policy])
    plan = fsdp2x.memory_report(model)
    for _ in range(3):
        run_stack(model)
    sent = {"gather": 0, "reduce": 0}

    def counted(kind, original):
        def count(output, source, *args, **kwargs):
            sent[kind] += abs(output.nbytes - source.nbytes)
            return original(output, source, *args, **kwargs)

        return count

    names = {"gather": ("all_gather_single", "all_gather_into_tensor")}
    names["reduce"] = ("reduce_scatter_single", "reduce_scatter_tensor")
    with pytest.MonkeyPatch.context() as patch:
        for kind, candidates in names.items():
            name = next(name for name in candidates if hasattr(dist, name))
            patch.setattr(dist, name, counted(kind, getattr(dist, name)))
        run_stack(model)
    assert sent == {"gather": plan.traffic.gather_bytes, "reduce": plan.traffic.reduce_bytes}


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@all_policies
@pytest.mark.parametrize("setting", ["plain", "separate group", "wire format"])
def test_gathers_in_place_over_gloo(ctx, policy, setting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdp2x.sharding.transport.pack_below_bytes", lambda gathers, world: 0)
        units = (*STACK_UNITS, "norm")  # it has vectors only, which have no codes in a wire format
        model = shard(ctx, Stack(width=32, hidden=48), units, transport="process_group", mp_policy=POLICIES[policy])
        if setting == "separate group":
            model.set_separate_reduce_scatter_group()
        if setting == "wire format":
            model.set_wire_dtype(weights="int8")
        check(model, lambda one: one(torch.randn(2, 32)).float().square().mean().backward())


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_scratches_that_peers_may_still_read_at_the_end_of_a_backward(ctx):
    """The frozen unit posts its empty reduction behind two others, and peers are elsewhere then."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)))
    for module, reshard in ((model[0], False), (model[1][1], True), (model[1], True), (model, True)):
        fsdp2x.fully_shard(module, reshard_after_forward=reshard, transport="shm", auto_wrap=False)
    assert fsdp2x.memory_report(model, micro_batches=2).scratch_bytes == 3 * mmap.PAGESIZE
