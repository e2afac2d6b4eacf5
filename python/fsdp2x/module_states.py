"""Makes parameters and buffers equal on the ranks that hold copies of them, or compares them."""

from __future__ import annotations

import torch
from torch import nn

from fsdp2x.arguments import checked
from fsdp2x.runtime import replicas
from fsdp2x.runtime.state import UnitState
from fsdp2x.units.lookup import named_params, units_of


@checked
def sync_module_states(model: nn.Module) -> None:
    """Gives every replica the values of the first one; collective over the mesh of ``model``.

        fsdp2x.fully_shard(model, mesh=mesh)  # 2-D: (replicate, shard)
        fsdp2x.sync_module_states(model)

    Shards are broadcast over the replicate axis. Buffers and parameters that are not sharded (``ignored_params``) are
    broadcast over all ranks of the mesh, also of a 1-D one. Each keeps its dtype and device. Call it when replicas were
    built with different seeds, before the first forward; the name is FSDP1's. On a 1-D mesh shards stay as they are.

    Raises:
        ValueError: nothing in ``model`` is sharded.
        RuntimeError: a parameter is on the meta device.
    """
    states = units_of(model, "sync_module_states")
    _refuse_meta(model, "sync_module_states")
    for state in states:
        state.reshard()
    device = states[0].ranks.device
    replicas.make_equal(replicas.shard_copies(states), device)
    for group in _groups_of_all(states):
        replicas.make_equal({group: _copied(model)}, device)


@checked
def check_module_states(model: nn.Module, *, buffers: bool = True) -> None:
    """Compares copies on several ranks bit by bit, through checksums; collective over the mesh of ``model``.

    Shards are compared over the replicate axis; the first forward, and the first one after a load, do so too.
    Buffers and parameters that are not sharded are compared over all ranks of the mesh.

    Args:
        buffers: compare buffers, too. Running statistics of BatchNorm differ between ranks that see other data.

    Raises:
        ValueError: on every rank, if some copies differ: it names the first ones and two ranks. Or nothing in ``model``
            is sharded.
        RuntimeError: a parameter is on the meta device.
    """
    states = units_of(model, "check_module_states")
    _refuse_meta(model, "check_module_states")
    copies = replicas.shard_copies(states)
    for group in _groups_of_all(states):
        copies[group] = {**copies.get(group, {}), **_copied(model, buffers)}
    replicas.require_equal("fsdp2x.check_module_states", copies, replicas.shard_groups(states))


def _copied(model: nn.Module, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Returns the tensors that every rank of the mesh holds completely."""
    found: dict[str, torch.Tensor] = {name: param for name, param, record in named_params(model) if record is None}
    if buffers:
        found.update(model.named_buffers())
    return found


def _groups_of_all(states: list[UnitState]) -> list:
    """Returns process groups that together reach all ranks of the outermost unit's mesh from its first rank."""
    ranks = states[0].ranks
    groups = (ranks.replicate_group if ranks.replicas > 1 else None, ranks.group)
    return [group for group in groups if group is not None]


def _refuse_meta(model: nn.Module, caller: str) -> None:
    for name, param in model.named_parameters():
        if param.is_meta:
            raise RuntimeError(
                f"fsdp2x.{caller}: parameter {name!r} is on the meta device. Load or initialize the model first."
            )
