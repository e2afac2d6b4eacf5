"""`fsdp2x rollout`: runs an engine process that samples for trainers of this host and takes their weights."""

from __future__ import annotations

import argparse
import logging
import os
import signal
from typing import Any

from fsdp2x.train.commands.shared import DTYPE, mistake, positive

_LIMITS = ("max_batch_rows", "max_batch_tokens")


def _ids(text: str) -> tuple[int, ...]:
    """Parses token ids from "2,5", or none from "none"."""
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 2,5, or none, got {text!r}") from None


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "rollout",
        help="sample for trainers of this host, which push weights",
        description=(
            "Run an engine for reinforcement learning: a transformers model with a KV cache. Trainers of the same user "
            "ask for samples through fsdp2x.rollout.RolloutClient(ADDRESS) and push weights to its target. With a "
            "tokenizer in the folder of the model, prompts may be text or messages, and answers have text."
        ),
    )
    command.add_argument("model", metavar="MODEL", help="Folder with a model, or with config.json alone.")
    command.add_argument(
        "--address", required=True, help="@NAME, which leaves no file behind, or the path of a socket."
    )
    command.add_argument("--dtype", **DTYPE, default="float32")
    command.add_argument("--device", default="cpu", help="Device, such as cuda:1. Default: cpu.")
    command.add_argument(
        "--stop-ids",
        type=_ids,
        metavar="ID,ID",
        help="Tokens that end a response if a request names none. Default: those of the generation config.",
    )
    command.add_argument("--max-batch-rows", type=positive, metavar="N", help="Responses drawn together. Default: 256.")
    command.add_argument(
        "--max-batch-tokens",
        type=positive,
        metavar="N",
        help="Limit of these responses times their longest prompt and max_tokens, for memory. Default: 65536.",
    )
    command.add_argument(
        "--once",
        type=float,
        metavar="S",
        help="Seconds to wait for a first trainer, and then end when all trainers have left. Default: never end.",
    )
    command.set_defaults(run=_rollout)


def _rollout(args: argparse.Namespace) -> int:
    import torch

    from fsdp2x.rl.rollout.server import RolloutServer, load_model, stop_ids_of
    from fsdp2x.rl.rollout.text import load_tokenizer

    if args.once is not None and not args.once > 0:
        return mistake(ValueError(f"rollout: --once must be positive, got {args.once:g}"))
    try:
        model, has_weights = load_model(args.model, dtype=getattr(torch, args.dtype), device=args.device)
        options: dict[str, Any] = {name: value for name in _LIMITS if (value := getattr(args, name)) is not None}
        options["stop_ids"] = stop_ids_of(model) if args.stop_ids is None else args.stop_ids
        options["tokenizer"] = load_tokenizer(args.model if os.path.isdir(args.model) else os.path.dirname(args.model))
        server = RolloutServer(model, args.address, has_weights=has_weights, **options)
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
