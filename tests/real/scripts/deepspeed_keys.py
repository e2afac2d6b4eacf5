"""Writes to its argument, as JSON, which keys DeepSpeed's own configuration has: of each section, "" is the whole."""

import importlib
import inspect
import json
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime import config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

# Keys of the whole are constants of these modules, or stand in the text of what reads them.
MODULES = ("runtime.constants", "runtime.config", "runtime.zero.config", "profiling.constants")


def fields_of(model) -> set[str]:
    return set(model.model_fields) | {field.alias for field in model.model_fields.values() if field.alias}


found = {"activation_checkpointing", "sequence_parallel_size"}
found = {key for key in found if f'"{key}"' in inspect.getsource(config)}
for name in (*MODULES, "runtime.activation_checkpointing.config"):
    values = vars(importlib.import_module(f"deepspeed.{name}"))
    found |= {value for key, value in values.items() if key.isupper() and isinstance(value, str)}
sections = {
    "": found,
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}
with open(sys.argv[1], "w") as file:
    json.dump({name: sorted(part if name == "" else fields_of(part)) for name, part in sections.items()}, file)
