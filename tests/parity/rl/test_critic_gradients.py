"""Updates of a sharded critic against the unsharded model, which takes one sample at a time, and its policy's loss."""

import copy

import pytest
import torch
import torch.distributed as dist

import fsdp2x
import sequences
from checkpoints import shared_folder
from fsdp2x import rl
from fsdp2x.sequence import (
    apply_context_parallel,
    apply_ulysses,
    init_sequence_mesh,
    micro_batches,
    pack_samples,
    use_varlen_attention,
)
from harness import distributed
from reference import both_transports, grads, only_fsdp2x, params, same

EXACT = {"rtol": 2e-5, "atol": 2e-5}
LENGTHS = [[9, 5, 13, 8, 3], [4], [], [6, 7]]
GAMMA, LAM, CLIP = 0.97, 0.9, 0.02


def build_critic():
    critic = rl.ValueModel(sequences.build("llama"))
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(4))
    return critic


def plain_targets(critic, samples, scores):
    """(old values, advantages, returns) of the labels of each sample, fp64, and where they are."""
    found = []
    for sample, score in zip(samples, scores, strict=True):
        row = pack_samples([sample])
        places = (row.next_labels[0] != -100).nonzero().flatten()
        with torch.no_grad():
            old = critic(input_ids=row.input_ids)[0, places].double()
        advantage, later = torch.zeros_like(old), torch.zeros(())
        following = torch.zeros(())
        for t in reversed(range(len(places))):
            reward = score if t == len(places) - 1 else 0.0
            later = reward + GAMMA * following - old[t] + GAMMA * LAM * later
            advantage[t], following = later, old[t]
        found.append((old, advantage, advantage + old, places))
    return found


def plain_step(critic, samples, targets):
    num_tokens = sum(len(places) for *_, places in targets)
    for sample, (old, _, returns, places) in zip(samples, targets, strict=True):
        now = critic(input_ids=sample["input_ids"][None])[0, places].double()
        moved = torch.clamp(now, old - CLIP, old + CLIP)
        (0.5 * torch.max((now - returns) ** 2, (moved - returns) ** 2).sum() / num_tokens).backward()


def check(ctx, transport="auto", apply=None):
    only_fsdp2x(ctx)
    plain = build_critic()
    critic = copy.deepcopy(plain)
    if apply is not None:
        mesh = init_sequence_mesh(2, "cpu")
        data_rank, num_data = mesh.data.get_local_rank(), mesh.data.size()
        context = apply(fsdp2x.fully_shard(critic, mesh=mesh.shard, transport=transport), mesh.sequence)
    else:
        data_rank, num_data = ctx.rank, ctx.world
        use_varlen_attention(fsdp2x.fully_shard(critic, transport=transport))
    assert len(fsdp2x.describe(critic).units) > 3
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02) for model in (plain, critic)]
    by_rank = [sequences.make_samples(plain, part, seed=rank) for rank, part in enumerate(LENGTHS[:num_data])]
    samples = [sample for part in by_rank for sample in part]
    scores = torch.randn(len(samples), generator=torch.Generator().manual_seed(2))
    first = sum(map(len, by_rank[:data_rank]))
    mine = scores[first : first + len(by_rank[data_rank])]

    packed = list(micro_batches(by_rank[data_rank], 20, group=dist.group.WORLD))
    parts = [context.shard_inputs(row) for row in packed] if apply else packed
    rows = [rl.RowTokens(row, part if apply else None) for row, part in zip(packed, parts, strict=True)]
    with torch.no_grad():
        old = [critic(**part.inputs) for part in parts]
    advantages, returns = rl.gae([row.on_last(mine) for row in rows], old, rows, gamma=GAMMA, lam=LAM, whiten=True)
    targets = plain_targets(plain, samples, scores.tolist())
    plain_advantages = torch.cat([advantage for _, advantage, _, _ in targets])
    wanted = ((plain_advantages - plain_advantages.mean()) / (plain_advantages.var() + 1e-8).sqrt()).abs().sum()
    total = torch.stack([one.abs().sum() for one in advantages]).sum().double()
    dist.all_reduce(total)
    same(total, wanted, "whitened advantages", **EXACT)

    count = rl.count_step(rows)
    clipped = torch.zeros(())
    for step in range(2):
        plain_step(plain, samples, targets)
        for index, (part, row) in enumerate(zip(parts, rows, strict=True)):
            with fsdp2x.accumulate(critic, last=index == len(rows) - 1):
                found = rl.value_loss(critic(**part.inputs), row, returns[index], count, old=old[index], clip=CLIP)
                found.loss.backward()
            clipped += found.clipped
        expected = grads(plain)
        for name, grad in grads(critic).items():
            same(grad, expected[name], f"step {step}, {name}", **EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(critic), params(plain), "parameters", **EXACT)
    dist.all_reduce(clipped)
    assert clipped > 0


@distributed(world_sizes=(1, 2, 3), timeout=120)
@both_transports
def test_updates_from_uneven_ranks(ctx, transport):
    """One rank has several rows, one a sample, one none; the second step is clipped."""
    check(ctx, transport)


@distributed(world_sizes=(4,), timeout=120)
@pytest.mark.parametrize("apply", [apply_context_parallel, pytest.param(apply_ulysses, marks=pytest.mark.full)])
def test_updates_over_sequence_parallel_ranks(ctx, apply):
    """Samples lie on two ranks each: the recurrence runs over both."""
    check(ctx, apply=apply)


@distributed(world_sizes=(2,), timeout=120)
def test_checkpoints_folders_and_adapters(ctx):
    """A checkpoint restores head and body, and a policy's folder fills the body. LoRA also trains the head."""
    only_fsdp2x(ctx)
    critic = fsdp2x.fully_shard(build_critic())
    expected = params(critic)
    policy = sequences.build("llama")
    with shared_folder() as folder:
        fsdp2x.checkpoint.save(folder / "critic", critic, step=1)
        other = fsdp2x.fully_shard(rl.ValueModel(sequences.build("llama")))
        fsdp2x.checkpoint.load(folder / "critic", other)
        same(params(other), expected, "checkpoint")
        fsdp2x.save_hf(fsdp2x.fully_shard(policy), folder / "policy")
        empty = rl.ValueModel(sequences.build("llama").to("meta"))
        report = fsdp2x.load_hf(fsdp2x.fully_shard(empty), folder / "policy", strict=False)
    assert sorted(report.missing_keys) == ["head.bias", "head.weight"]
    wanted, found = params(policy), params(empty)
    wanted |= {name: torch.zeros_like(found[name]) for name in report.missing_keys}
    same(found, {name: wanted[name] for name in found}, "folder")

    adapted = fsdp2x.add_lora(build_critic(), {"r": 2, "target_modules": "q_proj", "modules_to_save": "head"})
    use_varlen_attention(fsdp2x.fully_shard(adapted))
    row = next(micro_batches(sequences.make_samples(policy, [5, 4]), 20))
    tokens = rl.RowTokens(row)
    ones = torch.ones(row.input_ids.shape)
    rl.value_loss(adapted(**row.inputs), tokens, ones, rl.count_step([tokens])).loss.backward()
    trained = {name for name, param in adapted.named_parameters() if param.grad is not None}
    assert any("lora_B" in name for name in trained) and any("modules_to_save" in name for name in trained)
