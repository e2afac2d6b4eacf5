"""The training loop: one `Trainer` per run and process, the same calls on every rank."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import signal
import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x import checkpoint
from fsdp2x.api import (
    ADAPTER_FOLDER,
    Saver,
    accumulate,
    describe,
    has_adapters,
    local_tensor,
    save_adapter,
    save_adapter_config,
    seed_all,
    write_config,
)
from fsdp2x.base.arguments import checked, with_memory
from fsdp2x.base.failures import CheckpointError, ConfigError, exchange, run_on_all_ranks
from fsdp2x.optim import clip_grad_norm_
from fsdp2x.train.config import TrainConfig, TrainingError
from fsdp2x.train.distributed import (
    Interrupt,
    Interrupted,
    any_rank,
    deterministic_algorithms,
    explain_emulation,
    idle_gpus,
    open_world,
    sums_over_ranks,
)
from fsdp2x.train.metrics import Logger, memory_bytes, planned_bytes, shard_report
from fsdp2x.train.model import make_model, with_defaults
from fsdp2x.train.parts import Inputs, Output, Steps
from fsdp2x.train.resume import compare_runs, describe_run
from fsdp2x.train.tokenizer import replaces_tokenizer

logger = logging.getLogger(__name__)


class Trainer:
    """Makes the parts of a run from its config. `run()` trains, `close()` ends what was begun.

    `loggers` are functions like `wandb.log`, called on rank 0 with numbers by name and `step=`.

    Public state: `model` (sharded), `optimizer`, `schedule`, `scaler` (or None), `stream`, `blocks`, `world`, `plan`
    (the mesh), `num_steps` of the whole run, `step` (optimizer steps done or skipped), `skipped` (whether the last one
    was).
    """

    world, plan, blocks = (property(attrgetter(f"inputs.{name}")) for name in ("world", "plan", "blocks"))
    model = property(attrgetter("sharded.module"))
    num_steps, optimizer, schedule, scaler, stream = (
        property(attrgetter(f"steps.{name}")) for name in ("num_steps", "optimizer", "schedule", "scaler", "stream")
    )

    @checked
    @with_memory()
    def __init__(self, config: TrainConfig, *, loggers: Sequence[Logger] = ()):
        if config.missing:
            raise ConfigError(f"the config lacks settings. To run it needs {'; '.join(config.missing)}.")
        self.config = config
        self.step, self.skipped, self.num_tokens = 0, False, 0  # tokens of the last step, over all ranks
        self._closing = contextlib.ExitStack()
        self._interrupt: Interrupt | None = None
        self._stops = False  # set on all ranks when one was interrupted
        self._saves_late, self._saved_at = False, time.perf_counter()  # by checkpoint.save_minutes
        try:
            self._closing.enter_context(deterministic_algorithms(config.train.deterministic))
            world = open_world(config.parallel.device, config.parallel.timeout_s)
            self._closing.callback(world.close)
            self.config = run_on_all_ranks(lambda: with_defaults(config, world.device.type), raising=ConfigError)
            self._build(Inputs.read(self.config, world, self._closing), loggers)
        except BaseException:
            self.close()
            raise

    def _build(self, inputs: Inputs, loggers: Sequence[Logger]) -> None:
        config, self.inputs = self.config, inputs
        self.sharded = make_model(config, inputs.tokenizer, inputs.plan, self.world.device, inputs.param_dtype)
        self.steps = Steps.make(config, inputs, self.sharded)
        seed_all(config.train.seed, self.world.rank)
        Saver.of(self.model).lost_ranks = self.world.lost_ranks
        resume_from = config.checkpoint.resume_from
        resumed = None if resume_from is None else self._resume(resume_from)
        self.output = Output.open(config, inputs, self.num_steps, self.step, loggers, self._closing)
        self._say_how_it_begins(resumed)

    def _say_how_it_begins(self, resumed: Path | None) -> None:
        config, world, metrics = self.config, self.world, self.output.metrics
        say, per_step = metrics.say, self.inputs.blocks_per_step
        metrics.write("start", self.step, **self._describe())
        size = f"{per_step} samples" if config.data.packing else f"{self._tokens_per_step} tokens"
        trained = sum(param.numel() for param in self.model.parameters() if param.requires_grad)
        say(
            "%d parameters%s, %d rank%s on %s, %s a step",
            self.sharded.num_parameters, f" ({trained} are trained)" if config.lora.rank else "",
            world.size, "s" * (world.size > 1), world.device.type, size,
        )  # fmt: skip
        if self._trains:
            epochs = self.num_steps * per_step / len(self.blocks.train)
            say("%d steps, %.3g epochs of %d samples", self.num_steps, epochs, len(self.blocks.train))
        say("%s", self.plan)
        computed = self.inputs.param_dtype or getattr(torch, config.model.dtype)
        say(
            "parameters in %s, computed in %s%s",
            config.model.dtype, str(computed).removeprefix("torch."), ", with a scaled loss" if self.scaler else "",
        )  # fmt: skip
        emulated = explain_emulation(computed, world.device)
        if world.is_main and emulated:
            logger.warning("%s", emulated)
        if world.is_main and (idle := idle_gpus(world)):
            logger.warning("%s", idle)
        if world.is_main and replaces_tokenizer(config.data.tokenizer, config.model.path):
            logger.warning(
                "data.tokenizer=%s is not the tokenizer in model.path=%s; checkpoints and exports get the former",
                config.data.tokenizer, config.model.path,
            )  # fmt: skip
        num_rows = len(self.blocks.train)
        if world.is_main and self._trains and per_step > num_rows:
            logger.warning(
                "one step takes %d samples, but there are only %d for training, so each step repeats some. Lower "
                "train.batch_size or train.global_batch_size, use fewer ranks, or add data",
                per_step, num_rows,
            )  # fmt: skip
        expected = config.parallel.world_size
        if expected is not None and expected != world.size:
            say("the config is for %d ranks, this run has %d", expected, world.size)
        if config.logging.report:
            say("%s", shard_report(self.model))
        if resumed is not None:
            metrics.write("resume", self.step, path=str(resumed))
            say("resumed from %s after step %d", resumed, self.step)

    @property
    def _tokens_per_step(self) -> int:
        """Tokens of a step over all ranks. An upper limit if samples are packed."""
        return self.inputs.blocks_per_step * self.config.data.block_size

    @property
    def _trains(self) -> bool:
        return self.config.train.mode == "train"

    def run(self) -> None:
        """Trains until `num_steps`, evaluating, saving and reporting as configured, or only evaluates.

        Raises:
            Interrupted: a rank got SIGINT or SIGTERM. The running step was finished and saved.
            TrainingError: a loss or gradient is not finite. Nothing is saved.
        """
        if not self._trains:
            self._report_evaluation()
            self.output.metrics.write("end", self.step)
            return
        with Interrupt(says=self.world.is_main) as self._interrupt:
            self._train()

    def _train(self) -> None:
        config, observer = self.config, self.output.observer
        last_saved = self.step if config.checkpoint.resume_from is not None else None
        tokens, since = 0, time.perf_counter()
        began = self._saved_at = since
        start, first, loss = self.step, math.nan, math.nan
        while self.step < self.num_steps:
            observer.before_step(self.step + 1)
            with self.world.lost_ranks.named(f"training step {self.step + 1}"):
                loss, grad_norm, lr = self.train_step()
            observer.after_step(self.step, self.model, self.optimizer)
            tokens += self.num_tokens
            if self.step == start + 1:
                first = loss
                self.output.metrics.say("transport: %s", describe(self.model).transport)
            last = self.step == self.num_steps
            if self.step % config.logging.every == 0 or last or self.skipped:
                now = time.perf_counter()
                self._report_step(loss=loss, grad_norm=grad_norm, lr=lr, tokens_per_s=round(tokens / (now - since), 1))
                tokens, since = 0, now
            pause = time.perf_counter()
            # Ranks agree to stop by the sum of each step, and again after each long operation.
            if config.train.eval_every and (self.step % config.train.eval_every == 0 or last) and not self._stops:
                self._report_evaluation()
                self._stops = any_rank(self._is_interrupted, self.world.device)
            due = config.checkpoint.save_every and self.step % config.checkpoint.save_every == 0
            if (due or self._saves_late or (last and config.checkpoint.save_last)) and last_saved != self.step:
                self.save()
                last_saved = self.step
                self._stops = self._stops or not last and any_rank(self._is_interrupted, self.world.device)
            if self._stops:
                self._end_early(last_saved)
            # Throughput counts training only.
            since += time.perf_counter() - pause
        if last_saved is None and config.checkpoint.save_last:
            self.save()
        checkpoint.wait(self.model)
        if config.lora.rank:
            path = save_adapter(self.model, self.inputs.folder.output / "adapter", force=True)
            self.output.metrics.say("adapter: %s", path)
        self.output.metrics.write("end", self.step)
        self.output.metrics.draw()
        if self.step == start:
            self.output.metrics.say("nothing to do: the run ended after step %d", self.num_steps)
            return
        from tqdm import tqdm

        self.output.metrics.say(
            "done: %d steps in %s, loss %.4f to %.4f%s",
            self.step, tqdm.format_interval(time.perf_counter() - began), first, loss, self._next_command(last_saved),
        )  # fmt: skip

    def _next_command(self, last_saved: int | None) -> str:
        if last_saved is None:
            return ""
        merge = " --merge" if self.config.lora.rank else ""
        return f". Next: fsdp2x export {self.inputs.folder.checkpoints} MODEL{merge}"

    def _report_step(self, **values: Any) -> None:
        used, position = memory_bytes(self.world.device), self.stream.position
        progress = {"tokens": position * self.config.data.block_size}
        if self.config.data.packing:  # samples differ in length
            progress = {"samples": position}
        self.output.metrics.train(
            self.step,
            **values,
            memory_bytes=used,
            used_bytes=used - self.sharded.bytes_before,
            planned_bytes=self._planned_bytes,
            epoch=self.stream.epoch,
            epochs=round(position / len(self.blocks.train), 4),
            **progress,
            skipped=self.skipped,
            **({"scale": self.scaler.scale} if self.scaler else {}),
        )

    @functools.cached_property
    def _planned_bytes(self) -> int:
        return planned_bytes(self.model, self.optimizer, self.inputs.batching, self.config.parallel)

    def _end_early(self, last_saved: int | None) -> None:
        """Ends a run that can be resumed, and says how."""
        keep = self.config.checkpoint
        if keep.saves and last_saved != self.step:
            self.save()
            last_saved = self.step
        checkpoint.wait(self.model)
        self.output.metrics.write("interrupt", self.step)
        self.output.metrics.draw()
        how = "nothing was saved: checkpoint.save_last=false and checkpoint.save_every=0"
        if last_saved is not None:
            how = f"saved step {last_saved}; resume with --resume_from {self.inputs.folder.checkpoints}"
        number = self._interrupt.number if self._interrupt is not None else 0
        raise Interrupted(f"interrupted after step {self.step}; {how}", number or signal.SIGINT)

    @property
    def _is_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.noted

    def _report_evaluation(self) -> None:
        with self.world.lost_ranks.named(f"evaluation after step {self.step}"):
            held_out = self.evaluate()
        self.output.metrics.write("eval", self.step, loss=held_out)
        self.output.metrics.say("step %d  held-out loss %.4f", self.step, held_out)

    def train_step(self) -> tuple[float, float | None, float]:
        """Runs one optimizer step. Returns the loss (mean over ranks and micro-batches), gradient norm, and rate.

        `skipped` tells whether the step changed nothing: no parameter, no moment, and not the rate. The norm is then
        None. It is so if no rank has a label, if gradients of a scaled loss overflow on any rank, and, with
        `train.on_nonfinite=skip`, if the loss or a gradient is not finite.

        Raises:
            TrainingError: on every rank, before anything changed, if the loss or a gradient is not finite.
        """
        config, optimizer, schedule = self.config, self.optimizer, self.schedule
        assert optimizer is not None and schedule is not None, "a run that only evaluates takes no steps"
        shares, self.num_tokens = self.steps.feed.step()
        if self.num_tokens == 0:
            shares = []
        loss_sum = torch.zeros((), device=self.world.device, dtype=torch.float64)
        scale = self.scaler.scale if self.scaler else 1.0
        for index, share in enumerate(shares):
            last = index == len(shares) - 1
            with accumulate(self.model, last=last, before_last=config.parallel.accumulate):
                loss = share()
                (loss * scale).backward()
            loss_sum += loss.detach()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        mean, lr, grad_norm = self._mean_loss(float(loss_sum)), schedule.set_rate(), None
        self.step += 1
        if self.num_tokens == 0:
            self.skipped, mean = True, math.nan
            self._warn("no rank has a label")
        elif self.scaler is not None and not self.scaler.unscale(parameters):
            self.skipped = True
            self.scaler.update(False)
        else:
            grad_norm = self._update(optimizer, parameters) if math.isfinite(mean) else None
            self.skipped = grad_norm is None or not math.isfinite(grad_norm)
            if self.skipped:
                self._report_nonfinite(mean, grad_norm)
            elif self.scaler is not None:
                self.scaler.update(True)
        if not self.skipped:
            schedule.step += 1
        optimizer.zero_grad(set_to_none=True)
        return mean, None if self.skipped else grad_norm, lr

    def _mean_loss(self, loss: float) -> float:
        """Returns the mean loss over ranks. Collective.

        It also shares whether a rank was interrupted, and whether a save is late by rank 0's clock.
        """
        settings, waited = self.config.checkpoint, time.perf_counter() - self._saved_at
        is_late = self.world.is_main and settings.saves and 0 < settings.save_minutes * 60 <= waited
        sums = [loss, 1.0, float(self._is_interrupted), float(is_late)]
        total, ranks, num_interrupted, num_late = sums_over_ranks(sums, self.world.device)
        self._stops, self._saves_late = num_interrupted > 0, num_late > 0
        return total / ranks

    def _update(self, optimizer: Any, parameters: list[torch.nn.Parameter]) -> float:
        """Steps with clipped gradients if their norm is finite. Returns the norm before."""
        if hasattr(optimizer, "grad_norm"):
            before = optimizer.grad_norm
            try:
                optimizer.step()
            except RuntimeError:  # also for a norm that is not finite, which is reported with names
                if optimizer.grad_norm is before or math.isfinite(optimizer.grad_norm):
                    raise
            return float(optimizer.grad_norm)
        norm = float(clip_grad_norm_(parameters, self.config.train.clip or math.inf))
        if math.isfinite(norm):
            optimizer.step()
        return norm

    def _report_nonfinite(self, loss: float, norm: float | None) -> None:
        """Warns of a step that is skipped, or raises TrainingError. Collective."""
        mine = [
            (index, self.world.rank, name)
            for index, (name, param) in enumerate(self.model.named_parameters())
            if param.grad is not None and not torch.isfinite(local_tensor(param.grad)).all()
        ]
        found = sorted(entry for entries in exchange(mine) for entry in entries)
        what = f"the loss is {loss}" if norm is None else f"the norm of the gradients is {norm}"
        if found:
            # Backward runs from the last to the first, so that the cause is near the last.
            (_, rank, first), (_, last_rank, last) = found[0], found[-1]
            what += f"; not finite are gradients from {first} (shard of rank {rank}) to {last} (rank {last_rank})"
        if self.config.train.on_nonfinite == "skip":
            self._warn(what)
            return
        raise TrainingError(
            f"step {self.step}: {what}. No parameter was changed and nothing was saved. Lower optimizer.lr, set "
            "train.clip, or skip such steps by train.on_nonfinite=skip."
        )

    def _warn(self, reason: str) -> None:
        if self.world.is_main:
            logger.warning("step %d is skipped: %s", self.step, reason)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss per predicted token over the held-out blocks, the same on every rank.

        A run that only evaluates and holds no text out uses all blocks.
        """
        blocks = self.blocks.held_out if self._trains or len(self.blocks.held_out) else self.blocks.train
        self.model.eval()
        try:
            return self.steps.feed.evaluate(blocks[: self.config.train.eval_blocks])
        finally:
            self.model.train(self._trains)

    def save(self) -> Path:
        """Writes a checkpoint of this moment, in the background if configured. Collective.

        Raises:
            CheckpointError: on every rank if it cannot be written.
        """
        config = self.config.checkpoint
        saved = checkpoint.save(
            self.inputs.folder.checkpoints,
            self.model,
            self.optimizer,
            step=self.step,
            scheduler=self.schedule,
            scaler=self.scaler,
            data=self.stream,
            extra={"config": self.config.model_dump(), "run": self._described_run},
            form=config.form,
            keep=config.keep,
            marked=bool(config.keep_every and self.step % config.keep_every == 0),
            async_save=config.async_save,
            write_assets=self._write_assets,
        )
        self._saved_at = time.perf_counter()
        self.output.metrics.write("save", self.step, path=str(saved.path), seconds=round(saved.stall_s, 3))
        self.output.metrics.say("%s %s in %.2f s", "saved" if saved.done else "saving", saved.path, saved.stall_s)
        return saved.path

    def _resume(self, resume_from: str) -> Path:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        configured = [{key: group[key] for key in group if key != "params"} for group in groups]
        loaded = checkpoint.load(resume_from, self.model, self.optimizer, seed=self.config.train.seed)
        # A rank that cannot continue must not leave the others waiting in the first collective.
        run_on_all_ranks(lambda: self._go_on_from(loaded, configured), what=f"resuming from {loaded.path}")
        return loaded.path

    @functools.cached_property
    def _described_run(self) -> dict[str, Any]:
        return describe_run(self.config, self.inputs, self.sharded.assets_config)

    def _go_on_from(self, loaded: checkpoint.Loaded, configured: list[dict]) -> None:
        for sentence in compare_runs(loaded.extra, self._described_run, self.config):
            if self.world.is_main:
                logger.warning("%s", sentence)
        self.step = loaded.step if isinstance(loaded.step, int) else 0  # other programs do not save it
        if self.optimizer is None:
            return
        if loaded.scheduler is None or loaded.data is None:
            raise CheckpointError("it holds no training run (no schedule or data position)")
        for group, settings in zip(self.optimizer.param_groups, configured, strict=True):
            group.update(settings)
        if self.scaler is not None and not loaded.scaler:
            logger.warning("scaler: the checkpoint has none, the scale starts at %g", self.scaler.scale)
        parts: dict[str, tuple[Any, Any]] = {
            "schedule": (self.schedule, loaded.scheduler),
            "data": (self.stream, loaded.data),
        }
        if self.scaler is not None and loaded.scaler:
            parts["scaler"] = (self.scaler, loaded.scaler)
        for name, (own, state) in parts.items():
            try:
                said = own.load_state_dict(state)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"{name} does not take what was saved: {reason}") from None
            for sentence in said or ():
                logger.warning("%s: %s", name, sentence)

    def _write_assets(self, folder: Path) -> None:
        """Writes what the export needs in addition to weights."""
        write_config(self.sharded.assets_config, folder / "config.json")
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            write_config(generation, folder / "generation_config.json")
        if has_adapters(self.model):
            save_adapter_config(self.model, folder / ADAPTER_FOLDER)
        self.inputs.tokenizer.save(folder)

    def _describe(self) -> dict:
        return {
            "num_parameters": self.sharded.num_parameters,
            "world_size": self.world.size,
            "pids": [process.pid for process in self.world.lost_ranks.processes],
            "backend": self.world.backend,
            "device": str(self.world.device),
            "tokens_per_step": self._tokens_per_step,
            "num_steps": self.num_steps,
            "strategy": str(self.plan),
            "num_train_blocks": len(self.blocks.train),
            "num_held_out_blocks": len(self.blocks.held_out),
            "torch": torch.__version__,
        }

    def close(self) -> None:
        if hasattr(self, "sharded"):
            try:
                # After an error, what is being written may still become a complete checkpoint.
                checkpoint.wait(self.model)
            except RuntimeError as error:
                logger.error("%s", error)
        self._closing.close()


@checked
@with_memory()
def train(config: TrainConfig, *, loggers: Sequence[Logger] = ()) -> None:
    """Runs a complete training from its config. `loggers` are functions like `wandb.log`, called on rank 0."""
    trainer = Trainer(config, loggers=loggers)
    try:
        trainer.run()
        dist.barrier()
    finally:
        trainer.close()
