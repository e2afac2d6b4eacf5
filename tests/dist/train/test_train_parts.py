"""Settings that need other parts of fsdp2x, through the trainer: each gives the losses of a run without it."""

import logging
import os
import signal

import pytest
import torch
import torch.distributed as dist

from fsdp2x.train import Trainer, parse_config
from fsdp2x.train.config import ConfigError
from fsdp2x.train.distributed import Interrupted
from fsdp2x.train.metrics import read_metrics
from fsdp2x.train.model import build_model
from harness import distributed
from training import MODEL, MOE, Said, losses, run, settings, shared_folder

STEPS = {"steps": 3, "batch_size": None, "accumulation": None, "global_batch_size": 8}


def numbers(folder, output, **sections):
    """Losses of three steps, and the held-out loss, of a run with these settings."""
    train = {**STEPS, "eval_every": 3, **sections.pop("train", {})}
    trainer = run(settings(folder / "text", folder / output, train=train, **sections))
    dist.barrier()
    evaluated = {x["step"]: x["loss"] for x in read_metrics(folder / output / "metrics.jsonl") if x["event"] == "eval"}
    assert list(evaluated) == ([2, 3] if train["eval_every"] == 2 else [3])
    return trainer, [float.fromhex(value) for value in losses(folder / output).values()] + [evaluated[3]]


DENSE = (
    {"model": {"tiled_mlp": 3}},
    {"parallel": {"accumulate": "reduce_scatter"}},
    {"parallel": {"auto_wrap": ["Qwen3DecoderLayer"]}},
    {"parallel": {"expert_units": ["Qwen3MLP"]}},
    {"parallel": {"offload": True}},
    {"train": {"activation_checkpointing": True}},
    {"train": {"clip": None}},
    {"train": {"eval_every": 2}},
)
EXPERTS = (
    {"model": {"expert_patch": True}},
    {"model": {"grouped_gemm": True}},
    {"parallel": {"expert_parallel": 2}},
    {"parallel": {"expert_units": ["Qwen3MoeExperts"]}},
)


@distributed
@pytest.mark.parametrize(("model", "changes"), [(MODEL, DENSE), (MOE, EXPERTS)], ids=["dense", "experts"])
def test_settings_that_leave_the_numbers_alone(ctx, model, changes):
    with shared_folder(ctx) as folder:

        def seen(output, change):
            train = {"batch_size": 2, "accumulation": 2, "clip": 100.0, **change.get("train", {})}
            _, found = numbers(
                folder, output, **{**change, "train": train, "model": {"config": model, **change.get("model", {})}}
            )
            return found

        plain = seen("plain", {})
        for number, change in enumerate(changes):
            assert seen(str(number), change) == pytest.approx(plain, abs=1e-5), change


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("during", ["evaluate", "save"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_one_rank_during_long_work_starts_no_further_step(ctx, during, number):
    with shared_folder(ctx) as folder:
        train = {"steps": 6, "eval_every": 2}
        config = settings(folder / "text", folder / "run", train=train, checkpoint={"save_every": 2})
        trainer = Trainer(parse_config(config))
        work = getattr(trainer, during)

        def interrupted():
            if ctx.rank == 1:
                os.kill(os.getpid(), number)
            return work()

        setattr(trainer, during, interrupted)
        with pytest.raises(Interrupted, match="interrupted after step 2; saved step 2; resume with") as error:
            trainer.run()
        trainer.close()
        assert ctx.rank == 0 or error.value.number == number


@distributed(world_sizes=(2, 4))
@pytest.mark.parametrize(
    "parallel", [{}, {"strategy": "NO_SHARD"}, {"fsdp_size": 2, "sequence_parallel": {"context": 2}}], ids=str
)
def test_sequence_parallel(ctx, parallel):
    with shared_folder(ctx) as folder:
        _, plain = numbers(folder, "plain")
        trainer, sliced = numbers(folder, "sliced", parallel={"sequence_parallel": 2, **parallel})
        assert trainer.inputs.num_readers == ctx.world // 2 and trainer.inputs.blocks_per_step == 8
        assert sliced == pytest.approx(plain, abs=1e-5)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("sequence_parallel", [1, 2, {"context": 2}])
def test_packing_sees_samples_alone(ctx, sequence_parallel):
    """The loss of packed samples is the mean over the tokens of each sample by itself."""
    with shared_folder(ctx) as folder:
        config = parse_config(
            settings(
                folder / "text",
                folder / "run",
                data={"packing": True, "block_size": 24, "max_tokens": 40},
                parallel={"sequence_parallel": sequence_parallel},
                train={"batch_size": None, "accumulation": None, "global_batch_size": 6},
            )
        )
        trainer = Trainer(config)
        model = build_model(trainer.config.model, trainer.inputs.tokenizer, config.train.seed)
        order = [trainer.blocks.train.sample(trainer.stream._block_at(i))["input_ids"] for i in range(6)]
        assert len({len(sample) for sample in order}) > 1
        total = sum(model(input_ids=s[None], labels=s[None]).loss * (len(s) - 1) for s in order)
        expected = total / sum(len(s) - 1 for s in order)
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        loss, grad_norm, _ = trainer.train_step()
        assert loss == pytest.approx(expected.item(), abs=1e-5) and grad_norm == pytest.approx(norm.item(), abs=1e-5)
        assert trainer.num_tokens == sum(len(s) - 1 for s in order)
        held_out = trainer.evaluate()
        trainer.close()
        assert 3 < held_out < 7


ROUTER_LOSS = {
    "plain": {},
    "packed": {"data": {"packing": True}},
    "ulysses": {"parallel": {"sequence_parallel": 2}},
    "context": {"parallel": {"sequence_parallel": {"context": 2}}},
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("way", ROUTER_LOSS)
def test_the_router_loss_is_never_left_out(ctx, way, lora):
    sections = {name: {**given} for name, given in ROUTER_LOSS[way].items()}
    with shared_folder(ctx) as folder:

        def losses_of(wanted):
            name, train = str(wanted), {"steps": 1, "batch_size": 2}
            model = {"config": {**MOE, "output_router_logits": wanted, "router_aux_loss_coef": 1.0}}
            config = settings(folder / "text", folder / name, model=model, train=train, **sections)
            run({**config, "lora": {"rank": lora, "target_modules": ["q_proj"]}})
            dist.barrier()
            return [float.fromhex(value) for value in losses(folder / name).values()]

        without = losses_of(False)
        if way == "plain":
            # The loss of balanced experts is their number a token.
            assert losses_of(True)[0] > without[0] + 1
        else:
            setting = next(f"{section}.{name}" for section, given in sections.items() for name in given)
            with pytest.raises(ConfigError, match=f"output_router_logits: .* {setting}=.* Set output_router_logits to"):
                losses_of(True)


@distributed
def test_lora_trains_the_adapter_alone(ctx):
    with shared_folder(ctx) as folder:
        section = {**settings(folder / "text", folder / "run", train={"steps": 3}), "lora": {"rank": 2, "alpha": 4}}
        trainer = run(section)
        trainable = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
        assert trainable and all("lora_" in name for name in trainable)
        assert (folder / "run" / "adapter" / "adapter_config.json").exists()
        got = [float.fromhex(value) for value in losses(folder / "run").values()]
        assert got[-1] < got[0]
        section = {
            **section,
            **settings(folder / "text", folder / "other"),
            "lora": {"rank": 2, "target_modules": ["no"]},
        }
        with pytest.raises(ConfigError, match="lora"):
            run(section)


@distributed
def test_frozen_prefixes(ctx):
    with shared_folder(ctx) as folder:
        model = {"config": {**MODEL, "tie_word_embeddings": False}, "freeze": ["model.embed_tokens"]}
        trainer = run(settings(folder / "text", folder / "run", model=model, train={"steps": 2}))
        frozen = [name for name, p in trainer.model.named_parameters() if not p.requires_grad]
        assert frozen == ["model.embed_tokens.weight"]
        with pytest.raises(ConfigError, match="model.freeze: .*begins with 'vision_model'"):
            run(settings(folder / "text", folder / "other", model={**model, "freeze": ["vision_model"]}))


@distributed
@pytest.mark.parametrize("wanted", ["auto", "bfloat16", "float32"])
def test_ranks_agree_on_the_dtype_of_muon(ctx, wanted):
    """One rank whose CPU emulates bfloat16 decides for all, since blocks of matrices travel in this dtype."""
    with shared_folder(ctx) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: ctx.rank == 0, raising=False)
        trainer = run(settings(folder / "text", folder / "run", optimizer={"name": "muon", "muon_ns_dtype": wanted}))
    assert trainer.optimizer.ns_dtype is {"bfloat16": torch.bfloat16}.get(wanted, torch.float32)


@distributed(world_sizes=(2,))
def test_a_late_save_is_made_by_all_ranks(ctx):
    """By the first rank's clock. The log of the run says what it did, and how to go on."""
    from fsdp2x.train.metrics import read_metrics

    with shared_folder(ctx) as folder:
        saves = {}
        for minutes in (1e-9, 30.0):
            checkpoint = {"save_every": 0, "save_minutes": minutes}
            with Said(logging.INFO) as said:
                run(settings(folder / "text", folder / f"{minutes}", checkpoint=checkpoint, train={"steps": 3}))
            lines = read_metrics(folder / f"{minutes}" / "metrics.jsonl")
            saves[minutes] = [line["step"] for line in lines if line["event"] == "save"]
        assert saves == {1e-9: [1, 2, 3], 30.0: [3]}
        if ctx.rank == 0:
            assert "transport: shm" in said
            assert any(line.startswith("done: 3 steps") and "fsdp2x export" in line for line in said), said
