"""Three of the four parts of a run: what it reads, what a step needs, and what it writes. `model.py` has the model.

They are made one after the other, each from the config and the parts before it, and do not change. All are collective,
so that a mistake on one host ends every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp2x.api import find_checkpoint as find
from fsdp2x.api import repair_checkpoints as repair
from fsdp2x.base.failures import on_rank_0, run_on_all_ranks
from fsdp2x.train.config import ConfigError, TrainConfig
from fsdp2x.train.data import Blocks, BlockStream, read_blocks
from fsdp2x.train.distributed import World
from fsdp2x.train.feeds import BlockFeed, make_feed
from fsdp2x.train.metrics import Logger, Metrics, Observer, begin_wandb
from fsdp2x.train.model import Model, build_on_meta, check_folder
from fsdp2x.train.run_folder import RunFolder, check_writable
from fsdp2x.train.schedule import GradScaler, Schedule, make_optimizer
from fsdp2x.train.strategy import (
    Batching,
    MeshPlan,
    plan_mesh,
    resolve_batching,
    resolve_ns_dtype,
    resolve_param_dtype,
    resolve_scaling,
    resolve_steps,
)
from fsdp2x.train.tokenizer import Tokenizer, choose_tokenizer, make_tokenizer


@dataclass(frozen=True)
class Inputs:
    """The ranks of a run, their folders, which are locked, and their text. `num_readers` ranks read different text."""

    world: World
    plan: MeshPlan
    num_readers: int
    batching: Batching
    param_dtype: torch.dtype | None
    scales_loss: bool
    folder: RunFolder
    tokenizer: Tokenizer
    blocks: Blocks

    @classmethod
    def read(cls, config: TrainConfig, world: World, closing: ExitStack) -> Inputs:
        """Claims the folders first, so that a run without a folder fails before it reads a large text or model."""
        plan = plan_mesh(config.parallel, world.size, world.local_size)
        num_readers = world.size // config.parallel.sequence_ranks.total
        batching = resolve_batching(config.train, num_readers)
        param_dtype = resolve_param_dtype(config.model, config.parallel, world.device)
        scales = config.train.mode == "train" and resolve_scaling(config.scaler, config.model, param_dtype)
        folder = RunFolder.of(config)
        closing.callback(folder.release)
        run_on_all_ranks(lambda: _claim(config, folder, world), raising=ConfigError)
        run_on_all_ranks(lambda: _check_paths(config, world), raising=ConfigError)
        if config.checkpoint.resume_from is not None:
            run_on_all_ranks(lambda: find(config.checkpoint.resume_from))
        tokenizer, blocks = run_on_all_ranks(lambda: _read(config), raising=ConfigError)
        read_by_rank_0 = on_rank_0(lambda: blocks.fingerprint)
        run_on_all_ranks(lambda: _check_text(blocks, read_by_rank_0), raising=ConfigError)
        return cls(world, plan, num_readers, batching, param_dtype, scales, folder, tokenizer, blocks)

    @property
    def blocks_per_step(self) -> int:
        return self.batching.batch_size * self.batching.accumulation * self.num_readers


def _claim(config: TrainConfig, folder: RunFolder, world: World) -> None:
    if not world.is_main:
        return
    folder.claim(world.lost_ranks.local_pids)
    folder.refuse_former_run(config.checkpoint.resume_from)
    if folder.saves:
        repair(folder.checkpoints)


def _check_paths(config: TrainConfig, world: World) -> None:
    """Checks the model's path and the events' folder before any text is read."""
    if config.model.path is not None:
        check_folder(config.model)
        choose_tokenizer(config.data.tokenizer, config.model.path)
    attention = config.model.attn_implementation
    build_on_meta(config.model, getattr(torch, config.model.dtype), attn_implementation=attention)
    if config.logging.tensorboard and config.logging.tensorboard_dir and world.is_main:
        check_writable("logging.tensorboard_dir", Path(config.logging.tensorboard_dir).expanduser())


def _read(config: TrainConfig) -> tuple[Tokenizer, Blocks]:
    tokenizer = make_tokenizer(choose_tokenizer(config.data.tokenizer, config.model.path))
    blocks = read_blocks(config.data, tokenizer, config.train.seed)
    if config.train.eval_every and len(blocks.held_out) == 0:
        raise ConfigError("train.eval_every asks for evaluation, but data.held_out=0 keeps no text for it")
    return tokenizer, blocks


def _check_text(blocks: Blocks, read_by_rank_0: str) -> None:
    if blocks.fingerprint != read_by_rank_0:
        raise ConfigError("data.files: this rank read other text than rank 0. All ranks need the same files.")


@dataclass(frozen=True)
class Steps:
    """What a step needs next to the model. A run that only evaluates has no optimizer and no schedule."""

    num_steps: int
    optimizer: torch.optim.Optimizer | None
    schedule: Schedule | None
    scaler: GradScaler | None
    stream: BlockStream
    feed: BlockFeed

    @classmethod
    def make(cls, config: TrainConfig, inputs: Inputs, model: Model) -> Steps:
        num_steps = resolve_steps(config.train, len(inputs.blocks.train), inputs.blocks_per_step)
        optimizer = schedule = None
        if config.train.mode == "train":
            model.module.train()
            ns_dtype = resolve_ns_dtype(config.optimizer, inputs.world.device)
            clip = math.inf if config.train.clip is None else config.train.clip
            optimizer = make_optimizer(model.module, config.optimizer, model.decays, clip, ns_dtype)
            schedule = Schedule(optimizer, config.schedule, config.optimizer.lr, num_steps)
        stream = BlockStream(
            inputs.blocks,
            batch_size=inputs.batching.batch_size,
            rank=inputs.world.rank // config.parallel.sequence_ranks.total,
            world_size=inputs.num_readers,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
        )
        feed = make_feed(
            model.module,
            stream,
            inputs.batching,
            config.data,
            sequence_ranks=config.parallel.sequence_ranks,
            device=inputs.world.device,
            tiled_loss=config.train.tiled_loss,
        )
        scaler = GradScaler(config.scaler) if inputs.scales_loss else None
        return cls(num_steps, optimizer, schedule, scaler, stream, feed)


@dataclass(frozen=True)
class Output:
    """What rank 0 says and writes of a run, and what every rank observes of itself."""

    metrics: Metrics
    observer: Observer

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        inputs: Inputs,
        num_steps: int,
        first_step: int,
        loggers: Sequence[Logger],
        closing: ExitStack,
    ) -> Output:
        """Opens the metrics of a run that begins after `first_step`."""
        world, folder, logging = inputs.world, inputs.folder, config.logging

        if logging.wandb:
            options = {"dir": str(folder.output), **logging.wandb_options}
            run = run_on_all_ranks(
                lambda: begin_wandb(options, config.model_dump()) if world.is_main else None, raising=ConfigError
            )
            if run is not None:
                closing.callback(run.finish)
                loggers = [*loggers, run.log]
        metrics = Metrics(
            folder.output,
            main=world.is_main,
            tensorboard=logging.tensorboard and (logging.tensorboard_dir or True),
            progress=logging.progress,
            num_steps=num_steps,
            first_step=first_step,
            loggers=loggers,
        )
        closing.callback(metrics.close)
        observer = Observer(logging, folder.output, world.rank, world.device)
        closing.callback(observer.close)
        return cls(metrics, observer)
