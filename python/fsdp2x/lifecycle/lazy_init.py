"""Lazy initialization of a root: finds its units, takes their parameters, and makes the engine and transports.

``fully_shard`` makes the hooks of a unit. This file makes the rest of the engine's objects at the first forward.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Sequence

import torch

from fsdp2x.base.native import _C
from fsdp2x.lifecycle import comms, replicas
from fsdp2x.lifecycle.changes import (
    adopt_all,
    adopt_late,
    late_groups,
    meet,
    refuse_made_in_forward,
    share_late,
    snapshot,
    warn_of_raw_buffers,
)
from fsdp2x.lifecycle.hooks import follow_modules_of, watch_entries
from fsdp2x.lifecycle.transport_choice import TransportChoice
from fsdp2x.lifecycle.tree import check_tree, find_tree, is_on_a_stack, name_units, set_names
from fsdp2x.lifecycle.unit import RootState, ShardedUnit
from fsdp2x.sharding.mesh import post_forward_group
from fsdp2x.sharding.param_group import mark_aliases
from fsdp2x.sharding.transport import has_streams

logger = logging.getLogger("fsdp2x.roots")


def lazy_init(unit: ShardedUnit) -> None:
    """Makes the module of ``unit`` a root: the first one to run forward. Collective.

    Units below that were unsharded before move to it unchanged.

    Raises:
        RuntimeError: parameters are still on the meta device, or a unit below ran before its root.
        ValueError: two units claim one parameter, or replicas hold different values.
    """
    root = unit if unit.is_root is None else unit.shared.unit()
    if root is None:  # its module is gone
        unit.is_root, unit.shared, root = None, RootState(unit), unit
    with contextlib.ExitStack() as held:
        held.enter_context(root.initializing)
        if unit.is_root is None:
            _become_root(unit, held)
        elif root.root is None or root.root.has_replaced_shards:
            _adopt_again(root, held)  # another thread may have done it while this one waited
        replicas.require_equal_shards(unit.shared.unit() or unit)


def make_unit(unit: ShardedUnit) -> None:
    """Makes the engine's unit before the first forward, under a provisional root. Collective.

    Only the first forward shows which module is the root.
    """
    if unit.is_root is not None:
        if unit.root is None or unit.root.has_replaced_shards:
            lazy_init(unit)
        return
    with unit.initializing:
        if unit.unit is None:
            set_names(unit, [unit])
            _prepare([unit])
            unit.shared.tree = [unit]
            _make_root(unit)


def follow_modules(unit: ShardedUnit) -> None:
    """Adopts parameters that the modules of a root registered since its last forward. Collective if there are any.

    Raises:
        RuntimeError: there are some, and gradients wait for their reduction.
    """
    if not unit.is_root:
        return
    warn_of_raw_buffers(unit)
    root = unit.root
    if root is not None and (root.in_forward or root.in_backward or _C.is_same_tree(unit.modules_seen)):
        return
    with unit.initializing:
        _follow(unit)


def refuse_new_parameters(unit: ShardedUnit) -> None:
    """Raises RuntimeError if the root's forward that has ended registered parameters that need gradients now."""
    root = unit.root
    if root is None or root.in_forward or root.in_backward or not torch.is_grad_enabled():
        return
    if unit.is_root and not _C.is_same_tree(unit.modules_seen):
        refuse_made_in_forward(unit.shared.tree)


def remake_transports(unit: ShardedUnit, what: str) -> None:
    """Makes the root's transports again because ``what`` has changed. The error message names ``what``.

    Raises:
        RuntimeError: a forward or backward is running.
    """
    if unit.unit is None or not has_streams(unit.ranks.device):
        return
    if unit.is_running:
        raise RuntimeError(f"the {what} of collectives cannot be changed during forward or backward")
    _make_root(_root_of(unit))


def release_memory(unit: ShardedUnit) -> None:
    """Reshards all units of the root and frees what the engine keeps for the next forward. Collective.

    Pages of shared memory live as long as their transport, so it also makes that again.

    Raises:
        RuntimeError: a forward or backward is running.
    """
    if unit.root is None:
        return
    if unit.is_running:
        raise RuntimeError("the engine's memory cannot be released during forward or backward")
    root = _root_of(unit)
    for below in root.shared.tree:
        below.reshard()
    unit.root.release_idle()
    if any(group.transport.shares_memory for below in root.shared.tree for group in below.groups):
        _make_root(root)


def apply_comms(unit: ShardedUnit) -> None:
    """Passes changed custom collectives to the engine. Moves units from shared memory to a process group.

    Raises:
        RuntimeError: a forward or backward is running.
    """
    if unit.unit is None:
        return
    shares_memory = any(group.transport.shares_memory for group in unit.groups)
    if not (unit.needs_group and shares_memory):
        comms.apply(unit)
        return
    if unit.is_running:
        raise RuntimeError(f"{unit.needs_group} cannot be set during forward or backward")
    _make_root(_root_of(unit))


def _root_of(unit: ShardedUnit) -> ShardedUnit:
    root = unit.shared.unit()
    assert root is not None, "the unit has joined a root"
    return root


def _become_root(root: ShardedUnit, held: contextlib.ExitStack) -> None:
    if len(root.modules) > 1:
        raise RuntimeError(f"FSDP requires a single root module but got {root.modules}")
    tree = find_tree(root)
    for unit in tree:
        held.enter_context(unit.initializing)
    # Names, ties and replaced parameters are read from sharded modules.
    moves = [_C.UnitMove(unit.unit) for unit in tree if unit.unit is not None]
    name_units(root, tree)
    _adopt_late(root, tree)
    set_names(root, tree)
    _prepare(tree)
    root.shared.tree = tree
    _make_root(root)
    share_late(tree)
    if root.auto_reshard and root.options.reshard_after_forward:
        # Backward, if there is one, would gather it again at once.
        root.options.reshard_after_forward, root.options.reshard_without_grad = False, True
    _hook_tree(root)
    for move in moves:
        move.finish()
    root.modules_seen = snapshot(root.modules[0])
    follow_modules_of(root, follow_modules, refuse_new_parameters)
    watch_entries(root)
    warn_of_raw_buffers(root)
    engines = [group.engine for unit in tree for group in unit.groups]
    logger.debug(
        "fsdp2x: %s has %d unit(s) on %d rank(s), transport %s",
        type(root.modules[0]).__name__, len(tree), root.ranks.world,
        ", ".join(dict.fromkeys(engine.transport_name for engine in engines if engine is not None)) or "none",
    )  # fmt: skip


def _adopt_again(root: ShardedUnit, held: contextlib.ExitStack) -> None:
    """After the first forward: takes replaced shards, and makes the engine's objects again if necessary."""
    tree = root.shared.tree
    for unit in tree:
        held.enter_context(unit.initializing)
        unit.reshard()
    if root.unit is not None:
        _prepare(tree)
    if root.unit is None:
        _follow(root)


def _adopt_late(root: ShardedUnit, tree: Sequence[ShardedUnit]) -> bool:
    changed = adopt_late(root, tree)
    for unit in tree:
        if unit.unit is not None:
            unit.unit.set_groups([group.engine for group in unit.groups if group.engine is not None])
    return changed


def _follow(root: ShardedUnit) -> None:
    tree = root.shared.tree
    units = [unit.unit for unit in tree if unit.unit is not None]
    for made in units:
        for group in made.groups:
            group.forget_missing_owners()
    try:
        moves = [_C.UnitMove(made) for made in units]
    except RuntimeError as error:
        raise RuntimeError(
            "fsdp2x: modules or parameters were added to the model, or removed from it, between two "
            f"micro-batches. Do that after a step's last backward. ({error})"
        ) from error
    name_units(root, tree)
    if _adopt_late(root, tree) or root.unit is None:
        meet(root.ranks)
        set_names(root, tree)
        _prepare(tree)
        _make_root(root)
        share_late(tree)
        _hook_tree(root)
    for move in moves:
        move.finish()
    root.modules_seen = snapshot(root.modules[0])


def _hook_tree(root: ShardedUnit) -> None:
    tree = root.shared.tree
    for unit in tree:
        unit.is_root = unit is root
        if root.shared.has_equal_replicas:  # otherwise the comparison enables them
            unit.hooks.set_unit(unit.unit)
    root.hooks.set_all([unit.hooks for unit in tree])


def _prepare(tree: Sequence[ShardedUnit]) -> None:
    groups = [group for unit in tree for group in unit.groups]
    mark_aliases(groups)
    for group in groups:
        group.find_extensions()
    adopt_all(groups)
    check_tree(tree)


def _make_root(unit: ShardedUnit) -> None:
    """Makes the engine's root for the tree of ``unit``, and its transports. Collective."""
    tree = unit.shared.tree
    weak = weakref.ref(unit.modules[0])
    unit.shared.settings.set_forward_runs(lambda: (module := weak()) is not None and is_on_a_stack(module))
    root = _C.Root(unit.shared.settings)
    choice = TransportChoice(unit)
    new = [below for below in tree if below.unit is None]
    try:
        units = [_engine_unit(below) for below in tree]
        joins = [_transports(below, choice) for below in tree]
    except BaseException:
        # So the next forward tries again.
        for below in new:
            below.forget_unit()
        for group in late_groups(tree):
            if not group.is_shared:
                group.forget_engine()
        raise
    moves = [_C.UnitMove(below.unit) for below in tree if below.unit is not None]
    unit.shared.engine = root
    for below, made, transports in zip(tree, units, joins, strict=True):
        below.shared = unit.shared
        _join(below, root, made, choice, *transports)
    for below in tree:
        below.apply_prefetch()
        below.apply_reduce_buffers()
    for move in moves:
        move.finish()


def _engine_unit(unit: ShardedUnit) -> _C.Unit:
    for group in unit.groups:
        if group.engine is None:
            group.make_engine_group()
        comms.connect(group)
    if unit.unit is not None:
        return unit.unit
    groups = [group.engine for group in unit.groups if group.engine is not None]
    return _C.Unit(unit.name, unit.ranks.device, groups, unit.options)


def _transports(unit: ShardedUnit, choice: TransportChoice) -> tuple[list, list, list]:
    """Returns each group's transport, its all-reduce over replicas or None, and its transport after forward."""
    all_reduces = [
        choice.all_reduce_of(group.ranks) if group.ranks.has_replicate_axis and group.ranks.replicas > 1 else None
        for group in unit.groups
    ]
    small = []
    if unit.post_forward_world is not None:
        sharded = (group for group in unit.groups if not group.is_replicated)
        small = [choice.transport_of(post_forward_group(g.ranks, unit.post_forward_world)) for g in sharded]
    return [choice.transport_of(group.ranks) for group in unit.groups], all_reduces, small


def _join(
    unit: ShardedUnit,
    root: _C.Root,
    made: _C.Unit,
    choice: TransportChoice,
    transports: list,
    all_reduces: list,
    post_forward: list,
) -> None:
    """Puts the engine's unit, a new one or one of another root, under ``root``."""
    if len(made.groups) != len(unit.groups):
        made.set_groups([group.engine for group in unit.groups if group.engine is not None])
    root.add_unit(made, transports)
    for group, all_reduce in zip(unit.groups, all_reduces, strict=True):
        assert group.engine is not None, "made by _engine_unit"
        group.engine.explain = choice.explain_of(group.ranks.group)
        if all_reduce is not None:
            group.engine.all_reduce = all_reduce
            if isinstance(all_reduce, _C.HostAllReduce):
                root.add_replicas(all_reduce)
            group.engine.explain_all_reduce = choice.explain_of(group.ranks.replicate_group)
    for group, transport in zip(unit.groups, post_forward, strict=False):  # replicated groups come last
        assert unit.post_forward_world is not None and group.engine is not None
        smaller = post_forward_group(group.ranks, unit.post_forward_world)
        group.make_post_forward(smaller, choice.explain_of(smaller.group))
        root.add_post_forward(group.engine, transport)
    for group in unit.groups:
        choice.agree(root, group, unit.post_forward_world if post_forward else None)
    unit.unit = made
    comms.apply(unit)
