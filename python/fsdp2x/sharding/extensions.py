"""Gathers parameters whose local tensor defines ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

If one rank has all rows of a frozen parameter, ``fsdp_get_unsharded_view(mesh, module, mp_policy)`` may return a tensor
over the shard's memory to compute with, or None.

This path is slow: it runs in Python for each parameter, and only the collective covers the group. On a device it
overlaps with compute like other gathers. The engine runs everything else (hooks, gradients, registration). torch's
FSDP2 documentation describes the protocol.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2x.base import torch_private
from fsdp2x.sharding.mesh import ShardGroup
from fsdp2x.sharding.spec import ParamSpec


def has_extension(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` defines the extension protocol.

    Raises:
        AssertionError: it defines only one of the two functions.
    """
    before, after = hasattr(tensor, "fsdp_pre_all_gather"), hasattr(tensor, "fsdp_post_all_gather")
    if before != after:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using all-gather extensions: "
            f"{tensor}"
        )
    return before or hasattr(tensor, "fsdp_get_unsharded_view")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor`` is a subclass without memory of its own, whose inner tensors keep their storages."""
    return torch_private.is_traceable_wrapper_subclass(tensor) or (
        type(tensor) not in (torch.Tensor, nn.Parameter) and has_extension(tensor)
    )


class Extension:
    """Gathers of one parameter: the inputs of the current gather, and the tensors that hold its unsharded form."""

    def __init__(self, spec: ParamSpec, size: torch.Size, ranks: ShardGroup, module: nn.Module) -> None:
        if spec.shard_dim > 0:
            raise NotImplementedError(
                f"fsdp2x.fully_shard: a parameter of {type(module).__name__} with an all-gather extension is sharded "
                f"along dim {spec.shard_dim}, but extensions work along dim 0 only. Return Shard(0) for it from "
                "shard_placement_fn."
            )
        self.spec, self.ranks = spec, ranks
        self.size, self.stride = size, torch.empty(size, device="meta").stride()
        self.padded_size = torch.Size(ranks.rows(size, spec.shard_dim, rank=0)[1])
        self.parameter: nn.Parameter | None = None  # over the unsharded tensor, made once
        self._module_name = type(module).__name__
        self._inputs: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []  # the inputs, flat
        self._metadata: Any = None
        self._outputs: list[torch.Tensor] = []
        self._inner: list[torch.Tensor] = []
        self._view: torch.Tensor | None = None  # over the memory of `_viewed`, instead of a gather
        self._viewed: Any = None

    def prepare(self, local: Any, module: nn.Module, mp_policy, *, is_frozen: bool) -> None:
        """Runs ``fsdp_get_unsharded_view`` or ``fsdp_pre_all_gather``. What the latter allocates belongs to the current
        stream until ``finish``.

        Raises:
            AssertionError: the signature of ``fsdp_pre_all_gather`` or the sizes it returned violate the protocol.
            ValueError: the view is no view of the parameter.
            NotImplementedError: there is neither a view nor ``fsdp_pre_all_gather``.
        """
        if self._takes_view(local, module, mp_policy, is_frozen) or not self._gathers(local):
            return
        arity = len(inspect.signature(local.fsdp_pre_all_gather).parameters)
        if arity not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather of {self._module_name}: expects (mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), got {arity} parameters"
            )
        mesh = self._shard_mesh
        arguments = (mesh,) if arity == 1 else (mesh, self.size, self.stride, module, mp_policy)
        inputs, self._metadata = local.fsdp_pre_all_gather(*arguments)
        is_padded = local.size() != self.padded_size
        if arity == 5 and is_padded and any(one.size() != self.padded_size for one in inputs):
            raise AssertionError(
                f"When a parameter is unevenly sharded by FSDP (orig size={self.size}, FSDP world size="
                f"{self.ranks.world}), fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                f"{self.padded_size} but got {[one.size() for one in inputs]}"
            )
        self._inputs = list(inputs)
        self._sources = [source.reshape(-1).contiguous() for source in inputs]

    @property
    def _shard_mesh(self) -> DeviceMesh:
        mesh = self.ranks.mesh
        if mesh.ndim == 1:
            return mesh
        assert mesh.mesh_dim_names is not None, "two axes have names"
        return mesh[mesh.mesh_dim_names[-1]]

    def _takes_view(self, local: Any, module: nn.Module, mp_policy, is_frozen: bool) -> bool:
        """Returns whether modules compute with a view of the shard, which is asked for once for each local tensor."""
        get_view = getattr(local, "fsdp_get_unsharded_view", None)
        if get_view is None or self.ranks.group is None or self.ranks.world > 1:
            return False
        if self._viewed is not local:
            view = get_view(self._shard_mesh, module, mp_policy) if is_frozen else None
            if view is None:
                return False
            if (view.shape, view.dtype, view.device) != (self.size, local.dtype, local.device):
                raise ValueError(
                    f"fsdp2x: fsdp_get_unsharded_view of a parameter of {self._module_name} must return a tensor of "
                    f"the parameter's local shape, dtype, and device, got {tuple(view.shape)}, {view.dtype}, "
                    f"{view.device}."
                )
            if not is_wrapper(local):
                raise NotImplementedError(
                    f"fsdp2x: fsdp_get_unsharded_view of a plain tensor of {self._module_name} must return None. "
                    "Return a view for tensor subclasses only."
                )
            self._view, self._viewed, self.parameter = view, local, None
        if not is_frozen:
            raise NotImplementedError(
                f"fsdp2x: a parameter of {self._module_name} became trainable after fsdp_get_unsharded_view had "
                "returned a view of it. Call requires_grad_() before the first forward."
            )
        return True

    def _gathers(self, local: Any) -> bool:
        """Returns whether the extension gathers. Without a view, the engine gathers plain tensors."""
        gathers = hasattr(local, "fsdp_pre_all_gather")
        if not gathers and is_wrapper(local):
            raise NotImplementedError(
                f"fsdp2x: a {type(local).__name__} of {self._module_name} has no fsdp_pre_all_gather, so it is "
                "gathered only as the view that fsdp_get_unsharded_view returns: of a frozen parameter on one shard "
                "rank. Define fsdp_pre_all_gather and fsdp_post_all_gather."
            )
        return gathers

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (output, source) of each all-gather that ``fsdp_pre_all_gather`` requests. Empty at world size 1."""
        self._allocate()
        if self.ranks.world > 1:
            return list(zip(self._outputs, self._sources, strict=True))
        for source, output in zip(self._sources, self._outputs, strict=True):
            output.copy_(source)
        return []

    def finish(self, local: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """Unshards ``local`` in the compute ``dtype`` after all gathers finished.

        Returns the tensor to make ``parameter`` of, or None if ``parameter`` exists and now has the values.
        """
        if self._viewed is local:
            return self._view if self.parameter is None else None
        if not self._gathers(local):
            return None
        # The protocol wants the rows of all ranks concatenated along dim 0.
        outputs = tuple(
            out.view(-1, *source.shape[1:]) for out, source in zip(self._outputs, self._inputs, strict=True)
        )
        unsharded = None
        if self.parameter is None:
            tensor, self._inner = local.fsdp_post_all_gather(outputs, self._metadata, dtype)
            unsharded = torch.as_strided(tensor, self.size, self.stride, storage_offset=0)
        else:
            for tensor in self._inner:
                _allocate(tensor)
            # Pass the object that modules compute with, because extensions also write its other fields (a scale).
            local.fsdp_post_all_gather(outputs, self._metadata, dtype, out=self.parameter)
        self._inputs, self._sources, self._metadata = [], [], None
        release = getattr(local, "fsdp_should_release_all_gather_outputs_after_post_all_gather", None)
        if release is not None and release():
            for tensor in self._outputs:
                tensor.untyped_storage().resize_(0)
        return unsharded

    def free(self) -> None:
        """Frees the memory of the unsharded form. The tensor objects stay."""
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)

    def _allocate(self) -> None:
        fits = [(out.numel(), out.dtype) for out in self._outputs]
        wanted = [(one.numel() * self.ranks.world, one.dtype) for one in self._inputs]
        if fits != wanted:
            self._outputs = [torch.empty(numel, dtype=dtype, device=self.ranks.device) for numel, dtype in wanted]
            return
        for tensor in self._outputs:
            _allocate(tensor)


def _allocate(tensor: torch.Tensor) -> None:
    storage, needed = tensor.untyped_storage(), tensor.numel() * tensor.itemsize
    if storage.size() != needed:
        storage.resize_(needed)
