"""The training loop: one `Trainer` per run and process, the same calls on every rank."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2x import checkpoint
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError, on_rank_0, run_on_all_ranks
from fsdp2x.io.checkpoint.background import Saver
from fsdp2x.io.checkpoint.directory import find, repair
from fsdp2x.io.checkpoint.rng import seed_all
from fsdp2x.io.convert.adapters import ADAPTER_FOLDER
from fsdp2x.io.hf.lora import save_adapter
from fsdp2x.io.hf.save import save_adapter_config
from fsdp2x.io.names import has_adapters
from fsdp2x.lifecycle.contexts import accumulate
from fsdp2x.optim import clip_grad_norm_
from fsdp2x.train.config import ConfigError, TrainConfig, TrainingError
from fsdp2x.train.data import BlockStream, read_blocks
from fsdp2x.train.distributed import (
    Interrupt,
    Interrupted,
    KillWarning,
    World,
    any_rank,
    deterministic_algorithms,
    open_world,
    sums_over_ranks,
)
from fsdp2x.train.feeds import BlockFeed, make_feed
from fsdp2x.train.metrics import Logger, Metrics, Observer, WandbLogger, memory_bytes, planned_bytes, shard_report
from fsdp2x.train.model import build_model, build_on_meta, check_folder, make_sharded
from fsdp2x.train.run_folder import RunFolder, check_writable
from fsdp2x.train.schedule import GradScaler, Schedule, make_optimizer, restore_settings
from fsdp2x.train.strategy import (
    explain_emulation,
    plan_mesh,
    resolve_batching,
    resolve_ns_dtype,
    resolve_param_dtype,
    resolve_scaling,
    resolve_steps,
)
from fsdp2x.train.tokenizer import choose_tokenizer, make_tokenizer, replaces_tokenizer

logger = logging.getLogger(__name__)


class Trainer:
    """Builds everything that a run needs from its config. `run()` trains, `close()` ends what was begun.

    `loggers` are functions like `wandb.log`, called on rank 0 with numbers by name and `step=`.

    Public state: `model` (sharded), `optimizer`, `schedule`, `scaler` (or None), `stream`, `blocks`, `world`, `plan`
    (the mesh), `num_steps` of the whole run, `step` (optimizer steps done or skipped), `skipped` (whether the last one
    was).
    """

    @checked
    def __init__(self, config: TrainConfig, world: World | None = None, *, loggers: Sequence[Logger] = ()):
        self.config = config
        self._owns_world = world is None
        self._closing = contextlib.ExitStack()
        self._interrupt: Interrupt | None = None
        self._stops = False  # set on all ranks when one was interrupted
        self._planned_bytes: int | None = None
        self._saved: checkpoint.Saved | None = None  # the last save
        self._kill_warning = KillWarning()
        try:
            self._closing.enter_context(deterministic_algorithms(config.train.deterministic))
            self.world = world or open_world(config.parallel.device, config.parallel.timeout_s)
            if self._owns_world:
                self._closing.callback(self.world.close)
            self._build(loggers)
        except BaseException:
            self.close()
            raise

    def _build(self, loggers: Sequence[Logger]) -> None:
        config, world = self.config, self.world
        self.plan = plan_mesh(config.parallel, world.size, world.local_size)
        self.num_readers = world.size // config.parallel.sequence_ranks.total
        self.batching = resolve_batching(config.train, self.num_readers)
        self.param_dtype = resolve_param_dtype(config.model, config.parallel, world.device)
        self.training = config.train.mode == "train"
        scaling = self.training and resolve_scaling(config.scaler, config.model, self.param_dtype)
        self.scaler = GradScaler(config.scaler) if scaling else None
        self.output = Path(config.logging.output).expanduser()
        folder = config.checkpoint.folder
        self.checkpoints = Path(folder).expanduser() if folder else self.output / "checkpoints"
        self._folder = RunFolder(self.output, self.checkpoints if self.training else None)
        self._closing.callback(self._folder.release)
        run_on_all_ranks(self._claim_folders, raising=ConfigError)
        run_on_all_ranks(self._folder.join, raising=ConfigError)
        run_on_all_ranks(self._check_paths, raising=ConfigError)
        if config.checkpoint.resume_from is not None:
            run_on_all_ranks(lambda: find(config.checkpoint.resume_from))
        # A mistake in one host's files must not leave the other ranks waiting in the first collective.
        self.tokenizer, self.blocks, model = run_on_all_ranks(self._read_inputs, raising=ConfigError)
        read_by_rank_0 = on_rank_0(lambda: self.blocks.fingerprint)
        run_on_all_ranks(lambda: self._check_text(read_by_rank_0), raising=ConfigError)
        self.num_steps = resolve_steps(config.train, len(self.blocks.train), self.blocks_per_step)
        # On a CPU, subtract the memory of the interpreter and its libraries.
        self._bytes_before = 0 if world.device.type == "cuda" else memory_bytes(world.device)
        made = make_sharded(config, model, self.tokenizer, self.plan, world.device, self.param_dtype)
        self.model, self.num_parameters, self.assets_config = made.model, made.num_parameters, made.assets_config
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: Schedule | None = None
        if self.training:
            self.model.train()
            ns_dtype = resolve_ns_dtype(config.optimizer, world.device)
            self.optimizer = make_optimizer(self.model, config.optimizer, made.decays, config.train.clip, ns_dtype)
            self.schedule = Schedule(self.optimizer, config.schedule, config.optimizer.lr, self.num_steps)
        self.stream = BlockStream(
            self.blocks,
            batch_size=self.batching.batch_size,
            rank=world.rank // config.parallel.sequence_ranks.total,
            world_size=self.num_readers,
            seed=config.train.seed,
            shuffle=config.data.shuffle,
        )
        self.feed = self._make_feed()
        self.step, self.skipped = 0, False
        seed_all(config.train.seed, world.rank)
        Saver.of(self.model).lost_ranks = self.world.lost_ranks
        resume_from = config.checkpoint.resume_from
        resumed = None if resume_from is None else self._resume(resume_from)
        if world.is_main and config.logging.overwrite:
            self._folder.delete_former_run()
        self._open_metrics(loggers)
        self.observer = Observer(config.logging, self.output, world.rank, world.device)
        self._say_how_it_begins(resumed)

    def _make_feed(self) -> BlockFeed | None:
        return make_feed(
            self.model,
            self.blocks,
            self.stream,
            self.batching,
            self.config.data,
            sequence_ranks=self.config.parallel.sequence_ranks,
            device=self.world.device,
        )

    def _claim_folders(self) -> None:
        """Claims the folders first, so that a run without a folder fails before it reads a large model."""
        config = self.config
        if not self.world.is_main:
            return
        self._folder.claim(self.world.lost_ranks.local_pids)
        self._folder.refuse_former_run(config.checkpoint.resume_from, config.logging.overwrite)
        if self.training:
            repair(self.checkpoints)

    def _check_paths(self) -> None:
        """Checks the model's path and the events' folder before any text is read."""
        config = self.config
        if config.model.path is not None:
            check_folder(config.model)
            choose_tokenizer(config.data.tokenizer, config.model.path)
        attention = config.model.attn_implementation
        build_on_meta(config.model, getattr(torch, config.model.dtype), attn_implementation=attention)
        if config.logging.tensorboard and config.logging.tensorboard_dir and self.world.is_main:
            check_writable("logging.tensorboard_dir", Path(config.logging.tensorboard_dir).expanduser())

    def _open_metrics(self, loggers: Sequence[Logger]) -> None:
        logging_, loggers = self.config.logging, list(loggers)
        if logging_.wandb:
            # Only rank 0 has the run, but all must learn if it cannot begin.
            options = {"dir": str(self.output), **logging_.wandb_options}
            begin = lambda: WandbLogger(options, dataclasses.asdict(self.config)) if self.world.is_main else None  # noqa: E731
            run_of_rank_0 = run_on_all_ranks(begin, raising=ConfigError)
            loggers += [] if run_of_rank_0 is None else [run_of_rank_0]
        self.metrics = Metrics(
            self.output,
            main=self.world.is_main,
            tensorboard=logging_.tensorboard and (logging_.tensorboard_dir or True),
            progress=logging_.progress,
            num_steps=self.num_steps,
            first_step=self.step,
            loggers=loggers,
        )
        self._closing.callback(self.metrics.close)

    def _say_how_it_begins(self, resumed: Path | None) -> None:
        config, world, say = self.config, self.world, self.metrics.say
        self.metrics.write("start", self.step, **self._describe())
        per_step, unit = self._size_of_step()
        trained = sum(param.numel() for param in self.model.parameters() if param.requires_grad)
        say(
            "%d parameters%s, %d rank%s on %s (process group: %s), %d %s a step",
            self.num_parameters, f" ({trained} are trained)" if config.lora.rank else "",
            world.size, "s" * (world.size > 1), world.device.type, world.backend, per_step, unit,
        )  # fmt: skip
        say("%s", self.plan)
        computed = self.param_dtype or getattr(torch, config.model.dtype)
        say(
            "parameters in %s, computed in %s%s",
            config.model.dtype, str(computed).removeprefix("torch."), ", with a scaled loss" if self.scaler else "",
        )  # fmt: skip
        emulated = explain_emulation(computed, world.device)
        if world.is_main and emulated:
            logger.warning("%s", emulated)
        if world.is_main and replaces_tokenizer(config.data.tokenizer, config.model.path):
            logger.warning(
                "data.tokenizer=%s is not the tokenizer in model.path=%s; checkpoints and exports get the former",
                config.data.tokenizer, config.model.path,
            )  # fmt: skip
        num_rows = len(self.blocks.train)
        if world.is_main and self.training and self.blocks_per_step > num_rows:
            logger.warning(
                "one step takes %d samples, but there are only %d for training, so each step repeats some. Lower "
                "train.batch_size or train.global_batch_size, use fewer ranks, or add data",
                self.blocks_per_step, num_rows,
            )  # fmt: skip
        expected = config.parallel.world_size
        if expected is not None and expected != world.size:
            say("the config is for %d ranks, this run has %d", expected, world.size)
        if config.logging.report:
            say("%s", shard_report(self.model))
        if resumed is not None:
            self.metrics.write("resume", self.step, path=str(resumed))
            say("resumed from %s after step %d", resumed, self.step)

    def _size_of_step(self) -> tuple[int, str]:
        return (self.blocks_per_step, "samples") if self.config.data.packing else (self.tokens_per_step, "tokens")

    def _read_inputs(self):
        config = self.config
        name = choose_tokenizer(config.data.tokenizer, config.model.path)
        tokenizer = make_tokenizer(name)
        blocks = read_blocks(config.data, tokenizer, config.train.seed)
        if config.train.eval_every and len(blocks.held_out) == 0:
            raise ConfigError("train.eval_every asks for evaluation, but data.held_out=0 keeps no text for it")
        if config.model.load == "rows":
            check_folder(config.model)
            return tokenizer, blocks, None
        return tokenizer, blocks, build_model(config.model, tokenizer, config.train.seed)

    def _check_text(self, read_by_rank_0: str) -> None:
        if self.blocks.fingerprint != read_by_rank_0:
            raise ConfigError("data.files: this rank read other text than rank 0. All ranks need the same files.")

    @property
    def blocks_per_step(self) -> int:
        return self.batching.batch_size * self.batching.accumulation * self.num_readers

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks. An upper limit if samples are packed."""
        return self.blocks_per_step * self.config.data.block_size

    def run(self) -> None:
        """Trains until `num_steps`, evaluating, saving and reporting as configured, or only evaluates.

        Raises:
            Interrupted: a rank got SIGINT or SIGTERM. The running step was finished and saved.
            TrainingError: the loss is not a number.
        """
        if not self.training:
            self._report_evaluation()
            self.metrics.write("end", self.step)
            return
        with Interrupt(says=self.world.is_main) as self._interrupt:
            self._train()

    def _train(self) -> None:
        config = self.config
        last_saved = self.step if config.checkpoint.resume_from is not None else None
        tokens, since = 0, time.perf_counter()
        first = self.step + 1  # its duration says nothing about the others
        while self.step < self.num_steps:
            begun = time.perf_counter()
            self.observer.before_step(self.step + 1)
            with self.world.lost_ranks.named(f"training step {self.step + 1}"):
                loss, grad_norm, lr = self.train_step()
            self.observer.after_step(self.step, self.model, self.optimizer)
            if self.step != first:
                self._took("step", time.perf_counter() - begun)
            tokens += self.num_tokens
            last = self.step == self.num_steps
            if self.step % config.logging.every == 0 or last or self.skipped:
                now = time.perf_counter()
                scaling = {"scale": self.scaler.scale, "skipped": self.skipped} if self.scaler else {}
                if self._planned_bytes is None:
                    self._planned_bytes = planned_bytes(self.model, self.optimizer, self.batching, config.parallel)
                self.metrics.train(
                    self.step,
                    loss=loss,
                    grad_norm=grad_norm,
                    lr=lr,
                    tokens_per_s=round(tokens / (now - since), 1),
                    memory_bytes=memory_bytes(self.world.device),
                    used_bytes=memory_bytes(self.world.device) - self._bytes_before,
                    planned_bytes=self._planned_bytes,
                    epoch=self.stream.epoch,
                    epochs=round(self.stream.position / len(self.blocks.train), 4),
                    **self._progress(),
                    **scaling,
                )
                tokens, since = 0, now
            pause = time.perf_counter()
            # Ranks agree to stop by the sum of each step, and again after each long operation.
            if config.train.eval_every and (self.step % config.train.eval_every == 0 or last) and not self._stops:
                self._report_evaluation()
                self._took("evaluation", time.perf_counter() - pause)
                self._stops = any_rank(self._is_interrupted, self.world.device)
            due = config.checkpoint.save_every and self.step % config.checkpoint.save_every == 0
            if (due or (last and config.checkpoint.save_last)) and last_saved != self.step:
                self.save()
                last_saved = self.step
                self._stops = self._stops or not last and any_rank(self._is_interrupted, self.world.device)
            if self._stops:
                self._end_early(last_saved)
            # Throughput counts training only.
            since += time.perf_counter() - pause
        self.observer.close(self.step)
        if last_saved is None and config.checkpoint.save_last:
            self.save()
        checkpoint.wait(self.model)
        if config.lora.rank:
            path = save_adapter(self.model, self.output / "adapter", force=True)
            self.metrics.say("adapter: %s", path)
        self.metrics.write("end", self.step)

    def _end_early(self, last_saved: int | None) -> None:
        """Ends a run that can be resumed, and says how."""
        if self._saves and last_saved != self.step:
            self.save()
            last_saved = self.step
        checkpoint.wait(self.model)
        self.observer.close(self.step)
        self.metrics.write("interrupt", self.step)
        how = "nothing was saved: checkpoint.save_last=false and checkpoint.save_every=0"
        if last_saved is not None:
            how = f"saved step {last_saved}; resume with --resume_from {self.checkpoints}"
        number = self._interrupt.number if self._interrupt is not None else 0
        raise Interrupted(f"interrupted after step {self.step}; {how}", number or signal.SIGINT)

    @property
    def _saves(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.config.checkpoint.save_last or bool(self.config.checkpoint.save_every)

    @property
    def _is_interrupted(self) -> bool:
        return self._interrupt is not None and self._interrupt.noted

    def _took(self, kind: str, seconds: float) -> None:
        """Warns if an interrupted run would be killed before it has saved."""
        saved_in = self._saved.seconds if self._saved is not None else None
        warning = self._kill_warning.measured(kind, seconds, saved_in or 0.0)
        if warning and self._saves and self.world.is_main:
            logger.warning("%s", warning)

    def _progress(self) -> dict[str, int]:
        """Returns how much text was read, in tokens, or in samples that differ in length."""
        if self.config.data.packing:
            return {"samples": self.stream.position}
        return {"tokens": self.stream.position * self.config.data.block_size}

    def _report_evaluation(self) -> None:
        with self.world.lost_ranks.named(f"evaluation after step {self.step}"):
            held_out = self.evaluate()
        self.metrics.write("eval", self.step, loss=held_out)
        self.metrics.say("step %d  held-out loss %.4f", self.step, held_out)

    def train_step(self) -> tuple[float, float | None, float]:
        """Runs one optimizer step. Returns the loss (mean over ranks and micro-batches), gradient norm, and rate.

        With a scaled loss, a step whose gradients overflow on any rank changes no parameter. `skipped` is then True and
        the norm None.
        """
        config, optimizer, schedule = self.config, self.optimizer, self.schedule
        assert optimizer is not None and schedule is not None, "a run that only evaluates takes no steps"
        assert self.feed is not None
        shares, self.num_tokens = self.feed.step()
        loss_sum = torch.zeros((), device=self.world.device, dtype=torch.float64)
        scale = self.scaler.scale if self.scaler else 1.0
        for index, share in enumerate(shares):
            last = index == len(shares) - 1
            with accumulate(self.model, last=last, before_last=config.parallel.accumulate):
                loss = share()
                (loss * scale).backward()
            loss_sum += loss.detach()
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.skipped = self.scaler is not None and not self.scaler.unscale(parameters)
        lr = schedule.advance()
        grad_norm = None if self.skipped else self._update(optimizer, parameters)
        optimizer.zero_grad(set_to_none=True)
        self.step += 1
        if self.scaler is not None:
            self.scaler.update(not self.skipped)
        mean = self._end_step(float(loss_sum))
        return mean, grad_norm, lr

    def _end_step(self, loss: float) -> float:
        """Returns the mean loss over ranks, and shares whether one was interrupted. Collective.

        Raises:
            TrainingError: on every rank if the mean is not a number and the step was not skipped.
        """
        sums = [loss, 1.0, float(self._is_interrupted)]
        total, ranks, num_interrupted = sums_over_ranks(sums, self.world.device)
        mean, self._stops = total / ranks, num_interrupted > 0
        if mean != mean and not self.skipped:
            raise TrainingError(f"the loss of step {self.step} is not a number. Lower optimizer.lr or set train.clip.")
        return mean

    def _update(self, optimizer: Any, parameters: list[torch.nn.Parameter]) -> float | None:
        """Steps with clipped gradients. Returns their norm before, if they are clipped."""
        clip, norm = self.config.train.clip, None
        clips_itself = getattr(optimizer, "max_grad_norm", None) is not None
        if clip is not None and not clips_itself:
            norm = clip_grad_norm_(parameters, clip)
        optimizer.step()
        if clips_itself:
            norm = optimizer.grad_norm
        return None if norm is None else float(norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean loss per predicted token over the held-out blocks, the same on every rank.

        A run that only evaluates and holds no text out uses all blocks.
        """
        blocks = self.blocks.held_out if self.training or len(self.blocks.held_out) else self.blocks.train
        self.model.eval()
        try:
            assert self.feed is not None
            return self.feed.evaluate(blocks[: self.config.train.eval_blocks])
        finally:
            self.model.train(self.training)

    def save(self) -> Path:
        """Writes a checkpoint of this moment, in the background if configured. Collective.

        Raises:
            CheckpointError: on every rank if it cannot be written.
        """
        config = self.config.checkpoint
        saved = checkpoint.save(
            self.checkpoints,
            self.model,
            self.optimizer,
            step=self.step,
            scheduler=self.schedule,
            scaler=self.scaler,
            data=self.stream,
            extra={"config": dataclasses.asdict(self.config)},
            form=config.form,
            keep=config.keep,
            marked=bool(config.keep_every and self.step % config.keep_every == 0),
            async_save=config.async_save,
            write_assets=self._write_assets,
        )
        self._saved = saved
        self.metrics.write("save", self.step, path=str(saved.path), seconds=round(saved.stall_s, 3))
        self.metrics.say("%s %s in %.2f s", "saved" if saved.done else "saving", saved.path, saved.stall_s)
        return saved.path

    def _resume(self, resume_from: str) -> Path:
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        configured = [{key: group[key] for key in group if key != "params"} for group in groups]
        loaded = checkpoint.load(resume_from, self.model, self.optimizer, seed=self.config.train.seed)
        # A rank that cannot continue must not leave the others waiting in the first collective.
        run_on_all_ranks(lambda: self._go_on_from(loaded, configured), what=f"resuming from {loaded.path}")
        return loaded.path

    def _go_on_from(self, loaded: checkpoint.Loaded, configured: list[dict]) -> None:
        self.step = loaded.step if isinstance(loaded.step, int) else 0  # other programs do not save it
        if self.optimizer is None:
            return
        if loaded.scheduler is None or loaded.data is None:
            raise CheckpointError("it holds no training run (no schedule or data position)")
        for sentence in restore_settings(self.optimizer, configured):
            logger.warning("optimizer: %s", sentence)
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
        self.assets_config.save_pretrained(str(folder))
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))
        if has_adapters(self.model):
            save_adapter_config(self.model, folder / ADAPTER_FOLDER)
        self.tokenizer.save(folder)

    def _describe(self) -> dict:
        return {
            "num_parameters": self.num_parameters,
            "world_size": self.world.size,
            "pids": self.world.lost_ranks.pids,
            "backend": self.world.backend,
            "device": str(self.world.device),
            "tokens_per_step": self.tokens_per_step,
            "num_steps": self.num_steps,
            "strategy": str(self.plan),
            "num_train_blocks": len(self.blocks.train),
            "num_held_out_blocks": len(self.blocks.held_out),
            "torch": torch.__version__,
        }

    def close(self) -> None:
        if hasattr(self, "model"):
            try:
                # After an error, what is being written may still become a complete checkpoint.
                checkpoint.wait(self.model)
            except RuntimeError as error:
                logger.error("%s", error)
        self._closing.close()


@checked
def train(config: TrainConfig, *, loggers: Sequence[Logger] = ()) -> None:
    """Runs a complete training from its config. `loggers` are functions like `wandb.log`, called on rank 0."""
    run_to_end(Trainer(config, loggers=loggers))


def run_to_end(trainer: Trainer) -> None:
    """Runs a trainer of any kind and closes it."""
    try:
        trainer.run()
        dist.barrier()
    finally:
        trainer.close()
