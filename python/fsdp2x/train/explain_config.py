"""`fsdp2x config explain`: shows what a config means before it runs, without process group and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2x.api import how_to_download, plan_units
from fsdp2x.base.failures import reworded
from fsdp2x.train.config import ConfigError, TrainConfig, known_keys
from fsdp2x.train.config_file import ConfigFile, idle_settings, parse_config
from fsdp2x.train.model import build_on_meta, idle_expert_units, prepare, unit_policy
from fsdp2x.train.parse import show
from fsdp2x.train.strategy import MeshPlan, describe_step, plan_mesh, resolve_batching, usual_node
from fsdp2x.train.tokenizer import choose_tokenizer, make_tokenizer

# Settings that decide a run the most. Those that the file does not set are shown with their defaults.
_DECISIVE = (
    "model.dtype", "data.block_size", "lora.rank", "optimizer.name", "optimizer.lr", "optimizer.weight_decay",
    "schedule.kind", "schedule.warmup_steps", "parallel.param_dtype", "train.steps", "train.epochs",
    "train.batch_size", "train.accumulation", "train.clip", "train.eval_every", "checkpoint.save_every",
    "checkpoint.save_minutes", "checkpoint.keep", "logging.output",
)  # fmt: skip


@dataclass
class Explanation:
    file: ConfigFile
    world_size: int
    plan: MeshPlan
    batching: str
    needs: list[str]
    defaults: dict[str, Any]  # in effect, of decisive settings
    units: list[dict[str, Any]] = field(default_factory=list)  # of one kind: count, modules, reason, num_parameters
    idle: list[str] = field(default_factory=list)  # settings without effect for this model
    model: str = ""
    no_units: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": self.file.settings,
            "defaults": self.defaults,
            "needs": self.needs,
            "world_size": self.world_size,
            "mesh": {"shape": self.plan.shape, "axes": self.plan.axes, "strategy": self.plan.name},
            "reshard_after_forward": self.plan.reshard_after_forward,
            "idle": self.idle,
            "model": self.model,
            "units": self.units,
        }

    def __str__(self) -> str:
        given = {
            f"{section}.{name}": value
            for section, values in self.file.settings.items()
            for name, value in (values or {}).items()
        }
        lines = [f"{self.file.path}:", "", *map(_line, given.items())]
        lines += ["", "Defaults in effect:", "", *map(_line, self.defaults.items())]
        if self.needs:
            lines += ["", "To run it needs:", *(f"  {need}" for need in self.needs)]
        lines += ["", *self.idle] if self.idle else []
        lines += ["", f"{self.world_size} rank(s)  {self.plan}", self.batching]
        lines.append(f"{self.model} in units:" if self.units else f"units: {self.no_units}")
        line = "  {count} x {modules}: {num_parameters:,} parameters each ({reason})"
        return "\n".join(lines + [line.format(**unit) for unit in self.units])


def _line(setting: tuple[str, Any]) -> str:
    key, value = setting
    return f"  {key} = {show(value)}\n      {known_keys()[key].help}"


def explain(
    path: str | Path,
    overrides: Iterable[str] = (),
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> Explanation:
    """Checks everything that is possible without the run itself.

    `world_size` defaults to the config's, else to its shard group. `local_world_size` defaults to one node of at most
    eight ranks.

    Raises:
        ConfigError: a run would raise it as well, except for settings that are missing, which are listed.
    """
    file = ConfigFile.read(path, overrides)
    with file.located():
        return _explain(file, world_size, local_world_size)


def _explain(file: ConfigFile, world_size: int | None, local_world_size: int | None) -> Explanation:
    config = parse_config(file.settings)
    parallel, train = config.parallel, config.train
    world_size = world_size or parallel.world_size or max(parallel.fsdp_size or 1, 1)
    plan = plan_mesh(parallel, world_size, local_world_size or usual_node(world_size))
    readers = world_size // parallel.sequence_ranks.total
    batching = resolve_batching(train, readers)
    sentence = f"a step: {describe_step(batching.batch_size, batching.accumulation, readers)}"
    if train.mode == "evaluate":
        sentence = f"evaluation only: {batching.eval_batch_size} sequences per rank and forward"
    defaults = {key: known_keys()[key].default for key in _DECISIVE if not _is_given(config, key)}
    defaults |= {"train.batch_size": batching.batch_size, "train.accumulation": batching.accumulation}
    if train.steps is None:
        defaults["train.epochs"] = train.epochs or 1
    defaults = {key: value for key, value in defaults.items() if value is not None and not _is_given(config, key)}
    found = Explanation(file, world_size, plan, sentence, config.missing, defaults)
    if not config.model.missing:
        _find_units(found, config)
    else:
        found.no_units = "they follow from the model, which is missing"
    return found


def _is_given(config: TrainConfig, key: str) -> bool:
    section, _, name = key.partition(".")
    return name in getattr(config, section).model_fields_set


def _find_units(found: Explanation, config: TrainConfig) -> None:
    found.idle += idle_settings(config)
    path, tokenizer = config.model.path, None
    if path is not None and not (Path(path).expanduser() / "config.json").is_file():
        found.no_units = f"model.path={path} is not a local directory with a config.json.{how_to_download(path)}"
        return
    if path is None:  # use the tokenizer's vocabulary if it is here
        name = choose_tokenizer(config.data.tokenizer, None)
        tokenizer = make_tokenizer(name) if name == "bytes" or Path(name).is_dir() else None
    dtype, attention = torch.float32, config.model.attn_implementation
    model = prepare(build_on_meta(config.model, dtype, tokenizer, attention), config)
    idle = idle_expert_units(model, config.parallel)
    found.idle += [f"parallel.expert_units={name}: {why}" for name, why in idle.items()]
    with reworded(ConfigError, "parallel.auto_wrap"):
        units = plan_units(model, unit_policy(model, config.parallel))
    num_parameters = sum(p.numel() for p in model.parameters())
    found.model = f"{type(model).__name__} ({num_parameters:,} parameters)"
    counted: Counter[tuple[str, str, int]] = Counter()
    taken: set[int] = set()
    for unit in units:  # inner before outer: parameters of an inner unit are not the outer's
        params = {id(p): p.numel() for module in unit.modules for p in module.parameters() if id(p) not in taken}
        taken |= set(params)
        names = " + ".join(type(module).__name__ for module in unit.modules)
        counted[names, unit.reason, sum(params.values())] += 1
    rest = sum(p.numel() for p in model.parameters() if id(p) not in taken)
    if rest:
        counted[type(model).__name__, "the root: what is left", rest] += 1
    found.units = [
        {"count": count, "modules": names, "reason": reason, "num_parameters": numel}
        for (names, reason, numel), count in counted.items()
    ]
