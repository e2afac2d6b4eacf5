"""`fsdp2x plan`: predicts the memory of a run."""

from __future__ import annotations

import argparse
import json

from fsdp2x.train.commands.shared import DTYPE, NamesOf, positive, show


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "plan",
        help="predict the memory of a run",
        description=(
            "Predict the memory of a rank at the peak of a training step: model state, buffers of the step, and "
            "activations, for a model that is built without weights. If it does not fit --memory, name settings that "
            "would make it fit. Exit status 1: it does not fit."
        ),
    )
    command.add_argument("config", metavar="CONFIG", help="config.json of a HuggingFace model, or a training YAML.")
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="Settings that replace the YAML's, or those of a run that trains CONFIG's model, such as lora.rank=16.",
    )
    command.add_argument(
        "--world-size", type=positive, metavar="N", help="Number of ranks. Default: the GPUs of this host, or 1."
    )
    command.add_argument("--replicas", type=positive, metavar="R", help="Copies of the shards (HSDP). Must divide N.")
    command.add_argument(
        "--local-world-size",
        type=positive,
        metavar="N",
        help="Ranks of one node. Default: all, or 8 if there are more and 8 divides them.",
    )
    command.add_argument("--dtype", **DTYPE, help="Parameter dtype (fp32, bf16, fp16). Default: from the config.")
    command.add_argument("--param-dtype", **DTYPE, help="Compute dtype. Default: --dtype.")
    command.add_argument("--reduce-dtype", **DTYPE, help="Dtype in which gradients are summed.")
    command.add_argument(
        "--reshard-after-forward",
        type=_bool_or_int,
        metavar="true|false|M",
        help="Free parameters after forward, or keep them sharded over M ranks. Default: all units except the last.",
    )
    command.add_argument(
        "--auto-wrap",
        type=_auto_wrap,
        metavar="false|CLASS,..",
        help="Modules that form units. Default: the model's own plan.",
    )
    command.add_argument(
        "--transport", choices=("process_group", "shm"), help="shm: all ranks of a group on one host share memory."
    )
    command.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="Device. Default: the one that the YAML names, else cuda.",
    )
    command.add_argument(
        "--offload",
        choices=NamesOf("OFFLOAD_MODES"),
        metavar="MODE",
        help="What CPU memory holds: nothing, optimizer state, gradients as well, or shards as well (%(choices)s).",
    )
    command.add_argument(
        "--offload-budget",
        metavar="SIZE",
        help="Size of the parameters to offload, largest first, such as 20GiB. Default: see --offload.",
    )
    command.add_argument(
        "--optimizer",
        choices=NamesOf("PLANNED"),
        metavar="NAME",
        help="Optimizer: %(choices)s. A suffix sets its moments_dtype, such as int8.",
    )
    command.add_argument(
        "--expert-parallel", type=positive, metavar="E", help="Ranks that share the experts of a block."
    )
    command.add_argument(
        "--micro-batches", type=positive, metavar="M", help="Backwards per step, whose gradients add up."
    )
    command.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help="Tokens of a rank's micro-batch, for the activations. Default: from the YAML, else 4096.",
    )
    command.add_argument(
        "--activation-checkpointing",
        action="store_const",
        const=True,
        help="Blocks are computed again in backward. Default: from the YAML, else no.",
    )
    command.add_argument(
        "--tiled-loss",
        action="store_const",
        const=True,
        help="The loss is computed from tiles of logits. Default: from the YAML, else no.",
    )
    command.add_argument(
        "--memory", metavar="SIZE", help="Memory of one rank's device, such as 80GiB, to check whether the run fits."
    )
    command.add_argument(
        "--explain", action="store_true", help="List the units and all parts of the sum, and explain them."
    )
    command.add_argument("--json", action="store_true", help="Print everything as one JSON object.")
    command.set_defaults(run=_plan)


def _bool_or_int(text: str) -> bool | int:
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text)


def _auto_wrap(text: str) -> bool | list[str]:
    return False if text == "false" else text.split(",")


def _plan(args: argparse.Namespace) -> int:
    from fsdp2x.train.commands.plan_fit import find_fits
    from fsdp2x.train.commands.plan_request import make_plan, parse_bytes

    others = ("run", "command", "parser", "memory", "explain", "json")
    memory_bytes = parse_bytes(args.memory) if args.memory is not None else None
    asked = {name: value for name, value in vars(args).items() if name not in others}
    plan = make_plan(**asked)
    if args.json:
        show(json.dumps(plan.to_dict(memory_bytes), indent=1))
    else:
        show(plan.text(memory_bytes, explain=args.explain))
        if memory_bytes is not None and not plan.fits(memory_bytes):
            show("\n".join(find_fits(plan, asked, memory_bytes)))
    return 1 if plan.fits(memory_bytes) is False else 0
