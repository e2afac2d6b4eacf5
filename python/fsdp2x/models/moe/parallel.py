"""``expert_parallel``: gives each rank of a mesh axis some experts of every block and shards them over the other axes.

    mesh (efsdp 2, ep 2), 8 experts             ep 0                ep 1
                                     efsdp 0    rows 0..1 of 0..3   rows 4..5 of 4..7
                                     efsdp 1    rows 2..3 of 0..3   rows 6..7 of 4..7

Tokens of the ranks in a row (one ep group) go to their experts' owners and back. The ranks in a column hold the same
experts and reduce their gradients. Each expert unit divides by the number of all ranks, like every other unit.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.models.all_to_all import all_to_all
from fsdp2x.models.moe.units import PARALLEL_STATE, ExpertGroup, experts_of, touch
from fsdp2x.sharding.wrap import unsharded_class


@checked
def expert_parallel(model: nn.Module, mesh: DeviceMesh, *, ep: str = "ep", **options: Any) -> int:
    """Spreads fused experts over the axis ``ep`` of ``mesh`` and shards them over the other axes.

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        fsdp2x.moe.expert_parallel(model, mesh)
        fsdp2x.fully_shard(model, auto_wrap=True)          # everything else, over all ranks

    Every rank trains on different tokens. The experts' parameters become DTensors of their full shape in separate
    units: ``Shard(0)`` on ``ep``, and sharded over the other axes along dim 0, or along dim 1 if only that divides
    evenly. Gradients are the mean over all ranks of the mesh, and ``fsdp2x.clip_grad_norm_`` and ``fsdp2x.optim``
    include them. The choice of ``use_grouped_gemm`` stays.

    Args:
        model: a model that is not sharded yet, with the same weights on every rank. May be on the meta device.
        mesh: a mesh of all training ranks with the named axes (efsdp, ep), or (replicate, efsdp, ep).
        ep: name of the axis whose ranks share the experts of a block.
        options: arguments of ``fully_shard`` for the expert units: ``mp_policy`` (the same as elsewhere),
            ``reshard_after_forward``, ``transport``, ``timeout``.

    Returns:
        The number of blocks.

    Raises:
        ValueError: the mesh does not have these axes, the model has no fused experts, or their number is not divisible.
        NotImplementedError: a parameter does not have one row per expert.
        RuntimeError: experts are already sharded.
    """
    names = mesh.mesh_dim_names or ()
    if ep not in names or mesh.ndim not in (2, 3):
        raise ValueError(
            f"fsdp2x.expert_parallel: the mesh must have two or three named axes, one of them {ep!r}, got {mesh}. "
            f"Pass one such as init_device_mesh(device, (2, 2), mesh_dim_names=('efsdp', {ep!r}))."
        )
    groups = spreadable(model, mesh[ep].size())
    others = tuple(name for name in names if name != ep)
    data_mesh = mesh[others] if len(others) > 1 else mesh[others[0]]
    for group in groups:
        columns = cuts_columns(group, mesh[ep].size(), data_mesh.size(-1))
        _own_part(group, mesh[ep])
        fully_shard(
            group.experts,
            mesh=data_mesh,
            auto_wrap=False,
            shard_placement_fn=(lambda param: Shard(1)) if columns else None,
            **options,
        )
        cast("FSDPModule", group.experts).set_gradient_divide_factor(mesh.size())
    return len(groups)


def spreadable(model: nn.Module, world: int) -> list[ExpertGroup]:
    """Returns the experts of ``model`` that ``world`` ranks can share. Raises as ``expert_parallel`` does."""
    groups = experts_of(model, "expert_parallel")
    for group in groups:
        _check(group, world)
    return groups


def cuts_columns(group: ExpertGroup, ep: int, world: int) -> bool:
    """Returns whether ``world`` ranks share the columns of some experts, because rows do not divide evenly."""
    params = list(group.experts.parameters())
    return bool(group.num_experts // ep % world) and all(p.dim() > 1 and p.shape[1] % world == 0 for p in params)


def _check(group: ExpertGroup, world: int) -> None:
    if isinstance(group.experts, FSDPModule) or any(isinstance(p, DTensor) for p in group.experts.parameters()):
        raise RuntimeError(f"fsdp2x.expert_parallel: {group.name} is sharded already. Call it before fully_shard.")
    if group.num_experts % world:
        raise ValueError(
            f"fsdp2x.expert_parallel: {group.name} has {group.num_experts} experts, which {world} ranks cannot share "
            "evenly. Choose a size of the axis that divides it."
        )
    for name, param in group.experts.named_parameters():
        if "." in name or param.shape[0] != group.num_experts:
            raise NotImplementedError(
                f"fsdp2x.expert_parallel: {group.name}.{name} of shape {tuple(param.shape)} is not one row per expert "
                f"({group.num_experts}). Shard such a model with fully_shard or shard_experts."
            )


@dataclass(frozen=True)
class _State:
    group: dist.ProcessGroup
    num_experts: int
    num_local: int


def _own_part(group: ExpertGroup, mesh: DeviceMesh) -> None:
    """Makes parameters DTensors of which this rank keeps its experts. Their forward exchanges the tokens."""
    experts, world = group.experts, mesh.size()
    num_local = group.num_experts // world
    first = mesh.get_local_rank() * num_local
    for name, param in experts.named_parameters():
        local = param.detach()[first : first + num_local].clone()
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=param.shape, stride=param.stride())
        experts._parameters[name] = own = nn.Parameter(whole, requires_grad=param.requires_grad)
        torch_private.set_grad_dtype(own, torch_private.grad_dtype_of(param))
    setattr(experts, PARALLEL_STATE, _State(mesh.get_group(), group.num_experts, num_local))
    experts.forward = types.MethodType(_forward, experts)


def _forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    state: _State = getattr(self, PARALLEL_STATE)
    module, forward, params = _local_experts(self, state)

    def run(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if rows.shape[0] == 0:
            # Backward must still pass here, because other ranks wait in its all-to-all and the unit in its reduction.
            zero = touch(params)
            return rows if zero is None else rows + zero.to(rows.dtype)
        ones = rows.new_ones(rows.shape[0], 1)
        return forward(module, rows, numbers.unsqueeze(1), ones)

    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    top_k = top_k_index.shape[-1]
    out = dispatch(
        tokens,
        top_k_index.reshape(-1, top_k),
        top_k_weights.reshape(-1, top_k),
        state.num_experts,
        state.group,
        run,
    )
    return out.view(*hidden_states.shape[:-1], out.shape[-1])


def _local_experts(experts: nn.Module, state: _State) -> tuple[nn.Module, Callable, list[torch.Tensor]]:
    """Returns the local experts as a module of plain tensors, the forward of their class, and those tensors."""
    cls = unsharded_class(experts)
    twin = object.__new__(cls)
    twin.__dict__.update(experts.__dict__)
    twin.__dict__.pop("forward", None)
    params = {name: cast("DTensor", p).to_local() for name, p in experts._parameters.items() if p is not None}
    twin.__dict__["_parameters"] = {name: None for name, param in experts._parameters.items() if param is None}
    twin.__dict__.update(params)
    for name, value in experts.__dict__.items():
        if "expert" in name and type(value) is int and value == state.num_experts:
            twin.__dict__[name] = state.num_local
    return twin, cls.forward, list(params.values())


# ---- sends tokens to the ranks that own their experts, and back

Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def dispatch(
    hidden: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    num_experts: int,
    group: dist.ProcessGroup,
    experts: Experts,
) -> torch.Tensor:
    """Returns the weighted sum over each token's chosen experts. Collective over ``group``, forward and backward.

        rank r    tokens x top-k choices, sorted by expert  | to rank 0 | to rank 1 | ...  (rows of the hidden width)
                  --- all-to-all --->                       | from 0: my e0, my e1 | from 1: my e0, my e1 | ...
                  my experts, one call
                  <-- all-to-all ---                        the same rows in the same places; unsorted, weighted, summed

    Rows travel as bytes, so every dtype works on every backend.

    Args:
        hidden: (T, H) tokens of this rank.
        index: (T, K) numbers of the chosen experts, 0 to ``num_experts - 1``.
        weights: (T, K) weights of the choices.
        num_experts: the number of experts of all ranks. Rank r of the group owns the r-th part of them.
        experts: a function of (N, H) rows and (N,) local expert numbers that returns (N, H') rows, also for N = 0. Its
            output depends on the rows.
    """
    world = dist.get_world_size(group)
    num_tokens, top_k = index.shape
    chosen = index.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).view(world, num_experts // world)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    # One copy to the CPU for both directions.
    sends, receives = torch.stack([counts.sum(1), received.sum(1)]).tolist()
    rows = all_to_all(hidden[order // top_k], group, sends, receives)
    local = torch.arange(num_experts // world, device=hidden.device).repeat(world)
    out = experts(rows, torch.repeat_interleave(local, received.reshape(-1)))
    back = all_to_all(out, group, receives, sends)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    weighted = back[places].view(num_tokens, top_k, back.shape[1]) * weights.unsqueeze(-1)
    return weighted.sum(1).to(hidden.dtype)
