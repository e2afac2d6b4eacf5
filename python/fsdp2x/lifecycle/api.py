"""``fully_shard``: the public call. Validates, plans the units, shards each and mixes ``FSDPModule`` into its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.lifecycle.state import UnitState
from fsdp2x.lifecycle.tree import get_state
from fsdp2x.lifecycle.unit import UnitSettings, mark_managed
from fsdp2x.sharding import collect
from fsdp2x.sharding.collect import group_by_ranks, place
from fsdp2x.sharding.mesh import ShardGroup, default_mesh, shard_group
from fsdp2x.sharding.offload import offload_of
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.shapes import even_placement
from fsdp2x.sharding.transport import check_transport
from fsdp2x.sharding.wrap import plan_units, should_auto_wrap

_sharded_classes: dict[type, type] = {}
# Methods that sharded classes get besides those of FSDPModule, by name. A maker is called with the original class and
# may return None. Layers above add what they know, such as file formats.
method_makers: dict[str, Callable[[type], Callable | None]] = {}
# What shards or replicates modules in other ways. Torch's own names, whatever install() puts under them.
_OTHERS = (FSDPModule.__mro__[1], FullyShardedDataParallel, DistributedDataParallel)


@checked(own=("auto_wrap", "reshard_after_forward"))
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    auto_wrap: bool | list | Callable[[str, nn.Module], bool] | None = None,
    transport: str = "auto",
    timeout: timedelta | None = None,
    buffer_dtype: torch.dtype | None = None,
    check_ranks: bool = True,
):
    """Shards parameters, gradients and optimizer state of ``module`` over the ranks of ``mesh``, in place.

    Signature and semantics are those of ``torch.distributed.fsdp.fully_shard``; the last five arguments are fsdp2x's.
    Parameters become ``DTensor``s with placement ``Shard(0)`` (rows ``ceil(d0 / W)`` a rank, the last ranks short or
    empty) whose bytes lie in one pool per unit. They are gathered before the unit's forward and backward, freed
    afterwards, and their gradients are averaged over the ranks into ``.grad`` during backward.

    Parameters that modules register later (adapters, a new head) are adopted by the next forward of the root. They stay
    plain tensors, replicated with the values of the first rank, and backward averages their gradients.

    Args:
        module: a module, or a list of modules that form one unit. A HuggingFace model none of whose submodules is
            sharded yet is split into units first (see ``auto_wrap``); on any other module the call makes one unit of
            the parameters that nested calls left over, so call bottom-up.
        mesh: 1-D device mesh (shard), or 2-D with named axes (replicate, shard): gradients are then reduced over the
            shards and all-reduced over the replicas. Default all ranks on the machine's accelerator, else the CPU.
        reshard_after_forward: free the parameters after forward and gather them again in backward. ``None``: True,
            but the root keeps them for its backward; after a forward without gradients, which has none, it frees them,
            too (upstream's does not). False keeps them in any case. An int: keep them sharded over that many
            consecutive ranks, a factor of the shard axis, so that backward gathers from those only.
        shard_placement_fn: maps a parameter to ``None``, ``Shard(dim)`` (``dim > 0`` needs an even split), or torch's
            ``ShardPlacementResult``, which also chooses the parameter's mesh. A model that is split into units has a
            default of its own: the first dim that the ranks divide, for large parameters whose padded rows would be
            twice their bytes or more (fused experts over more ranks than experts).
        mp_policy: dtypes of compute and reduction, casts of inputs and outputs. ``reduce_dtype=None`` means what it
            means in the installed torch: the parameters' original dtype from 2.15 on, ``param_dtype`` before.
        offload_policy: ``CPUOffloadPolicy``: shards, gradients and so the optimizer's state live in host memory, pinned
            by default; one copy per unit brings the shards to the device before each gather, one takes the reduced
            gradients back. ``fsdp2x.HostOffloadPolicy(mode)`` does that or less: only the optimizer's state, or that
            and the gradients. On a CPU mesh it may pin the shards' memory, and nothing else changes.
        ignored_params: parameters to leave alone: not sharded, moved or reduced.
        dp_mesh_dims: torch's ``DataParallelMeshDims``: ``mesh`` is the whole mesh, on which all parameters are DTensors
            already, and these are its data-parallel axes.
        auto_wrap: ``None``: split HuggingFace models only. ``True``: split any model. ``False``: never. A list of
            classes or class names, or a predicate ``(name, module) -> bool``: these modules become units.
        transport: ``"shm"`` (ranks of one host share memory), ``"process_group"``, or ``"auto"``: what the environment
            variable ``FSDP2X_TRANSPORT`` says, else the former where it is possible and no dispatch mode
            (CommDebugMode) is active at the root's first forward, since shared memory has no collectives to be seen.
        timeout: limit of every wait for a peer, on the CPU; default the process group's. On a device nobody waits, and
            the process group ends what hangs: give the timeout to it.
        buffer_dtype: floating-point buffers of the sharded modules are converted to it, once and in place.
        check_ranks: compare each collective over a process group with those of the peers before it is posted. If ranks
            run other units, settings, or passes, all of them raise an error that names both sides. A step that repeats
            an earlier one costs no message. False turns this off; one rank or unit that passes False does so for all.
            Over shared memory, ranks always compare.

    Returns:
        ``module`` itself; its class is now ``FSDP<Name>``, a subclass of ``FSDPModule`` and of its own class.

    Raises:
        ValueError: a container without ``forward``, a mesh of the wrong shape or without this rank, a wrap class that
            does not exist, no wrap class at all, an unknown transport, a scalar parameter, a part that torch's FSDP or
            DDP has already.
        AssertionError: the module is sharded already (upstream's type and message).
        TypeError: an argument of another kind.
        RuntimeError: ``offload_policy`` pins memory on a machine without an accelerator; nobody has started
            torch.distributed, and the process was not started by torchrun.
        NotImplementedError: an argument that is not supported yet, by name.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    _check_modules(modules)
    _check_reshard(reshard_after_forward)
    _check_mesh_dims(dp_mesh_dims)
    transport = check_transport(transport)
    # Without a plan and an unsharded child the call is upstream's.
    split = isinstance(module, nn.Module) and should_auto_wrap(module, auto_wrap)
    if auto_wrap not in (None, False) and not isinstance(module, nn.Module):
        raise ValueError("fully_shard: auto_wrap splits one model, but a list of modules was passed")
    plans = plan_units(module, auto_wrap, ignored_params=ignored_params or ()) if split else []
    ranks = shard_group(mesh or default_mesh(), dp_mesh_dims)
    if split and shard_placement_fn is None:
        shard_placement_fn = partial(even_placement, world=ranks.world)
    settings = UnitSettings(
        ranks, mp_policy, offload_of(offload_policy), transport, _check_timeout(timeout, ranks), check_ranks
    )
    ignored = ignored_params or set()

    def shard(modules: Iterable[nn.Module], reshard: bool | int | None, keeps_for_backward: bool = False) -> None:
        state, roots = UnitState(), tuple(torch_private.root_modules(list(modules)))
        torch_private.register_state(roots, "fully_shard", state)
        try:
            classes = [_sharded_class(type(root)) for root in roots]
            managed = collect.managed_modules(roots, lambda inner: get_state(inner) is not None)
            groups = _shard_params(roots, managed, settings, ignored, shard_placement_fn, buffer_dtype)
            state.configure(roots, managed, groups, settings, reshard)
            for root, cls in zip(roots, classes, strict=True):
                root.__class__ = cls
        except BaseException:
            torch_private.forget_state(roots, "fully_shard")
            raise
        state.options.reshard_without_grad = keeps_for_backward  # backward needs it at once, if there is one
        for inner in managed:
            mark_managed(inner)

    for plan in plans:
        own = plan.reshard_after_forward
        keeps = own is False and reshard_after_forward is not False
        shard(plan.modules, reshard_after_forward if own is None else own, keeps)
    shard(modules, reshard_after_forward)
    return module


fully_shard.state = get_state


def _shard_params(
    roots: Iterable[nn.Module],
    managed: list[nn.Module],
    settings: UnitSettings,
    ignored: set[nn.Parameter],
    placement_fn: Callable | None,
    buffer_dtype: torch.dtype | None,
) -> list[ShardedParamGroup]:
    """Cuts the parameters of ``managed`` and moves their buffers. Returns a group for each mesh."""
    ranks, offload = settings.ranks, settings.offload
    owned = collect.collect_params(managed, ignored)
    _refuse_ties_to_replicas(roots, {id(entry.param) for entry in owned})
    if not offload.of_shards:
        collect.move_to_device([entry.param for entry in owned], ranks.device)
    buffers = collect.collect_buffers(managed)
    collect.move_to_device(buffers, ranks.device)
    if buffer_dtype is not None:
        collect.cast_floating(buffers, buffer_dtype)
    placed = [place(entry, ranks, placement_fn) for entry in owned]
    return [ShardedParamGroup(members, settings.mp_policy, offload) for members in group_by_ranks(placed)]


def _refuse_ties_to_replicas(roots: Iterable[nn.Module], owned: set[int]) -> None:
    """Modules under torch's ``replicate`` are left alone, so a tie to one would be cut."""
    for module in [inner for root in roots for inner in root.modules() if torch_private.is_replicated(inner)]:
        for name, param in module.named_parameters():
            if id(param) in owned:
                raise RuntimeError(
                    f"fully_shard: parameter {name!r} of a {type(module).__name__} under torch's replicate() is tied "
                    "to a parameter that would be sharded. Untie them, or shard both modules."
                )


def _check_timeout(timeout: timedelta | None, ranks: ShardGroup) -> timedelta | None:
    if timeout is None:
        return None
    if timeout <= timedelta(0):
        raise ValueError(f"fully_shard: timeout must be a positive datetime.timedelta, got {timeout!r}")
    if ranks.device.type != "cpu":
        raise ValueError(
            f"fully_shard: timeout={timeout} acts on CPU meshes alone, and this mesh is on {ranks.device.type}: "
            "there the process group ends collectives that hang; give the timeout to init_process_group or new_group"
        )
    return timeout


def _check_modules(modules: list[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard expects at least one module, got an empty list")
    _refuse_others(modules)
    for module in modules:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {module}")


def _refuse_others(modules: list[nn.Module]) -> None:
    """Units of torch's engine, or of FSDP1 and DDP, in the model: their hooks and ours would not know of each other."""
    for module in modules:
        for name, inner in module.named_modules():
            ours = isinstance(inner, FSDPModule) or torch_private.is_replicated(inner)  # the latter is left alone
            if ours or not isinstance(inner, _OTHERS):
                continue
            kind = next(other for other in _OTHERS if isinstance(inner, other))
            raise ValueError(
                f"fully_shard: {type(module).__name__} has {name or 'itself'}, which {kind.__module__}.{kind.__name__} "
                "shards or replicates already; use one of the two for the whole model (fsdp2x.install() puts fsdp2x in "
                "place of torch's fully_shard)"
            )


def _check_mesh_dims(dp_mesh_dims: Any) -> None:
    if dp_mesh_dims is not None and not (
        hasattr(dp_mesh_dims, "shard_names") and hasattr(dp_mesh_dims, "replicate_names")
    ):
        raise TypeError(
            f"fully_shard: dp_mesh_dims must be torch's DataParallelMeshDims, got {dp_mesh_dims!r}; such as "
            'DataParallelMeshDims(shard="fsdp")'
        )


def _check_reshard(reshard_after_forward: bool | int | None) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to reshard to, not "
            f"{reshard_after_forward!r}"
        )


def _sharded_class(cls: type) -> type:
    """``FSDP<Name>``; made with the metaclass of ``cls``, so that models that are ABCs work."""
    if cls not in _sharded_classes:
        made = {name: method for name, make in method_makers.items() if (method := make(cls)) is not None}
        names = {"__deepcopy__": _no_deepcopy, **made}
        _sharded_classes[cls] = type(cls)(f"FSDP{cls.__name__}", (FSDPModule, cls), names)
    return _sharded_classes[cls]


def _no_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    # The first two sentences are upstream's.
    raise AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization. To have the model twice, copy it "
        "before fully_shard, or build a second one and fill its parameters from fsdp2x.full_tensors(model)"
    )
