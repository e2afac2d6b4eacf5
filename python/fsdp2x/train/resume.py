"""Compares a run with that of the checkpoint from which it resumes.

A run of another function is refused. What only changes a step is said, with the setting that restores it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fsdp2x.base.failures import CheckpointError
from fsdp2x.train.config import TrainConfig
from fsdp2x.train.parts import Inputs
from fsdp2x.train.strategy import describe_step

# Keys of a HuggingFace config that change neither outputs nor loss, or that other settings decide.
_WITHOUT_EFFECT = {
    "_commit_hash", "_name_or_path", "architectures", "dtype", "initializer_range", "output_attentions",
    "output_hidden_states", "return_dict", "transformers_version", "use_cache",
}  # fmt: skip
# Settings that change steps but not what a step minimizes, and whole sections of them. The text says its own.
_OF_STEPS = (
    "train.clip", "train.seed", "train.steps", "train.epochs", "data.shuffle", "lora.dropout", "model.dtype",
    "model.freeze", "parallel.param_dtype", "parallel.reduce_dtype", "optimizer", "schedule",
)  # fmt: skip


def describe_run(config: TrainConfig, inputs: Inputs, model_config: Any) -> dict[str, Any]:
    """Returns what a checkpoint says of its run: plain values."""
    function: dict[str, Any] = {"data.packing": config.data.packing, "data.tokenizer": inputs.tokenizer.fingerprint}
    function |= _flat("model.config", json.loads(model_config.to_json_string(use_diff=False)))
    if (lora := config.lora).rank:
        function |= {"lora.rank": lora.rank, "lora.alpha": lora.alpha}
        function["lora.target_modules"] = sorted(lora.target_modules)
    batching, readers = inputs.batching, inputs.num_readers
    step = {"batch_size": batching.batch_size, "accumulation": batching.accumulation, "readers": readers}
    return {"function": function, "step": {**step, "ranks": inputs.world.size, "sequences": math.prod(step.values())}}


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(f"{prefix}.{name}", value)
        elif name not in _WITHOUT_EFFECT:
            found[f"{prefix}.{name}"] = value
    return found


def compare_runs(saved: Any, run: dict[str, Any], config: TrainConfig) -> list[str]:
    """Returns a sentence for each change since the checkpoint, whose ``extra`` is ``saved``.

    Raises:
        CheckpointError: the run computes another function, and checkpoint.accept_changes is false.
    """
    then = saved.get("run") if isinstance(saved, dict) else None
    if not isinstance(then, dict) or "function" not in then:  # of another program
        return []
    before, now, settings = then["function"], run["function"], config.model_dump()
    changes = [
        f"{key} was {_shown(key, before[key], saved['config'])} in the run of the checkpoint, and is "
        f"{_shown(key, now[key], settings)}"
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key]
    ]
    if changes and not config.checkpoint.accept_changes:
        raise CheckpointError(
            f"{'; '.join(changes)}. The resumed run would compute another function. Set what it was, or "
            "checkpoint.accept_changes=true."
        )
    if config.train.mode == "evaluate":
        return changes
    for section, values in settings.items():
        for name, value in values.items():
            key, old = f"{section}.{name}", saved["config"][section].get(name, value)
            if old != value and not {key, section}.isdisjoint(_OF_STEPS):
                was = f"{key} was {old!r} in the run of the checkpoint"
                changes.append(f"{was}, and is {value!r}. To restore it set {old!r}")
    return changes + _changes_of_step(then["step"], run["step"], config)


def _shown(key: str, value: Any, config: Mapping[str, Any]) -> str:
    if key != "data.tokenizer":
        return repr(value)
    return f"{config['data']['tokenizer'] or config['model']['path'] or 'bytes'} ({value})"


def _changes_of_step(before: dict[str, int], now: dict[str, int], config: TrainConfig) -> list[str]:
    if before == now:
        return []
    total, readers, per_rank = before["sequences"], now["readers"], now["batch_size"]
    if total == now["sequences"]:
        way = "The number of sequences is the same"
    elif total % (readers * per_rank) == 0 and config.train.global_batch_size is None:
        way = f"To restore it set train.accumulation={total // (readers * per_rank)}"
    elif total % readers == 0:
        way = f"To restore it set train.global_batch_size={total}, train.batch_size=null, and train.accumulation=null"
    else:
        way = f"To restore it use a number of data-parallel ranks that divides {total}"
    had, has = (describe_step(step["batch_size"], step["accumulation"], step["readers"]) for step in (before, now))
    return [
        f"a step has {has} of {now['ranks']}. In the run of the checkpoint it had {had} of {before['ranks']}. {way}"
    ]
