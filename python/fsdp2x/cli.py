"""The command line: `fsdp2x train`, `export` and `plan`; parses, calls, and turns mistakes into one sentence."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 done, 1 failed, 2 a mistake in what was asked for."""
    parser = argparse.ArgumentParser(prog="fsdp2x", description="Sharded training of HuggingFace models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(commands)
    _add_export(commands)
    _add_plan(commands)
    args, rest = parser.parse_known_args(argv)
    # argparse does not take up a list again after an option: `train c.yaml a=1 --resume_from p b=2`.
    if rest and (args.command == "export" or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    rank = os.environ.get("RANK")
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s " + (f"[rank {rank}] " if rank else "") + "%(message)s",
        datefmt="%H:%M:%S",
    )
    return args.run(args)


def _add_train(commands) -> None:
    command = commands.add_parser(
        "train",
        help="train a model",
        description="Train as a YAML file says; under torchrun on all its ranks, else in this process alone.",
    )
    command.add_argument("config", metavar="CONFIG.yaml")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that replace the file's: train.steps=100"
    )
    command.add_argument(
        "--resume_from", "--resume-from", metavar="PATH", help="a checkpoint, or a folder of them whose latest is taken"
    )
    command.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .train import ConfigError, load_config, train

    try:
        config = load_config(args.config, args.overrides, resume_from=args.resume_from)
        train(config)
    except (ConfigError, CheckpointError) as error:
        return _mistake(error)
    return 0


def _add_export(commands) -> None:
    command = commands.add_parser(
        "export",
        help="write a checkpoint in HuggingFace form",
        description="Read a checkpoint in this one process and write what from_pretrained loads.",
    )
    command.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a folder of them whose latest is taken")
    command.add_argument("out", metavar="OUT", help="folder to write; must not exist")
    command.add_argument("--force", action="store_true", help="replace OUT when it exists")
    command.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from .checkpoint import CheckpointError
    from .hf.export import export_checkpoint

    try:
        out = export_checkpoint(args.checkpoint, args.out, force=args.force)
    except (CheckpointError, FileExistsError) as error:
        return _mistake(error)
    logging.getLogger(__name__).info("exported to %s", out)
    return 0


def _add_plan(commands) -> None:
    command = commands.add_parser(
        "plan",
        help="foretell the memory of a run",
        description=(
            "Units, padding, bytes at rest and at the peak of a step on rank 0, and bytes sent in a step, for a model "
            "that is built without weights. Activations come on top. Exit status 1: it does not fit --memory."
        ),
    )
    dtypes = ("float32", "bfloat16", "float16")
    command.add_argument("config", metavar="CONFIG", help="config.json of a HuggingFace model, or a training YAML")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the YAML's")
    command.add_argument("--world-size", "--world_size", type=int, required=True, metavar="N", help="number of ranks")
    command.add_argument("--replicas", type=int, default=1, metavar="R", help="copies of the shards (HSDP); divides N")
    command.add_argument("--dtype", choices=dtypes, help="of the parameters; default the config's")
    command.add_argument("--param-dtype", "--param_dtype", choices=dtypes, help="of computation; default --dtype")
    command.add_argument("--reduce-dtype", "--reduce_dtype", choices=dtypes, help="in which gradients are summed")
    command.add_argument(
        "--reshard-after-forward",
        "--reshard_after_forward",
        type=_bool_or_int,
        metavar="true|false|M",
        help="free parameters after forward, or keep them sharded over M ranks; default: all but the last unit",
    )
    command.add_argument(
        "--auto-wrap",
        "--auto_wrap",
        type=_auto_wrap,
        metavar="false|CLASS,..",
        help="modules that form units; default: the model's own plan",
    )
    command.add_argument(
        "--transport", choices=("process_group", "shm"), help="shm: all ranks of a group on one host share memory"
    )
    command.add_argument("--optimizer", choices=("adamw", "sgd", "sgd_momentum", "none"))
    command.add_argument("--memory", metavar="SIZE", help="memory of one rank, such as 80GiB: says whether it fits")
    command.add_argument("--json", action="store_true", help="everything as one JSON object")
    command.set_defaults(run=_plan)


def _bool_or_int(text: str) -> bool | int:
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text)


def _auto_wrap(text: str) -> bool | list[str]:
    return False if text == "false" else text.split(",")


def _plan(args: argparse.Namespace) -> int:
    from .memory.plan import PlanError, Request, make_plan, parse_bytes
    from .train import ConfigError

    names = {field.name for field in dataclasses.fields(Request)}
    try:
        memory_bytes = parse_bytes(args.memory) if args.memory is not None else None
        options = {name: value for name, value in vars(args).items() if name in names}
        plan = make_plan(Request(**options, memory_bytes=memory_bytes))
    except (ConfigError, PlanError) as error:
        return _mistake(error)
    print(json.dumps(plan.to_dict(), indent=1) if args.json else plan)
    return 1 if plan.fits is False else 0


def _mistake(error: Exception) -> int:
    # All ranks raise the same sentence; the first rank says it. A cause is a slip of ours: show where it happened.
    if error.__cause__ is not None:
        logging.getLogger(__name__).error("unexpected failure", exc_info=error)
    elif os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"fsdp2x: error: {error}\n")
    return 2
