"""`fsdp2x selftest`: checks that sharded training is correct on this machine, on any number of ranks."""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys

from fsdp2x.base.errors import ConfigError
from fsdp2x.train.commands.shared import NamesOf


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "selftest",
        help="check sharded training on this machine",
        description=(
            "Check sharding, gradients, loss, memory and speed of a small transformer against an unsharded one. Starts "
            "its own processes, or uses torchrun's. Exit status 1: a check failed."
        ),
    )
    command.add_argument("--world", type=int, metavar="N", help="Number of ranks. Default: one per GPU, else 2.")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--transport", choices=NamesOf("TRANSPORTS"), default="auto", metavar="NAME", help="%(choices)s."
    )
    command.add_argument("--steps", type=int, default=20, metavar="N", help="Timed steps of the speed check.")
    command.add_argument("--timeout", type=float, default=110.0, metavar="S", help="Seconds for all checks together.")
    command.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from fsdp2x.train.distributed import choose_device

    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world = args.world if args.world is not None else _default_world(args.device)
    if launched:
        world = int(os.environ["WORLD_SIZE"])
    if world < 1 or args.steps < 1 or not args.timeout > 0:
        raise ConfigError("selftest: --world and --steps must be at least 1, and --timeout positive")
    if launched and args.world not in (None, world):
        raise ConfigError(f"selftest: --world {args.world}, but torchrun started {world} rank(s)")
    choose_device(args.device, 0, 1)
    return _check(args) if launched or world == 1 else _launch(args, world)


def _default_world(device: str) -> int:
    import torch

    return max(torch.cuda.device_count(), 1) if device != "cpu" and torch.cuda.is_available() else 2


def _check(args: argparse.Namespace) -> int:
    from fsdp2x.train.distributed import open_world
    from fsdp2x.train.selftest import run_suite, shard_layers

    # torchrun ends the other ranks when one has ended.
    faulthandler.dump_traceback_later(args.timeout, exit=True)
    world = open_world(args.device, args.timeout)
    try:

        def shard(model, **options):
            return shard_layers(model, transport=args.transport, **options)

        return 1 if run_suite(world.device, shard=shard, num_steps=args.steps) else 0
    finally:
        faulthandler.cancel_dump_traceback_later()
        world.close()


def _launch(args: argparse.Namespace, world: int) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    command += ["-m", "fsdp2x", "selftest", "--device", args.device, "--transport", args.transport]
    command += ["--steps", str(args.steps), "--timeout", str(args.timeout)]
    return 1 if subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode else 0
