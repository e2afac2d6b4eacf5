"""What each script ends with: its numbers, as text that keeps all bits, whose engine made them, how long steps took."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim.optimizer import register_optimizer_step_post_hook

# Without it some runs of stock end with "terminate called without an active exception", all their work done. Loaded
# alone: a run of stock has nothing else of fsdp2x.
_ENDS_OF_GLOO = Path(__file__).parents[3] / "python" / "fsdp2x" / "base" / "gloo_threads.py"
_spec = importlib.util.spec_from_file_location("gloo_threads", _ENDS_OF_GLOO)
_spec.loader.exec_module(importlib.util.module_from_spec(_spec))

first, ends = [], []


def note_end(optimizer, *_) -> None:
    """Of the first optimizer only: containers of optimizers, and optimizers of single parameters, step too."""
    first[:] = first or [optimizer]
    if optimizer is first[0]:
        ends.append(time.perf_counter())


register_optimizer_step_post_hook(note_end)


def write(values: list[float], model: torch.nn.Module) -> None:
    """To the path that is the script's first argument, with the rank behind it."""
    units = [type(module) for module in model.modules() if isinstance(module, FSDPModule)]
    assert units, "nothing is sharded"
    is_ours = all(any(kind.__module__.startswith("fsdp2x") for kind in unit.__mro__) for unit in units)
    answer = {"values": [float(value).hex() for value in values], "is_ours": is_ours, "units": len(units)}
    # Times are between ends of optimizer steps: the first step, which gathers lazily and records, is not among them.
    answer["seconds"] = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
        json.dump(answer, file)
