"""`fsdp2x config explain`: shows what a config means before it runs, without process group and weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2x.sharding.wrap import plan_units
from fsdp2x.train.config import TrainConfig, as_config_error
from fsdp2x.train.dialects import DIALECTS
from fsdp2x.train.load_config import OWN, Dialects, idle_settings, translate_file
from fsdp2x.train.model import build_on_meta, idle_expert_units, prepare, unit_policy
from fsdp2x.train.parse import Config, apply_overrides, build, parse_config, sections_of, show
from fsdp2x.train.strategy import MeshPlan, plan_mesh, resolve_batching, usual_node
from fsdp2x.train.tokenizer import choose_tokenizer, make_tokenizer
from fsdp2x.train.translate import Translation


@dataclass
class Explanation:
    path: str
    translation: Translation
    world_size: int
    plan: MeshPlan
    batching: str
    units: list[dict[str, Any]] = field(default_factory=list)  # of one kind: count, modules, reason, num_parameters
    idle: list[str] = field(default_factory=list)  # settings without effect for this model
    model: str = ""
    no_units: str = ""

    def to_dict(self) -> dict[str, Any]:
        found = self.translation
        return {
            "dialect": found.dialect,
            "settings": found.settings,
            "keys": [
                {**asdict(result), "became": dict(result.became), "has_effect": result.has_effect}
                for result in found.results
            ],
            "needs": found.needs,
            "world_size": self.world_size,
            "mesh": {"shape": self.plan.shape, "axes": self.plan.axes, "strategy": self.plan.name},
            "reshard_after_forward": self.plan.reshard_after_forward,
            "idle": self.idle,
            "model": self.model,
            "units": self.units,
        }

    def __str__(self) -> str:
        found = self.translation
        lines = [f"{self.path}: {found.title}", ""]
        if found.dialect == OWN:
            for section, values in found.settings.items():
                lines += [f"  {section}.{name} = {show(value)}" for name, value in (values or {}).items()]
        else:
            # Settings that a dialect adds without a key are in parentheses.
            shown = [(r.key if r.key.startswith("(") else f"{r.key}: {show(r.value)}", r) for r in found.results]
            width = min(max((len(text) for text, _ in shown), default=0), 72)
            lines += [f"  {text.ljust(width)}  {result}" for text, result in shown if result.has_effect]
            idle = found.without_effect()
            lines += ["", *(f"  {sentence}" for sentence in idle)] if idle else []
        if found.needs:
            lines += ["", "To run it needs:", *(f"  {need}" for need in found.needs)]
        lines += ["", *self.idle] if self.idle else []
        lines += ["", f"{self.world_size} rank(s)  {self.plan}", self.batching]
        lines.append(f"{self.model} in units:" if self.units else f"units: {self.no_units}")
        line = "  {count} x {modules}: {num_parameters:,} parameters each ({reason})"
        return "\n".join(lines + [line.format(**unit) for unit in self.units])


def explain(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    kind: type[TrainConfig] = TrainConfig,
    dialects: Dialects = DIALECTS,
    flags: Mapping[str, Any] | None = None,
) -> Explanation:
    """Translates and checks everything that is possible without the run itself.

    `world_size` defaults to the config's, else to its shard group. `local_world_size` defaults to one node of at most
    eight ranks.

    Raises:
        ConfigError: a run would raise it as well, except for settings that are missing, which are listed.
    """
    translation = translate_file(path, overrides, kind, dialects, flags)
    with translation.told():
        return _explain(translation, world_size, local_world_size, kind)


def _explain(
    translation: Translation, world_size: int | None, local_world_size: int | None, kind: type[TrainConfig]
) -> Explanation:
    settings = _completed(translation)
    sections = {name: build(name, settings, kind) for name in sections_of(kind) if name not in ("model", "data")}
    parallel, train = sections["parallel"], sections["train"]
    world_size = world_size or parallel.world_size or max(parallel.fsdp_size or 1, 1)
    plan = plan_mesh(parallel, world_size, local_world_size or usual_node(world_size))
    readers = world_size // parallel.sequence_ranks.total
    batching = resolve_batching(train, readers)
    sentence = kind.describe_step(sections, batching.batch_size, batching.accumulation, readers)
    if train.mode == "evaluate":
        sentence = f"evaluation only: {batching.eval_batch_size} sequences per rank and forward"
    found = Explanation(translation.path, translation, world_size, plan, sentence)
    model = settings.get("model") or {}
    if not (model.get("config") or model.get("path")):
        found.no_units = "they follow from the model, which is missing"
    else:
        _find_units(found, parse_config(settings, kind))
    return found


def parse_incomplete(translation: Translation, kind: type[Config]) -> Config:
    """Returns the config of settings that may lack what only a run needs."""
    return parse_config(_completed(translation), kind)


# Placeholders for settings that only a run needs.
_STAND_INS = {"data.files": "[text]"}


def _completed(translation: Translation) -> dict[str, Any]:
    missing = [need.partition("=")[0] for need in translation.needs]
    return apply_overrides(
        translation.settings, [f"{path}={_STAND_INS[path]}" for path in missing if path in _STAND_INS]
    )


def _find_units(found: Explanation, config: TrainConfig) -> None:
    found.idle += idle_settings(config, found.translation.settings)
    path, tokenizer = config.model.path, None
    if path is not None and not (Path(path).expanduser() / "config.json").is_file():
        found.no_units = f"model.path={path} is not a local directory with a config.json"
        return
    if path is None:  # use the tokenizer's vocabulary if it is here
        name = choose_tokenizer(config.data.tokenizer, None)
        tokenizer = make_tokenizer(name) if name == "bytes" or Path(name).is_dir() else None
    dtype, attention = getattr(torch, config.model.dtype), config.model.attn_implementation
    model = prepare(build_on_meta(config.model, dtype, tokenizer, attention), config)
    idle = idle_expert_units(model, config.parallel)
    found.idle += [f"parallel.expert_units={name}: {why}" for name, why in idle.items()]
    with as_config_error("parallel.auto_wrap"):
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
