"""`fsdp2x plan`: the memory of a run, predicted."""

from __future__ import annotations

import argparse
import dataclasses
import json

from fsdp2x.plan.optimizers import PLANNED
from fsdp2x.sharding.offload import OFFLOAD_MODES
from fsdp2x.train.commands.shared import DTYPE, positive, show


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "plan",
        help="predict the memory of a run",
        description=(
            "Units, padding, bytes at rest and at the peak of a step on rank 0, and bytes sent in a step, for a model "
            "that is built without weights. Activations come on top. Exit status 1: it does not fit --memory."
        ),
    )
    command.add_argument("config", metavar="CONFIG", help="config.json of a HuggingFace model, or a training YAML")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace the YAML's")
    command.add_argument("--world-size", type=positive, required=True, metavar="N", help="number of ranks")
    command.add_argument("--replicas", type=positive, metavar="R", help="copies of the shards (HSDP); divides N")
    command.add_argument(
        "--local-world-size",
        type=positive,
        metavar="N",
        help="ranks of one node; default all, or 8 if there are more and 8 divides them",
    )
    command.add_argument("--dtype", **DTYPE, help="of the parameters, also fp32, bf16 or fp16; default the config's")
    command.add_argument("--param-dtype", **DTYPE, help="of computation; default --dtype")
    command.add_argument("--reduce-dtype", **DTYPE, help="in which gradients are summed")
    command.add_argument(
        "--reshard-after-forward",
        type=_bool_or_int,
        metavar="true|false|M",
        help="free parameters after forward, or keep them sharded over M ranks; default: all but the last unit",
    )
    command.add_argument(
        "--auto-wrap",
        type=_auto_wrap,
        metavar="false|CLASS,..",
        help="modules that form units; default: the model's own plan",
    )
    command.add_argument(
        "--transport", choices=("process_group", "shm"), help="shm: all ranks of a group on one host share memory"
    )
    command.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        help="default: what a run of the YAML would choose on this machine, or cuda for a config.json",
    )
    command.add_argument(
        "--offload",
        choices=OFFLOAD_MODES,
        help="what is in host memory: nothing, the optimizer's state, gradients as well, or shards, too",
    )
    command.add_argument(
        "--optimizer",
        choices=PLANNED,
        help="adamw_int8: AdamW with moments_dtype='int8'; likewise the others",
    )
    command.add_argument(
        "--expert-parallel", type=positive, metavar="E", help="ranks that share the experts of a block"
    )
    command.add_argument(
        "--micro-batches", type=positive, metavar="M", help="backwards of a step, whose gradients add up"
    )
    command.add_argument(
        "--memory", metavar="SIZE", help="memory of one rank's device, such as 80GiB: says whether it fits"
    )
    command.add_argument("--explain", action="store_true", help="say what each row and column means, too")
    command.add_argument("--json", action="store_true", help="everything as one JSON object")
    command.set_defaults(run=_plan)


def _bool_or_int(text: str) -> bool | int:
    return {"true": True, "false": False}[text] if text in ("true", "false") else int(text)


def _auto_wrap(text: str) -> bool | list[str]:
    return False if text == "false" else text.split(",")


def _plan(args: argparse.Namespace) -> int:
    from fsdp2x.train.commands.plan_request import Request, make_plan, parse_bytes

    names = {field.name for field in dataclasses.fields(Request)}
    options = {name: value for name, value in vars(args).items() if name in names}
    memory_bytes = parse_bytes(args.memory) if args.memory is not None else None
    plan = make_plan(Request(**options, memory_bytes=memory_bytes))
    show(json.dumps(plan.to_dict(), indent=1) if args.json else str(plan))
    return 1 if plan.fits is False else 0
