"""Runs GRPO from one command: `torchrun -m fsdp2x.grpo CONFIG.yaml` is `fsdp2x grpo CONFIG.yaml`."""

import sys

from fsdp2x.train.grpo.config import GrpoConfig
from fsdp2x.train.grpo.load import load_grpo_config
from fsdp2x.train.grpo.trainer import GrpoTrainer, train_policy

__all__ = ["GrpoConfig", "GrpoTrainer", "load_grpo_config", "train_policy"]

if __name__ == "__main__":
    from fsdp2x.train.cli import main

    sys.exit(main(["grpo", *sys.argv[1:]]))
