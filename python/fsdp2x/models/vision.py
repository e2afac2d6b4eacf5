"""``shard_vision_language``: shards vision-language models so that a rank may have no image in a step.

Gathers must be the same on every rank, but a rank without an image never runs the vision tower. So the tower belongs to
the root's unit, which every rank gathers once at the root's forward and keeps until backward ends. Over a process
group, every rank must reduce the root at the same point. So a rank that did not run a trainable tower provides zeros
for it. The zeros depend on the text embedding, which every backward reaches.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.sharding.wrap import clean_name, plan_units

_USUAL_NAMES = ("visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens", "image_encoder")


@checked
def shard_vision_language(
    model: nn.Module,
    *,
    tower: str | list[str] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    **options: Any,
) -> nn.Module:
    """Shards a vision-language model with ``fully_shard``, so that a rank may skip the vision tower.

    Inputs of the tower are never cast: its first layer knows its dtype, and coordinates stay float32. Towers may be
    frozen or trainable. If no rank has an image in a step, the ``.grad`` of a trainable tower depends on the transport.
    With shared memory it stays None, and over a process group it is zero.

    Args:
        model: the complete model, not sharded yet.
        tower: paths of the modules that only images need (tower, projector), from the model or from a level below it.
            Default: modules with the usual names of towers.
        mp_policy: policy of the language model. Tower and root get it with ``cast_forward_inputs=False``.
        options: other arguments of ``fully_shard``, except ``auto_wrap``.

    Returns:
        ``model``.

    Raises:
        ValueError: there is no such tower, or the tower is trainable and the model has no ``get_input_embeddings``.
    """
    towers = _find_towers(model, tower)
    _Absent(model, [model.get_submodule(path) for path in towers])
    uncast = dataclasses.replace(mp_policy, cast_forward_inputs=False)
    for plan in plan_units(model):
        paths = [clean_name(name) for name in plan.names]
        inside = [any(path == root or path.startswith(root + ".") for root in towers) for path in paths]
        modules = [module for module, below in zip(plan.modules, inside, strict=True) if not below]
        if not modules:
            continue
        reshard = plan.reshard_after_forward
        reshard = options.get("reshard_after_forward") if reshard is None else reshard
        own = {**options, "reshard_after_forward": reshard, "mp_policy": uncast if any(inside) else mp_policy}
        fully_shard(modules[0] if len(modules) == 1 else modules, auto_wrap=False, **own)
    return fully_shard(model, auto_wrap=False, mp_policy=uncast, **options)


class _Absent:
    """Records which towers ran in the current forward, through forward hooks of the towers and the embedding."""

    def __init__(self, model: nn.Module, towers: list[nn.Module]) -> None:
        self._towers = towers
        self._model = weakref.ref(model)
        self._ran: set[int] = set()
        embedding = getattr(model, "get_input_embeddings", lambda: None)()
        if embedding is None:
            raise ValueError(
                f"fsdp2x.shard_vision_language: {type(model).__name__} has no get_input_embeddings(), which ranks "
                "without images need. Shard it with fsdp2x.fully_shard if every rank has an image in every step."
            )
        model.register_forward_pre_hook(self._begin)
        embedding.register_forward_hook(self._connect)
        for tower in towers:
            tower.register_forward_hook(self._see)

    def _begin(self, *_: Any) -> None:
        self._ran = set()

    def _see(self, tower: nn.Module, *_: Any) -> None:
        self._ran.add(id(tower))

    def _connect(self, module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
        model = self._model()
        if not torch.is_grad_enabled() or not isinstance(model, FSDPModule):
            return None
        # Otherwise the root's reduction is keyed by unit and has no place among the collectives of the other units.
        groups = model._get_fsdp_state().groups
        if not any(group.ranks.has_replicate_axis or not group.transport.shares_memory for group in groups):
            return None
        params = [(id(tower), param) for tower in self._towers for param in tower.parameters() if param.requires_grad]
        if not params:
            return None
        owners, tensors = zip(*params, strict=True)
        return _ZerosWhereAbsent.apply(self._ran, owners, output, *tensors)


class _ZerosWhereAbsent(torch.autograd.Function):
    """Returns ``output`` unchanged. Its backward gives zeros to parameters of towers that have not run by then."""

    @staticmethod
    def forward(ctx: Any, ran: set[int], owners: tuple[int, ...], output: torch.Tensor, *params: torch.Tensor):
        ctx.ran, ctx.owners, ctx.params = ran, owners, params
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        zeros = (
            None if owner in ctx.ran else torch.zeros_like(param)
            for owner, param in zip(ctx.owners, ctx.params, strict=True)
        )
        return None, None, grad, *zeros


def _find_towers(model: nn.Module, tower: str | list[str] | None) -> list[str]:
    paths = [clean_name(name) for name, _ in model.named_modules() if name]
    wanted = list(_USUAL_NAMES) if tower is None else [tower] if isinstance(tower, str) else list(tower)
    found: list[str] = []
    for name in wanted:
        ends = [path for path in paths if f".{path}".endswith(f".{name}")]
        if not ends and tower is not None:
            raise ValueError(f"fsdp2x.shard_vision_language: {type(model).__name__} has no module {name!r}")
        # A tower may contain a module with its own name (vision_tower.vision_model). The outermost counts.
        found += [path for path in ends if path.count(".") == min(end.count(".") for end in ends)]
    if not found:
        raise ValueError(
            f"fsdp2x.shard_vision_language: {type(model).__name__} has no module named {', '.join(_USUAL_NAMES)}. Pass "
            "tower= with its path."
        )
    return found
