"""Holds the parameters of one group: cuts them into shards in one flat buffer, and adopts replaced parameters.

``ShardedParamGroup`` owns the buffer (the pool) and the sharded ``nn.Parameter`` objects. Lazy initialization builds
the engine's ``_C.ParamGroup`` from it, which keeps the same pool.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp2x.base import optimizer_hooks, torch_private
from fsdp2x.base.annotations import skips_checks
from fsdp2x.base.native import _C
from fsdp2x.sharding import spec as specs
from fsdp2x.sharding.collect import Owners, Placed
from fsdp2x.sharding.extensions import Extension, has_extension, is_wrapper
from fsdp2x.sharding.mesh import ShardGroup
from fsdp2x.sharding.offload import mark, new_mark
from fsdp2x.sharding.shapes import PARTS, REDUCIBLE, keeps_dtype, kept_shapes, layout_shapes
from fsdp2x.sharding.sharded_param import (
    ShardedParam,
    cut,
    is_sharded,
    parameter_over,
    refuse_grad_dtype,
    tie_again,
    unsharded_parameter,
    user_attributes,
)
from fsdp2x.sharding.transport import TransportKind, has_streams
from fsdp2x.sharding.upstream_names import GroupNames
from fsdp2x.sharding.wrap import writes_in_forward


class ShardedParamGroup(GroupNames):
    """The sharded parameters of one group and the pool that holds their shards."""

    is_replicated = False

    def __init__(self, placed: list[Placed], mp_policy: MixedPrecisionPolicy) -> None:
        self.ranks, offload = placed[0].ranks, placed[0].offload
        self.offload = offload
        self.offloads = offload.of_shards  # shards are in CPU memory, whatever the mesh's device
        # The mark makes optimizers keep the state of these parameters in CPU memory.
        keeps_state = offload.mode == "optimizer" and has_streams(self.ranks.device)
        self._mark = new_mark(offload.pin_memory) if keeps_state else None
        self.policy = mp_policy
        self._pin_memory = offload.pin_memory and offload.of_shards
        self._own_pool: torch.Tensor | None = None  # used until there is an engine, which may move shards
        self.params: list[ShardedParam] = []
        self.unit_state: Callable = lambda: None  # weak reference to the state of the unit
        self.engine: _C.ParamGroup | None = None  # set at lazy initialization
        self.extension_gathers: Any = None  # comms._ExtensionGathers, if there are extensions or aliases
        self._own_offsets: list[int] = []
        self._dtypes: list[torch.dtype] = []
        for one in placed:
            self._check(one)
        with torch.no_grad():
            for one in placed:
                self._shard(one)
            self.find_extensions()
            self._adopt()
        self._take_places(placed)
        self.seal()

    def _take_places(self, placed: list[Placed]) -> None:
        """Registers the sharded parameters in place of the originals."""
        for one, sharded in zip(placed, self.params, strict=True):
            sharded.original = optimizer_hooks.mark_original(one.owned.param)
            for module, name in sharded.owners:
                module._parameters[name] = sharded.param

    def add_owner(self, index: int, module: nn.Module, name: str) -> None:
        """Adds a module that registers parameter ``index``. Call it while the unit is sharded."""
        self.params[index].owners.append((module, name))
        if self.engine is not None:
            self.engine.add_owner(index, _owner(module, name))

    def _check(self, placed: Placed) -> None:
        param, where = placed.owned.param, _where(placed)
        if not param.is_contiguous():
            _make_contiguous(param, where)
        refuse_grad_dtype(param, where)
        if param.requires_grad and param.dtype not in (*REDUCIBLE, *PARTS):
            raise NotImplementedError(
                f"fsdp2x.fully_shard: {where} is trainable and has dtype {param.dtype}, but gradients can be reduced "
                f"only for {', '.join(str(dtype) for dtype in (*REDUCIBLE, *PARTS))}. Freeze or convert it first."
            )

    def _shard(self, placed: Placed) -> None:
        owned, ranks = placed.owned, placed.ranks
        spec, full = specs.make_spec(owned.param, _where(placed), ranks, placed.shard_dim)
        spec.grad_dtype = torch_private.grad_dtype_of(owned.param)
        dim = placed.shard_dim
        if dim > 0 and full.shape[dim] % ranks.world != 0:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: {full.size()} (world size: {ranks.world})"
            )
        local = cut(full, ranks, dim)
        if self.offloads and not local.is_meta:
            local = local.cpu()  # a DTensor never changes the device that it was made on
        sharded = parameter_over(local, spec, requires_grad=owned.param.requires_grad)
        # Attributes of a wrapper instance are its parts; users did not set them.
        attributes = {} if is_wrapper(full) else user_attributes(owned.param)
        sharded.__dict__.update(attributes)
        keeps = keeps_dtype(owned.param, self.policy)
        owners = Owners(owned.owners)
        self.params.append(ShardedParam(sharded, owners, spec, full.shape, attributes, keeps, is_wrapper(local)))

    def find_extensions(self) -> None:
        """Finds local tensors that define their own all-gather. Runs again at lazy initialization: users patch late."""
        for sharded in self.params:
            local = sharded.local
            if sharded.extension is None and has_extension(local):
                sharded.extension = Extension(sharded.spec, sharded.local_size, self.ranks, sharded.owners[0][0])

    def shapes(self) -> list[_C.ParamShape]:
        """Describes each parameter for the engine's layout."""
        policy = self.policy
        return layout_shapes([sharded.facts for sharded in self.params], policy.param_dtype, policy.reduce_dtype)

    def _pool_layout(self) -> _C.Layout:
        """Returns where shards are stored. Compute and reduction dtypes do not change it."""
        shapes = layout_shapes([sharded.facts for sharded in self.params], None, None)
        return _C.Layout(shapes, self.ranks.world, self.ranks.rank)

    def _make_pool(self, layout: _C.Layout, device: torch.device, dtypes: list[torch.dtype]) -> torch.Tensor:
        """Allocates memory for shards of ``dtypes`` without zeroing it."""
        pool = _C.pool_memory(max(layout.shard_pool_bytes, 1), device)
        if self._pin_memory:
            pool = pool.pin_memory()
        self._own_pool, self._dtypes = pool, dtypes
        return pool

    @property
    def transport(self) -> TransportKind:
        """The transport in use. Set at lazy initialization."""
        assert self.engine is not None, "transport was read before lazy initialization"
        return TransportKind(self.engine.transport_name)

    @property
    def holds_unreduced(self) -> bool:
        return self.engine is not None and self.engine.holds_unreduced

    @property
    def pool(self) -> torch.Tensor | None:
        """The bytes that hold the shards: a pool, or the gather buffer they stay in. None on the meta device."""
        return self._own_pool if self.engine is None else self.engine.pool

    @property
    def _present_pool(self) -> torch.Tensor:
        pool = self.pool
        assert pool is not None, "a parameter is on the meta device"
        return pool

    @property
    def _offsets(self) -> list[int]:
        """Offsets of the shards in ``pool``, in bytes."""
        return self._own_offsets if self.engine is None else self.engine.shard_offsets

    def adopt(self) -> None:
        """Brings every shard back into the pool after ``load_state_dict(assign=True)``, ``.to()`` or ``.to_empty()``.

        Copies the values of parameters that moved. The ``nn.Parameter`` objects stay. If dtypes or the device changed,
        the pool is new, and the next forward makes the engine's unit again.

        Raises:
            ValueError: a parameter does not have the shape of its shard. Modules then register the shard again.
            RuntimeError: the ``grad_dtype`` of a parameter was changed after the first forward.
        """
        self.take_grad_dtypes()
        before = [sharded.param for sharded in self.params]
        self.follow_modules()
        _refuse_shapes(self, before, self._dtypes)
        if self.engine is None:
            self.take_grad_dtypes()  # of parameters that were loaded
        for sharded in self.params:
            sharded.restore_grad_dtype()
            torch_private.restore_gradient_hooks(sharded.param)
            if not user_attributes(sharded.param):  # converting a module inside the unit drops them
                sharded.param.__dict__.update(sharded.attributes)
        self._adopt()
        if self.engine is None:
            return
        for index, (old, sharded) in enumerate(zip(before, self.params, strict=True)):
            if sharded.param is not old:
                self.engine.set_sharded_param(index, sharded.param, sharded.spec)
        self._watch_shards(self.engine)

    def take_grad_dtypes(self) -> None:
        """Follows ``grad_dtype`` until the first forward. Raises RuntimeError if it was changed later."""
        for sharded in self.params:
            sharded.take_grad_dtype(has_layout=self.engine is not None)

    def follow_modules(self) -> None:
        """Takes over the parameters that modules register now."""
        for sharded in self.params:
            module, name = sharded.owners[0]
            current = None if module is None else module._parameters.get(name)
            before = sharded.param
            if current is not None and self._is_replacement(current, sharded):
                sharded.param = current
            tie_again(sharded, before)

    def _is_replacement(self, current: nn.Parameter, sharded: ShardedParam) -> bool:
        return is_sharded(current) and current is not sharded.param

    @property
    def keeps_shards_apart(self) -> bool:
        """Whether gathered parameters are copies of the shards, also where they could be the shards themselves.

        Aliases are copied from another pool. What a forward writes to its weight must end with its reshard, as it does
        on several ranks.
        """
        is_alone = self.ranks.world == 1 and has_streams(self.ranks.device)
        writes = is_alone and any(writes_in_forward(module) for param in self.params for module, _ in param.owners)
        return writes or any(param.is_alias for param in self.params)

    def refresh_aliases(self) -> None:
        """Copies the rows of parameters that are stored in another group's pool."""
        pool = self._present_pool
        with torch.no_grad():
            for sharded, offset in zip(self.params, self._offsets, strict=True):
                if sharded.is_alias:
                    local = sharded.local
                    _C.tensor_in_pool(pool, offset, list(sharded.spec.local_shape), local.dtype).copy_(local)

    def _adopt(self) -> None:
        locals_ = [sharded.local for sharded in self.params]
        if any(local.is_meta for local in locals_):
            self._leave_engine()
            # Until materialize() makes a pool, no shard may keep its full tensor alive.
            self._own_pool = None
            for sharded, local in zip(self.params, locals_, strict=True):
                if not (local.is_meta or sharded.is_wrapper) and local.nbytes < local.untyped_storage().nbytes():
                    torch_private.set_local_tensor(sharded.param, local.clone())
            return
        self._leave_slot()
        layout, pool, dtypes = self._pool_layout(), self.pool, [local.dtype for local in locals_]
        device = torch.device("cpu") if self.offloads else locals_[0].device
        fresh = pool is None or pool.numel() != max(layout.shard_pool_bytes, 1)
        fresh = fresh or pool.device != device or self._dtypes != dtypes
        if pool is None or fresh:
            self._leave_engine()
            pool = self._make_pool(layout, device, dtypes).zero_()
        self._own_offsets = layout.shard_offsets
        with torch.no_grad():
            for sharded, local, offset in zip(self.params, locals_, layout.shard_offsets, strict=True):
                if not sharded.is_alias:
                    mark(sharded.param, self._mark)
                if sharded.is_pooled:
                    self._move_in(sharded, local, pool, offset, fresh)

    def _leave_engine(self) -> None:
        """Drops the engine's group, because it was made for other shards."""
        if self.engine is not None:
            self.unit_state().forget_engine()

    def _leave_slot(self) -> None:
        """Moves shards that stay in the engine's gather buffer back into a pool, where they can be replaced."""
        if self.engine is not None:
            self.engine.give_back_shards()

    def materialize(self) -> None:
        """Gives parameters on the meta device memory in a new pool, with undefined values and zero padding.

        The ``nn.Parameter`` objects stay. Parameters of the group that have values keep them.

        Raises:
            NotImplementedError: a parameter on the meta device is a tensor subclass.
        """
        self.follow_modules()
        locals_ = [sharded.local for sharded in self.params]
        if not any(local.is_meta for local in locals_):
            return
        for sharded, local in zip(self.params, locals_, strict=True):
            if local.is_meta and sharded.is_wrapper:
                raise NotImplementedError(
                    f"fsdp2x: parameter {sharded.label!r} is a {type(local).__name__} on the meta device. Call "
                    "to_empty() on the model and fill it yourself."
                )
        layout = self._pool_layout()
        # Filling the parameters writes every page once. Here only the padding is zeroed.
        device = torch.device("cpu") if self.offloads else self.ranks.device
        pool = self._make_pool(layout, device, [local.dtype for local in locals_])
        self._own_offsets = layout.shard_offsets
        end = 0
        with torch.inference_mode(False), torch.no_grad():
            places = zip(self.params, locals_, layout.shard_offsets, strict=True)
            for sharded, local, offset in sorted(places, key=lambda place: place[2]):
                if not sharded.is_pooled:
                    continue
                pool[end:offset].zero_()
                end = offset + local.numel() * local.dtype.itemsize
                pooled = _C.tensor_in_pool(pool, offset, list(sharded.spec.local_shape), local.dtype)
                sharded.storage = pooled.untyped_storage()
                if not local.is_meta:
                    pooled.copy_(local)
                    torch_private.set_local_tensor(sharded.param, pooled)
                    continue
                fresh = sharded.spec.parameter(pooled, requires_grad=sharded.param.requires_grad)
                fresh.__dict__.update(user_attributes(sharded.param))
                # A DTensor cannot change its device, so swap the contents of the object.
                torch.utils.swap_tensors(sharded.param, fresh)
            pool[end:].zero_()

    def _move_in(
        self, sharded: ShardedParam, local: torch.Tensor, pool: torch.Tensor, offset: int, fresh: bool
    ) -> None:
        if not fresh and local.numel() and _lies_at(local, pool, offset):
            return
        pooled = _C.tensor_in_pool(pool, offset, list(sharded.spec.local_shape), local.dtype)
        pooled.copy_(local)
        if not fresh and sharded.was_moved(local):
            return
        torch_private.set_local_tensor(sharded.param, pooled)
        sharded.storage = pooled.untyped_storage()

    def pooled_tensors(self) -> list[tuple[torch.Tensor, int]]:
        """Returns the local tensors in ``pool``, which is a pool again, and their offsets in bytes."""
        self._leave_slot()
        found, pool = [], self._present_pool
        for sharded, offset in zip(self.params, self._offsets, strict=True):
            local = sharded.local
            if sharded.is_pooled and _lies_at(local, pool, offset):
                found.append((local, offset))
        return found

    def lost_shard(self) -> str:
        """Says which shard is not where the engine reads it: other code replaced its memory after the first forward."""
        if self.engine is None:
            return ""
        pool = self._present_pool
        for sharded, offset in zip(self.params, self._offsets, strict=True):
            local = sharded.local
            is_kept = not sharded.is_pooled or local.numel() == 0 or sharded.was_moved(local)
            if is_kept or _lies_at(local, pool, offset):
                continue
            return (
                f"the shard of parameter {sharded.fqn!r} on rank {self.ranks.rank} has left its pool: something "
                "assigned to the `.data` of its local tensor, or replaced it, after the first forward. Training would "
                "use the old values. Write in place (`param.copy_()`), or load full tensors with torch's "
                "set_model_state_dict(..., StateDictOptions(full_state_dict=True)) or fsdp2x.load_hf."
            )
        return ""

    def make_engine_group(self) -> None:
        """Makes the ``_C.ParamGroup`` over these parameters.

        On an accelerator, gather buffers have room for equal chunks of all ranks, because collectives gather in place.
        Shards and gradients may stay in CPU memory.
        """
        on_device = has_streams(self.ranks.device)
        if on_device:
            self._check_offload()
        shapes = self.shapes()
        engine = self.engine = _C.ParamGroup(
            _C.Layout(shapes, self.ranks.world, self.ranks.rank, on_device),
            self._present_pool,
            self._engine_params(shapes),
            skips_checks(specs.make_gradient),
            skips_checks(specs.add_to_foreign),
            skips_checks(specs.plain_gradient),
            self.ranks.replicas,
            self.ranks.device,
            _OFFLOADS.get(self.offload.mode, _C.Offload.nothing) if on_device else _C.Offload.nothing,
        )
        self._own_pool = None  # the engine owns it now and may move shards
        self._watch_shards(engine)
        optimizer_hooks.watch_steps()
        optimizer_hooks.watch_zero_grad()

    def forget_engine(self) -> None:
        """Undoes ``make_engine_group``."""
        self._leave_slot()
        if self._own_pool is None and self.engine is not None:
            self._own_pool, self._own_offsets = self.engine.pool, self.engine.shard_offsets
        self.engine = self.extension_gathers = None
        for sharded in self.params:
            sharded.extension = sharded.gathered = None

    def _watch_shards(self, engine: _C.ParamGroup) -> None:
        engine.watch_shards([sharded.local if sharded.is_pooled else None for sharded in self.params])

    def _check_offload(self) -> None:
        for sharded in self.params:
            if self.offloads and sharded.extension is not None:
                what = "has its own all-gather"
            elif self.offloads and sharded.is_alias:
                what = "is tied to another unit's"
            elif self._mark is not None and sharded.is_wrapper:
                what = "is a tensor subclass with its own memory"
            else:
                continue
            raise NotImplementedError(
                f"fsdp2x: parameter {sharded.label!r} {what}, and its unit offloads to the CPU. Use OffloadPolicy() "
                "there."
            )

    def make_post_forward(self, ranks: ShardGroup, explain: Callable | None) -> None:
        """Gives the engine's group the smaller world ``ranks`` that keeps its rows after forward.

        ``explain``: makes the exception to raise if one of its collectives fails.
        """
        shapes = kept_shapes(self.shapes())
        layout = _C.Layout(shapes, ranks.world, ranks.rank, has_streams(self.ranks.device))
        pool = _C.pool_memory(max(layout.shard_pool_bytes, 1), ranks.device).zero_()
        params = []
        with torch.inference_mode(False), torch.no_grad():
            for sharded, shape, offset in zip(self.params, shapes, layout.shard_offsets, strict=True):
                _, sizes = ranks.rows(sharded.local_size, sharded.spec.shard_dim)
                local = _C.tensor_in_pool(pool, offset, sizes, sharded.gathered_dtype(shape))
                shard = specs.post_forward_dtensor(sharded, local, ranks)
                params.append(nn.Parameter(shard, sharded.param.requires_grad))
                torch_private.set_grad_dtype(params[-1], sharded.spec.grad_dtype)
        assert self.engine is not None, "made before"
        self.engine.set_post_forward(layout, pool, params, explain)

    def _engine_params(self, shapes: list[_C.ParamShape]) -> list[tuple]:
        """Returns the tuples ``_C.ParamGroup`` takes: fqn, sharded, unsharded, local, gradient spec, owners."""
        result = []
        # Made outside of inference mode, because an inference tensor can never be trained.
        with torch.inference_mode(False), torch.no_grad():
            for sharded, shape in zip(self.params, shapes, strict=True):
                unsharded = local = None
                if sharded.is_wrapper and sharded.extension is None:
                    kind = type(sharded.local).__name__
                    raise NotImplementedError(
                        f"fsdp2x.fully_shard: parameter {sharded.fqn!r} is a {kind}, a tensor subclass without "
                        "fsdp_pre_all_gather and fsdp_post_all_gather. Unwrap it or define them."
                    )
                if not sharded.is_wrapper:
                    dtype = sharded.gathered_dtype(shape)
                    local = _C.tensor_without_memory(list(sharded.local_size), dtype, self.ranks.device)
                    unsharded = unsharded_parameter(sharded, sharded.spec.wrap_unsharded(local))
                    sharded.gathered = unsharded if unsharded.is_floating_point() else None
                owners = [_owner(module, name) for module, name in sharded.owners]
                wrapped = sharded.spec.is_wrapped
                result.append((sharded.fqn, sharded.param, unsharded, local if wrapped else None, sharded.spec, owners))
        return result


def mark_aliases(groups: list[ShardedParamGroup]) -> None:
    """Finds parameters that were tied between groups after sharding. The first group keeps them in its pool.

    Raises:
        ValueError: the groups shard such a parameter differently.
    """
    owners: dict[int, ShardedParam] = {}
    for group in groups:
        group.follow_modules()
        for sharded in group.params:
            first = owners.setdefault(id(sharded.param), sharded)
            sharded.is_alias = first is not sharded
            if sharded.is_alias and first.spec.local_shape != sharded.spec.local_shape:
                raise ValueError(
                    f"fsdp2x: parameter {sharded.fqn!r} was tied to {first.fqn!r} after sharding, but their units cut "
                    "it differently. Tie weights before fully_shard."
                )


def _where(placed: Placed) -> str:
    module, name = placed.owned.owners[0]
    return f"parameter {name!r} of {type(module).__name__}"


def _make_contiguous(param: nn.Parameter, where: str) -> None:
    """Copies the values of a parameter, such as one in ``channels_last``, because rows are cut from contiguous memory.

    Raises:
        NotImplementedError: elements share memory, as after ``expand``, or the parameter is a tensor subclass.
    """
    span, overlaps = 1, False
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        overlaps |= size > 1 and stride < span
        span += stride * (size - 1)
    if overlaps or type(param) is not nn.Parameter:
        raise NotImplementedError(
            f"fsdp2x.fully_shard: {where} is not contiguous: shape {tuple(param.shape)}, strides {param.stride()}. "
            "Replace it by nn.Parameter(param.detach().contiguous()) first."
        )
    if not any(param.is_contiguous(memory_format=form) for form in (torch.channels_last, torch.channels_last_3d)):
        warnings.warn(
            f"fsdp2x.fully_shard: {where} is not contiguous and becomes a contiguous copy. If it is a view of another "
            "parameter, the two are no longer tied.",
            stacklevel=2,
        )
    param.data = param.data.contiguous()


def _lies_at(local: torch.Tensor, pool: torch.Tensor, offset: int) -> bool:
    return local.untyped_storage().data_ptr() == pool.data_ptr() + offset and local.is_contiguous()


_OFFLOADS = {"gradients": _C.Offload.gradients, "all": _C.Offload.everything}


def _owner(module: nn.Module, name: str) -> tuple:
    """Returns an owner as the engine takes it: a weak reference if the class overrides ``__setattr__`` (LSTM does)."""
    is_custom = type(module).__setattr__ is not nn.Module.__setattr__
    return module._parameters, name, weakref.ref(module) if is_custom else None


def _refuse_shapes(group: ShardedParamGroup, before: list[nn.Parameter], dtypes: list[torch.dtype]) -> None:
    """Restores the old parameters if a new one does not have the shape of its shard, then raises.

    Args:
        before: the parameters that modules registered when the shards came into the pool.
        dtypes: dtypes of the shards in the pool. Empty if they are not there yet.

    Raises:
        ValueError: a new parameter has the wrong shape.
    """
    wrong = ""
    for index, (old, sharded) in enumerate(zip(before, group.params, strict=True)):
        param, expected = sharded.param, sharded.spec.local_shape
        local, whole = sharded.local, sharded.spec.sharded.shape
        if sharded.is_wrapper or (local.shape == expected and param.shape == whole and param.dtype == local.dtype):
            continue
        wrong = wrong or (
            f"fsdp2x: parameter {sharded.label!r} has local shape {tuple(local.shape)} of "
            f"{tuple(param.shape)} and dtype {param.dtype} over {local.dtype} on rank {group.ranks.rank}, expected "
            f"{tuple(expected)} of {tuple(whole)}. Load DTensors with the placement of the sharded model, and convert "
            "it by model.to(dtype)."
        )
        _put_back(sharded, old, dtypes[index] if dtypes else None)
    if wrong:
        raise ValueError(wrong)


def _put_back(sharded: ShardedParam, param: nn.Parameter, dtype: torch.dtype | None) -> None:
    """Makes modules register ``param`` again, over the memory of its shard in the pool."""
    if sharded.param is param and sharded.storage is not None and dtype is not None:
        pooled: Any = torch.empty(0, dtype=dtype, device=sharded.storage.device)
        pooled.set_(sharded.storage, 0, sharded.spec.local_shape)
        param.grad = None
        shard = sharded.spec.parameter(pooled, requires_grad=param.requires_grad)
        if isinstance(param, DTensor):
            shard.__dict__.update(user_attributes(param) or sharded.attributes)
            torch.utils.swap_tensors(param, shard)
        else:
            param.data = shard
    sharded.param = param
    for module, name in sharded.owners:
        module._parameters[name] = param
