"""`fsdp2x config explain`: what a config means before it runs, without a process group and without weights."""

from __future__ import annotations

import typing
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..units.wrap import plan_units
from .config import ParallelConfig, TrainConfig, TrainSection, said_of
from .dialects import OWN, TITLES, Translation, translate_file
from .dialects.rules import show
from .idle import idle_settings
from .model import build_on_meta, idle_expert_units, prepare, unit_policy
from .parse import build, parse_config
from .resolve import resolve_batching
from .strategy import MeshPlan, plan_mesh, usual_node
from .tokenizer import Tokenizer, choose_tokenizer, make_tokenizer


@dataclass
class Explanation:
    path: str
    translation: Translation
    world_size: int
    plan: MeshPlan
    batching: str
    units: list[dict[str, Any]] = field(default_factory=list)  # of one kind: count, modules, reason, num_parameters
    idle: list[str] = field(default_factory=list)  # settings that mean nothing for this model
    model: str = ""
    no_units: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "dialect": self.translation.dialect,
            "settings": self.translation.settings,
            "keys": [
                {"key": fate.key, "value": fate.value, "became": dict(fate.became), "remark": fate.remark,
                 "has_effect": fate.has_effect}
                for fate in self.translation.fates
            ],
            "needs": self.translation.needs,
            "world_size": self.world_size,
            "mesh": {"shape": self.plan.shape, "axes": self.plan.axes, "strategy": self.plan.name},
            "reshard_after_forward": self.plan.reshard_after_forward,
            "idle": self.idle,
            "model": self.model,
            "units": self.units,
        }  # fmt: skip

    def __str__(self) -> str:
        found = self.translation
        lines = [f"{self.path}: {TITLES[found.dialect]}", ""]
        if found.dialect == OWN:
            lines += [f"  {line}" for line in _flat_settings(found.settings)]
        else:
            # What a dialect brings along without a key stands in parentheses.
            shown = [(f.key if f.key.startswith("(") else f"{f.key}: {show(f.value)}", f) for f in found.fates]
            width = min(max((len(text) for text, _ in shown), default=0), 72)
            lines += [f"  {text.ljust(width)}  {fate}" for text, fate in shown if fate.has_effect]
            idle = found.without_effect()
            lines += ["", *(f"  {sentence}" for sentence in idle)] if idle else []
        if found.needs:
            lines += ["", "To run it needs:", *(f"  {need}" for need in found.needs)]
        lines += ["", *self.idle] if self.idle else []
        lines += ["", f"{self.world_size} rank(s)  {self.plan}", self.batching]
        if self.units:
            lines.append(f"{self.model} in units:")
            lines += [
                "  {count} x {modules}: {num_parameters:,} parameters each ({reason})".format(**unit)
                for unit in self.units
            ]
        else:
            lines.append(f"units: {self.no_units}")
        return "\n".join(lines)


def explain(
    path: str | Path,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> Explanation:
    """Translates and checks everything that can be without the run itself.

    `world_size` defaults to what the config says, else 1; `local_world_size` to one node of at most eight.

    Raises:
        ConfigError: what a run would refuse as well, except what is missing altogether, which is listed.
    """
    translation = translate_file(path, overrides)
    parallel = build(ParallelConfig, translation.settings.get("parallel"), "parallel")
    train = build(TrainSection, translation.settings.get("train"), "train")
    for name, kind in typing.get_type_hints(TrainConfig).items():
        if name not in ("parallel", "train", "model", "data") or translation.settings.get(name):
            if not (name in ("model", "data") and translation.needs):
                build(kind, translation.settings.get(name), name)
    world_size = world_size or parallel.world_size or 1
    if local_world_size is None:
        local_world_size = usual_node(world_size)
    plan = plan_mesh(parallel, world_size, local_world_size)
    readers = world_size // parallel.sequence_parallel
    batching = resolve_batching(train, readers)
    sentence = (
        f"a step: {batching.batch_size} blocks x {batching.accumulation} micro-batches x {readers} ranks that read = "
        f"{readers * batching.accumulation * batching.batch_size} blocks"
    )
    if train.mode == "evaluate":
        sentence = f"evaluation only: {batching.eval_batch_size} blocks a rank and forward"
    found = Explanation(str(path), translation, world_size, plan, sentence)
    _find_units(found, translation.settings)
    return found


def _find_units(found: Explanation, settings: dict[str, Any]) -> None:
    model_settings = settings.get("model") or {}
    if not (model_settings.get("config") or model_settings.get("path")):
        found.no_units = "they follow from the model, which is missing"
        return
    # Where the text is does not matter here.
    data = settings.get("data") or {}
    config = parse_config({**settings, "data": {**data, "files": data.get("files") or ["text"]}})
    found.idle += idle_settings(config, settings)
    path = config.model.path
    if path is not None and not (Path(path).expanduser() / "config.json").is_file():
        found.no_units = f"model.path={path} is no local directory with a config.json"
        return
    model = build_on_meta(
        config.model,
        getattr(torch, config.model.dtype),
        tokenizer=_tokenizer(config),
        attn_implementation=config.model.attn_implementation,
    )
    model = prepare(model, config)
    idle = idle_expert_units(model, config.parallel)
    found.idle += [f"parallel.expert_units={name}: {why}" for name, why in idle.items()]
    with said_of("parallel.auto_wrap"):
        units = plan_units(model, unit_policy(model, config.parallel))
    found.model = f"{type(model).__name__} ({sum(p.numel() for p in model.parameters()):,} parameters)"
    counted: Counter[tuple[str, str, int]] = Counter()
    taken: set[int] = set()
    for unit in units:  # inner before outer: what an inner unit has taken is not the outer's
        params = [p for module in unit.modules for p in module.parameters() if id(p) not in taken]
        taken.update(map(id, params))
        numel = sum(p.numel() for p in {id(p): p for p in params}.values())
        counted[" + ".join(type(module).__name__ for module in unit.modules), unit.reason, numel] += 1
    rest = sum(p.numel() for p in model.parameters() if id(p) not in taken)
    if rest:
        counted[type(model).__name__, "the root: what is left", rest] += 1
    found.units = [
        {"count": count, "modules": names, "reason": reason, "num_parameters": numel}
        for (names, reason, numel), count in counted.items()
    ]


def _tokenizer(config: TrainConfig) -> Tokenizer | None:
    """For its vocabulary; None where it would have to be made from the text, or is not here."""
    if config.model.path is not None:
        return None
    name = choose_tokenizer(config.data.tokenizer, None)
    return None if name == "characters" or not (name == "bytes" or Path(name).is_dir()) else make_tokenizer(name)


def _flat_settings(settings: Any, path: str = "") -> list[str]:
    if isinstance(settings, dict) and settings and path.count(".") < 1:
        return [
            line for key, value in settings.items() for line in _flat_settings(value, f"{path}.{key}" if path else key)
        ]
    return [f"{path} = {show(settings)}"]
