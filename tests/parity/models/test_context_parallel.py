"""Context parallelism over 2 to 4 ranks: logits, loss and gradients of one process on whole samples."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2x
import sequences
from fsdp2x.models.sequence.exchange import ExchangedBytes
from fsdp2x.sequence import apply_context_parallel, init_sequence_mesh, micro_batches
from harness import distributed
from reference import only_fsdp2x, same

EXACT = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = {"whole": [16, 16], "uneven": [9, 11, 5], "packed": [9, 5, 13, 8, 3], "short": [3, 2]}
MODELS = ("llama", "llama_kv1", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_vl")


def with_adapters(model):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.05, generator=generator)
    return model


def recompute(model):
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})


def check_logits(ours, context, shard, reference, batch, samples):
    whole = context.gather_outputs(ours(**shard.inputs).logits, shard).detach()
    chosen = samples if isinstance(batch, dict) else [samples[index] for index in batch.sample_ids]
    found = whole if isinstance(batch, dict) else batch.unpack(whole)
    for got, sample in zip(found, chosen, strict=True):
        ids = sample["input_ids"]
        same(got[: len(ids)], reference(input_ids=ids[None]).logits[0].detach(), "logits", **EXACT)


def check(ctx, name, kind, size, ulysses=None, adapters=False, checkpointing=False):
    only_fsdp2x(ctx)
    mesh = init_sequence_mesh(size, "cpu", ulysses=ulysses)
    reference = sequences.build(name)
    reference = with_adapters(reference) if adapters else reference
    ours = copy.deepcopy(reference)
    if checkpointing:
        recompute(ours)
    fsdp2x.fully_shard(ours, mesh=mesh.shard)
    context = apply_context_parallel(ours, mesh.sequence)
    everyone = [sequences.make_samples(reference, LENGTHS[kind], seed=rank) for rank in range(mesh.data.size())]
    mine = everyone[mesh.data.get_local_rank()]
    packs = kind in ("packed", "short")
    batches = list(micro_batches(mine, 24)) if packs else [sequences.collate(mine)]
    shards = [context.shard_inputs(batch) for batch in batches]
    if not hasattr(reference.config, "vision_config"):
        for shard, batch in zip(shards, batches, strict=True):
            check_logits(ours, context, shard, reference, batch, mine)
    exact = hasattr(reference.config, "vision_config")
    sequences.check_step(ours, shards, reference, sum(everyone, []), exact=exact)


# World size -> (ranks that share a sequence, Ulysses ranks inside).
MESHES = {2: [(2, None)], 3: [(3, None)], 4: [(2, None), (4, None), (4, 2)]}
# World size -> model, batch, mesh, LoRA, checkpointing.
NORMAL = {
    2: {
        ("gemma2", "uneven", (2, None), False, False),
        ("mistral", "short", (2, None), True, True),
        ("qwen3_vl", "uneven", (2, None), False, False),
    },
    3: {("llama", "packed", (3, None), False, False)},
    4: {("gpt_oss", "packed", (4, 2), False, True)},
}


def table(world):
    """Every model, batch and mesh, plain and with LoRA and checkpointing; few of them run without --full."""
    every = {
        (*row, adapted and row[0] != "qwen3_vl", adapted)
        for *row, adapted in itertools.product(MODELS, LENGTHS, MESHES[world], [False, True])
    }
    return [
        pytest.param(*row, marks=() if row in NORMAL[world] else pytest.mark.full, id="-".join(map(str, row)))
        for row in sorted(every | NORMAL[world], key=str)
    ]


COLUMNS = ("name", "kind", "mesh", "adapters", "checkpointing")


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize(COLUMNS, table(2))
def test_two_ranks(ctx, name, kind, mesh, adapters, checkpointing):
    check(ctx, name, kind, *mesh, adapters=adapters, checkpointing=checkpointing)


@distributed(world_sizes=(3,), timeout=120)
@pytest.mark.parametrize(COLUMNS, table(3))
def test_four_heads_over_three_ranks(ctx, name, kind, mesh, adapters, checkpointing):
    check(ctx, name, kind, *mesh, adapters=adapters, checkpointing=checkpointing)


@distributed(world_sizes=(4,), timeout=180)
@pytest.mark.parametrize(COLUMNS, table(4))
def test_times_data_parallel_and_with_ulysses_inside(ctx, name, kind, mesh, adapters, checkpointing):
    check(ctx, name, kind, *mesh, adapters=adapters, checkpointing=checkpointing)


@contextlib.contextmanager
def sent_bytes():
    """Yields a list of the bytes that each collective of this rank sends to others."""
    sent: list[int] = []

    def gathered(output, tensor, size, rank):
        return output.numel() - tensor.numel()

    def reduced(output, tensor, size, rank):
        return tensor.numel() - output.numel()

    def exchanged(output, tensor, size, rank):
        return tensor.numel() - tensor.numel() // size

    def counting(real, elements):
        def call(output, tensor, *splits, group):
            count = elements(output, tensor, dist.get_world_size(group), dist.get_rank(group))
            sent.append(tensor.element_size() * count)
            return real(output, tensor, *splits, group=group)

        return call

    # The processes of the ranks are reused: a patch that stays would count in later tests too.
    with pytest.MonkeyPatch.context() as patch:
        for name, elements in (
            ("all_gather_into_tensor", gathered),
            ("reduce_scatter_tensor", reduced),
            ("all_to_all_single", exchanged),
        ):
            patch.setattr(dist, name, counting(getattr(dist, name), elements))
        yield sent


@distributed(world_sizes=(4,), only_fsdp2x=True)
@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("ulysses", [None, 2])
def test_bytes_as_planned(ctx, ulysses, itemsize):
    """Few collectives, kv heads before they are repeated, and the bytes that `fsdp2x plan` says."""
    mesh = init_sequence_mesh(4, "cpu", ulysses=ulysses)
    model = sequences.build("llama")
    context = apply_context_parallel(model, mesh.sequence)
    shard = context.shard_inputs({"input_ids": torch.arange(3, 27).view(1, 24)})
    with sent_bytes() as sent:
        with torch.autocast("cpu", torch.bfloat16, enabled=itemsize == 2):
            logits = model(**shard.inputs).logits
        one = ExchangedBytes.of(24, (4, 2), (4, 4), (ulysses or 1, 4 // (ulysses or 1)), itemsize)
        assert len(sent) == 2 * (1 if ulysses is None else 3) and sum(sent) == 2 * one.sent
        logits.sum().backward()
    assert sum(sent) == 4 * one.sent and one.kept == 24 * (2 if ulysses is None else 1) * 8 * itemsize


@distributed(world_sizes=(4,), only_fsdp2x=True)
def test_meshes_that_are_refused(ctx):
    mesh = init_sequence_mesh(4, "cpu", ulysses=2)
    assert mesh.sequence.mesh_dim_names == ("context", "ulysses") and mesh.data.size() == 1
    with pytest.raises(ValueError, match="over 2 ranks: 3 attention heads .* apply_context_parallel"):
        apply_context_parallel(
            sequences.build("llama", hidden_size=12, num_attention_heads=3, num_key_value_heads=1), mesh.sequence
        )
    with pytest.raises(ValueError, match="takes one axis"):
        names = ("a", "b", "c")
        apply_context_parallel(sequences.build("llama"), init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names))
    for ranks, names, said in (
        ([[0, 1], [2, 3]], None, "needs a mesh with the named axes"),
        ([[0, 1], [2, 3]], ("ulysses", "context"), r"in the order \(context, ulysses\)"),
        ([[0, 2], [1, 3]], ("context", "ulysses"), "its ranks in ascending order"),
        ([[0, 2], [1, 3]], ("a", "b"), "its ranks in ascending order"),
    ):
        model = sequences.build("llama")
        with pytest.raises(ValueError, match=f"{said}.* Pass init_sequence_mesh"):
            apply_context_parallel(model, DeviceMesh("cpu", ranks, mesh_dim_names=names))
        assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="ulysses=3 does not divide .* 4"):
        init_sequence_mesh(4, "cpu", ulysses=3)
