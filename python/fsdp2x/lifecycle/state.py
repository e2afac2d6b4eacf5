"""Lazy initialization of a root: finds its units, takes their parameters, and makes the engine and transports.

There is one ``UnitState`` for each ``fully_shard`` call. ``fully_shard.state(module)`` returns it. It owns the engine's
objects: the hooks from the start, unit and root from the first forward on.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import cast

from torch import nn

from fsdp2x.base.failures import number_unit
from fsdp2x.base.native import _C
from fsdp2x.lifecycle import comms, replicas
from fsdp2x.lifecycle.changes import adopt_all, adopt_late, late_groups, meet, share_late, snapshot, warn_of_raw_buffers
from fsdp2x.lifecycle.hooks import follow_modules_of, register_hooks, watch_entries
from fsdp2x.lifecycle.transport_choice import TransportChoice
from fsdp2x.lifecycle.tree import check_tree, find_tree, name_units, places_in, set_names
from fsdp2x.lifecycle.unit import ShardedUnit, UnitSettings
from fsdp2x.sharding.mesh import post_forward_group, smaller_world
from fsdp2x.sharding.param_group import ShardedParamGroup, mark_aliases
from fsdp2x.sharding.transport import has_streams


class UnitState(ShardedUnit):
    """A unit, which may be a root or belong to one."""

    def configure(
        self,
        modules: tuple[nn.Module, ...],
        managed: list[nn.Module],
        groups: list[ShardedParamGroup],
        settings: UnitSettings,
        reshard_after_forward: bool | int | None,
    ) -> None:
        """Makes this the unit of ``modules``. ``managed`` are the modules of its parameters."""
        vars(self).update(vars(settings))
        ranks, policy = settings.ranks, settings.mp_policy
        self.modules = modules
        # Before the unit has parameters, so ranks with models of different shapes count alike and errors name shapes.
        self.number = number_unit(self, ranks.mesh.mesh.flatten().tolist())
        self.groups, self.places = groups, places_in(managed)
        for group in groups:
            group.unit_state = weakref.ref(self)
        self.auto_reshard = reshard_after_forward is None
        gathers_alone = any(param.spec.unsharded is not None or param.is_wrapper for param in self.params)
        self.post_forward_world = smaller_world(
            reshard_after_forward, [ranks, *(group.ranks for group in groups)], gathers_alone=gathers_alone
        )
        is_off = reshard_after_forward is False or reshard_after_forward == 1 and reshard_after_forward is not True
        self.options.reshard_after_forward = not is_off
        self.options.cast_forward_inputs = policy.cast_forward_inputs
        self.options.param_dtype = policy.param_dtype
        self.options.output_dtype = policy.output_dtype
        register_hooks(self, managed)

    def lazy_init(self) -> None:
        """Makes this unit's module a root: the first one to run forward. Collective.

        Units below that were unsharded before move to it unchanged.

        Raises:
            RuntimeError: parameters are still on the meta device, or a unit below ran before its root.
            ValueError: two units claim one parameter, or replicas hold different values.
        """
        root = None if self.is_root is None else self.root_state()
        if not isinstance(root, UnitState):
            self.is_root, root = None, self  # there was no root yet, or its module is gone
        with contextlib.ExitStack() as held:
            held.enter_context(root._initializing)
            if self.is_root is None:
                self._become_root(held)
            elif root.root is None or root.root.has_replaced_shards:
                root._adopt_again(held)  # another thread may have done it while this one waited
            replicas.require_equal_shards(self.root_state() or self)

    @property
    def root_unit(self) -> UnitState:
        """The unit of the root that this unit joined."""
        state = self.root_state()
        assert isinstance(state, UnitState), "the unit has joined a root"
        return state

    def _adopt_again(self, held: contextlib.ExitStack) -> None:
        """After the first forward: takes replaced shards, and makes the engine's objects again if necessary."""
        for state in self.tree:
            held.enter_context(state._initializing)
            state.reshard()
        if self.unit is not None:
            self._prepare(self.tree)
        if self.unit is None:
            self._follow()

    def _become_root(self, held: contextlib.ExitStack) -> None:
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        tree = cast("list[UnitState]", find_tree(self))
        for state in tree:
            held.enter_context(state._initializing)
        # Names, ties and replaced parameters are read from sharded modules.
        moves = [_C.UnitMove(state.unit) for state in tree if state.unit is not None]
        name_units(self, tree)
        self._adopt_late(tree)
        set_names(self, tree)
        self._prepare(tree)
        self.tree = tree
        self._make_root()
        share_late(tree)
        options = self.live_options()
        if self.auto_reshard and options.reshard_after_forward:
            # Backward, if there is one, would gather it again at once.
            options.reshard_after_forward, options.reshard_without_grad = False, True
        self._hook_tree()
        for move in moves:
            move.finish()
        self.modules_seen = snapshot(self.modules[0])
        follow_modules_of(self)
        watch_entries(self)
        warn_of_raw_buffers(self)

    def _adopt_late(self, tree: Sequence[UnitState]) -> bool:
        changed = adopt_late(self, tree)
        for state in tree:
            if state.unit is not None:
                state.unit.set_groups([group.engine for group in state.groups if group.engine is not None])
        return changed

    def follow_modules(self) -> None:
        """Adopts parameters that the modules of a root registered since its last forward. Collective if there are any.

        Raises:
            RuntimeError: there are some, and gradients wait for their reduction.
        """
        if not self.is_root:
            return
        warn_of_raw_buffers(self)
        root = self.root
        if root is not None and (root.in_forward or root.in_backward or _C.is_same_tree(self.modules_seen)):
            return
        with self._initializing:
            self._follow()

    def _follow(self) -> None:
        units = [state.unit for state in self.tree if state.unit is not None]
        for unit in units:
            for group in unit.groups:
                group.forget_missing_owners()
        try:
            moves = [_C.UnitMove(unit) for unit in units]
        except RuntimeError as error:
            raise RuntimeError(
                "fsdp2x: modules or parameters were added to the model, or removed from it, between two "
                f"micro-batches. Do that after a step's last backward. ({error})"
            ) from error
        name_units(self, self.tree)
        if self._adopt_late(self.tree) or self.unit is None:
            meet(self.ranks)
            set_names(self, self.tree)
            self._prepare(self.tree)
            self._make_root()
            share_late(self.tree)
            self._hook_tree()
        for move in moves:
            move.finish()
        self.modules_seen = snapshot(self.modules[0])

    def _hook_tree(self) -> None:
        for state in self.tree:
            state.is_root = state is self
            if self.has_equal_replicas:  # otherwise the comparison enables them
                state.hooks.set_unit(state.unit)
        self.hooks.set_all([state.hooks for state in self.tree])

    def make_unit(self) -> None:
        """Makes the engine's unit before the first forward, under a provisional root. Collective.

        Only the first forward shows which module is the root.
        """
        if self.is_root is not None:
            if self.root is None or self.root.has_replaced_shards:
                self.lazy_init()
            return
        with self._initializing:
            if self.unit is None:
                set_names(self, [self])
                self._prepare([self])
                self.tree = [self]
                self._make_root()

    @staticmethod
    def _prepare(tree: Sequence[UnitState]) -> None:
        mark_aliases([group for state in tree for group in state.groups])
        groups = [group for state in tree for group in state.groups]
        for group in groups:
            group.find_extensions()
        adopt_all(groups)
        check_tree(tree)

    def _make_root(self) -> None:
        """Makes the engine's root for ``self.tree`` and its transports. Collective."""
        tree = self.tree
        root = _C.Root()
        root.is_last_backward = self.is_last_backward
        root.set_post_optimizer_event(self.post_optimizer_event)
        root.manual_finalization = self.manual_finalization
        choice = TransportChoice(self)
        new = [state for state in tree if state.unit is None]
        try:
            units = [state._engine_unit() for state in tree]
            joins = [state._transports(choice) for state in tree]
        except BaseException:
            # So the next forward tries again.
            for state in new:
                state.forget_unit()
            for group in late_groups(tree):
                if not group.is_shared:
                    group.forget_engine()
            raise
        moves = [_C.UnitMove(state.unit) for state in tree if state.unit is not None]
        for state, unit, transports in zip(tree, units, joins, strict=True):
            state._join(root, unit, choice, *transports)
        for state in tree:
            state.root_state = weakref.ref(self)
            state.apply_prefetch()
            state.apply_reduce_buffers()
        for move in moves:
            move.finish()

    def remake_transports(self, what: str) -> None:
        """Makes the root's transports again because ``what`` has changed. The error message names ``what``.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if self.unit is None or not has_streams(self.ranks.device):
            return
        if self.is_running:
            raise RuntimeError(f"the {what} of collectives cannot be changed during forward or backward")
        self.root_unit._make_root()

    def release_memory(self) -> None:
        """Reshards all units of the root and frees what the engine keeps for the next forward. Collective.

        Pages of shared memory live as long as their transport, so it also makes that again.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if self.root is None:
            return
        if self.is_running:
            raise RuntimeError("the engine's memory cannot be released during forward or backward")
        root_state = self.root_unit
        for state in root_state.tree:
            state.reshard()
        self.root.release_idle()
        if any(group.transport.shares_memory for state in root_state.tree for group in state.groups):
            root_state._make_root()

    def apply_comms(self) -> None:
        """Passes changed custom collectives to the engine. Moves units from shared memory to a process group.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if self.unit is None:
            return
        shares_memory = any(group.transport.shares_memory for group in self.groups)
        if not (self.needs_group and shares_memory):
            comms.apply(self)
            return
        if self.is_running:
            raise RuntimeError(f"{self.needs_group} cannot be set during forward or backward")
        self.root_unit._make_root()

    def _engine_unit(self):
        for group in self.groups:
            if group.engine is None:
                group.make_engine_group()
            comms.connect(group)
        if self.unit is not None:
            return self.unit
        return _C.Unit(
            self.name,
            self.ranks.device,
            [group.engine for group in self.groups if group.engine is not None],
            self.options,
        )

    def _transports(self, choice: TransportChoice) -> tuple[list, list, list]:
        """Returns each group's transport, its all-reduce over replicas or None, and its transport after forward."""
        all_reduces = [
            choice.all_reduce_of(group.ranks) if group.ranks.has_replicate_axis and group.ranks.replicas > 1 else None
            for group in self.groups
        ]
        small = []
        if self.post_forward_world is not None:
            sharded = (group for group in self.groups if not group.is_replicated)
            small = [choice.transport_of(post_forward_group(g.ranks, self.post_forward_world)) for g in sharded]
        return [choice.transport_of(group.ranks) for group in self.groups], all_reduces, small

    def _join(
        self, root, unit, choice: TransportChoice, transports: list, all_reduces: list, post_forward: list
    ) -> None:
        """Puts the engine's unit, a new one or one of another root, under ``root``."""
        if len(unit.groups) != len(self.groups):
            unit.set_groups([group.engine for group in self.groups])
        root.add_unit(unit, transports)
        for group, all_reduce in zip(self.groups, all_reduces, strict=True):
            assert group.engine is not None, "made by _engine_unit"
            group.engine.explain = choice.explain_of(group.ranks.group)
            if all_reduce is not None:
                group.engine.all_reduce = all_reduce
                if isinstance(all_reduce, _C.HostAllReduce):
                    root.add_replicas(all_reduce)
                group.engine.explain_all_reduce = choice.explain_of(group.ranks.replicate_group)
        for group, transport in zip(self.groups, post_forward, strict=False):  # replicated groups come last
            assert self.post_forward_world is not None and group.engine is not None
            smaller = post_forward_group(group.ranks, self.post_forward_world)
            group.make_post_forward(smaller, choice.explain_of(smaller.group))
            root.add_post_forward(group.engine, transport)
        for group in self.groups:
            choice.agree(root, group, self.post_forward_world if post_forward else None)
        self.unit, self.root = unit, root
        comms.apply(self)
