"""Strategies by name: the mesh that each makes, and losses, gradients and weights of one process for all of them."""

import pytest
import torch
import yaml

from agents import run_agents
from fsdp2x.train import Trainer, parse_config
from fsdp2x.train.config import OptimizerConfig
from fsdp2x.train.data import BlockStream
from fsdp2x.train.metrics import read_metrics
from fsdp2x.train.model import build_model
from fsdp2x.train.schedule import Schedule, decay_groups, make_optimizer
from harness import distributed
from reference import full, params
from training import settings, shared_folder, write_text

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
BATCH = 12  # blocks of all ranks; divides by 1 to 4


def section(**parallel):
    return {
        "train": {"steps": 3, "batch_size": None, "accumulation": 1, "global_batch_size": BATCH},
        "parallel": parallel,
        "checkpoint": {"save_every": 0, "save_last": False},
    }


def three_steps(trainer):
    """Losses and norms of three steps, whole gradients of the first, whole weights at the end."""
    grads = {}

    def keep(*_):
        if not grads:
            grads.update(full({name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}))

    hook = trainer.optimizer.register_step_pre_hook(keep)
    numbers = [trainer.train_step() for _ in range(3)]
    hook.remove()
    return numbers, grads, params(trainer.model)


def unsharded_steps(trainer, config):
    """The same from a plain model and torch's AdamW on the blocks of all ranks, in this process alone."""
    model = build_model(trainer.config.model, trainer.inputs.tokenizer, config.train.seed)
    ours = make_optimizer(model, OptimizerConfig(lr=config.optimizer.lr), decay_groups(model))
    groups = [{name: group[name] for name in ("params", "weight_decay")} for group in ours.param_groups]
    betas, eps = config.optimizer.betas, config.optimizer.eps
    optimizer = torch.optim.AdamW(groups, lr=config.optimizer.lr, betas=betas, eps=eps, foreach=False)
    schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, 3)
    stream = BlockStream(
        trainer.blocks, batch_size=BATCH, rank=0, world_size=1, seed=config.train.seed, shuffle=config.data.shuffle
    )
    numbers, grads = [], {}
    for _ in range(3):
        tokens = stream.next_batch()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        grads = grads or {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
        numbers.append((loss.item(), norm.item(), schedule.set_rate()))
        schedule.step += 1
        optimizer.step()
        optimizer.zero_grad()
    return numbers, grads, dict(model.named_parameters())


def check(folder, **parallel):
    base = settings(folder / "text", folder / "run")
    config = parse_config({**base, **{k: {**base[k], **v} for k, v in section(**parallel).items()}})
    trainer = Trainer(config)
    try:
        got, expected = three_steps(trainer), unsharded_steps(trainer, config)
    finally:
        trainer.close()
    for one, other in zip(got[0], expected[0], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    for one, other in zip(got[1:], expected[1:], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name].detach(), rtol=1e-5, atol=1e-5, msg=name)
    return trainer.plan


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_name_equals_one_process(ctx, strategy):
    with shared_folder(ctx) as folder:
        plan = check(folder, strategy=strategy)
    axes = {"NO_SHARD": (ctx.world, 1)}.get(strategy, (ctx.world,))
    if strategy.startswith("HYBRID"):
        axes = (1, ctx.world)  # one node: its shards have one copy
    assert plan.shape == axes


@distributed(world_sizes=(4,))
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2", None])
def test_two_copies_of_two_shards(ctx, strategy):
    with shared_folder(ctx) as folder:
        plan = check(folder, strategy=strategy, fsdp_size=2)
    assert (plan.shape, plan.axes) == ((2, 2), ("ddp", "fsdp"))


# ---- two torchrun agents as two nodes


@pytest.mark.full
def test_a_hybrid_mesh_shards_inside_nodes_and_copies_across(tmp_path):
    config = settings(write_text(tmp_path / "text"), tmp_path / "run", parallel={"strategy": "HYBRID_SHARD"})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    run_agents(tmp_path, "-m", "fsdp2x.train", tmp_path / "config.yaml", "train.steps=3")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[0]["strategy"].startswith("HYBRID_SHARD: mesh (2, 2) [ddp, fsdp], 2 copies of 2 shards")
    assert lines[0]["world_size"] == 4 and len({line["step"] for line in lines if line["event"] == "train"}) == 3
