"""`fsdp2x grpo`: trains a policy with reinforcement learning from a YAML file."""

from __future__ import annotations

import argparse

from fsdp2x.train.commands.shared import add_resume_from, mistake, split_words


def add(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "grpo",
        help="train a policy from rewards",
        description=(
            "Sample responses, reward them and update the policy by the settings of a YAML file: GRPO, its relatives, "
            "or PPO. Under torchrun it uses all ranks, else this process. `fsdp2x config list --command grpo` lists "
            "all keys. Flags of other trainers follow --, with or without a file: fsdp2x grpo -- --num-rollout 20 ..."
        ),
    )
    command.add_argument("config", nargs="?", default="", metavar="CONFIG.yaml")
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Settings that replace the file's: rollout.group_size=16."
    )
    add_resume_from(command)
    command.set_defaults(run=_grpo)


def _grpo(args: argparse.Namespace) -> int:
    from fsdp2x.rl.rollout.client import RolloutError
    from fsdp2x.rl.sync.targets.base import SyncError
    from fsdp2x.train.config import TrainingError
    from fsdp2x.train.grpo.config import GrpoConfig
    from fsdp2x.train.grpo.dialects import DIALECTS
    from fsdp2x.train.grpo.flags import read_flags
    from fsdp2x.train.grpo.trainer import train_policy
    from fsdp2x.train.load_config import config_of, translate_file

    path, overrides, flags = split_words([args.config, *args.overrides])
    translation = translate_file(path, overrides, GrpoConfig, DIALECTS, read_flags(flags))
    config = config_of(translation, GrpoConfig, resume_from=args.resume_from)
    try:
        with translation.told():
            train_policy(config)
    except (TrainingError, RolloutError, SyncError) as error:
        mistake(error)
        return 1
    return 0
