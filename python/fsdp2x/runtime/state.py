"""The Python side of one unit: its modules, its parameters, its settings, and the lazy initialization of a root.

One ``UnitState`` exists per ``fully_shard`` call; ``fully_shard.state(module)`` returns it. The engine's objects
(hooks from the start, unit and root from the first forward on) hang below it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.runtime import calls, comms, moving, replicas, torch_private, wire_formats
from fsdp2x.runtime.hooks import follow_modules_of, register_hooks
from fsdp2x.runtime.late import adopt_late, late_groups, meet, share_late, snapshot
from fsdp2x.runtime.mesh import ShardGroup, post_forward_group, smaller_world
from fsdp2x.runtime.native import _C
from fsdp2x.runtime.offload import Offload
from fsdp2x.runtime.params import GroupParams, mark_aliases
from fsdp2x.runtime.past_root import watch_entries
from fsdp2x.runtime.sharded_param import ShardedParam
from fsdp2x.runtime.transport import TransportChoice, has_streams
from fsdp2x.runtime.tree import Place, WeakTuple, check_tree, find_tree, name_units, places_in, set_names
from fsdp2x.runtime.upstream_names import StateNames


class UnitState(StateNames, torch_private.State):
    """State of one unit. Attributes without a comment are what the call was given."""

    modules = WeakTuple()
    tree = WeakTuple()  # all units below a root, set on the root only

    def __init__(self) -> None:
        super().__init__()
        self.ranks: ShardGroup | None = None
        self.number = calls.UnitNumber()
        self.mp_policy = MixedPrecisionPolicy()
        self.transport = "auto"
        self.timeout: timedelta | None = None
        self.checks_ranks = True
        self.groups: list[GroupParams] = []  # one per mesh; none without parameters
        self.offload = Offload()
        self.places: list[Place] = []  # of all parameters when the unit was made, ignored ones among them
        self.auto_reshard = True  # reshard_after_forward was None: the root keeps its parameters
        self.post_forward_world: int | None = None  # reshard_after_forward as an int
        self.is_root: bool | None = None  # decided at lazy initialization
        self.hooks = None  # _C.UnitHooks
        self.unit = None  # _C.Unit, from lazy initialization on, or from an earlier unshard()
        self.root = None  # _C.Root, shared by all units of one root module; provisional until is_root is decided
        self.modules_seen: tuple = ()  # by the root's last forward; see late.snapshot
        self.options = _C.UnitOptions()  # becomes the unit's own at lazy initialization
        self.names: list[str] = []  # FQNs of the modules from the root
        self.prefetch: dict[
            str, list[weakref.ref[UnitState]]
        ] = {}  # engine setter -> units, given before or after the unit exists
        self.raw_buffers: moving.RawBuffers = []  # of to_empty, until the next forward
        self.comms = comms.CustomComms()  # the user's collectives and hooks
        self.root_state: Callable[[], UnitState | None] = lambda: None  # weak reference to the state of the root
        # Threads may come first to one root side by side; ranks meet while one of them makes it, without the GIL. Ranks
        # that are threads of one process have a model each.
        self._initializing = threading.RLock()
        # Read on the root only.
        self.has_equal_replicas = False  # since the last load
        self.entered: Callable[[], nn.Module | None] | None = None  # the module below that was called past it
        self.is_last_backward = True
        self.post_optimizer_event: Any = None  # given before there is a root
        self.manual_finalization = False
        self.reduction_pending = False  # a handle of finalize_backward was not waited for
        self.generation = 0  # counts resets, which invalidate handles
        self.comm_memory: str | None = None  # where slots come from: "process_group", "symmetric"; None: torch
        self.max_reduce_buffers: int | None = None  # None: the engine's default
        self.layers: dict[torch.device, Any] | None = None  # streams of several roots; None: the root's own

    def configure(
        self,
        modules: tuple[nn.Module, ...],
        ranks: ShardGroup,
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | int | None,
        transport: str,
        timeout: timedelta | None,
        checks_ranks: bool,
        groups: list[GroupParams],
        managed: list[nn.Module],
    ) -> None:
        self.modules, self.ranks, self.mp_policy, self.checks_ranks = modules, ranks, mp_policy, checks_ranks
        self.number = calls.number_unit(self, ranks.mesh.mesh.flatten().tolist())
        self.transport, self.timeout, self.groups = transport, timeout, groups
        self.places = places_in(managed)
        for group in groups:
            group.unit_state = weakref.ref(self)
        self.auto_reshard = reshard_after_forward is None
        gathers_alone = any(param.spec.unsharded is not None or param.is_wrapper for param in self.params)
        self.post_forward_world = smaller_world(
            reshard_after_forward, [ranks, *(group.ranks for group in groups)], gathers_alone=gathers_alone
        )
        is_off = reshard_after_forward is False or reshard_after_forward == 1 and reshard_after_forward is not True
        self.options.reshard_after_forward = not is_off
        self.options.cast_forward_inputs = mp_policy.cast_forward_inputs
        self.options.param_dtype = mp_policy.param_dtype
        self.options.output_dtype = mp_policy.output_dtype
        register_hooks(self, managed)

    def live_options(self):
        """The settings the engine reads: the unit's once it exists."""
        return self.options if self.unit is None else self.unit.options

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """From the next forward on; nothing is kept by fewer ranks any more."""
        self.post_forward_world = None
        for group in self.groups:
            if group.engine is not None:
                group.engine.clear_post_forward()
        options = self.live_options()
        options.reshard_after_forward, options.reshard_without_grad = reshard, False

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Of the whole root."""
        (self.root_state() or self).is_last_backward = is_last_backward
        if self.root is not None:
            self.root.is_last_backward = is_last_backward

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters of all groups."""
        return [param for group in self.groups for param in group.params]

    # --- lazy initialization ---

    def lazy_init(self) -> None:
        """Makes this unit's module a root: the first one to run forward. Collective.

        Units below that were unsharded before move to it, as they are.

        Raises:
            RuntimeError: parameters are still on the meta device; a unit below was run before its root.
            ValueError: two units claim one parameter, or replicas hold different values.
        """
        root = None if self.is_root is None else self.root_state()
        if root is None:
            self.is_root, root = None, self  # nobody was the root yet, or its module is gone
        with contextlib.ExitStack() as held:
            held.enter_context(root._initializing)
            if self.is_root is None:
                self._become_root(held)
            elif root.unit is None or root.root.has_replaced_shards:
                root._adopt_again(held)  # another thread may have done it while this one waited
            replicas.require_equal_shards(self.root_state() or self)

    def _adopt_again(self, held: contextlib.ExitStack) -> None:
        """After the first forward: takes replaced shards, and makes the engine's objects again if it has to."""
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
        tree = find_tree(self)
        for state in tree:
            held.enter_context(state._initializing)
        # Names, ties and replaced parameters are read from what modules register while they are sharded.
        moves = [_C.UnitMove(state.unit) for state in tree if state.unit is not None]
        name_units(self, tree)
        self._adopt_late(tree)
        set_names(self, tree)
        self._prepare(tree)
        self.tree = tree
        self._make_root()
        share_late(tree)
        if self.auto_reshard and self.unit.options.reshard_after_forward:
            # Gathered again at once by backward, if there is one.
            self.unit.options.reshard_after_forward = False
            self.unit.options.reshard_without_grad = True
        self._hook_tree()
        for move in moves:
            move.finish()
        self.modules_seen = snapshot(self.modules[0])
        follow_modules_of(self)
        watch_entries(self)
        moving.warn_of_raw_buffers(self)

    def _adopt_late(self, tree: list[UnitState]) -> bool:
        changed = adopt_late(self, tree)
        for state in tree:
            if state.unit is not None:
                state.unit.set_groups([group.engine for group in state.groups if group.engine is not None])
        return changed

    def follow_modules(self) -> None:
        """Adopts what the modules of a root register since its last forward. Collective if there is something.

        Raises:
            RuntimeError: there is something, and gradients wait for their reduction.
        """
        if not self.is_root:
            return
        moving.warn_of_raw_buffers(self)
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
            if self.has_equal_replicas:  # else the comparison does
                state.hooks.set_unit(state.unit)
        self.hooks.set_all([state.hooks for state in self.tree])

    def make_unit(self) -> None:
        """For what needs the engine's unit before the first forward: under a provisional root of its own. Collective.

        Which module is the root shows at the first forward.
        """
        if self.is_root is not None:
            if self.unit is None or self.root.has_replaced_shards:
                self.lazy_init()
            return
        with self._initializing:
            if self.unit is None:
                set_names(self, [self])
                self._prepare([self])
                self.tree = [self]
                self._make_root()

    @staticmethod
    def _prepare(tree: list[UnitState]) -> None:
        mark_aliases([group for state in tree for group in state.groups])
        groups = [group for state in tree for group in state.groups]
        for group in groups:
            group.find_extensions()
        moving.adopt_all(groups)
        check_tree(tree)

    def _make_root(self) -> None:
        """Makes the engine's root for ``self.tree`` and its transports. Collective."""
        tree = self.tree
        root = _C.Root()
        root.is_last_backward = self.is_last_backward
        root.set_post_optimizer_event(self.post_optimizer_event)
        root.manual_finalization = self.manual_finalization
        choice = TransportChoice(
            self.transport,
            self.timeout,
            needs_group=next((needed for state in tree if (needed := state.needs_group)), ""),
            comm_memory=next((state.comm_memory for state in tree if state.comm_memory is not None), None),
            model=f"{self.number.kind} {self.number.number}",
            checks_ranks=all(state.checks_ranks for state in tree),
            layers=next((state.layers for state in tree if state.layers is not None), None),
            units=[(state.name, state.mp_policy, group) for state in tree for group in state.groups],
        )
        new = [state for state in tree if state.unit is None]
        try:
            units = [state._engine_unit() for state in tree]
            joins = [state._transports(choice) for state in tree]
        except BaseException:
            # The next forward tries again.
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
        """Makes the root's transports again, because ``what`` (for the message) has changed.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if self.unit is None or not has_streams(self.ranks.device):
            return
        if self.root.in_forward or self.root.in_backward:
            raise RuntimeError(f"the {what} of collectives cannot be changed during forward or backward")
        self.root_state()._make_root()

    def release_memory(self) -> None:
        """Reshards all units of the root and gives back what the engine keeps for the next forward. Collective.

        Pages of shared memory live as long as their transport, so that one is made again.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if self.root is None:
            return
        if self.root.in_forward or self.root.in_backward:
            raise RuntimeError("the engine's memory cannot be released during forward or backward")
        root_state = self.root_state()
        for state in root_state.tree:
            state.reshard()
        self.root.release_idle()
        if any(group.transport.shares_memory for state in root_state.tree for group in state.groups):
            root_state._make_root()

    def apply_reduce_buffers(self) -> None:
        """Hands the number of reduction buffers to the engine: the largest that any unit of the root asks for."""
        if self.root is None or self.root_state() is None:
            return
        wanted = [state.max_reduce_buffers for state in self.root_state().tree if state.max_reduce_buffers is not None]
        if wanted:
            self.root.set_max_reduce_buffers(max(wanted))

    @property
    def needs_group(self) -> str:
        """What of this unit's settings runs over a process group alone; "" if nothing does."""
        if self.comms.is_custom:
            return "custom collectives"
        return "wire formats" if wire_formats.is_used(self.live_options()) else ""

    def apply_comms(self) -> None:
        """Hands changed custom collectives to the engine; moves the tree to a process group when it shares memory.

        Raises:
            RuntimeError: a forward or backward is running.
        """
        if self.unit is None:
            return
        shares_memory = any(group.transport.shares_memory for group in self.groups)
        if not (self.needs_group and shares_memory):
            self.comms.apply(self)
            return
        if self.root.in_forward or self.root.in_backward:
            raise RuntimeError(f"{self.needs_group} cannot be set during forward or backward")
        self.root_state()._make_root()

    def check_finalization(self) -> None:
        """What ``finalize_backward`` demands, in upstream's words."""
        if self.reduction_pending:
            raise RuntimeError("The previous gradient reduction must be waited on before finalizing backward again")
        if not self.is_root:
            raise RuntimeError("finalize_backward must be called on the root FSDP module")
        if not self.manual_finalization:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization. Call set_manual_backward_finalization(True) "
                "before forward"
            )
        if self.root.in_backward:
            raise RuntimeError("finalize_backward must be called after backward completes")

    def finish_held_backwards(self) -> None:
        """Reduces what backwards without gradient sync left, in all units of the root; nothing before a forward."""
        if self.root is None:
            return
        if self.root.in_backward:
            raise RuntimeError(f"post_backward of unit '{self.name}' must be called after backward completes")
        self.root.finish_held_backwards()

    def _engine_unit(self):
        policy = self.mp_policy
        for group in self.groups:
            if group.engine is None:
                streams = has_streams(group.ranks.device)
                group.make_engine_group(policy.param_dtype, policy.reduce_dtype, has_streams=streams)
            comms.connect(group, policy)
        if self.unit is not None:
            return self.unit
        return _C.Unit(self.name, self.ranks.device, [group.engine for group in self.groups], self.options)

    def _transports(self, choice: TransportChoice) -> tuple[list, list, list]:
        """Per group: its transport, the all-reduce over its replicas or None, the transport it has after forward."""
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
            group.engine.explain = choice.explain_of(group.ranks.group)
            if all_reduce is not None:
                group.engine.all_reduce = all_reduce
                if isinstance(all_reduce, _C.HostAllReduce):
                    root.add_replicas(all_reduce)
                group.engine.explain_all_reduce = choice.explain_of(group.ranks.replicate_group)
        for group, transport in zip(self.groups, post_forward, strict=False):  # replicated groups are the last
            smaller = post_forward_group(group.ranks, self.post_forward_world)
            group.make_post_forward(smaller, choice.explain_of(smaller.group))
            root.add_post_forward(group.engine, transport)
        for group in self.groups:
            choice.agree(root, group, self.post_forward_world if post_forward else None)
        self.unit, self.root = unit, root
        self.comms.apply(self)

    def set_prefetch(self, setter: str, targets: list[UnitState]) -> None:
        self.prefetch[setter] = [weakref.ref(target) for target in targets]
        self.apply_prefetch()

    def apply_prefetch(self) -> None:
        """Hands the explicit prefetch lists to the engine once all units in them exist."""
        for setter, refs in self.prefetch.items():
            targets = [target for ref in refs if (target := ref()) is not None]
            if self.unit is not None and all(target.unit is not None for target in targets):
                getattr(self.unit, setter)([target.unit for target in targets])

    @property
    def name(self) -> str:
        """FQNs of the modules, ``<root>`` for the root itself."""
        return ", ".join(name or "<root>" for name in self.names) or type(self.modules[0]).__name__

    # --- what may move parameters ---

    def reshard(self) -> None:
        """Registers the sharded parameters; frees the unsharded ones."""
        if self.unit is not None:
            self.unit.reshard()

    def adopt(self) -> None:
        """Takes parameters that were replaced or moved back into the pool."""
        moving.adopt_all(self.groups)

    def forget_unit(self) -> None:
        """Undoes ``make_unit``."""
        if self.unit is not None:
            self.options = _C.UnitOptions(self.unit.options)
            self.unit.retire()
        self.unit = self.root = None
        for group in self.groups:
            group.forget_engine()

    def check_pools(self) -> None:
        """Before each forward of a root, with FSDP2X_DEBUG=1: no shard has left its pool since the last one."""
        if self.is_root:
            for state in self.tree:
                for group in state.groups:
                    group.check_pool()

    def reset(self) -> None:
        """Drops the running iteration: every unit of this root is resharded and idle, its gradients are gone."""
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if self.root is None:
            return
        for state in self.tree:
            state.hooks.forget_progress()
            for sharded in state.params:
                sharded.param.grad = None
        self.reduction_pending = False
        self.generation += 1
        self.root.reset()
