"""Steps that verl and transformers' loader take, under stock and through install(): equal numbers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.utils.clip_grad import _clip_grads_with_norm_, _get_total_norm

import fsdp2x
from frameworks import launched
from harness import distributed
from models import batch, build
from reference import params, same
from training import shared_folder


def compare(ctx, run):
    """Calls run(upstream's name) before and after install(); it returns results, which must be equal, and the model."""
    import torch.distributed.fsdp as torch_fsdp

    expected, model = run(torch_fsdp.fully_shard)
    assert not isinstance(model, fsdp2x.FSDPModule)
    with fsdp2x.install():
        results, model = run(torch_fsdp.fully_shard)
    assert isinstance(model, fsdp2x.FSDPModule)
    same(results, expected)
    return expected


# ---- verl: actor.strategy=fsdp2


def verl_shard(fully_shard, model, **options):
    """apply_fsdp2: blocks and untied embeddings by class or name, then the root."""
    tied = model.config.tie_word_embeddings
    classes = set(model._no_split_modules)
    for name, module in list(model.named_modules()):
        by_name = name.rsplit(".", 1)[-1] in ("embed_tokens", "lm_head") and not tied
        if type(module).__name__ in classes or by_name:
            fully_shard(module, **options)
    fully_shard(model, **options)


def verl_load(ctx, model, full_state):
    """fsdp2_load_full_state_dict: rank 0 has the weights, the others are on the meta device."""
    model = model.to("cpu", non_blocking=True) if ctx.rank == 0 else model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, cpu_offload=False, broadcast_from_rank0=True)
    set_model_state_dict(model, full_state, options=options)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


def verl_clip(parameters, max_norm):
    """fsdp2_clip_grad_norm_."""
    parameters = list(parameters)
    total = _get_total_norm([p.grad for p in parameters if p.grad is not None], 2.0, False, None)
    total = total.full_tensor()
    _clip_grads_with_norm_(parameters, max_norm, total, None)
    return total


def verl_rollout(model):
    """Around a rollout the model moves away and back, and its weights are gathered one by one."""
    model.reshard()
    model.cpu()
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    model.to("cpu", non_blocking=True)
    return {name: value.detach() for name, value in weights.items()}


@distributed(world_sizes=(2, 3), timeout=120)
def test_verl(ctx):
    def run(fully_shard, folder):
        source = build("llama")
        expected = {name: value.clone() for name, value in source.state_dict().items()}
        full_state = source.state_dict()
        if ctx.rank == 0:
            model = source
        else:
            with torch.device("meta"):
                model = build("llama")
            full_state = {}
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
        verl_shard(fully_shard, model, mp_policy=policy, reshard_after_forward=True)
        verl_load(ctx, model, copy.deepcopy(full_state))
        same(params(model), {name: expected[name] for name, _ in model.named_parameters()})
        units = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for unit, following in zip(units[1:], units[2:], strict=False):
            unit.set_modules_to_forward_prefetch([following])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results = []
        for step in range(2):
            for micro in range(2):
                model.set_requires_gradient_sync(micro == 1)
                loss = model(**batch("llama", ctx.rank + 10 * step + 100 * micro)).loss / 2
                loss.backward()
                results.append(loss.detach())
            results.append(verl_clip(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
            results.append(verl_rollout(model))
        torch.save(model.state_dict(), folder / f"model_world_size_{ctx.world}_rank_{ctx.rank}.pt")
        loaded = torch.load(folder / f"model_world_size_{ctx.world}_rank_{ctx.rank}.pt", weights_only=True)
        model.load_state_dict(loaded)
        exported = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        same(dict(exported), results[-1] if ctx.rank == 0 else {})
        results.append(model(**batch("llama", ctx.rank)).loss.detach())
        return results, model

    with shared_folder(ctx) as folder:
        results = compare(ctx, lambda fully_shard: run(fully_shard, folder))
    assert float(results[0]) != float(results[-1])


# ---- transformers: from_pretrained(distributed_config=...), which shards while it reads


@pytest.mark.parametrize("reduces", [True, False])
@distributed(world_sizes=(2,), timeout=120)
def test_trainer_of_an_adapter_on_what_transformers_sharded(ctx, reduces):
    """With the gradients that Trainer averages by itself (``reduces``), as of 5.24, and by fsdp2x alone."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
    from transformers.distributed import DistributedConfig

    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False)
    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
    rows = [{name: ids[0] for name, ids in batch("qwen3", i, size=1).items()} for i in range(32)]

    def run(fully_shard, folder):
        model = AutoModelForCausalLM.from_pretrained(str(folder), distributed_config=DistributedConfig(fsdp_size=2))
        torch.manual_seed(ctx.rank)
        model = peft.get_peft_model(model, config)
        sizes = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        settings = TrainingArguments(str(folder / "out"), learning_rate=1e-2, max_grad_norm=0.5, **sizes, **quiet)
        trainer = Trainer(model=model, args=settings, train_dataset=rows)
        if not reduces and fully_shard is fsdp2x.fully_shard:
            trainer._sync_replicated_trainable_parameters = lambda model: None
        trainer.train()
        logged = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == 3
        return [logged, params(model)], model.get_base_model()

    with shared_folder(ctx) as folder, launched(ctx, impl="torch"):
        if ctx.rank == 0:
            build("qwen3").save_pretrained(str(folder))
        dist.barrier()
        compare(ctx, lambda fully_shard: run(fully_shard, folder))
