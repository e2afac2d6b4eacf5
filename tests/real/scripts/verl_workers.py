"""The workers that Ray starts for verl_ppo.py: verl's own worker on a CPU, with fsdp2x if FSDP2X_TRANSPORT is set."""

import os
import sys

if os.environ.get("FSDP2X_TRANSPORT"):
    import fsdp2x

    fsdp2x.install()
import torch
import transformers
import verl_cpu  # noqa: F401, it tells verl what it runs on
from torch.distributed.fsdp import FSDPModule
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import TrainingWorker

import report

_load = transformers.AutoModelForTokenClassification.from_pretrained


def with_torchs_attention(*args, **kwargs):
    """verl asks for flash attention by name for every critic."""
    return _load(*args, **kwargs | {"attn_implementation": "sdpa"})


transformers.AutoModelForTokenClassification.from_pretrained = with_torchs_attention


class CpuWorker(TrainingWorker):
    """An actor or a critic."""

    def __init__(self, config) -> None:
        # verl asks for "cpu:gloo" and its device's backend, which is the same here.
        torch.distributed.init_process_group("gloo")
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sums(self) -> list[float]:
        """Returns the sums of the full parameters. First checks whose units they are in."""
        units = [type(each) for each in self.engine.module.modules() if isinstance(each, FSDPModule)]
        ours = [unit for unit in units if any(kind.__module__.startswith("fsdp2x") for kind in unit.__mro__)]
        assert units and ours == (units if os.environ.get("FSDP2X_TRANSPORT") else []), units
        return [param.full_tensor().double().sum().item() for param in self.engine.module.parameters()]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, path: str, values: list[float]) -> None:
        sys.argv[1:] = [path]
        report.write(values, self.engine.module)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self) -> None:
        torch.distributed.destroy_process_group()
