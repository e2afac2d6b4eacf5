"""``fully_shard``: validates its arguments, plans units, shards each, and mixes ``FSDPModule`` into its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import all_units
from fsdp2x.lifecycle.hooks import register_hooks
from fsdp2x.lifecycle.lazy_init import lazy_init
from fsdp2x.lifecycle.module import FSDPModule
from fsdp2x.lifecycle.tree import get_state, unit_states
from fsdp2x.lifecycle.unit import ShardedUnit, UnitSettings, is_managed, mark_managed
from fsdp2x.sharding import collect
from fsdp2x.sharding.collect import group_by_pool, place
from fsdp2x.sharding.mesh import Keep, ShardGroup, default_mesh, shard_group
from fsdp2x.sharding.offload import Offload, OffloadPolicies, named_offloads
from fsdp2x.sharding.param_group import ShardedParamGroup
from fsdp2x.sharding.shapes import even_placement
from fsdp2x.sharding.transport import check_transport
from fsdp2x.sharding.wrap import float32_ids, plan_units, should_auto_wrap, unsharded_class

_sharded_classes: dict[type, type] = {}
# Methods that sharded classes get in addition to FSDPModule's, by name. A maker is called with the original class and
# may return None. Layers above add what they know, such as file formats.
method_makers: dict[str, Callable[[type], Callable | None]] = {}
# Classes that shard or replicate modules in other ways. These are torch's own, even after install().
_OTHERS = (FSDPModule.__mro__[1], FullyShardedDataParallel, DistributedDataParallel)


@checked(own=("auto_wrap", "reshard_after_forward"))
def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicies | None = OffloadPolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    auto_wrap: bool | list | Callable[[str, nn.Module], bool] | None = None,
    transport: str = "auto",
    timeout: timedelta | None = None,
    buffer_dtype: torch.dtype | None = None,
    check_ranks: bool = True,
):
    """Shards parameters, gradients and optimizer state of ``module`` over the ranks of ``mesh``, in place.

    Signature and semantics are those of ``torch.distributed.fsdp.fully_shard``. The arguments from ``auto_wrap`` on are
    fsdp2x's. Parameters become ``DTensor``s with placement ``Shard(0)``: each rank has ``ceil(d0 / W)`` rows, and the
    last ranks have fewer or none. The call is not collective; the first forward is. The unit gathers its parameters
    before forward and backward, frees them afterwards, and averages gradients over the ranks into ``.grad``.

    The next forward of the root adopts parameters that modules register later (adapters, a new head). They stay plain
    tensors with the values of the first rank, and backward averages their gradients.

    Args:
        module: a module, or a list of modules that form one unit. An unsharded HuggingFace model is split into units
            (see ``auto_wrap``). For any other module the call makes one unit of all parameters that nested calls have
            not sharded, so call it bottom-up.
        mesh: 1-D device mesh (shard), or 2-D with named axes (replicate, shard), which reduces over shards and
            all-reduces over replicas. Default: all ranks on the machine's accelerator, else on the CPU.
        reshard_after_forward: whether to free the parameters after forward and gather them again in backward. ``None``:
            True, except that the root keeps them until backward. An int, a factor of the shard axis: keep them sharded
            over that many consecutive ranks, so backward gathers from those only.
        shard_placement_fn: function that maps a parameter to ``None``, ``Shard(dim)`` (``dim > 0`` needs an even
            split), or torch's ``ShardPlacementResult``, which also chooses the mesh. Models that are split into units
            default to the first evenly divisible dim where padded rows would at least double a large parameter.
        mp_policy: dtypes of compute and reduction, and casts of inputs and outputs. ``reduce_dtype=None`` follows the
            installed torch: the parameters' original dtype from 2.15 on, ``param_dtype`` before. Parameters that a
            transformers model keeps in float32 (``_keep_in_fp32_modules_strict``, and ``_keep_in_fp32_modules`` for
            float16) are computed in it. ``param_dtype_override_fn``, or None in that attribute, turns this off.
        offload_policy: ``CPUOffloadPolicy`` keeps shards, gradients, and optimizer state in CPU memory, pinned by
            default. ``fsdp2x.HostOffloadPolicy(mode)`` can keep only some of them there. A mapping from names of
            parameters, relative to ``module``, offloads only those (see ``fsdp2x.cpu_offload_by_budget``). A unit then
            gathers and reduces those with each policy separately. On a CPU mesh only ``pin_memory`` has an effect.
        ignored_params: parameters that are not sharded, moved or reduced.
        dp_mesh_dims: data-parallel axes of ``mesh``, as torch's ``DataParallelMeshDims``, if ``mesh`` is the full mesh
            and all parameters already are DTensors on it.
        auto_wrap: which modules become units. ``None``: those of HuggingFace models. ``True``: those of any model.
            ``False``: none. Or a list of classes or class names, or a predicate ``(name, module) -> bool``.
        transport: ``"shm"`` (ranks of one host share memory), ``"process_group"``, or ``"auto"``. The environment
            variable ``FSDP2X_TRANSPORT`` replaces ``"auto"``. Otherwise ``"auto"`` takes shared memory if possible, and
            the process group if a dispatch mode (CommDebugMode) is active at the root's first forward.
        timeout: limit for each wait for another rank, on CPU meshes. Default: the process group's. On a device, give
            the timeout to the process group.
        buffer_dtype: dtype to which floating-point buffers of the sharded modules are converted, once and in place.
        check_ranks: whether to compare each collective of a process group with the other ranks before it starts. If
            units, settings, or passes differ, all ranks raise an error that names both sides. A repeated step costs no
            message. One rank or unit with False turns it off for all. Shared memory always compares.

    Returns:
        ``module`` itself. Its class is now ``FSDP<Name>``, a subclass of ``FSDPModule`` and of its original class.

    Raises:
        ValueError: ``module`` is a container without ``forward``, has a scalar parameter, or contains modules of
            torch's FSDP or DDP; ``mesh`` has the wrong shape or lacks this rank; a class of ``auto_wrap`` does not
            exist; ``offload_policy`` names no parameter that this call shards; or ``transport`` is unknown.
        AssertionError: the module is already sharded (FSDP2's type and message).
        TypeError: an argument has the wrong type.
        RuntimeError: ``offload_policy`` pins memory on a machine without an accelerator, or there is no process group
            and torchrun did not start the process.
        NotImplementedError: a parameter or an argument is not supported. The message names it.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    _check_modules(modules)
    keep = Keep.of(reshard_after_forward)
    _check_mesh_dims(dp_mesh_dims, reshard_after_forward)
    transport = check_transport(transport)
    # Without a plan and without sharded children, the call does what FSDP2's does.
    split = isinstance(module, nn.Module) and should_auto_wrap(module, auto_wrap)
    if auto_wrap not in (None, False) and not isinstance(module, nn.Module):
        raise ValueError(
            "fully_shard: auto_wrap splits one model, but got a list of modules. Pass the model, or omit auto_wrap."
        )
    plans = plan_units(module, auto_wrap, ignored_params=ignored_params or ()) if split else []
    _refuse_views(modules)
    ranks = shard_group(mesh or default_mesh(), dp_mesh_dims)
    if split and shard_placement_fn is None:
        shard_placement_fn = partial(even_placement, world=ranks.world)
    ignored = ignored_params or set()
    offload, named = named_offloads(offload_policy, modules, _managed_params(modules, ignored))
    settings = UnitSettings(ranks, mp_policy, offload, transport, _check_timeout(timeout, ranks), check_ranks)

    def shard(modules: Iterable[nn.Module], keep: Keep, unshard_in_backward: bool = True) -> None:
        state, roots = ShardedUnit(), tuple(torch_private.root_modules(list(modules)))
        torch_private.register_state(roots, "fully_shard", state)
        try:
            classes = [_sharded_class(type(root)) for root in roots]
            managed = collect.managed_modules(roots, _is_unit)
            groups = _shard_params(roots, managed, settings, named, ignored, shard_placement_fn, buffer_dtype)
            state.configure(roots, managed, groups, settings, keep)
            state.options.unshard_in_backward = unshard_in_backward
            register_hooks(state, managed, lazy_init)
            for root, cls in zip(roots, classes, strict=True):
                root.__class__ = cls
        except BaseException:
            torch_private.forget_state(roots, "fully_shard")
            raise
        for inner in managed:
            mark_managed(inner)

    for plan in plans:
        shard(plan.modules, keep.in_unit(plan.reshard_after_forward), plan.unshard_in_backward)
    shard(modules, keep)
    _keep_float32(modules)
    return module


fully_shard.state = get_state


def _keep_float32(modules: Iterable[nn.Module]) -> None:
    """Lets parameters compute in float32 that a transformers model keeps in it. Its layers may be units already."""
    for module in modules:
        ids_by_policy = cache(partial(float32_ids, module))
        for state in unit_states(module):
            if kept := ids_by_policy(state.settings.mp_policy):
                state.keep_float32(kept)


def _is_unit(module: nn.Module) -> bool:
    return get_state(module) is not None


def _managed_params(modules: list[nn.Module], ignored: set[nn.Parameter]) -> set[nn.Parameter]:
    """Returns the parameters that a call for ``modules`` shards, in its unit or in those it plans."""
    managed = collect.managed_modules(torch_private.root_modules(modules), _is_unit)
    return {param for module in managed for param in module.parameters(recurse=False)} - ignored


def _shard_params(
    roots: Sequence[nn.Module],
    managed: list[nn.Module],
    settings: UnitSettings,
    named: dict[nn.Parameter, Offload],
    ignored: set[nn.Parameter],
    placement_fn: Callable | None,
    buffer_dtype: torch.dtype | None,
) -> list[ShardedParamGroup]:
    """Cuts the parameters of ``managed``, moves their buffers, and returns a group for each mesh and offload."""
    ranks = settings.ranks
    _refuse_params_of_units(roots, managed)
    owned = collect.collect_params(managed, ignored)
    _refuse_ties_to_replicas(roots, {id(entry.param) for entry in owned})
    offloads = [named.get(entry.param, settings.offload) for entry in owned]
    on_device = [entry.param for entry, offload in zip(owned, offloads, strict=True) if not offload.of_shards]
    collect.move_to_device(on_device, ranks.device)
    buffers = collect.collect_buffers(managed)
    collect.move_to_device(buffers, ranks.device)
    if buffer_dtype is not None:
        collect.cast_floating(buffers, buffer_dtype)
    placed = [place(entry, ranks, placement_fn, offload) for entry, offload in zip(owned, offloads, strict=True)]
    return [ShardedParamGroup(members, settings.mp_policy) for members in group_by_pool(placed)]


def _refuse_ties_to_replicas(roots: Iterable[nn.Module], owned: set[int]) -> None:
    """Raises if a tie leads to a module under torch's ``replicate``, because sharding would cut that tie."""
    for module in [inner for root in roots for inner in root.modules() if torch_private.is_replicated(inner)]:
        for name, param in module.named_parameters():
            if id(param) in owned:
                raise RuntimeError(
                    f"fully_shard: parameter {name!r} of a {type(module).__name__} under torch's replicate() is tied "
                    "to a parameter that would be sharded. Untie them, or shard both modules."
                )


def _refuse_params_of_units(roots: Sequence[nn.Module], managed: list[nn.Module]) -> None:
    """Raises if an earlier unit has a parameter of ``managed``: of an outer module, or of one with a common part."""
    inner = {id(module): module for module in managed if is_managed(module)}
    if not inner:
        return
    for unit in all_units:
        places = ((module, name) for param in unit.params for module, name in param.owners)
        for module, name in ((module, name) for module, name in places if id(module) in inner):
            outer = unit.modules[0]
            paths = {id(below): path for path, below in outer.named_modules()}
            root = next((root for root in roots if id(root) in paths), None)
            hint = f"Call fully_shard for {type(module).__name__} first, because both modules contain it."
            if root is not None:
                hint = f"Call fully_shard for {paths[id(root)]!r} first, and for the outer module afterwards."
            raise ValueError(
                f"fully_shard: parameter {name!r} of {type(module).__name__} already belongs to the unit of "
                f"{unsharded_class(outer).__name__}, so {type(root or roots[0]).__name__} cannot be sharded. {hint}"
            )


def _refuse_views(modules: Iterable[nn.Module]) -> None:
    """Raises if a parameter is not contiguous and shares its memory with another one, since a copy would untie them."""
    named = {param: name for module in modules for name, param in module.named_parameters()}
    plain = {param: name for param, name in named.items() if not (isinstance(param, DTensor) or param.is_meta)}
    for param, name in plain.items():
        if param.is_contiguous() or not (memory := _memory(param)):
            continue
        others = (its_name for one, its_name in plain.items() if one is not param and _memory(one) == memory)
        if (other := next(others, None)) is not None:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: parameter {name!r} is not contiguous and shares its memory with {other!r}. "
                "Shards cannot share memory like that. Use one parameter for both modules, or untie them "
                "(ensure_weight_tying=False for adapters of PEFT)."
            )


def _memory(param: nn.Parameter) -> int:
    return param.untyped_storage().data_ptr()


def _check_timeout(timeout: timedelta | None, ranks: ShardGroup) -> timedelta | None:
    if timeout is None:
        return None
    if timeout <= timedelta(0):
        raise ValueError(f"fully_shard: timeout must be a positive datetime.timedelta, got {timeout!r}")
    if ranks.device.type != "cpu":
        raise ValueError(
            f"fully_shard: timeout={timeout} acts on CPU meshes only, but this mesh is on {ranks.device.type}, where "
            "the process group ends collectives that hang. Give the timeout to init_process_group or new_group."
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
    """Raises if the model contains units of FSDP2, FSDP1 or DDP, whose hooks would conflict with fsdp2x's."""
    for module in modules:
        for name, inner in module.named_modules():
            ours = isinstance(inner, FSDPModule) or torch_private.is_replicated(inner)  # the latter is ignored
            if ours or not isinstance(inner, _OTHERS):
                continue
            kind = next(other for other in _OTHERS if isinstance(inner, other))
            raise ValueError(
                f"fully_shard: {type(module).__name__} has {name or 'itself'}, which {kind.__module__}.{kind.__name__} "
                "shards or replicates already. Use only one of the two for the model. fsdp2x.install() replaces "
                "torch's fully_shard."
            )


def _check_mesh_dims(dp_mesh_dims: Any, reshard_after_forward: bool | int | None) -> None:
    if dp_mesh_dims is None:
        return
    if not (hasattr(dp_mesh_dims, "shard_names") and hasattr(dp_mesh_dims, "replicate_names")):
        raise TypeError(
            "fully_shard: dp_mesh_dims must be torch's DataParallelMeshDims, such as "
            f'DataParallelMeshDims(shard="fsdp"), got {dp_mesh_dims!r}'
        )
    if not isinstance(reshard_after_forward, bool | None):
        raise NotImplementedError(
            "fully_shard: reshard_after_forward as int is not supported with dp_mesh_dims, got "
            f"{reshard_after_forward!r}. Use True or False."
        )


def _sharded_class(cls: type) -> type:
    """Makes ``FSDP<Name>`` with the metaclass of ``cls``, so that models that are ABCs work."""
    if cls not in _sharded_classes:
        made = {name: method for name, make in method_makers.items() if (method := make(cls)) is not None}
        names = {"__deepcopy__": _no_deepcopy, **made}
        _sharded_classes[cls] = type(cls)(f"FSDP{cls.__name__}", (FSDPModule, cls), names)
    return _sharded_classes[cls]


def _no_deepcopy(*args: Any, **kwargs: Any) -> NoReturn:
    # The first two sentences are FSDP2's.
    raise AssertionError(
        "FSDP does not support deepcopy. Please use state dict for serialization. For a second copy, copy the model "
        "before fully_shard, or build another one and fill its parameters from fsdp2x.full_tensors(model)."
    )
