"""transformers' Trainer(fsdp=...) through install(): a resumed run repeats the losses, and models are saved."""

import logging
from unittest import mock

import pytest
import torch

import fsdp2x
from frameworks import assert_sharded_by_us, fsdp_accelerator_class, launched
from fsdp2x import rl
from harness import distributed
from models import VOCAB, build
from reference import params, same
from training import shared_folder

NUM_STEPS = 4


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(3, VOCAB, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids.clone()}


def trainer_of(model, output, *, config=None, **arguments):
    """A Trainer whose accelerator takes the FSDP path; call within launched()."""
    from transformers import Trainer, TrainingArguments

    quiet = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(output),
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        seed=3,
        dataloader_num_workers=0,
        fsdp=True,
        fsdp_config=config or {},
        **{**quiet, **arguments},
    )
    with mock.patch("transformers.trainer.Accelerator", fsdp_accelerator_class()):
        return Trainer(model=model, args=arguments, train_dataset=Tokens())


def logged(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("state_dict_type", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@distributed(world_sizes=(2,), timeout=120)
def test_resume_gives_the_same_losses(ctx, name, state_dict_type):
    config = {"state_dict_type": state_dict_type}
    saving = {"save_strategy": "steps", "save_steps": 2}
    with shared_folder(ctx) as folder:
        with launched(ctx):
            trainer = trainer_of(build(name), folder, config=config, **saving)
            trainer.train()
            assert_sharded_by_us(trainer.model)
            expected, weights = logged(trainer), params(trainer.model)
        with launched(ctx):
            trainer = trainer_of(build(name, seed=5), folder, config=config)
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
            assert_sharded_by_us(trainer.model)
            assert len(expected) == NUM_STEPS
            same(logged(trainer)[-2:], expected[-2:])
            same(params(trainer.model), weights)


@distributed(world_sizes=(2,), timeout=120)
def test_the_tiled_loss_is_the_trainers(ctx):
    """With accumulation, bf16 autocast, experts, and an evaluation between steps."""
    with shared_folder(ctx) as folder:
        for name, bf16 in (("qwen3", True), ("qwen3_moe", False)):
            found = []
            for tiled in (False, True):
                with launched(ctx):
                    model = build(name)
                    model.config.output_router_logits = name == "qwen3_moe"
                    trainer = trainer_of(model, folder, bf16=bf16)
                    trainer.eval_dataset = torch.utils.data.Subset(Tokens(), range(8))
                    if tiled:
                        rl.use_tiled_loss(trainer)
                    trainer.train()
                    found.append(logged(trainer) + [trainer.evaluate()["eval_loss"]])
            same(torch.tensor(found[1]), torch.tensor(found[0]), rtol=0, atol=1e-2 if bf16 else 1e-5)


@distributed(world_sizes=(2,), timeout=120)
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_evaluation_before_training(ctx, name):
    """accelerate refuses a model without an optimizer. The losses afterwards are those without the evaluation."""
    found = []
    for first in (False, True):
        with shared_folder(ctx) as folder, launched(ctx):
            trainer = trainer_of(build(name), folder)
            trainer.eval_dataset = torch.utils.data.Subset(Tokens(), range(8))
            if first:
                from transformers import default_data_collator

                batch = default_data_collator([Tokens()[index] for index in range(8)])
                with torch.no_grad():
                    plain = build(name).eval()(**batch).loss
                same(torch.tensor(trainer.evaluate()["eval_loss"]), plain, rtol=1e-4, atol=1e-5)
                assert isinstance(trainer.model, fsdp2x.FSDPModule)
            torch.manual_seed(0)  # an evaluation draws a seed for its loader
            trainer.train()
            assert_sharded_by_us(trainer.model)
            assert len(trainer.accelerator._models) == len(trainer.accelerator._optimizers) == 1
            found.append((logged(trainer), params(trainer.model)))
    same(found[1], found[0])


@distributed(world_sizes=(1,))
def test_trainers_that_need_logits(ctx):
    with shared_folder(ctx) as folder, launched(ctx):
        trainer = trainer_of(build("qwen3"), folder, label_smoothing_factor=0.1)
        with pytest.raises(NotImplementedError, match="Trainer smooths labels.*fsdp2x.rl.causal_lm_loss"):
            rl.use_tiled_loss(trainer)
        trainer = trainer_of(build("qwen3"), folder)
        trainer.compute_loss_func = lambda *_, **__: None
        with pytest.raises(NotImplementedError, match="Trainer computes a loss of its own"):
            rl.use_tiled_loss(trainer)


@distributed(world_sizes=(2,), timeout=120)
def test_saved_model_and_generation(ctx):
    """save_model() writes what from_pretrained reads; generate() runs on the sharded model."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    with shared_folder(ctx) as folder, launched(ctx):
        trainer = trainer_of(build("qwen3"), folder)
        trainer.train()
        weights = params(trainer.model)
        trainer.save_model(str(folder / "saved"))
        trainer.accelerator.wait_for_everyone()
        plain = Qwen3ForCausalLM.from_pretrained(str(folder / "saved")).eval()
        same({name: param.detach() for name, param in plain.named_parameters()}, weights)
        prompt = torch.arange(3, 8)[None]
        arguments = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        trainer.model.eval()
        same(trainer.model.generate(prompt, **arguments), plain.generate(prompt, **arguments))
        with fsdp2x.unsharded(trainer.model):
            same(trainer.model.generate(prompt, **arguments), plain.generate(prompt, **arguments))
