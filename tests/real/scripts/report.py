"""What each script ends with: its numbers, as text that keeps all bits, and whose engine made them."""

import json
import os
import sys

import torch
from torch.distributed.fsdp import FSDPModule


def write(values: list[float], model: torch.nn.Module) -> None:
    """To the path that is the script's first argument, with the rank behind it."""
    units = [type(module) for module in model.modules() if isinstance(module, FSDPModule)]
    assert units, "nothing is sharded"
    is_ours = all(any(kind.__module__.startswith("fsdp2x") for kind in unit.__mro__) for unit in units)
    with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
        json.dump({"values": [float(value).hex() for value in values], "is_ours": is_ours, "units": len(units)}, file)
