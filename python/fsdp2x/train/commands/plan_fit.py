"""Finds settings that make a run fit: plans it again with one or two of a few settings changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2x.api import columns, readable
from fsdp2x.base.failures import ConfigError
from fsdp2x.train.commands.plan_request import MemoryPlan, is_model_config, make_plan

# Number of ways that are named.
_MOST = 2


@dataclass(frozen=True)
class Change:
    """A setting: its name and value for `make_plan`, and how a training YAML writes it, if it can."""

    name: str
    value: Any
    key: str | None = None

    def shown(self, is_yaml: bool) -> str:
        if is_yaml and self.key is not None:
            return self.key
        option = "--" + self.name.replace("_", "-")
        return option if self.value is True else f"{option} {self.value}"


def changes_of(plan: MemoryPlan) -> Iterator[Change]:
    """Yields the settings to try, those first that cost the least."""
    request, batch = plan.request, plan.batch
    if batch is not None and plan.activations is not None:
        if not batch.tiled_loss:
            yield Change("tiled_loss", True, "train.tiled_loss=true")
        if not batch.activation_checkpointing:
            yield Change("activation_checkpointing", True, "train.activation_checkpointing=true")
    if request.on_cuda and (plan.dtypes["param_dtype"] or plan.dtypes["dtype"]) == "float32":
        yield Change("param_dtype", "bfloat16", "parallel.param_dtype=bfloat16")
    if plan.has_frozen and plan.dtypes["dtype"] == "float32":
        yield Change("dtype", "bfloat16", "model.dtype=bfloat16")
    if request.on_cuda and request.offload == "none":
        if request.optimizer.startswith("adamw"):
            yield Change("offload", "optimizer", "parallel.offload=optimizer")
        yield Change("offload", "all", "parallel.offload=all")
    if plan.activations is not None and plan.activations.tokens > 1:
        half = plan.activations.tokens // 2
        yield Change("tokens", half, f"--tokens {half} (a smaller train.batch_size)")
    for times in (2, 4, 8):
        yield Change("world_size", request.world_size * times)


def find_fits(plan: MemoryPlan, asked: Mapping[str, Any], memory_bytes: int) -> list[str]:
    """Returns lines that name at most two ways to make the run fit: one setting each, or else two.

    `asked`: the arguments of `make_plan` that gave `plan`.
    """
    is_yaml = bool(asked["overrides"]) or not is_model_config(Path(asked["config"]).expanduser())
    tried = list(changes_of(plan))
    for number in (1, 2):
        found = list(itertools.islice(_fitting(itertools.combinations(tried, number), asked, memory_bytes), _MOST))
        if found:
            rows = [(" ".join(one.shown(is_yaml) for one in way), readable(total)) for way, total in found]
            return ["", "It fits with one of these:", *columns([(f"  {name}", size) for name, size in rows])]
    return ["", "No two of the settings that plan tries make it fit."]


def _fitting(
    ways: Iterator[tuple[Change, ...]], asked: Mapping[str, Any], memory_bytes: int
) -> Iterator[tuple[tuple[Change, ...], int]]:
    found: set[frozenset[str]] = set()
    for way in ways:
        names = frozenset(change.name for change in way)
        if names in found or len(names) < len(way):
            continue
        try:
            plan = make_plan(**{**asked, **{change.name: change.value for change in way}})
        except ConfigError:  # settings that exclude each other
            continue
        if plan.fits(memory_bytes):
            found.add(names)
            yield way, plan.total_bytes
