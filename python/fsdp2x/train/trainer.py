"""The training loop: one `Trainer` per run and process, the same calls on every rank."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ..checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from ..checkpoint.agree import on_rank_0, together
from ..checkpoint.directory import repair
from ..checkpoint.rng import seed_all
from ..hf.export import plain_config
from .config import ConfigError, TrainConfig
from .data import BlockStream, held_out_batches, read_blocks
from .distributed import World, mean_over_ranks, open_world
from .metrics import Metrics, memory_bytes
from .model import build_model, recompute_activations, shard
from .schedule import Schedule, decay_groups, make_optimizer, restore_settings
from .tokenizer import make_tokenizer

logger = logging.getLogger(__name__)


class Trainer:
    """Builds everything that a run needs from its config; `run()` trains, `close()` ends what was begun.

    Public state: `model` (sharded), `optimizer`, `schedule`, `stream`, `blocks`, `world`, `step` (optimizer steps
    done).
    """

    def __init__(self, config: TrainConfig, world: World | None = None):
        self.config = config
        self._owns_world = world is None
        self.world = world or open_world(config.parallel.device, config.parallel.timeout_s)
        self.metrics: Metrics | None = None
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        config, world = self.config, self.world
        self.output = Path(config.logging.output).expanduser()
        self.checkpoints = self.output / "checkpoints"
        # A mistake in the files of one host must not leave the other ranks waiting in the first collective.
        self.tokenizer, self.blocks, model = together(self._read_inputs, raising=ConfigError)
        read_by_rank_0 = on_rank_0(lambda: self.blocks.fingerprint)
        together(lambda: self._check_text(read_by_rank_0), raising=ConfigError)
        self.assets_config = plain_config(model)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        decays = decay_groups(model)
        if config.train.activation_checkpointing:
            recompute_activations(model)
        self.model = shard(model.to(world.device), config.parallel)
        self.model.train()
        self.optimizer = make_optimizer(self.model, config.optimizer, decays)
        self.schedule = Schedule(self.optimizer, config.schedule, config.optimizer.lr, config.train.steps)
        self.stream = BlockStream(
            self.blocks,
            batch_size=config.train.batch_size,
            rank=world.rank,
            world_size=world.size,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
        )
        self.step = 0
        seed_all(config.train.seed, world.rank)
        resumed = self._resume() if config.checkpoint.resume_from else None
        self.metrics = Metrics(
            self.output,
            main=world.is_main,
            tensorboard=config.logging.tensorboard,
            progress=config.logging.progress,
            num_steps=config.train.steps,
            first_step=self.step,
        )
        self.metrics.write("start", self.step, **self._describe())
        self.metrics.say(
            "%d parameters, %d ranks on %s (%s), %d tokens a step",
            self.num_parameters, world.size, world.device.type, world.backend, self.tokens_per_step,
        )  # fmt: skip
        if resumed is not None:
            self.metrics.write("resume", self.step, path=str(resumed))
            self.metrics.say("resumed from %s after step %d", resumed, self.step)

    def _read_inputs(self):
        config = self.config
        if self.world.is_main:
            repair(self.checkpoints)
        tokenizer = make_tokenizer(config.data.tokenizer)
        blocks = read_blocks(config.data, tokenizer, config.train.seed)
        if config.train.eval_every and len(blocks.held_out) == 0:
            raise ConfigError("train.eval_every asks for evaluation, but data.held_out=0 keeps no text for it")
        return tokenizer, blocks, build_model(config.model, tokenizer, config.train.seed)

    def _check_text(self, read_by_rank_0: str) -> None:
        if self.blocks.fingerprint != read_by_rank_0:
            raise ConfigError("data.files: this rank read other text than rank 0; all ranks need the same files")

    @property
    def tokens_per_step(self) -> int:
        train = self.config.train
        return train.batch_size * train.accumulation * self.world.size * self.config.data.block_size

    def run(self) -> None:
        """Trains until `train.steps`, evaluating, saving and reporting as configured."""
        config = self.config
        last_saved = self.step if config.checkpoint.resume_from else None
        tokens, since = 0, time.perf_counter()
        while self.step < config.train.steps:
            with self.world.lost_ranks.named(f"training step {self.step + 1}"):
                loss, grad_norm, lr = self.train_step()
            tokens += self.tokens_per_step
            last = self.step == config.train.steps
            if self.step % config.logging.every == 0 or last:
                now = time.perf_counter()
                self.metrics.train(
                    self.step,
                    loss=loss,
                    grad_norm=grad_norm,
                    lr=lr,
                    tokens_per_s=round(tokens / (now - since), 1),
                    memory_bytes=memory_bytes(self.world.device),
                    epoch=self.stream.epoch,
                    tokens=self.stream.position * config.data.block_size,
                )
                tokens, since = 0, now
            pause = time.perf_counter()
            if config.train.eval_every and (self.step % config.train.eval_every == 0 or last):
                with self.world.lost_ranks.named(f"evaluation after step {self.step}"):
                    held_out = self.evaluate()
                self.metrics.write("eval", self.step, loss=held_out)
                self.metrics.say("step %d  held-out loss %.4f", self.step, held_out)
            due = config.checkpoint.save_every and self.step % config.checkpoint.save_every == 0
            if due or (last and config.checkpoint.save_last):
                self.save()
                last_saved = self.step
            # Throughput is that of training alone.
            since += time.perf_counter() - pause
        if last_saved is None and config.checkpoint.save_last:
            self.save()
        self.metrics.write("end", self.step)

    def train_step(self) -> tuple[float, float | None, float]:
        """One optimizer step. Returns the loss (mean over ranks and micro-batches), the gradient's norm, the rate."""
        train = self.config.train
        loss_sum = torch.zeros((), device=self.world.device, dtype=torch.float64)
        for micro in range(train.accumulation):
            self.model.set_requires_gradient_sync(micro == train.accumulation - 1)
            tokens = self.stream.next_batch().to(self.world.device, non_blocking=True)
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            # Every block has equally many tokens, so the mean of means is the mean over all tokens.
            (loss / train.accumulation).backward()
            loss_sum += loss.detach()
        grad_norm = None
        if train.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), train.clip)
            grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        lr = self.schedule.advance()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        mean = mean_over_ranks(float(loss_sum) / train.accumulation, 1.0, self.world.device)
        if mean != mean:
            raise RuntimeError(f"the loss of step {self.step} is not a number; lower optimizer.lr or set train.clip")
        return mean, grad_norm, lr

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss per predicted token over the held-out blocks, the same number on every rank."""
        held_out = self.blocks.held_out[: self.config.train.eval_blocks]
        batches = held_out_batches(
            held_out, batch_size=self.config.train.batch_size, rank=self.world.rank, world_size=self.world.size
        )
        self.model.eval()
        try:
            loss_sum = weight_sum = 0.0
            for tokens, weight in batches:
                tokens = tokens.to(self.world.device)
                loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss_sum += float(loss) * weight
                weight_sum += weight
        finally:
            self.model.train()
        return mean_over_ranks(loss_sum, weight_sum, self.world.device)

    def save(self) -> Path:
        """Writes a checkpoint of this moment; collective."""
        begun = time.perf_counter()
        path = save_checkpoint(
            self.checkpoints,
            self.step,
            self.model,
            self.optimizer,
            {
                "schedule": self.schedule.state_dict(),
                "data": self.stream.state_dict(),
                "config": dataclasses.asdict(self.config),
            },
            keep=self.config.checkpoint.keep,
            write_assets=self._write_assets,
            lost_ranks=self.world.lost_ranks,
        )
        seconds = time.perf_counter() - begun
        self.metrics.write("save", self.step, path=str(path), seconds=round(seconds, 3))
        self.metrics.say("saved %s in %.2f s", path, seconds)
        return path

    def _resume(self) -> Path:
        configured = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        loaded = load_checkpoint(
            self.config.checkpoint.resume_from,
            self.model,
            self.optimizer,
            seed=self.config.train.seed,
            lost_ranks=self.world.lost_ranks,
        )
        if not {"schedule", "data"} <= set(loaded.trainer):
            raise CheckpointError(f"{loaded.path}: it holds no training run (no schedule or data position)")
        for sentence in restore_settings(self.optimizer, configured):
            logger.warning("optimizer: %s", sentence)
        for sentence in self.schedule.load_state_dict(loaded.trainer["schedule"]):
            logger.warning("schedule: %s", sentence)
        for sentence in self.stream.load_state_dict(loaded.trainer["data"]):
            logger.warning("data: %s", sentence)
        self.step = loaded.step
        return loaded.path

    def _write_assets(self, folder: Path) -> None:
        """What the export needs beside the weights."""
        self.assets_config.save_pretrained(str(folder))
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))
        self.tokenizer.save(folder)

    def _describe(self) -> dict:
        return {
            "num_parameters": self.num_parameters,
            "world_size": self.world.size,
            "pids": self.world.pids,
            "backend": self.world.backend,
            "device": str(self.world.device),
            "tokens_per_step": self.tokens_per_step,
            "num_train_blocks": len(self.blocks.train),
            "num_held_out_blocks": len(self.blocks.held_out),
            "torch": torch.__version__,
        }

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        if self._owns_world:
            self.world.close()


def train(config: TrainConfig) -> None:
    """Runs a whole training from its config."""
    trainer = Trainer(config)
    try:
        trainer.run()
        dist.barrier()
    finally:
        trainer.close()
