"""HostOffloadPolicy: all modes train alike, gradients mode keeps the shards on the device, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp2x
import streams
from checkpoints import shared_folder
from harness import distributed
from models import STACK_UNITS, inputs
from offloading import (
    CLOSE,
    LOOSE,
    MODES,
    OFFLOAD,
    OPTIMIZERS,
    OURS,
    POLICIES,
    agree,
    expect,
    loss_of,
    moments,
    policy,
    sharded,
    train,
    transfers,
)
from reference import grads, params, same, shard
from streams import WIDTH, wide


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("mp", POLICIES)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.each_pair
def test_trains_as_one_rank_would(ctx, mode, mp, reshard):
    recorder = streams.install(pack_below_bytes=600)
    reference = wide()
    model = sharded(ctx, reference, mode, mp_policy=POLICIES[mp], reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW(reference.parameters(), lr=1e-2), OURS(model.parameters(), lr=1e-2)]
    for step in range(3):
        expect(reference, ctx, step)
        loss_of(model, ctx.rank, step).backward()
        same(grads(model), grads(reference), f"gradients of step {step}", **CLOSE.get(mp, LOOSE))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        same(fsdp2x.clip_grad_norm_(model.parameters(), 0.1), norm, "norms", **CLOSE.get(mp, LOOSE))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if mp == "fp32":
        same(params(model), params(reference), "parameters", rtol=1e-3, atol=1e-5)
    assert streams.races(recorder.entries) == []


SETTINGS = {
    "plain": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "weight_decay": 0.1}),
    "bf16 moments": (torch.float32, {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3}),
    "int8 moments": (torch.float32, {"moments_dtype": "int8", "amsgrad": True}),
    "stepped by torch's functions": (torch.float64, {"amsgrad": True}),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", SETTINGS)
def test_every_mode_computes_the_same_bits(ctx, mode, name):
    recorder = streams.install()
    dtype, settings = SETTINGS[name]
    model = wide().to(dtype)
    results = []
    for one in ("none", mode):
        recorder.clear()  # memory of the first model's device may be the second one's host memory
        trained = sharded(ctx, model, one)
        groups = [{"params": list(trained.blocks.parameters()), "lr": 3e-2}]
        groups.append({"params": [*trained.norm.parameters(), *trained.head.parameters()]})
        optimizer = OURS(groups, lr=1e-2, **settings)
        for step in range(4):
            trained(inputs(ctx.rank, step, width=WIDTH).to(dtype)).square().mean().backward()
            fsdp2x.clip_grad_norm_(trained.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append((params(trained), moments(optimizer)))
    same(results[1][0], results[0][0], "parameters")
    same(results[1][1], results[0][1], "moments")


@distributed(world_sizes=(1, 2))
def test_one_upload_per_group_and_forward(ctx):
    recorder = streams.install()
    model = sharded(ctx, wide(), "gradients", reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, ctx, range(2))
    resident = model._get_fsdp_state().root.stats()["resident_shard_bytes"]
    recorder.clear()
    train(model, optimizer, ctx, range(2, 4))
    entries = recorder.entries
    uploads = transfers(entries)
    assert len(uploads) == 2 * 4 == len(transfers(entries, "copy_out"))  # three blocks and the root, two steps
    assert len({tuple(entry[4]) for entry in uploads}) == 4, "each has its place"
    stats = model._get_fsdp_state().root.stats()
    assert stats["resident_shard_bytes"] == resident > 0
    # Forwards without a backward between them use the values that other code has written to the parameters.
    for write in (lambda p: p.data.mul_(0.5), lambda p: p.detach().to_local().mul_(0.5)):
        reference = copy_of(model)
        with torch.no_grad():
            for param in model.parameters():
                write(param)
            for param in reference.parameters():
                param.mul_(0.5)
            same(model(inputs(0, width=WIDTH)), reference(inputs(0, width=WIDTH)), "output", rtol=1e-4, atol=1e-6)
    assert streams.races(recorder.entries) == []


def copy_of(model) -> nn.Module:
    plain = wide()
    plain.load_state_dict(params(model))
    return plain


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", ["none", "gradients", "all"])
def test_backward_reads_the_copy_of_its_forward(ctx, mode):
    """Several forwards, then their backwards; a whole model that is recomputed; a unit gathered by hand."""
    recorder = streams.install()
    reference = wide()
    model = sharded(ctx, reference, mode, reshard_after_forward=True)
    losses = [loss_of(model, ctx.rank, step) for step in range(2)]
    model.set_is_last_backward(False)
    losses[1].backward()
    model.set_is_last_backward(True)
    losses[0].backward()
    expected: dict = {}
    for step in range(2):
        expect(reference, ctx, step)
        for name, grad in grads(reference).items():
            expected[name] = grad + expected.get(name, 0)
    same(grads(model), expected, "gradients", rtol=1e-4, atol=1e-6)
    model.zero_grad()
    model.blocks[0].unshard()
    model.blocks[0].reshard()
    with torch.no_grad():
        for one in (reference, model):
            for param in one.parameters():
                param.mul_(0.5)
    agree(ctx, reference, model, 2)
    assert streams.races(recorder.entries) == []


KINDS = {
    # (lane, event): what would go wrong without that wait.
    ("copy_out", "reduce"): "rows leave before they are reduced",
    ("host", "downloaded"): "the host reads gradients that have not arrived",
    ("host", "copy_in"): "the optimizer writes shards that are still uploaded",
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", ["gradients", "all"])
def test_events_order_every_access(ctx, mode):
    recorder = streams.install(pack_below_bytes=1200)
    model = sharded(ctx, wide(), mode, mp_policy=POLICIES["bf16"], reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, ctx, range(1), None)
    recorder.clear()
    for step in range(1, 4):
        train(model, optimizer, ctx, range(step, step + 1), None)
        with torch.no_grad():
            loss_of(model, ctx.rank, step)
            for param in model.parameters():
                param.mul_(1.0)
    entries = recorder.entries
    assert streams.races(entries) == []
    streams.every_wait_is_needed(entries, KINDS)
    # One lane uploads and casts, in order: its waits are there, and no race shows without them.
    assert (len(streams.without_waits(entries, "copy_in", "resident shards")) < len(entries)) == (mode == "gradients")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_checkpoint_goes_on_where_it_was(ctx, mode):
    recorder = streams.install()
    model = wide()
    with shared_folder() as folder:
        trained = sharded(ctx, model, mode)
        optimizer = OURS(trained.parameters(), lr=1e-2)
        train(trained, optimizer, ctx, range(2))
        fsdp2x.checkpoint.save(folder / "saved", trained, optimizer, step=2)
        train(trained, optimizer, ctx, range(2, 4))
        recorder.clear()
        resumed = sharded(ctx, wide(), mode)
        later = OURS(resumed.parameters(), lr=1e-2)
        fsdp2x.checkpoint.load(folder / "saved", resumed, later)
        train(resumed, later, ctx, range(2, 4))
    same(params(resumed), params(trained), "parameters")
    same(moments(later), moments(optimizer), "moments")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_offloaded_gradients(ctx, name):
    recorder = streams.install()
    model = wide()
    results = []
    for mode in ("none", "gradients"):
        recorder.clear()
        trained = sharded(ctx, model, mode)
        train(trained, OPTIMIZERS[name](trained.parameters(), lr=1e-2), ctx, range(3))
        results.append(params(trained))
    same(results[1], results[0], "parameters")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("mode", MODES[1:])
def test_sleep_and_wake(ctx, mode):
    streams.install()
    model = wide()
    awake, asleep = sharded(ctx, model, mode), sharded(ctx, model, mode)
    optimizers = [OURS(one.parameters(), lr=1e-2) for one in (awake, asleep)]
    for first in (0, 2):
        for one, optimizer in zip((awake, asleep), optimizers, strict=True):
            train(one, optimizer, ctx, range(first, first + 2))
        freed = fsdp2x.sleep(asleep, optimizers[1] if mode == "optimizer" else None)
        shards = sum(group.pool.numel() for state in asleep._get_fsdp_state().shared.tree for group in state.groups)
        assert freed == (shards if mode == "optimizer" else 0), "moments and offloaded shards are on the host as it is"
        stats = asleep._get_fsdp_state().root.stats()
        assert stats["resident_shard_bytes"] == 0 and asleep._get_fsdp_state().root.loans() == []
        fsdp2x.wake(asleep, optimizers[1])
    for one, optimizer in zip((awake, asleep), optimizers, strict=True):
        train(one, optimizer, ctx, range(4, 5))
    same(params(asleep), params(awake), "parameters")
    same(moments(optimizers[1]), moments(optimizers[0]), "moments")


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_on_a_cpu_mesh_nothing_changes(ctx, transport):
    model = wide()
    results = []
    for mode in MODES:
        trained = sharded(ctx, model, mode, transport=transport)
        train(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2), ctx, range(2))
        results.append(params(trained))
    for result in results[1:]:
        same(result, results[0], "parameters")


@distributed(world_sizes=(1,))
def test_policies(ctx):
    streams.install()
    with pytest.raises(ValueError, match="mode must be .*got 'half'"):
        fsdp2x.HostOffloadPolicy("half")
    with pytest.raises(TypeError, match="offload_policy must be .*got 'gradients'"):
        fsdp2x.fully_shard(wide(), offload_policy="gradients")
    assert isinstance(policy("none"), fsdp2x.OffloadPolicy) and fsdp2x.HostOffloadPolicy().mode == "all"
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match=r"HostOffloadPolicy\(mode='optimizer', pin_memory=False\)"):
            fsdp2x.fully_shard(wide(), offload_policy=fsdp2x.HostOffloadPolicy("optimizer"))
        fsdp2x.fully_shard(wide(), offload_policy=fsdp2x.HostOffloadPolicy("none"))
    modes = [shard(ctx, wide(), STACK_UNITS, offload_policy=one)._get_fsdp_state().groups[0].offload.mode
             for one in (OFFLOAD, policy("all"), policy("optimizer"), CPUOffloadPolicy(pin_memory=False))]  # fmt: skip
    assert modes == ["all", "all", "optimizer", "all"]
