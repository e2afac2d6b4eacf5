"""The result of one ``fully_shard`` call: modules, parameters and settings.

``lazy_init.py`` makes the engine's objects for it. The other modules of this folder come between the two.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.base import torch_private
from fsdp2x.base.failures import UnitNumber, number_unit
from fsdp2x.base.native import _C
from fsdp2x.sharding.mesh import Keep, ShardGroup, post_forward_group
from fsdp2x.sharding.offload import Offload
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.sharded_param import ShardedParam
from fsdp2x.sharding.upstream_names import StateNames

# A module and the names under which it registers parameters. Weak, because a later module may get the same id.
Place = tuple[weakref.ref[nn.Module], frozenset[str]]
# Buffers without values: weak references to them, and the versions of their memory.
RawBuffers = list[tuple["weakref.ref[torch.Tensor]", int]]


class WeakTuple:
    """An attribute that holds its values weakly, for objects that refer back to its owner.

    So a model and its engine are freed without Python's cycle collector when the last reference to the model goes.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._key = f"_{name}_refs"

    def __get__(self, instance: Any, owner: type | None = None) -> tuple:
        found = (ref() for ref in instance.__dict__.get(self._key, ()))
        return tuple(value for value in found if value is not None)

    def __set__(self, instance: Any, values: Iterable) -> None:
        instance.__dict__[self._key] = [weakref.ref(value) for value in values]


@dataclass
class CommSettings:
    """What the user set about the communication of a unit, before or after the engine's groups exist."""

    all_gather: Any = None
    reduce_scatter: Any = None
    all_reduce_hook: Callable[[torch.Tensor], Any] | None = None
    all_reduce_hook_stream: Any = None
    separate_reduction: bool = False  # over a separate process group
    memory: str | None = None  # allocator of gather buffers: "process_group", "symmetric"; None: torch
    max_reduce_buffers: int | None = None  # None: the engine's default
    layers: dict[torch.device, Any] | None = None  # streams of several roots; None: the root has its own

    @property
    def is_custom(self) -> bool:
        """Whether collectives must use a process group."""
        return self.all_gather is not None or self.reduce_scatter is not None


@dataclass(frozen=True)
class UnitSettings:
    """Settings that one ``fully_shard`` call gives to each of its units."""

    ranks: ShardGroup
    mp_policy: MixedPrecisionPolicy
    offload: Offload
    transport: str
    timeout: timedelta | None
    checks_ranks: bool


class RootState:
    """What the units of one root module share. Before there is a root, a unit has its own."""

    tree = WeakTuple()  # all units of the root

    def __init__(self, unit: ShardedUnit) -> None:
        self.unit = weakref.ref(unit)  # of the root module
        self.settings = _C.RootSettings()  # the engine's root reads them as well
        self.engine: _C.Root | None = None  # provisional until the units' ``is_root`` is decided
        self.has_equal_replicas = False  # set since the last load
        self.entered: Any = None  # weak reference to the module below that was called instead of it; None: not watched
        self.reduction_pending = False  # a handle of finalize_backward was not waited for
        self.generation = 0  # counts resets, which invalidate handles


class ShardedUnit(StateNames, torch_private.State):
    """One unit. ``fully_shard`` registers it on its modules, shards their parameters, and then configures it."""

    modules = WeakTuple()
    settings: UnitSettings
    hooks: _C.UnitHooks

    def __init__(self) -> None:
        super().__init__()
        self.number = UnitNumber()
        self.groups: list[ShardedParamGroup] = []  # one per mesh; none without parameters
        self.places: list[Place] = []  # of all parameters when the unit was made, including ignored ones
        self.auto_reshard = True  # reshard_after_forward was None: the root keeps its parameters
        self.post_forward_world: int | None = None  # reshard_after_forward as an int
        self.options = _C.UnitOptions()  # the engine's unit reads them as well
        self.comms = CommSettings()
        # Engine setter -> units, set before or after the engine's unit exists.
        self.prefetch: dict[str, list[weakref.ref[ShardedUnit]]] = {}
        self.raw_buffers: RawBuffers = []  # from to_empty, until the next forward
        self.names: list[str] = []  # FQNs of the modules from the root
        self.unit: _C.Unit | None = None  # made at lazy initialization or by an earlier unshard()
        self.is_root: bool | None = None  # decided at lazy initialization
        self.shared = RootState(self)  # with all units of the root, once there is one
        # Of a root: modules at its last forward, see ``changes.snapshot``. Units below must not refer to modules.
        self.modules_seen: tuple = ()
        # Several threads may reach one root first. While one of them makes it, the ranks communicate without the GIL.
        # Ranks that are threads of one process have separate models.
        self.initializing = threading.RLock()
        self.seal()

    def configure(
        self,
        modules: tuple[nn.Module, ...],
        managed: list[nn.Module],
        groups: list[ShardedParamGroup],
        settings: UnitSettings,
        keep: Keep,
    ) -> None:
        """Makes this the unit of ``modules``. ``managed`` are the modules of its parameters."""
        self.settings, self.modules, policy = settings, modules, settings.mp_policy
        # Before the unit has parameters, so ranks with models of different shapes count alike and errors name shapes.
        self.number = number_unit(self, settings.ranks.mesh.mesh.flatten().tolist())
        self.groups, self.places = groups, _places_in(managed)
        for group in groups:
            group.unit_state = weakref.ref(self)
        self.auto_reshard = keep.fully_in_root
        self.post_forward_world = self._smaller_world(keep)
        self.options.reshard_after_forward = keep.ranks != 1
        self.options.reshard_without_grad = keep.until_backward
        self.options.cast_forward_inputs = policy.cast_forward_inputs
        self.options.param_dtype = policy.param_dtype
        self.options.output_dtype = policy.output_dtype

    def keep_float32(self, kept: Collection[int]) -> None:
        """Computes with the parameters of these ids, which are stored in float32, in their own dtype."""
        for param in self.params:
            if id(param.param) in kept and not param.keeps_dtype:
                self.forget_engine()  # if unshard() made it
                param.keeps_dtype = True
        for module in self.modules:
            ids = {id(param) for param in module.parameters()}
            if ids and ids <= set(kept):
                self.options.param_dtype = None  # inputs stay as they come, which the module's caller has cast

    def _smaller_world(self, keep: Keep) -> int | None:
        """Returns the number of ranks that keep the parameters after forward. None if it is one or all.

        Raises:
            ValueError: it does not divide the number of ranks.
            NotImplementedError: a parameter is model-parallel or has an all-gather extension.
        """
        for group in self.groups:
            keep.smaller_world(group.ranks.world)
        if keep.ranks is None or keep.ranks in (1, self.ranks.world):
            return None
        if any(param.spec.unsharded is not None or param.is_wrapper for param in self.params):
            raise NotImplementedError(
                "Resharding to smaller mesh is not supported for DTensor parameters and all-gather extensions. Use "
                "reshard_after_forward=True or False."
            )
        for group in self.groups:
            post_forward_group(group.ranks, keep.ranks)
        return keep.ranks

    @property
    def ranks(self) -> ShardGroup:
        """The ranks of the call's mesh. Groups may have others."""
        return self.settings.ranks

    @property
    def root(self) -> _C.Root | None:
        """The engine's root, shared by all units of one root module."""
        return self.shared.engine

    @property
    def made_unit(self) -> _C.Unit:
        """Returns the engine's unit, after ``make_unit``."""
        assert self.unit is not None, "make_unit runs before this"
        return self.unit

    @property
    def needs_group(self) -> str:
        """Names the settings of this unit that need a process group. Empty if there are none."""
        formats, plain = (self.options.wire_weights, self.options.wire_gradients), _C.WireFormat.plain
        if self.comms.is_custom:
            return "custom collectives"
        return "wire formats" if formats != (plain, plain) else ""

    @property
    def is_running(self) -> bool:
        """Whether the root is in a forward or backward."""
        return self.root is not None and (self.root.in_forward or self.root.in_backward)

    @property
    def units_of_root(self) -> list[ShardedUnit]:
        """This unit and all units under its root, or only this unit before there is a root."""
        return [self, *self.shared.tree]

    @property
    def params(self) -> list[ShardedParam]:
        """The parameters of all groups."""
        return [param for group in self.groups for param in group.params]

    @property
    def name(self) -> str:
        """FQNs of the modules, ``<root>`` for the root itself."""
        return ", ".join(name or "<root>" for name in self.names) or type(self.modules[0]).__name__

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Acts from the next forward on. No smaller world keeps the parameters any more."""
        self.post_forward_world = None
        for group in self.groups:
            if group.engine is not None:
                group.engine.clear_post_forward()
        self.options.reshard_after_forward, self.options.reshard_without_grad = reshard, False

    def set_prefetch(self, setter: str, targets: list[ShardedUnit]) -> None:
        self.prefetch[setter] = [weakref.ref(target) for target in targets]
        self.apply_prefetch()

    def apply_prefetch(self) -> None:
        """Passes the explicit prefetch lists to the engine once all units in them exist."""
        for setter, refs in self.prefetch.items():
            targets = [target for ref in refs if (target := ref()) is not None]
            if self.unit is not None and all(target.unit is not None for target in targets):
                getattr(self.unit, setter)([target.unit for target in targets])

    def apply_reduce_buffers(self) -> None:
        """Passes the number of reduction buffers to the engine: the largest that a unit of the root asks for."""
        wanted = [num for state in self.shared.tree if (num := state.comms.max_reduce_buffers) is not None]
        if self.root is not None and wanted:
            self.root.set_max_reduce_buffers(max(wanted))

    @property
    def awaits_finalization(self) -> bool:
        """Whether backwards of the root wait for ``finalize_backward``, and no handle of it waits for them."""
        return self.root is not None and self.root.awaits_finalization and not self.shared.reduction_pending

    def check_finalization(self) -> None:
        """Checks the conditions of ``finalize_backward``, with FSDP2's messages."""
        if self.shared.reduction_pending:
            raise RuntimeError("The previous gradient reduction must be waited on before finalizing backward again")
        if not self.is_root:
            raise RuntimeError("finalize_backward must be called on the root FSDP module")
        if not self.shared.settings.manual_finalization:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization. Call set_manual_backward_finalization(True) "
                "before forward"
            )
        if self.root is not None and self.root.in_backward:
            raise RuntimeError("finalize_backward must be called after backward completes")

    def finish_held_backwards(self) -> None:
        """Reduces what backwards without gradient sync left in all units of the root. No effect before a forward."""
        if self.root is None:
            return
        if self.root.in_backward:
            raise RuntimeError(f"post_backward of unit '{self.name}' must be called after backward completes")
        self.root.finish_held_backwards()

    # --- methods that may move parameters ---

    def reshard(self) -> None:
        """Registers the sharded parameters and frees the full ones."""
        if self.unit is not None:
            self.unit.reshard()

    def forget_unit(self) -> None:
        """Undoes ``make_unit``."""
        if self.unit is not None:
            self.unit.retire()
        self.unit = None
        for group in self.groups:
            group.forget_engine()

    def forget_engine(self) -> None:
        """Drops the engine of this unit's tree. The next forward makes a new one for the parameters of that time.

        Raises:
            RuntimeError: units of the tree hold unreduced gradients.
        """
        refuse_unreduced(self.units_of_root)
        for state in self.shared.tree or (self,):
            state.forget_unit()
            state.hooks.set_unit(None)  # type: ignore[arg-type]  # the stub has no Optional
        self.shared.engine = None

    def reset(self) -> None:
        """Drops the running iteration: every unit of this root is resharded and idle, and its gradients are gone."""
        if self.is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if self.root is None:
            return
        for state in self.shared.tree:
            state.hooks.forget_progress()
            for sharded in state.params:
                sharded.param.grad = None
        self.shared.reduction_pending = False
        self.shared.generation += 1
        self.root.reset()


def _places_in(modules: Iterable[nn.Module]) -> list[Place]:
    """Returns the places where ``modules`` register parameters now."""
    found = []
    for module in modules:
        if names := frozenset(name for name, param in module._parameters.items() if param is not None):
            found.append((weakref.ref(module), names))
    return found


def mark_managed(module: nn.Module) -> None:
    """Sets the attributes that Dynamo and HuggingFace's ``generate()`` read."""
    module.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)


def is_managed(module: nn.Module) -> bool:
    """Returns whether a unit had parameters of the module."""
    return "_is_fsdp_managed_module" in module.__dict__


def refuse_unreduced(units: Iterable[ShardedUnit]) -> None:
    """Raises RuntimeError if one of ``units`` holds gradients that a change of dtype or device would invalidate."""
    for state in units:
        if any(group.holds_unreduced for group in state.groups):
            raise RuntimeError(
                f"fsdp2x: unit '{state.name}' holds gradients that are not reduced yet, so the model's parameters "
                "cannot change their dtype or device. End the step with a synchronized backward, or call "
                "model.zero_grad(set_to_none=True)."
            )
