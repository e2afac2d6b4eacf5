"""`fsdp2x trl METHOD`: starts TRL's script on all local devices. `trl_rank.py` is what each rank runs."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp2x.base.errors import ConfigError
from fsdp2x.train.commands.shared import positive

# Seconds after Ctrl-C. Ranks end at once, unless TRL's enable_jit_checkpoint saves a checkpoint first.
_SAVE_S = 300
_DESCRIPTION = """\
Train with TRL's own script and all its arguments, sharded by fsdp2x. It uses all GPUs of this host, CPU ranks if there
are none, or torchrun's ranks. `fsdp2x trl sft --help` lists TRL's arguments.

  --config FILE   YAML file with TRL's arguments.
  --nproc N       Number of ranks. Default: one per GPU, else 2.

dataset_name is a local folder, a local file (JSONL, parquet, CSV), or a name in the HuggingFace cache. Nothing is
downloaded unless you set HF_HUB_OFFLINE=0. Sharding is on unless the file says `fsdp: false`."""


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "trl",
        help="train chats, preferences, and rewards with TRL",
        usage="fsdp2x trl {sft,grpo,dpo,reward} --config FILE [--nproc N] [TRL's arguments]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--supervisor", type=int, metavar="PID", help=argparse.SUPPRESS)
    command.add_argument("method", choices=("sft", "grpo", "dpo", "reward"))
    command.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from fsdp2x.train.parse import read_yaml

    if importlib.util.find_spec("trl") is None:
        raise ConfigError("fsdp2x trl needs TRL, which is not installed. Run pip install 'fsdp2x[trl]'.")
    own = argparse.ArgumentParser(prog="fsdp2x trl", add_help=False, allow_abbrev=False)
    own.add_argument("--config")
    own.add_argument("--nproc", type=positive)
    options, words = own.parse_known_args(args.words)
    if {"RANK", "WORLD_SIZE"} <= set(os.environ) or {"-h", "--help"} & set(words):
        from fsdp2x.train.commands.trl_rank import run_rank

        return run_rank(args.method, options.config, words, args.supervisor)
    settings = read_yaml(options.config) if options.config else {}
    own.add_argument("--output_dir", "--output-dir", default=settings.get("output_dir", "trainer_output"))
    own.add_argument("--use_cpu", "--use-cpu", nargs="?", const=True, default=settings.get("use_cpu", False))
    trls, _ = own.parse_known_args(words)
    world, num_threads = _choose_ranks(options.nproc, str(trls.use_cpu).lower() in ("true", "yes", "1"))
    return _supervise([args.method, *args.words], world, num_threads, Path(trls.output_dir))


def _choose_ranks(nproc: int | None, use_cpu: bool) -> tuple[int, int]:
    """Returns the number of ranks, and of threads of each."""
    import torch

    num_devices = 0 if use_cpu else torch.accelerator.device_count()
    if num_devices and nproc is not None and nproc > num_devices:
        raise ConfigError(f"--nproc {nproc}: this host has {num_devices} GPU(s). Use --use_cpu for CPU ranks.")
    world = nproc or num_devices or 2
    fair_share = 1 if num_devices else max(1, len(os.sched_getaffinity(0)) // world)
    num_threads = int(os.environ.get("OMP_NUM_THREADS") or fair_share)
    if nproc is None and not num_devices:
        sys.stderr.write(f"fsdp2x: {world} CPU ranks with {num_threads} thread(s) (--nproc, OMP_NUM_THREADS)\n")
    return world, num_threads


def _supervise(words: list[str], world: int, num_threads: int, output: Path) -> int:
    """Runs the ranks and returns the exit status. None of them outlives this call."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

    from fsdp2x.compare.ranks import local_ranks

    command = ["-m", "fsdp2x", "trl", "--supervisor", str(os.getpid()), *words]
    try:
        with contextlib.ExitStack() as closing:
            folder = tempfile.mkdtemp(prefix="fsdp2x-trl-")
            closing.callback(shutil.rmtree, folder, ignore_errors=True)
            # The other ranks repeat what the first one writes to the terminal.
            logs = DefaultLogsSpecs(folder, redirects=dict.fromkeys(range(1, world), Std.ALL))
            ranks = closing.enter_context(local_ranks("fsdp2x trl", command, world, num_threads, logs, _SAVE_S))
            return _judge(ranks.wait(period=0.1), ranks.stderrs)
    except SignalException as stop:
        interrupt: Any = KeyboardInterrupt(f"{stop.sigval.name}: all ranks have ended. {_how_to_continue(output)}")
        interrupt.number = stop.sigval
        raise interrupt from None


def _how_to_continue(output: Path) -> str:
    # The trainer's state is the last file of a checkpoint.
    saved = sorted(output.glob("checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return f"Continue with --resume_from_checkpoint {saved[-1].parent}" if saved else f"{output} has no checkpoint."


def _judge(result: Any, logs: Mapping[int, str]) -> int:
    """Reports the first failure once and returns the exit status. Raises ``ConfigError`` for a wrong argument."""
    if not result.failures:
        return 0
    from fsdp2x.compare.ranks import first_failure, how_it_ended, last_lines

    first = first_failure(result.failures)
    what, text = "failed", first.message
    if "time" not in first.error_file_data:  # it could not report
        what, text = f"ended {how_it_ended(first)}", last_lines(logs, first)
    elif first.exitcode == 2:
        raise ConfigError(text)
    sys.stderr.write(f"fsdp2x: error: rank {first.local_rank} {what}\n{text.rstrip()}\n")
    return 1
