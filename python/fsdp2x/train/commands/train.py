"""`fsdp2x train`: runs training from a YAML file."""

from __future__ import annotations

import argparse
import functools

from fsdp2x.base.errors import CheckpointError, ConfigError
from fsdp2x.train.commands.launch import choose_ranks, is_launched, run_rank, run_ranks
from fsdp2x.train.commands.shared import positive


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "train",
        help="train a model",
        description="Train by the settings of a YAML file. Under torchrun it uses all ranks, else this process.",
    )
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Settings that replace the file's: train.steps=100."
    )
    command.add_argument(
        "--nproc",
        type=lambda text: text if text == "auto" else positive(text),
        metavar="N|auto",
        help="Number of ranks to start on this host. auto: one per GPU, or 2 that share the CPU's cores. Default: 1.",
    )
    command.add_argument(
        "--resume-from", metavar="PATH", help="Checkpoint, or a folder of checkpoints, whose latest is used."
    )
    command.add_argument(
        "--report", action="store_true", help="List every parameter with its placement, global and local shape."
    )
    command.add_argument("--supervisor", type=int, metavar="PID", help=argparse.SUPPRESS)
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from fsdp2x.train.config import TrainingError
    from fsdp2x.train.config_file import ConfigFile, parse_config

    overrides = [*args.overrides, *(["logging.report=true"] if args.report else [])]
    if args.nproc is not None:
        if is_launched():
            raise ConfigError("--nproc: a launcher such as torchrun has started this rank. Use one of the two.")
        file = ConfigFile.read(args.config, overrides)
        with file.located():
            on_cpu = parse_config(file.settings).parallel.device == "cpu"
        world, num_threads = choose_ranks(None if args.nproc == "auto" else args.nproc, on_cpu, "parallel.device=cpu")
        if world > 1:
            resume = ["--resume-from", args.resume_from] if args.resume_from is not None else []
            return run_ranks(["train", args.config, *overrides, *resume], world, num_threads, finish=True)
    statuses: dict[type[Exception], int] = {ConfigError: 2, CheckpointError: 2, FileExistsError: 2, TrainingError: 1}
    return run_rank(functools.partial(_train, args, overrides), args.supervisor, statuses)


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    from fsdp2x.train import train
    from fsdp2x.train.config_file import ConfigFile

    file = ConfigFile.read(args.config, overrides)
    config = file.parse(resume_from=args.resume_from)
    with file.located():
        train(config)
