"""Ulysses over 2 ranks, alone and times data parallel: gradients and steps of one process on whole samples."""

import copy
import importlib

import pytest
import torch

import fsdp2x
import sequences
from fsdp2x.sequence import apply_ulysses, init_sequence_mesh, micro_batches, pack_samples
from harness import distributed
from reference import changes, grads, only_fsdp2x, params, same

EXACT = {"rtol": 1e-5, "atol": 1e-5}
KINDS = {
    "plain": [12, 12],  # A batch without padding.
    "uneven": [9, 11, 5],  # Rows of different lengths are padded. The batch is padded to a multiple of the ranks.
    "packed": [9, 5, 13, 8, 3],  # Two rows of several samples are accumulated.
}
PAPER_MODELS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "qwen3_moe", "qwen2_vl")
OTHER_MODELS = (
    *("llama_kv1", "llama_kv3", "qwen2_window", "gemma2", "gemma3"),
    *("gpt_oss", "mixtral", "deepseek_v3", "olmo2", "qwen3_vl"),
)
full = pytest.mark.full


def data_of(model, kind, data_rank, step):
    """Every data-parallel rank has other samples, of other lengths."""
    lengths = [length + data_rank if kind != "plain" else length for length in KINDS[kind]]
    return sequences.make_samples(model, lengths, seed=100 * step + 10 * data_rank)


def micro_batches_of(kind, samples, size):
    if kind == "packed":
        return list(micro_batches(samples, 24))
    return [sequences.collate(samples)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def check_steps(ctx, name, kind, shard=None, transport="auto", prepare=lambda model: None):
    """Two steps, the second one with momentum."""
    only_fsdp2x(ctx)
    mesh = init_sequence_mesh(2, "cpu")
    reference = sequences.build(name)
    ours = copy.deepcopy(reference)
    prepare(ours)
    fsdp2x.fully_shard(ours, mesh=mesh.shard if shard is None else shard(mesh), transport=transport)
    context = apply_ulysses(ours, mesh.sequence)
    optimizers = sgd(reference), sgd(ours)
    losses = []
    for step in range(2):
        everyone = [data_of(reference, kind, rank, step) for rank in range(mesh.data.size())]
        batches = micro_batches_of(kind, everyone[mesh.data.get_local_rank()], context.size)
        shards = [context.shard_inputs(batch) for batch in batches]
        losses.append(sequences.check_step(ours, shards, reference, sum(everyone, []), f"of step {step}"))
        assert max(grad.abs().max() for grad in grads(reference).values() if grad is not None) > 0.05
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(ours), params(reference), "parameters", **EXACT)
    assert changes(losses)


def grid(names, normal):
    """All kinds for all names; those that `normal` does not choose run with --full."""
    return [
        pytest.param(name, kind, marks=() if normal(name, kind) else full, id=f"{name}-{kind}")
        for name in names
        for kind in KINDS
    ]


# The attention of the others is one of theirs.
NORMAL = ("qwen3", "gemma", "qwen3_moe", "qwen2_vl")


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize(
    ("name", "kind"), grid(PAPER_MODELS, lambda name, kind: name == "llama" or kind == "packed" and name in NORMAL)
)
def test_two_ranks(ctx, name, kind):
    check_steps(ctx, name, kind)


@distributed(world_sizes=(4,), timeout=180)
@pytest.mark.parametrize(
    ("name", "kind"), grid(PAPER_MODELS, lambda *chosen: chosen in (("llama", "packed"), ("qwen2_vl", "uneven")))
)
def test_two_ranks_times_two_data_parallel(ctx, name, kind):
    check_steps(ctx, name, kind)


NORMAL_OTHERS = ("llama_kv1", "gpt_oss", "deepseek_v3", "qwen3_vl")


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize(
    ("name", "kind"), grid(OTHER_MODELS, lambda name, kind: kind == "uneven" and name in NORMAL_OTHERS)
)
def test_other_kinds_of_attention(ctx, name, kind):
    """kv heads that ranks share, windows in some layers, soft caps, sinks, wide keys, deep visual features."""
    check_steps(ctx, name, kind)


@full
@distributed(world_sizes=(4,), timeout=180)
@pytest.mark.parametrize(("name", "kind"), grid(OTHER_MODELS, lambda *_: True))
def test_other_kinds_of_attention_times_two_data_parallel(ctx, name, kind):
    check_steps(ctx, name, kind)


@distributed(world_sizes=(4,), timeout=180)
def test_hsdp_replicates_over_data_and_shards_over_the_sequence(ctx):
    check_steps(ctx, "llama", "packed", shard=lambda mesh: mesh.grid)


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=full)])
def test_gradient_checkpointing(ctx, reentrant):
    """The recomputation in backward exchanges heads again, with the layout of its own micro-batch."""

    def prepare(model):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()

    check_steps(ctx, "mistral", "packed", prepare=prepare)


@distributed(world_sizes=(2,), timeout=120)
def test_over_the_process_group(ctx):
    check_steps(ctx, "qwen3", "uneven", transport="process_group")


_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64}
_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "dropout": 0.0, "attention_dropout": 0.0}
# Package below transformers.models -> arguments of its config beyond the usual ones.
ARCHITECTURES = {
    **{name: {} for name in ("apertus", "arcee", "bitnet", "cohere", "cohere2", "ernie4_5", "exaone4", "glm", "glm4")},
    **{name: {} for name in ("glm4_moe", "gpt_neox", "granite", "helium", "hunyuan_v1_dense", "ministral")},
    **{name: {} for name in ("olmo", "olmo3", "persimmon", "phi", "phi3", "seed_oss", "smollm3", "starcoder2")},
    **dict.fromkeys(("flex_olmo", "granitemoe", "minimax_m2", "olmoe", "phimoe", "qwen2_moe"), _EXPERTS),
    "gpt2": _GPT2,
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "vaultgemma": {},
}


def build_architecture(package):
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[package](**{**sequences.DENSE, **_DROPOUT, **ARCHITECTURES[package]})
    config._attn_implementation = "eager"
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    torch.manual_seed(0)
    model = getattr(module, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[package])(config)
    sequences.enliven(model)
    return model.eval()  # some have noise or dropout under a name of their own


@pytest.mark.full
@distributed(world_sizes=(2,), timeout=120, only_fsdp2x=True)
@pytest.mark.parametrize("package", ARCHITECTURES)
def test_one_step(ctx, package):
    reference = build_architecture(package)
    ours = copy.deepcopy(reference)
    mesh = init_sequence_mesh(2, "cpu")
    fsdp2x.fully_shard(ours, mesh=mesh.shard)
    context = apply_ulysses(ours, mesh.sequence)
    samples = sequences.make_samples(reference, [9, 5, 14, 7, 2])
    sequences.check_step(ours, [context.shard_inputs(pack_samples(samples))], reference, samples)
