"""`fsdp2x export` and `fsdp2x convert`: convert checkpoints to HuggingFace form and back, offline."""

from __future__ import annotations

import argparse
import logging
from typing import Any

from fsdp2x.base.errors import ConfigError
from fsdp2x.train.commands.shared import DTYPE

_EPILOG = """\
forms:
  fsdp2x convert --input-dir CKPT --output-dir OUT --origin-hf-dir HF [-f]      a DCP directory to HuggingFace form
  fsdp2x convert --hf_dir HF --ckpt_dir DIR --save_dir OUT --iter N [--groupgemm]
                                          files DIR/N/model_world_size_W_rank_R.pt to HuggingFace form
  fsdp2x convert --to dcp --input-dir HF --output-dir OUT [-f]                  a HuggingFace folder to a DCP directory
  fsdp2x convert --to sharded|full --input-dir CKPT --output-dir OUT [-f]       a checkpoint of fsdp2x to another form
"""


def add(commands: argparse._SubParsersAction) -> None:
    _add_export(commands)
    _add_convert(commands)


def _add_export(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "export",
        help="write a checkpoint in HuggingFace form",
        description="Read a checkpoint in this process and write a folder that from_pretrained loads.",
    )
    command.add_argument(
        "checkpoint", metavar="CKPT", help="Checkpoint, or a folder of checkpoints, whose latest is used."
    )
    command.add_argument("out", metavar="OUT", help="Folder to write. It must not exist.")
    lora = command.add_mutually_exclusive_group()
    lora.add_argument(
        "--merge",
        dest="lora",
        action="store_const",
        const="merge",
        help="For a LoRA run: write the full model with merged adapters.",
    )
    lora.add_argument(
        "--adapter", dest="lora", action="store_const", const="adapter", help="For a LoRA run: write only the adapter."
    )
    command.add_argument("--force", action="store_true", help="Replace OUT if it exists.")
    command.set_defaults(run=_export)


def _export(args: argparse.Namespace) -> int:
    from fsdp2x.convert import export_checkpoint

    out = export_checkpoint(args.checkpoint, args.out, lora=args.lora, force=args.force)
    logging.getLogger(__name__).info("exported to %s", out)
    return 0


def _add_convert(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "convert",
        help="convert a checkpoint to HuggingFace form, or back",
        description="Convert in this process, without accelerator and in little memory. Executes no code of the files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    command.add_argument("--input-dir", metavar="DIR", help="DCP directory, or with --to dcp a HuggingFace folder.")
    command.add_argument("--output-dir", metavar="OUT", help="Folder to write.")
    command.add_argument("--origin-hf-dir", metavar="HF", help="Folder whose names, files and dtypes the output gets.")
    command.add_argument("--hf-dir", metavar="HF", help="The same, for rank files.")
    command.add_argument("--ckpt-dir", metavar="DIR", help="Folder of the iterations.")
    command.add_argument("--save-dir", metavar="OUT", help="Folder to write, for rank files.")
    command.add_argument("--iter", type=int, metavar="N", help="Number of the iteration: the folder CKPT_DIR/N.")
    command.add_argument(
        "--groupgemm", nargs="?", type=int, choices=(0, 1), const=1, default=0, help="Experts are group_mlp weights."
    )
    command.add_argument("--to", choices=("hf", "dcp", "sharded", "full"), default="hf", help="default hf")
    command.add_argument("--dtype", **DTYPE, help="Dtype of floating-point weights. Default: the origin's.")
    command.add_argument("--prefix", help="Prefix of the model's keys in the checkpoint. Default: the one that fits.")
    command.add_argument("-f", "--force", action="store_true", help="Replace the output if it exists.")
    command.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    import torch

    from fsdp2x.convert import convert_checkpoint, dcp_to_hf, hf_to_dcp, ranks_to_hf

    form = {
        "dcp": ("input_dir", "output_dir"),
        "checkpoint": ("input_dir", "output_dir"),
        "hf": ("input_dir", "output_dir", "origin_hf_dir"),
        "ranks": ("hf_dir", "ckpt_dir", "save_dir", "iter"),
    }
    given = {name for names in form.values() for name in names if getattr(args, name) is not None}
    to_hf = "ranks" if given & set(form["ranks"]) else "hf"
    kind = {"hf": to_hf, "dcp": "dcp"}.get(args.to, "checkpoint")
    needed = form[kind]
    if given != set(needed):
        expected = ", ".join(f"--{name.replace('_', '-')}" for name in needed)
        raise ConfigError(f"convert: this form needs exactly {expected}. See fsdp2x convert --help.")
    for name, forms in (("groupgemm", ("ranks",)), ("prefix", ("hf", "ranks")), ("dtype", ("hf", "ranks", "dcp"))):
        if getattr(args, name) not in (None, 0) and kind not in forms:
            raise ConfigError(f"convert: --{name} has no effect in this form. Omit it. See fsdp2x convert --help.")
    options: dict[str, Any] = {"dtype": getattr(torch, args.dtype) if args.dtype else None, "force": args.force}
    if kind == "checkpoint":
        out = convert_checkpoint(args.input_dir, args.output_dir, form=args.to, force=args.force)
    elif kind == "dcp":
        out = hf_to_dcp(args.input_dir, args.output_dir, **options)
    elif kind == "hf":
        out = dcp_to_hf(args.input_dir, args.output_dir, args.origin_hf_dir, prefix=args.prefix, **options)
    else:
        options |= {"groupgemm": bool(args.groupgemm), "prefix": args.prefix}
        out = ranks_to_hf(args.hf_dir, args.ckpt_dir, args.save_dir, args.iter, **options)
    logging.getLogger(__name__).info("converted to %s", out)
    return 0
