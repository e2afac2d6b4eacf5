"""``shard_vision_language``: vision-language models whose ranks need not all have an image in a step.

Gathers must be the same on every rank, but a rank without an image never runs the vision tower. So the tower is left to
the root's unit, which every rank gathers once at the root's forward and keeps until backward ends; ranks without its
gradients count as zero. Where every rank always has an image, the tower's blocks can be units of their own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.api import fully_shard
from fsdp2x.hf.names import clean_name
from fsdp2x.wrap import plan_units

_USUAL_NAMES = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "image_encoder")


def shard_vision_language(
    model: nn.Module,
    *,
    tower: str | list[str] | None = None,
    every_rank_has_images: bool = False,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    **options: Any,
) -> nn.Module:
    """``fully_shard`` for a vision-language model: the language model as usual, the tower so that it may be skipped.

    Inputs of the tower are never cast, neither by its units nor by the root: its first layer knows its dtype, and
    coordinates stay float32. Frozen towers and trainable ones, on every transport.

    Args:
        model: the whole model, not sharded yet.
        tower: path or paths of the modules that only images need (tower, projector), whole or from a level below the
            model; default what is named as towers usually are.
        every_rank_has_images: False: the tower belongs to the root's unit and stays gathered from forward to the end of
            backward: memory of the whole tower, ranks with and without images in one step. True: the tower's blocks are
            units of their own, gathered one by one; a rank that skips the tower then ends in an error (shared memory)
            or in the timeout (process group), so give ranks without an image a small one with no label on it.
        mp_policy: of the language model; the tower and the root get it with ``cast_forward_inputs=False``.
        options: other arguments of ``fully_shard``, but ``auto_wrap``.

    Returns:
        ``model``.

    Raises:
        ValueError: no tower found, or ``tower`` names none.
    """
    towers = _find_towers(model, tower)
    uncast = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    for plan in plan_units(model):
        paths = [clean_name(name) for name in plan.names]
        inside = [any(path == root or path.startswith(root + ".") for root in towers) for path in paths]
        if any(inside) and not every_rank_has_images:
            modules = [module for module, below in zip(plan.modules, inside, strict=True) if not below]
        else:
            modules = list(plan.modules)
        if not modules:
            continue
        reshard = plan.reshard_after_forward
        reshard = options.get("reshard_after_forward") if reshard is None else reshard
        own = {**options, "reshard_after_forward": reshard, "mp_policy": uncast if any(inside) else mp_policy}
        fully_shard(modules[0] if len(modules) == 1 else modules, auto_wrap=False, **own)
    return fully_shard(model, auto_wrap=False, mp_policy=uncast, **options)


def _find_towers(model: nn.Module, tower: str | list[str] | None) -> list[str]:
    paths = [clean_name(name) for name, _ in model.named_modules() if name]
    wanted = list(_USUAL_NAMES) if tower is None else [tower] if isinstance(tower, str) else list(tower)
    found: list[str] = []
    for name in wanted:
        ends = [path for path in paths if f".{path}".endswith(f".{name}")]
        if not ends and tower is not None:
            raise ValueError(f"fsdp2x.shard_vision_language: {type(model).__name__} has no module {name!r}")
        # A tower may hold a module of its own name (vision_tower.vision_model): the outermost is meant.
        found += [path for path in ends if path.count(".") == min(end.count(".") for end in ends)]
    if not found:
        raise ValueError(
            f"fsdp2x.shard_vision_language: {type(model).__name__} has no module named {', '.join(_USUAL_NAMES)}; pass "
            "tower= with its path"
        )
    return found
