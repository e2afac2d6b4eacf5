"""Adapters on a model that transformers sharded while it read, under stock and through install(): equal numbers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp

import fsdp2x
from frameworks import launched
from harness import distributed
from models import batch, build
from reference import params, same
from training import shared_folder


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
        expected, model = run(torch_fsdp.fully_shard, folder)
        assert not isinstance(model, fsdp2x.FSDPModule)
        with fsdp2x.install():
            results, model = run(torch_fsdp.fully_shard, folder)
        assert isinstance(model, fsdp2x.FSDPModule)
        same(results, expected)
