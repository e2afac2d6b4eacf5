"""Ulysses in use: gathered outputs and their backward, log-probabilities, empty rows, other widths, and its errors."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import sequences
from fsdp2x.models.sequence.attention import IMPLEMENTATION
from fsdp2x.sequence import apply_ulysses, init_sequence_mesh, micro_batches, pack_samples, token_log_probs
from harness import distributed
from reference import grads, only_fsdp2x, same

EXACT = {"rtol": 1e-5, "atol": 1e-5}


def setup(ctx, model="llama", size=2, shard=True, **options):
    """A reference, a copy under fully_shard and Ulysses, its context and mesh."""
    only_fsdp2x(ctx)
    mesh = init_sequence_mesh(size, "cpu")
    reference = sequences.build(model) if isinstance(model, str) else model
    ours = copy.deepcopy(reference)
    if shard:
        fsdp2x.fully_shard(ours, mesh=mesh.shard, **options)
    return reference, ours, apply_ulysses(ours, mesh.sequence), mesh


# ---- outputs


@distributed(world_sizes=(2, 4))
def test_a_loss_of_gathered_log_probs(ctx):
    """A policy gradient: every rank of a group computes the same loss of its data-parallel rank's whole sequences."""
    reference, ours, context, mesh = setup(ctx)
    advantages = torch.linspace(-1, 1, 11)

    def policy_loss(log_probs):
        return (log_probs.exp() * advantages[: log_probs.shape[-1]]).sum()

    expected = []
    for data_rank in range(mesh.data.size()):
        batch = sequences.collate(sequences.make_samples(reference, [11, 7], seed=data_rank))
        logits = reference(**{key: value for key, value in batch.items() if key != "labels"}).logits
        labels = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
        log_probs = token_log_probs(logits, labels)
        (policy_loss(log_probs) / mesh.data.size()).backward()
        expected.append((batch, log_probs.detach()))
    batch, log_probs = expected[mesh.data.get_local_rank()]
    shard = context.shard_inputs(batch)
    gathered = context.gather_outputs(token_log_probs(ours(**shard.inputs).logits, shard.next_labels), shard)
    same(gathered.detach(), log_probs, "log-probabilities", **EXACT)
    policy_loss(gathered).backward()
    same(grads(ours), grads(reference), "gradients", **EXACT)


@distributed(world_sizes=(3,))
def test_gather_hands_back_slices(ctx):
    _, ours, context, _ = setup(ctx, "llama_kv3", size=3)
    shard = context.shard_inputs({"input_ids": torch.arange(3, 17).view(2, 7)})
    assert shard.layout.length == 9 and shard.length == 7 and shard.next_labels is None
    values = torch.arange(6.0).view(2, 3).add(10 * ctx.rank).requires_grad_()
    whole = context.gather_outputs(values, shard)
    assert whole.tolist() == [[0, 1, 2, 10, 11, 12, 20], [3, 4, 5, 13, 14, 15, 23]]
    weights = torch.arange(14.0).view(2, 7)
    (grad,) = torch.autograd.grad((whole * weights).sum(), values)
    mine = torch.nn.functional.pad(weights, (0, 2))[:, 3 * ctx.rank : 3 * ctx.rank + 3]
    assert torch.equal(grad, 3 * mine)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) do not belong"):
        context.gather_outputs(torch.zeros(2, 4), shard)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "qwen2_vl"])
def test_logits_and_positions(ctx, name):
    """Each rank's logits are the reference's at its own positions, also with padding on the left."""
    reference, ours, context, _ = setup(ctx, name, shard=False)
    for left in (False, True):
        batch = sequences.collate(sequences.make_samples(reference, [9, 11, 8]), left=left)
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        expected = reference(**inputs).logits
        shard = context.shard_inputs(batch)
        logits = context.gather_outputs(ours(**shard.inputs).logits, shard)
        mask = batch["attention_mask"].bool()
        same(logits[mask].detach(), expected[mask].detach(), f"logits, left={left}", **EXACT)


# ---- rows and ranks


@distributed(world_sizes=(3,), timeout=120)
@pytest.mark.parametrize("name", ["llama_kv3", pytest.param("gemma2_six", marks=pytest.mark.full)])
def test_three_ranks(ctx, name):
    """Six heads of three or two kv heads over three ranks, rows that no three divide, short last slices of padding."""
    if name == "gemma2_six":
        name = sequences.build("gemma2", hidden_size=24, num_attention_heads=6, num_key_value_heads=2)
    reference, ours, context, _ = setup(ctx, name, size=3)
    samples = sequences.make_samples(reference, [9, 5, 3, 2])
    shard = context.shard_inputs(pack_samples(samples))
    assert shard.layout.length == 21 and shard.layout.num_padding == 2
    sequences.check_step(ours, [shard], reference, samples)


@distributed(world_sizes=(4,), timeout=120)
def test_a_data_parallel_rank_without_samples(ctx):
    reference, ours, context, mesh = setup(ctx)
    samples = sequences.make_samples(reference, [9, 5, 13])
    mine = samples if mesh.data.get_local_rank() == 0 else []
    shards = [context.shard_inputs(row) for row in micro_batches(mine, 15)]
    assert len(shards) == 2
    sequences.check_step(ours, shards, reference, samples)


@distributed(world_sizes=(2,))
def test_bf16_compute(ctx):
    """Against the same model in bf16 on one rank: only the order of sums differs."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference, ours, context, _ = setup(ctx, sequences.build("qwen3"), mp_policy=policy)
    samples = sequences.make_samples(reference, [12, 9])
    sequences.check_step(ours, [context.shard_inputs(pack_samples(samples))], reference, samples, loose=5e-2)


@distributed(world_sizes=(2,))
def test_one_rank_groups_and_few_collectives(ctx):
    """Two all-to-alls a layer in forward and two in backward; none in a group of one."""
    calls = []
    real = dist.all_to_all_single

    def counted(*arguments, **options):
        calls.append(arguments[0].numel())
        return real(*arguments, **options)

    dist.all_to_all_single = counted
    try:
        for size, per_layer in ((2, 2), (1, 0)):
            _, ours, context, _ = setup(ctx, size=size)
            shard = context.shard_inputs({"input_ids": torch.arange(3, 21).view(2, 9)})
            calls.clear()
            logits = ours(**shard.inputs).logits
            assert len(calls) == per_layer * 2, f"forward, {size} ranks"
            logits.sum().backward()
            assert len(calls) == 2 * per_layer * 2, f"backward, {size} ranks"
    finally:
        dist.all_to_all_single = real


@distributed(world_sizes=(2,))
def test_whole_sequences_while_disabled(ctx):
    reference, ours, context, _ = setup(ctx)
    ids = torch.arange(3, 12).view(1, 9)
    with context.disabled(), torch.no_grad():
        same(ours(input_ids=ids).logits, reference(input_ids=ids).logits.detach(), "logits", **EXACT)
    shard = context.shard_inputs({"input_ids": ids})
    got = context.gather_outputs(ours(**shard.inputs).logits, shard)
    same(got.detach(), reference(input_ids=ids).logits.detach(), "logits", **EXACT)
    context.remove()
    assert reference.config._attn_implementation == ours.config._attn_implementation == "eager"


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=180)
def test_compiled_blocks(ctx):
    """Attention stays outside of the graphs; rows of another length and layout compile at most once more each."""
    reference, ours, context, _ = setup(ctx, "mistral")
    torch._dynamo.reset()
    try:
        for layer in ours.model.layers:
            layer.compile(backend="aot_eager")
        for lengths in ([9, 5, 4], [7, 6, 5], [3, 15], [6, 6]):
            reference.zero_grad()
            ours.zero_grad()
            samples = sequences.make_samples(reference, lengths)
            shard = context.shard_inputs(pack_samples(samples))
            sequences.check_step(ours, [shard], reference, samples, f"of {lengths}")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


# ---- errors


@distributed(world_sizes=(4,))
def test_heads_that_do_not_divide_are_refused_before_anything_is_changed(ctx):
    model = sequences.build("llama_kv3")
    with pytest.raises(ValueError, match="6 attention heads cannot be split .*1, 2, 3, 6"):
        apply_ulysses(model, dist.group.WORLD)
    assert model.config._attn_implementation != IMPLEMENTATION
    assert model(input_ids=torch.arange(3, 9)[None]).logits.shape == (1, 6, sequences.VOCAB)


TOKENS = torch.arange(3, 27).view(2, 12)


@distributed(world_sizes=(2,))
def test_a_mask_does_not_undo_packing(ctx):
    reference, ours, context, _ = setup(ctx)
    batch = {"input_ids": TOKENS, "position_ids": torch.arange(6).repeat(2, 2), "attention_mask": torch.ones(2, 12)}
    shard = context.shard_inputs(batch)
    logits = context.gather_outputs(ours(**shard.inputs).logits, shard)
    same(logits.reshape(4, 6, -1), reference(input_ids=TOKENS.view(4, 6)).logits, "logits", **EXACT)


# What differs -> a change of the second rank's batch.
CHANGES = {
    "input_ids": lambda batch: {"input_ids": TOKENS.flip(1)},
    "labels": lambda batch: {"labels": batch["labels"].flip(0)},
    "attention_mask": lambda batch: {"attention_mask": batch["attention_mask"].flip(1)},
    "samples": lambda batch: {"attention_mask": batch["attention_mask"].flip(1)},
    "position_ids": lambda batch: {"position_ids": torch.arange(6).repeat(1, 2)},
    "inputs_embeds": lambda batch: {"input_ids": None, "inputs_embeds": batch["inputs_embeds"].roll(1, 2)},
    "other inputs": lambda batch: {"features": batch["features"] + 2**-20},
    "names, shapes or dtypes": lambda batch: {"features": batch["features"].half()},
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("what", CHANGES)
def test_inputs_that_differ_in_a_group(ctx, what):
    _, ours, context, _ = setup(ctx, shard=False)
    batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": torch.arange(12)[None], "features": torch.ones(3)}
    batch["attention_mask"] = (torch.arange(12) < 9).long().expand(2, -1)
    if what == "inputs_embeds":
        batch |= {"input_ids": None, "inputs_embeds": torch.linspace(-1, 1, 384).view(2, 12, 16)}
    context.shard_inputs(batch)
    with pytest.raises(ValueError, match=f"same batch, but they differ in .*{what}"):
        context.shard_inputs({**batch, **CHANGES[what](batch)} if ctx.rank else batch)
    context.shard_inputs(batch)


ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
# An invalid input -> its error. The other ranks have a valid batch.
INVALID = {
    "nothing": ({"input_ids": None}, ValueError, "expected input_ids or inputs_embeds"),
    "list": ({"input_ids": TOKENS.tolist()}, TypeError, "input_ids must be a tensor, got list"),
    "label_list": ({"labels": TOKENS.tolist()}, TypeError, "labels must be a tensor, got list"),
    "vector": ({"input_ids": TOKENS[0]}, ValueError, r"input_ids must have the shape \[rows, length\], got \[12\]"),
    "labels": ({"labels": TOKENS[:, 1:]}, ValueError, "labels of shape"),
    "mask_shape": ({"attention_mask": torch.ones(2, 11)}, ValueError, "attention_mask of shape"),
    "mask_hole": ({"attention_mask": torch.tensor([[1, 0, 1] * 4] * 2)}, ValueError, "padding between tokens"),
    "positions": ({"position_ids": torch.arange(11)[None]}, ValueError, "position_ids of shape"),
    "unknown": ({"weights": torch.ones(2, 12)}, NotImplementedError, "seems to run along the sequence"),
    "ends": ({"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS}, ValueError, "do not keep samples apart"),
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("rank", [0, 1, None])
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_batch_raises_on_every_rank(ctx, name, rank):
    _, ours, context, _ = setup(ctx, shard=False)
    batch = {"input_ids": TOKENS, "labels": TOKENS}
    change, error, said = INVALID[name]
    mine = rank is None or rank == ctx.rank
    if not mine:
        change, error, said = {}, ValueError, f"rank {rank} of the sequence-parallel group rejected its batch"
    with pytest.raises(error, match=said):
        context.shard_inputs({**batch, **change})
    ours(**context.shard_inputs(batch).inputs)


@distributed(world_sizes=(4,), only_fsdp2x=True)
@pytest.mark.parametrize("when", ["before", "after"])
def test_parameters_sharded_over_data_parallel_ranks_only(ctx, when):
    """Their gradients would never meet those of the other slices."""
    mesh = init_sequence_mesh(2, "cpu")
    model = sequences.build("llama")
    said = r"is sharded over the ranks \[\d, \d\], without \[\d\] of the sequence-parallel group"
    if when == "before":
        fsdp2x.fully_shard(model, mesh=mesh.data)
        with pytest.raises(ValueError, match=said):
            apply_ulysses(model, mesh.sequence)
        return
    context = apply_ulysses(model, mesh.sequence)
    fsdp2x.fully_shard(model, mesh=mesh.data)
    shard = context.shard_inputs({"input_ids": torch.arange(3, 11)[None]})
    with pytest.raises(ValueError, match=said):
        model(**shard.inputs)


@distributed(world_sizes=(2,))
def test_misuse(ctx):
    _, ours, context, _ = setup(ctx, shard=False)
    ids = torch.arange(3, 12)[None]
    with pytest.raises(RuntimeError, match="inputs that shard_inputs"):
        ours(input_ids=ids)
    with pytest.raises(ValueError, match="was not made for this model"):
        ours(**pack_samples([{"input_ids": ids[0]}]).inputs)
    shard = context.shard_inputs({"input_ids": ids, "labels": ids})
    with pytest.raises(ValueError, match="own loss is wrong"):
        ours(**shard.inputs, labels=ids)
    for keep in (1, torch.tensor([8])):
        with pytest.raises(ValueError, match="logits_to_keep counts"):
            ours(**context.shard_inputs({"input_ids": ids, "logits_to_keep": keep}).inputs)
    ours(**shard.inputs, logits_to_keep=0)
    with context.disabled(), pytest.raises(RuntimeError, match="while attention over layouts is disabled"):
        ours(**shard.inputs)
    with pytest.raises(ValueError, match="expected one axis of a mesh"):
        apply_ulysses(sequences.build("llama"), init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b")))
    with pytest.raises(ValueError, match="size 3 does not divide the 2 ranks"):
        init_sequence_mesh(3, "cpu")
