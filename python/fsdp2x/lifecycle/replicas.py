"""Compares copies of values on several ranks by checksums, and makes them equal by broadcasts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import exchange, first_problem, odd_rank
from fsdp2x.lifecycle.tree import named_params, units_of
from fsdp2x.lifecycle.unit import ShardedUnit

# Tensors of which the ranks of a group hold copies, by name.
Copies = dict[dist.ProcessGroup, dict[str, Tensor]]

# Not int64, because a sum of products modulo 2**64 loses the sign bits of two words.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_CHUNK_NUMEL = 1 << 20
_NUM_NAMED = 3


def shard_copies(states: Iterable[ShardedUnit]) -> Copies:
    """Returns the local shards of replicated units."""
    copies: Copies = {}
    for state in states:
        for group in state.groups:
            replicas = group.ranks.replicate_group
            if replicas is not None and group.ranks.replicas > 1 and dist.get_backend(replicas) != "fake":
                of_group = copies.setdefault(replicas, {})
                of_group.update({p.label: p.local for p in group.params})
    return copies


def shard_groups(states: Iterable[ShardedUnit]) -> list[dist.ProcessGroup]:
    """Returns the process groups of sharded units, each once, in the same order on every rank."""
    groups = dict.fromkeys(group.ranks.group for state in states for group in state.groups)
    return [group for group in groups if group is not None and dist.get_backend(group) != "fake"]


def require_equal_shards(root: ShardedUnit) -> None:
    """Compares the root's replicas, and enables the hooks of its units if they are equal. Collective over replicas.

    Raises:
        ValueError: see ``require_equal``. The next forward tries again.
    """
    if root.shared.has_equal_replicas:
        return
    tree = root.shared.tree
    require_equal("fully_shard", shard_copies(tree), shard_groups(tree))
    root.shared.has_equal_replicas = True
    for state in tree:
        state.hooks.set_unit(state.unit)


def check_again(state: ShardedUnit) -> None:
    """Makes the next forward of the root compare its replicas. Called after shards of ``state`` were loaded."""
    root = state.shared
    if not root.has_equal_replicas or state.is_running:
        return
    if shard_copies(root.tree):
        root.has_equal_replicas = False
        for below in root.tree:
            below.hooks.set_unit(None)  # type: ignore[arg-type]


def require_equal(caller: str, copies: Copies, others: Iterable[dist.ProcessGroup]) -> None:
    """Compares checksums over each group. Collective, also over ``others``, whose ranks raise as well.

    Raises:
        ValueError: copies differ. Raised on every rank, with the first differing names and the ranks.
    """
    problem = ""
    for group, tensors in copies.items():
        sums = exchange([checksum(tensor) for tensor in tensors.values()], group, "comparison of replicas")
        problem = problem or _difference(dist.get_process_group_ranks(group), list(tensors), sums)
    for group in [*copies, *others] if copies else ():
        problem = first_problem(problem, group, "comparison of replicas")
    if problem:
        raise ValueError(
            f"{caller}: {problem}. Build or load every replica with the same values. Or call "
            "fsdp2x.sync_module_states(model) before the first forward, which copies the first replica."
        )


def _difference(ranks: list[int], names: list[str], sums: list[list[int]]) -> str:
    odd = odd_rank(sums)
    if odd is None:
        return ""
    differing = [name for name, *values in zip(names, *sums, strict=True) if len(set(values)) > 1]
    named = ", ".join(map(repr, differing[:_NUM_NAMED]))
    more = f", and {len(differing) - _NUM_NAMED} more" if len(differing) > _NUM_NAMED else ""
    return f"ranks {ranks[0]} and {ranks[odd]} are replicas of each other, but hold different values of {named}{more}"


def make_equal(copies: Copies, device: torch.device) -> None:
    """Broadcasts the values of each group's first rank through ``device``. Collective."""
    with torch.no_grad(), torch_private.unobserved():
        for group, tensors in copies.items():
            for tensor in tensors.values():
                for part in _plain(tensor):
                    sent = part.to(device).contiguous()
                    dist.broadcast(sent, group=group, group_src=0)
                    if sent is not part:
                        part.copy_(sent)


def checksum(tensor: Tensor) -> int:
    """Hashes the bits, so signs of zero and payloads of NaN count. The result is the same on every machine."""
    return int(sum_of_bits(tensor)) % 2**64


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Returns ``checksum`` as an int64 scalar, without a wait for the device of ``tensor``.

    Sums integers modulo 2**64, each multiplied by a different odd number, so any single difference changes the sum.
    """
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for part in _plain(tensor):
        real = torch.view_as_real(part) if part.is_complex() else part
        bits = real.contiguous().flatten().view(_BITS[real.element_size()])
        odd = torch.arange(1, min(len(bits), _CHUNK_NUMEL) + 1, device=part.device) * -7046029254386353131
        odd = (odd ^ (odd >> 32)) | 1  # equal distances of places have unequal distances of factors
        for chunk in bits.split(_CHUNK_NUMEL):
            total = 31 * total + (chunk.long() * odd[: len(chunk)]).sum()
    return total


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the plain tensors inside a tensor subclass, or ``tensor`` itself."""
    tensor = tensor.detach()
    if not torch_private.is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


@checked
def sync_module_states(model: nn.Module) -> None:
    """Gives every replica the values of the first one. Collective over the mesh of ``model``.

        fsdp2x.fully_shard(model, mesh=mesh)  # 2-D: (replicate, shard)
        fsdp2x.sync_module_states(model)

    Call it before the first forward if replicas were built with different seeds. The name is FSDP1's. It broadcasts
    shards over the replicate axis, and buffers and ignored parameters over all ranks of the mesh. Each keeps its dtype
    and device. On a 1-D mesh, shards do not change.

    Raises:
        ValueError: nothing in ``model`` is sharded.
        RuntimeError: a parameter is on the meta device.
    """
    states = units_of(model, "sync_module_states")
    _refuse_meta(model, "sync_module_states")
    for state in states:
        state.reshard()
    device = states[0].ranks.device
    make_equal(shard_copies(states), device)
    for group in _groups_of_all(states):
        make_equal({group: _copied(model)}, device)


@checked
def check_module_states(model: nn.Module, *, buffers: bool = True) -> None:
    """Compares copies on several ranks bit by bit, through checksums. Collective over the mesh of ``model``.

    It compares shards over the replicate axis, as do the first forward and the first one after a load. It compares
    buffers and ignored parameters over all ranks of the mesh. It also checks that the shards are those that forward
    uses.

    Args:
        model: a module that contains FSDP units.
        buffers: whether to compare buffers. Running statistics of BatchNorm differ between ranks with different data.

    Raises:
        ValueError: copies differ (on every rank, with the first differing names and two ranks), or nothing in
            ``model`` is sharded.
        RuntimeError: a parameter is on the meta device, or other code replaced the memory of a shard. The latter is
            raised on every rank.
    """
    states = units_of(model, "check_module_states")
    _refuse_meta(model, "check_module_states")
    lost = next(filter(None, (group.lost_shard() for state in states for group in state.groups)), "")
    for group in _groups_of_all(states):
        lost = first_problem(lost, group, "check of shards")
    if lost:
        raise RuntimeError(f"fsdp2x.check_module_states: {lost}")
    copies = shard_copies(states)
    for group in _groups_of_all(states):
        copies[group] = {**copies.get(group, {}), **_copied(model, buffers)}
    require_equal("fsdp2x.check_module_states", copies, shard_groups(states))


def _copied(model: nn.Module, buffers: bool = True) -> dict[str, torch.Tensor]:
    """Returns the tensors that every rank of the mesh holds in full."""
    found: dict[str, torch.Tensor] = {name: param for name, param, record in named_params(model) if record is None}
    if buffers:
        found.update(model.named_buffers())
    return found


def _groups_of_all(states: list[ShardedUnit]) -> list:
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
