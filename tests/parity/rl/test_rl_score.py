"""Scores of sharded models without logits against whole logits of one process, in values, gradients and steps."""

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import models
import sequences
from fsdp2x import rl
from fsdp2x.sequence import apply_ulysses, init_sequence_mesh, micro_batches, pack_samples, use_varlen_attention
from harness import distributed
from policies import plain_scores
from reference import both_transports, even_out, grads, only_fsdp2x, params, same

EXACT = {"rtol": 1e-5, "atol": 1e-5}
LENGTHS = [[9, 5, 13, 8], [4, 7], [], [11]]
full = pytest.mark.full
# Models beyond those of sequences.py: name -> class, package, arguments, what they do to logits.
OTHERS = {
    "granite": ("Granite", "granite", {"logits_scaling": 13.0}, rl.LogitTransform(1 / 13)),
    "cohere": ("Cohere", "cohere", {"logit_scale": 0.0625}, rl.LogitTransform(0.0625)),
    "gemma2_cap": ("Gemma2", "gemma2", {"final_logit_softcapping": 3.0}, rl.LogitTransform(1.0, 3.0)),
    "phi": ("Phi", "phi", {"head_dim": None}, rl.LogitTransform()),  # a head with a bias
}


def build(name):
    if name not in OTHERS:
        return sequences.build(name)
    prefix, package, arguments, _ = OTHERS[name]
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    settings = {**sequences.DENSE, **arguments}
    config = getattr(module, f"{prefix}Config")(**{key: value for key, value in settings.items() if value is not None})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(module, f"{prefix}ForCausalLM")(config)
    sequences.enliven(model)
    return model


def weights_of(sample, seed=0):
    """Returns weights for a sample's log-probabilities and entropies, as a loss has them: [2, tokens], some zero."""
    length = len(sample["input_ids"])
    generator = torch.Generator().manual_seed(7000 + 31 * seed + int(sample["input_ids"].sum()))
    return torch.randn(2, length, generator=generator) * (torch.rand(2, length, generator=generator) < 0.8)


def on_row(row, per_sample):
    """Values [2, length] of the samples at their places in a packed row: [2, 1, tokens]."""
    made = torch.zeros(2, *row.input_ids.shape)
    ends = row.cu_seqlens.tolist()
    for index, start, stop in zip(row.sample_ids, ends, ends[1:], strict=False):
        made[:, 0, start:stop] = per_sample[index]
    return made


def expected_step(model, samples, temperature, world):
    """Gradients of the mean over ranks of all samples' weighted scores, one sample at a time, logits in whole."""
    found = []
    for sample in samples:
        row = pack_samples([sample])
        log_probs, entropy = plain_scores(model(**row.inputs).logits, row.next_labels, temperature)
        weights = weights_of(sample).unsqueeze(1)
        ((log_probs * weights[0] + entropy * weights[1]).sum() / world).backward()
        found.append((log_probs.detach()[0], entropy.detach()[0]))
    return found


def scored_step(model, rows, samples, temperature, shards=None):
    """The same of this rank's rows through ``rl.score``; the samples' scores, by their index."""
    found = {}
    for index, row in enumerate(rows):
        shard = row if shards is None else shards[index]
        weights = on_row(row, [weights_of(sample) for sample in samples])
        if shards is not None:
            padding = shard.layout.length - row.input_ids.shape[1]
            weights = shard.layout.take(nn.functional.pad(weights, (0, padding)), dim=2)
        with fsdp2x.accumulate(model, last=index == len(rows) - 1):
            scores = rl.score(model, shard.inputs, shard.next_labels, temperature=temperature, entropy=True)
            (scores.log_probs * weights[0] + scores.entropy * weights[1]).sum().backward()
        if shards is None:
            values = zip(row.unpack(scores.log_probs), row.unpack(scores.entropy), strict=True)
            found.update(zip(row.sample_ids, [(a.detach(), b.detach()) for a, b in values], strict=True))
    return found


def same_grads(ours, reference, **tolerance):
    even_out(ours, reference)
    same(grads(ours), grads(reference), "gradients", **tolerance)


def check(ctx, name, transport="auto", temperature=0.8, model=None, steps=2, shard=None, **options):
    """Two steps, from ranks with several rows to ranks with none."""
    only_fsdp2x(ctx)
    reference = build(name) if model is None else model
    if shard is None:
        shard = fsdp2x.shard_vision_language if name in sequences.VISION else fsdp2x.fully_shard
    ours = shard(copy.deepcopy(reference), transport=transport, **options)
    use_varlen_attention(ours)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (reference, ours)]
    for step in range(steps):
        everyone = [
            sequences.make_samples(reference, part, seed=100 * step + r) for r, part in enumerate(LENGTHS[: ctx.world])
        ]
        wanted = [expected_step(reference, samples, temperature, ctx.world) for samples in everyone]
        rows = list(micro_batches(everyone[ctx.rank], 20, group=dist.group.WORLD))
        got = scored_step(ours, rows, everyone[ctx.rank], temperature)
        same([list(got[i]) for i in sorted(got)], [list(one) for one in wanted[ctx.rank]], f"step {step}", **EXACT)
        same_grads(ours, reference, **EXACT)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(params(ours), params(reference), "parameters", **EXACT)
    return ours


@distributed(world_sizes=(1, 4), timeout=120)
@both_transports
@pytest.mark.parametrize("name", ["qwen3", "gemma2_cap"])
def test_packed_rows(ctx, name, transport):
    """Tied and untied embeddings; rank 2 of 4 has no sample, and rows of padding only."""
    check(ctx, name, transport)


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("name", ["llama", "phi", "granite", "cohere", "qwen2_vl", "qwen3_moe"])
def test_kinds_of_heads(ctx, name):
    """Heads are plain, with a bias, scaled by a quotient or a factor, tied, for vision-language, or after experts."""
    check(ctx, name, steps=1)


@distributed(world_sizes=(2,), timeout=300)
@full
@pytest.mark.parametrize("name", [*sequences.MODELS, *sequences.VISION])
def test_every_model(ctx, name):
    check(ctx, name, steps=1)


def in_the_root(model, **options):
    """Blocks alone are units: embedding, norm and head belong to the root, which is freed after forward."""
    for block in model.model.layers:
        fsdp2x.fully_shard(block, **options)
    return fsdp2x.fully_shard(model, auto_wrap=False, reshard_after_forward=True, **options)


def head_alone(model, **options):
    """The head is a unit of its own, freed after forward."""
    return in_the_root_with(model, [model.lm_head], **options)


def in_the_root_with(model, units, **options):
    for unit in [*model.model.layers, *units]:
        fsdp2x.fully_shard(unit, reshard_after_forward=True, **options)
    return fsdp2x.fully_shard(model, auto_wrap=False, reshard_after_forward=True, **options)


@distributed(world_sizes=(2,), timeout=120)
@both_transports
@pytest.mark.parametrize(("shard", "name"), [(in_the_root, "qwen3"), (in_the_root, "llama"), (head_alone, "llama")])
def test_units_around_the_head(ctx, shard, name, transport):
    check(ctx, name, transport, shard=shard, steps=1)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_bf16_policy(ctx):
    """bf16 parameters and outputs, fp32 scores: those of the model's own bf16 hidden states, never rounded."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    model = build("granite")
    weight = model.lm_head.weight.detach().bfloat16().double().requires_grad_()
    ours = fsdp2x.fully_shard(model, mp_policy=policy)
    row = pack_samples(sequences.make_samples(model, [9, 5, 13], seed=ctx.rank))
    seen = []
    ours.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    scores = rl.score(ours, row.inputs, row.next_labels, entropy=True)
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    assert seen[-1].dtype == torch.bfloat16
    plain = plain_scores(seen[-1].double() @ weight.t() / 13, row.next_labels)
    same(scores.log_probs.detach(), plain[0].detach().float(), "log-probabilities", **EXACT)
    same(scores.entropy.detach(), plain[1].detach().float(), "entropy", **EXACT)
    for log_probs, entropy in ((scores.log_probs, scores.entropy), plain):
        (log_probs.sum() + entropy.sum()).backward()
    # Each rank's gradient is rounded to bf16 once; their mean is made in fp32.
    everyone = [torch.empty_like(weight) for _ in range(ctx.world)]
    dist.all_gather(everyone, weight.grad)
    rounded = torch.stack([grad.bfloat16().float() for grad in everyone])
    same(grads(ours)["lm_head.weight"], rounded.mean(0), "gradient of the head", rtol=2**-7, atol=1e-4)


@distributed(world_sizes=(2, 4), timeout=120, only_fsdp2x=True)
@pytest.mark.parametrize(
    "name", ["qwen3", pytest.param("gemma2_cap", marks=full), pytest.param("qwen2_vl", marks=full)]
)
def test_ulysses(ctx, name):
    """Slices of sequences: each rank scores the positions it holds."""
    mesh = init_sequence_mesh(2, "cpu")
    reference = build(name)
    ours = fsdp2x.fully_shard(copy.deepcopy(reference), mesh=mesh.shard)
    context = apply_ulysses(ours, mesh.sequence)
    everyone = [sequences.make_samples(reference, [9, 5, 13], seed=rank) for rank in range(mesh.data.size())]
    for samples in everyone:
        expected_step(reference, samples, 0.8, ctx.world)
    samples = everyone[mesh.data.get_local_rank()]
    rows = list(micro_batches(samples, 20, group=dist.group.WORLD))
    scored_step(ours, rows, samples, 0.8, [context.shard_inputs(row) for row in rows])
    same_grads(ours, reference, **EXACT)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(ctx, reentrant):
    model = build("gemma2_cap").train()
    if reentrant:
        model.enable_input_require_grads()

    def shard(model, **options):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return fsdp2x.fully_shard(model, **options)

    check(ctx, "gemma2_cap", model=model, shard=shard, steps=1)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_several_forwards_before_a_backward(ctx):
    results = []
    for together in (False, True):
        model = fsdp2x.fully_shard(build("gemma2_cap"))
        rows = [pack_samples(sequences.make_samples(model, [9, 5], seed=10 * i + ctx.rank)) for i in range(3)]
        losses = (rl.score(model, row.inputs, row.next_labels).log_probs.sum() for row in rows)
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()
        results.append(grads(model))
    same(results[1], results[0], "gradients", **EXACT)


@distributed(world_sizes=(2,), only_fsdp2x=True)
@both_transports
def test_without_gradients(ctx, transport):
    """Between its updates, a policy without gradients computes the same values, and training continues unchanged."""
    model = fsdp2x.fully_shard(build("gemma2_cap"), transport=transport)
    row = pack_samples(sequences.make_samples(model, [9, 5], seed=ctx.rank))
    with torch.no_grad():
        before = rl.score(model, row.inputs, row.next_labels)
    scores = rl.score(model, row.inputs, row.next_labels)
    assert not before.log_probs.requires_grad and before.entropy is None
    same(before.log_probs, scores.log_probs.detach(), "log-probabilities")
    scores.log_probs.sum().backward()
    assert all(grad is not None for grad in grads(model).values())


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("where", ["layers", "head"])
def test_adapters(ctx, where):
    """LoRA on the layers; a trained copy of the head in PEFT's modules_to_save, with the adapter and without."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    extra = {"modules_to_save": ["lm_head"]} if where == "head" else {}
    model = peft.get_peft_model(build("llama"), peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], **extra))
    sequences.enliven(model)
    reference = copy.deepcopy(model)
    ours = fsdp2x.fully_shard(model)
    row = pack_samples(sequences.make_samples(reference.get_base_model(), [9, 5], seed=ctx.rank))
    wanted, _ = plain_scores(reference(**row.inputs).logits, row.next_labels)
    scores = rl.score(ours, row.inputs, row.next_labels)
    same(scores.log_probs.detach(), wanted.detach(), "log-probabilities", **EXACT)
    wanted.sum().backward()
    scores.log_probs.sum().backward()
    for param in reference.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= ctx.world
    same_grads(ours, reference, **EXACT)
    with torch.no_grad(), reference.disable_adapter():
        base, _ = plain_scores(reference(**row.inputs).logits, row.next_labels)
    with torch.no_grad(), ours.disable_adapter():
        scores = rl.score(ours, row.inputs, row.next_labels)
    same(scores.log_probs, base, "without the adapter", **EXACT)
    assert not torch.allclose(base, wanted)


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_other_outputs_come_along(ctx):
    model = fsdp2x.fully_shard(build("qwen3_moe"))
    row = pack_samples(sequences.make_samples(model, [9, 5], seed=ctx.rank))
    scores = rl.score(model, {**row.inputs, "output_router_logits": True}, row.next_labels)
    assert set(scores.output) == {"aux_loss", "router_logits"}
    (scores.log_probs.sum() + scores.output["aux_loss"]).backward()
    assert all(grad is not None for grad in grads(model).values())


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("name", ["llama", "granite", "gemma2_cap", "qwen3_moe"])
def test_losses_are_the_models(ctx, name):
    """Some positions have no label, labels are shifted or not, and a Trainer has counted them or not."""
    reference = build(name)
    reference.config.output_router_logits = name == "qwen3_moe"
    ours = fsdp2x.fully_shard(copy.deepcopy(reference))
    ids = torch.randint(3, models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(ctx.rank))
    labels = torch.where(ids % 4 == 0, -100, ids)
    shifted = {"labels": labels, "shift_labels": labels.roll(1, 1)}
    for inputs, count in ((labels, None), (labels, torch.tensor(11)), (shifted, 7)):
        inputs = {"input_ids": ids, **(inputs if isinstance(inputs, dict) else {"labels": inputs})}
        given = {} if count is None else {"num_items_in_batch": count}
        wanted, got = reference(**inputs, **given).loss, rl.causal_lm_loss(ours, inputs, **given)
        same(got.detach(), wanted.detach(), "loss", **EXACT)
        wanted.backward()
        got.backward()
        for param in reference.parameters():
            dist.all_reduce(param.grad)
            param.grad /= ctx.world
        same_grads(ours, reference, **EXACT)
        for model in (ours, reference):
            model.zero_grad()
    with pytest.raises(ValueError, match="expected labels in the inputs"):
        rl.causal_lm_loss(ours, {"input_ids": ids})
    ours.loss_function = lambda **_: None
    with pytest.raises(NotImplementedError, match="has another loss than the mean cross-entropy"):
        rl.causal_lm_loss(ours, {"input_ids": ids, "labels": labels})


# ---- refusals, each leaving a model that works


def refused(model, said, error=NotImplementedError, inputs=None, labels=None):
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = model(input_ids=ids).logits
    with pytest.raises(error, match=said):
        rl.score(model, {"input_ids": ids, **(inputs or {})}, ids if labels is None else labels)
    same(model(input_ids=ids).logits, expected, "logits")


class Marked(nn.Linear):
    def forward(self, x):
        return super().forward(x)


@distributed(world_sizes=(1,), only_fsdp2x=True)
def test_heads_that_are_not_known(ctx):
    model = build("llama")
    model.lm_head.__class__ = Marked
    refused(model, "the head of LlamaForCausalLM is a Marked: it is not a plain torch.nn.Linear")
    model = build("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda x: plain(x)
    refused(model, "the head of LlamaForCausalLM is a Linear: its forward was replaced")
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(build("llama"), peft.LoraConfig(r=3, target_modules=["q_proj", "lm_head"]))
    refused(adapted, "an adapter changes it; leave it out of target_modules")


@distributed(world_sizes=(1,), only_fsdp2x=True)
def test_logits_that_are_not_known(ctx):
    def patched(change):
        model = build("llama")
        whole = type(model).forward

        class Changed(type(model)):
            def forward(self, *args, **kwargs):
                output = whole(self, *args, **kwargs)
                output.logits = change(self, output)
                return output

        Changed.__name__ = "LlamaForCausalLM"
        model.__class__ = Changed
        return model

    refused(patched(lambda self, out: out.logits + 0.5), "neither a scaling nor a soft cap: -20 -> -19.5")
    refused(patched(lambda self, out: out.logits.clamp(max=5.0)), "neither a scaling nor a soft cap")
    refused(patched(lambda self, out: out.logits[..., :4]), "changes the shape of its logits")
    refused(patched(lambda self, out: out.logits + torch.zeros(models.VOCAB)), "fails on 8 numbers in their place")
    refused(patched(lambda self, out: (0.3 * out.logits).bfloat16()), "scales its logits in torch.bfloat16")
    refused(patched(lambda self, out: out.logits.detach()), "detaches its logits")
    refused(patched(lambda self, out: self.lm_head(out.logits.new_zeros(1, 4, 16))), "several times in a forward")


@distributed(world_sizes=(1,), only_fsdp2x=True)
def test_wrong_inputs(ctx):
    model = build("llama")
    ids = torch.tensor([[3, 4, 5, 6]])
    refused(model, "the inputs contain labels", ValueError, inputs={"labels": ids})
    refused(
        model, r"for hidden states of .*, got next_labels of shape \[1, 4\]", ValueError, inputs={"logits_to_keep": 2}
    )
    refused(model, "outside of the vocabulary of 37 tokens", ValueError, labels=ids + 37)
    with pytest.raises(TypeError, match="Linear is not a transformers model"):
        rl.score(nn.Linear(2, 3), {}, ids)
    with pytest.raises(NotImplementedError, match="LlamaModel has no output embedding"):
        rl.score(models.build("llama_base"), {"input_ids": ids}, ids)
