"""Whole policy updates of sharded models against one process that takes one sample and one token at a time."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import memory
import sequences
import streams
from fsdp2x import rl
from fsdp2x.sequence import (
    apply_ulysses,
    init_sequence_mesh,
    mean_over_ranks,
    micro_batches,
    pack_samples,
    use_varlen_attention,
)
from harness import distributed
from policies import Rollout, plain_loss, plain_scores
from reference import both_transports, grads, only_fsdp2x, params, same

EXACT = {"rtol": 2e-5, "atol": 2e-5}
full = pytest.mark.full
# Lengths of each rank's samples: several rows, one sample, none.
LENGTHS = [[9, 5, 13, 8, 3], [4], [], [6, 7]]
SETTINGS = {
    "dapo": dataclasses.replace(rl.DAPO, kl_weight=0.05, clip=(0.004, 0.006)),
    "grpo": dataclasses.replace(rl.GRPO, clip=(0.002, 0.003)),
}
HIGHEST = 1.06  # of importance weights


class Data:
    """Samples of all ranks, their advantages in groups that lie on several ranks, and what an engine reported."""

    def __init__(self, model, num_ranks):
        self.by_rank = [sequences.make_samples(model, part, seed=r) for r, part in enumerate(LENGTHS[:num_ranks])]
        self.samples = [sample for part in self.by_rank for sample in part]
        self.first = [sum(map(len, self.by_rank[:r])) for r in range(num_ranks + 1)]
        generator = torch.Generator().manual_seed(11)
        num = len(self.samples)
        self.rewards = torch.rand(num, generator=generator)
        self.ids = [index % 3 for index in range(num)]
        self.noise = [0.1 * torch.randn(len(s["input_ids"]), generator=generator) for s in self.samples]
        self.behaviour = []  # an engine's log-probabilities of the tokens themselves

    def of(self, rank, values):
        return values[self.first[rank] : self.first[rank + 1]]


def plain_logs(model, samples):
    """(log-probabilities, entropies, labels are there) of each sample alone, [length] each."""
    found = []
    for sample in samples:
        row = pack_samples([sample])
        log_probs, entropy = plain_scores(model(**row.inputs).logits, row.next_labels)
        found.append((log_probs[0], entropy[0], row.next_labels[0] != -100))
    return found


def plain_step(model, data, old, reference, which):
    """Gradients on ``model``; the loss, the part of clipped tokens, the KL to the old policy, the entropy."""
    now = plain_logs(model, data.samples)
    ids, rewards = torch.tensor(data.ids), data.rewards.double()
    groups = [rewards[ids == group] for group in data.ids]
    spreads = [float(group.std()) if len(group) > 1 else 0.0 for group in groups]
    advantages = [float(r - g.mean()) / (std + 1e-4) for r, g, std in zip(rewards, groups, spreads, strict=True)]
    rollouts = []
    for index, (log_probs, entropy, has_label) in enumerate(now):
        one = Rollout.__new__(Rollout)
        one.logp, one.entropy, one.has_label = log_probs.detach().double(), entropy.detach().double(), has_label
        one.old, one.reference = old[index][0].double(), reference[index][0].double()
        one.advantage = advantages[index]
        behaviour = torch.cat((data.behaviour[index][1:], torch.zeros(1))).double()
        one.weights = (one.old - behaviour).exp().clamp(max=HIGHEST)
        rollouts.append(one)
    numbers, gradients = plain_loss(rollouts, which)
    torch.autograd.backward([log_probs for log_probs, _, _ in now], [one.float() for one in gradients])
    return numbers


def our_step(model, rows, tokens, shards, data, rank, old, reference, which):
    count = rl.count_step(tokens)
    group = None if shards is rows else data.group
    mine = [data.of(rank, values) for values in (data.rewards, data.ids)]
    advantages = rl.group_advantages(*mine, group=group)
    totals = torch.zeros(4)
    for index, (part, row) in enumerate(zip(shards, tokens, strict=True)):
        with fsdp2x.accumulate(model, last=index == len(rows) - 1):
            scores = rl.score(model, part.inputs, part.next_labels, entropy=True)
            behaviour = row.align(data.of(rank, data.behaviour))
            weights = rl.importance_weights(old[index], behaviour, row, high=HIGHEST)
            found = rl.policy_loss(
                scores,
                row,
                advantages,
                count,
                which,
                old=old[index],
                reference=reference[index],
                weights=weights,
            )
            found.loss.backward()
        totals += torch.stack([found.loss, found.clipped, found.policy_kl, found.entropy]).detach()
    return mean_over_ranks(totals)


def check(ctx, name, which, transport="auto", ulysses=False):
    """Two updates on the same rollouts: the first at r = 1, the other one with tokens that are clipped."""
    only_fsdp2x(ctx)
    plain, frozen = sequences.build(name), sequences.build(name)
    with torch.no_grad():
        for param in frozen.parameters():
            param.add_(0.02 * torch.randn(param.shape, generator=torch.Generator().manual_seed(3)))
    ours, beside = copy.deepcopy(plain), copy.deepcopy(frozen)
    if ulysses:
        mesh = init_sequence_mesh(2, "cpu")
        data_rank, num_data = mesh.data.get_local_rank(), mesh.data.size()
        contexts = [
            apply_ulysses(fsdp2x.fully_shard(model, mesh=mesh.shard, transport=transport), mesh.sequence)
            for model in (ours, beside)
        ]
    else:
        data_rank, num_data = ctx.rank, ctx.world
        for model in (ours, beside):
            use_varlen_attention(fsdp2x.fully_shard(model, transport=transport))
    # Before the first forward, after which the head's unit is kept unsharded: then parameters() are not the shards.
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (plain, ours)]
    data = Data(plain, num_data)
    rows = list(micro_batches(data.by_rank[data_rank], 20, group=dist.group.WORLD))
    shards = rows
    if ulysses:
        data.group = mesh.data.get_group()
        shards = [contexts[0].shard_inputs(row) for row in rows]
        others = [contexts[1].shard_inputs(row) for row in rows]
    tokens = [rl.RowTokens(row, part if ulysses else None) for row, part in zip(rows, shards, strict=True)]

    with torch.no_grad():
        plain_old, plain_reference = plain_logs(plain, data.samples), plain_logs(frozen, data.samples)
        old = [rl.score(ours, part.inputs, part.next_labels).log_probs for part in shards]
    with rl.Reference(beside) as asked:
        reference = [asked.score(part.inputs, part.next_labels) for part in (others if ulysses else shards)]
    for logs, noise in zip(plain_old, data.noise, strict=True):
        data.behaviour.append(torch.cat((torch.zeros(1), logs[0][:-1])) + noise)

    clipped = []
    for step in range(2):
        expected = plain_step(plain, data, plain_old, plain_reference, which)
        got = our_step(ours, rows, tokens, shards, data, data_rank, old, reference, which)
        same(got.double(), expected, f"step {step}", **EXACT)
        clipped.append(float(expected[1]))
        wanted = grads(plain)
        for name_, grad in grads(ours).items():
            same(grad, wanted[name_], f"step {step}, {name_}", **EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(ours), params(plain), "parameters", **EXACT)
    assert clipped[0] == 0 and max(clipped) > 0.02, clipped


@distributed(world_sizes=(3,), timeout=120)
@pytest.mark.parametrize("which", SETTINGS)
@both_transports
def test_updates_from_uneven_ranks(ctx, which, transport):
    """One rank has several rows, one a sample, one none; groups lie on several ranks."""
    check(ctx, "llama", SETTINGS[which], transport)


@distributed(world_sizes=(1, 4), timeout=120)
@pytest.mark.parametrize(("name", "which"), [("qwen3", "dapo"), pytest.param("gemma2", "grpo", marks=full)])
def test_updates_of_tied_models(ctx, name, which):
    check(ctx, name, SETTINGS[which])


@distributed(world_sizes=(4,), timeout=120)
@pytest.mark.parametrize("which", ["grpo", pytest.param("dapo", marks=pytest.mark.full)])
def test_updates_over_sequence_parallel_ranks(ctx, which):
    """Samples lie on two ranks each: their means are made over both."""
    check(ctx, "llama", SETTINGS[which], ulysses=True)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@both_transports
def test_a_bf16_policy_that_has_not_moved(ctx, transport):
    """Scores without and with gradients are the same bits, so r is exactly 1, and the loss is -mean(A)."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    model = fsdp2x.fully_shard(sequences.build("qwen3"), mp_policy=policy, transport=transport)
    samples = sequences.make_samples(model, [9, 5, 13], seed=ctx.rank)
    rows = list(micro_batches(samples, 20, group=dist.group.WORLD))
    tokens = [rl.RowTokens(row) for row in rows]
    count = rl.count_step(tokens)
    advantages = torch.randn(3, generator=torch.Generator().manual_seed(ctx.rank))
    with torch.no_grad():
        old = [rl.score(model, row.inputs, row.next_labels).log_probs for row in rows]
    totals, mean = torch.zeros(3), torch.zeros(())
    for index, (row, part) in enumerate(zip(rows, tokens, strict=True)):
        with fsdp2x.accumulate(model, last=index == len(rows) - 1):
            scores = rl.score(model, row.inputs, row.next_labels)
            same(scores.log_probs.detach(), old[index], "log-probabilities")
            found = rl.policy_loss(scores, part, advantages, count, rl.DAPO, old=old[index])
            found.loss.backward()
        totals += torch.stack([one.detach() for one in found[:3]])
        mean += part.spread(advantages).sum() * ctx.world / count.tokens.float()
    same(totals, torch.stack([-mean, torch.zeros(()), torch.zeros(())]), "loss", rtol=1e-6, atol=1e-7)
    assert all(grad is not None and grad.any() for name, grad in grads(model).items() if "norm" not in name)


@distributed(world_sizes=(3,), only_fsdp2x=True)
@both_transports
def test_a_step_without_a_response(ctx, transport):
    """No rank has a label: the loss is zero, every parameter has a gradient of zeros, and ranks do not wait."""
    model = fsdp2x.fully_shard(sequences.build("qwen3"), transport=transport)
    samples = sequences.make_samples(model, [9, 5] if ctx.rank else [])
    for sample in samples:
        sample["labels"] = torch.full_like(sample["labels"], -100)
    rows = list(micro_batches(samples, 20, group=dist.group.WORLD))
    tokens = [rl.RowTokens(row) for row in rows]
    advantages = rl.group_advantages([1.0] * len(samples), [0] * len(samples))
    for row, part in zip(rows, tokens, strict=True):
        scores = rl.score(model, row.inputs, row.next_labels, entropy=True)
        found = rl.policy_loss(scores, part, advantages, rl.count_step(tokens))
        found.loss.backward()
        assert found.loss == 0
    assert all(grad is not None and not grad.any() for grad in grads(model).values())


# ---- advantages over ranks


@distributed(world_sizes=(3,))
def test_one_ranks_bad_reward_is_an_error_on_every_rank(ctx):
    rewards = [[1.0], [float("nan")], []][ctx.rank]
    with pytest.raises(ValueError, match="rank 1: the reward of sample 0 is nan"):
        rl.group_advantages(rewards, [0] * len(rewards))
    assert rl.group_advantages([1.0], [ctx.rank]).tolist() == [0.0]


# ---- the reference model next to the policy


def held_bytes(model):
    """Returns the bytes of the engine's shared memory and gather buffers, and the buffers in use."""
    root = model._get_fsdp_state().root
    return sum(memory.shared_files().values()), root.stats()["gather_slot_bytes"], root.loans()


@distributed(world_sizes=(2,), fresh=True, only_fsdp2x=True)
@pytest.mark.parametrize("transport", ["shm", "process_group", "streams"])
@pytest.mark.parametrize("offload", [False, True])
def test_the_references_memory_returns(ctx, transport, offload):
    """Two models share a process. After each block the reference only has its shards, and the policy still trains."""
    if transport == "streams":
        streams.install()
    policy = fsdp2x.fully_shard(sequences.build("llama"), transport=transport)
    beside = sequences.build("qwen3", vocab_size=8192)
    expected = copy.deepcopy(beside)
    reference = rl.Reference(fsdp2x.fully_shard(beside, transport=transport), offload=offload)
    optimizer = fsdp2x.optim.AdamW(policy.parameters(), lr=1e-3)
    samples = sequences.make_samples(policy, [9, 5], seed=ctx.rank)
    (row,) = micro_batches(samples, 20, group=dist.group.WORLD)
    wanted, _ = plain_scores(expected(**row.inputs).logits, row.next_labels)

    def update():
        rl.score(policy, row.inputs, row.next_labels).log_probs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    update()
    before = sum(memory.shared_files().values())
    for _ in range(3):
        with reference:
            for _ in range(2):
                got = reference.score(row.inputs, row.next_labels)
                same(got, wanted.detach(), "log-probabilities", **EXACT)
            inside = sum(memory.shared_files().values())
        assert not got.requires_grad and all(param.grad is None for param in beside.parameters())
        if transport == "shm":
            after = sum(memory.shared_files().values())
            assert inside > before + 2**19 and after < before + 2**16, (before, inside, after)
        elif transport == "streams":
            root = beside._get_fsdp_state().root
            assert root.stats()["gather_slot_bytes"] == 0 and root.loans() == []
        update()
    with pytest.raises(RuntimeError, match="inside `with reference:`"):
        reference.score(row.inputs, row.next_labels)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_a_reference_after_an_error(ctx):
    model = fsdp2x.fully_shard(sequences.build("llama"))
    reference = rl.Reference(model, offload=True)
    (row,) = micro_batches(sequences.make_samples(model, [9]), 20, group=dist.group.WORLD)
    with pytest.raises(KeyError), reference:
        raise KeyError
    with reference, pytest.raises(RuntimeError, match="already entered"), reference:
        pass
    with reference:
        assert reference.score(row.inputs, row.next_labels).any()
    with pytest.raises(ValueError, match="Reference: nothing in this Linear"):
        rl.Reference(nn.Linear(2, 2))
