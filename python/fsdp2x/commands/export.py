"""`fsdp2x export`: a checkpoint in HuggingFace form."""

from __future__ import annotations

import argparse
import logging

from fsdp2x.commands.shared import mistake


def add(commands: argparse._SubParsersAction) -> None:
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
    from fsdp2x.convert.to_hf import export_checkpoint
    from fsdp2x.errors import CheckpointError

    try:
        out = export_checkpoint(args.checkpoint, args.out, force=args.force)
    except (CheckpointError, FileExistsError) as error:
        return mistake(error)
    logging.getLogger(__name__).info("exported to %s", out)
    return 0
