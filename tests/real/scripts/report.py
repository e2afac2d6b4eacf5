"""The report at the end of each script: its numbers as text with all bits, their engine, and the times of steps."""

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
    """Notes the first optimizer only, because containers of optimizers and per-parameter optimizers also step."""
    first[:] = first or [optimizer]
    if optimizer is first[0]:
        ends.append(time.perf_counter())


register_optimizer_step_post_hook(note_end)


def write(values: list[float], model: torch.nn.Module) -> None:
    """Writes to the path in the script's first argument, followed by the rank."""
    units = [type(module) for module in model.modules() if isinstance(module, FSDPModule)]
    assert units, "nothing is sharded"
    is_ours = all(any(kind.__module__.startswith("fsdp2x") for kind in unit.__mro__) for unit in units)
    answer = {"values": [float(value).hex() for value in values], "is_ours": is_ours, "units": len(units)}
    # Each time is from the end of one optimizer step to the next. The first step, which is slower, is not counted.
    answer["seconds"] = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
        json.dump(answer, file)
