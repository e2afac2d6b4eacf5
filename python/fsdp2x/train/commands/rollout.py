"""`fsdp2x rollout`: an engine process that samples for trainers of this host and takes their weights."""

from __future__ import annotations

import argparse
import logging
import os
import signal

from fsdp2x.train.commands.shared import DTYPE, mistake


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "rollout",
        help="sample for trainers of this host, which push weights",
        description=(
            "An engine for reinforcement learning: transformers' model with a KV cache. Trainers of the same user ask "
            "for samples through fsdp2x.rollout.RolloutClient(ADDRESS) and push weights to its target."
        ),
    )
    command.add_argument("model", metavar="MODEL", help="a folder with a model, or with config.json alone")
    command.add_argument("--address", required=True, help="@NAME, which leaves no file behind, or the path of a socket")
    command.add_argument("--dtype", **DTYPE, default="float32")
    command.add_argument("--device", default="cpu", help="where it runs, such as cuda:1; default cpu")
    command.add_argument(
        "--once",
        type=float,
        metavar="S",
        help="end when all trainers that had come have left, or none has come in S seconds; default: stay",
    )
    command.set_defaults(run=_rollout)


def _rollout(args: argparse.Namespace) -> int:
    import torch

    from fsdp2x.rl.rollout.server import RolloutServer, load_model

    if args.once is not None and not args.once > 0:
        return mistake(ValueError(f"rollout: --once must be positive, got {args.once:g}"))
    try:
        model, has_weights = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
        server = RolloutServer(model, args.address, has_weights=has_weights)
    except (OSError, ValueError) as error:
        return mistake(error)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        with server:
            said = "its own until a push" if has_weights else "those that are pushed"
            logging.getLogger(__name__).info("process %d samples at %s; weights: %s", os.getpid(), args.address, said)
            server.serve(contact_s=args.once)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)
