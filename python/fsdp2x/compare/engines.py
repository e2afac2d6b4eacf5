"""How a side shards: as its script says, or with FSDP2, fsdp2x, DDP, or nothing in place of it.

An engine replaces ``fully_shard`` and ``DistributedDataParallel`` before the script imports them.

- ``unsharded``: every rank has the full model, and gradients are averaged over ranks after each backward. The model is
  in torch's ``fully_shard`` on a mesh of one rank, so that mixed precision and FSDP2's methods act as in the script. So
  both sides have the same ranks, and each rank the same rows, losses, and dropout masks.
- ``ddp``: DDP around the module whose forward runs first.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fsdp2x

_STOCK = torch_fsdp.fully_shard
_DDP = DistributedDataParallel
_STOCK_OPTIONS = frozenset(inspect.signature(_STOCK).parameters) - {"module"}


class Patches(contextlib.ExitStack):
    """Attributes that are replaced until the end of a `with` block."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Callable], Callable]) -> None:
        """Replaces a function by what ``make`` returns for it."""
        self.set(owner, name, make(getattr(owner, name)))


class AsScript(Patches):
    """Changes nothing. The other engines are subclasses, each with its patches."""

    def __enter__(self) -> AsScript:
        self._patch()
        return self

    def _patch(self) -> None: ...

    def before_root(self, module: nn.Module) -> None:
        """Runs before each outermost forward."""

    def after_backward(self) -> None:
        """Runs after each outermost backward."""


class FSDP2(AsScript):
    """torch's ``fully_shard``, also for scripts of fsdp2x and DDP. Options that only fsdp2x has are left out."""

    def _patch(self) -> None:
        shard = functools.wraps(_STOCK)(lambda module, **options: self.shard(module, **options))
        for owner in (torch_fsdp, fsdp2x):
            self.set(owner, "fully_shard", shard)
        self._replace_ddp()
        self.set(fsdp2x, "accumulate", _accumulate)
        self.set(fsdp2x, "clip_grad_norm_", nn.utils.clip_grad_norm_)
        self.set(fsdp2x.optim, "clip_grad_norm_", nn.utils.clip_grad_norm_)
        self.set(fsdp2x.optim, "AdamW", _with_known_options(torch.optim.AdamW))
        self.set(fsdp2x, "install", lambda **_: None)

    def _replace_ddp(self) -> None:
        wrapper = type(_DDP.__name__, (_Wrapper,), {"engine": self})
        for owner in (nn.parallel, nn.parallel.distributed):
            self.set(owner, _DDP.__name__, wrapper)

    def shard(self, module: Any, **options: Any) -> Any:
        return _STOCK(module, **_stock_options(options))


class FSDP2x(FSDP2):
    """fsdp2x, by ``install()``."""

    def _patch(self) -> None:
        self.callback(fsdp2x.install().uninstall)
        self._replace_ddp()

    def shard(self, module: Any, **options: Any) -> Any:
        return fsdp2x.fully_shard(module, **options)


class Unsharded(FSDP2):
    """Every rank has the full model, and gradients are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: list[nn.Module] = []
        self._mesh: DeviceMesh | None = None

    def shard(self, module: Any, **options: Any) -> Any:
        mesh, has_dims = options.get("mesh"), options.get("dp_mesh_dims") is not None
        num_ranks = mesh.size() if mesh is not None else dist.get_world_size()
        if has_dims or num_ranks != dist.get_world_size():
            how = "DTensors by dp_mesh_dims" if has_dims else f"over {num_ranks} of {dist.get_world_size()} ranks"
            raise NotImplementedError(
                f"fsdp2x compare: the script shards {how}, so other parallelism may take part. An unsharded side "
                "cannot replace that. Use --against fsdp2 or fsdp2x."
            )
        self._modules += module if isinstance(module, list) else [module]
        options = _stock_options(options) | {"mesh": self._mesh_of_one(mesh), "reshard_after_forward": True}
        options.pop("shard_placement_fn", None)
        return _STOCK(module, **options)

    def _mesh_of_one(self, mesh: DeviceMesh | None) -> DeviceMesh:
        if self._mesh is None:
            device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
            kind = mesh.device_type if mesh is not None else device.type
            if not dist.is_initialized():
                dist.init_process_group()
            shape = (dist.get_world_size(), 1)
            self._mesh = init_device_mesh(kind, shape, mesh_dim_names=("compare_copies", "compare_one"))["compare_one"]
        return self._mesh

    @torch.no_grad()
    def after_backward(self) -> None:
        """Averages gradients. A rank without one has zeros. Averages of earlier backwards stay as they are."""
        params = dict.fromkeys(param for module in self._modules for param in module.parameters())
        trained = [param for param in params if param.requires_grad]
        if not trained:
            return
        has_gradient = torch.tensor([param.grad is not None for param in trained], device=trained[0].device).int()
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        for param, is_there in zip(trained, has_gradient.tolist(), strict=True):
            if is_there and param.grad is None:
                param.grad = torch.zeros_like(param)
        found = [param.grad for param in trained if param.grad is not None]
        gradients = [one.to_local() if isinstance(one, DTensor) else one for one in found]
        none = torch.empty(0, dtype=torch.float64, device=trained[0].device)
        flat = torch.cat([none, *(one.flatten().to(torch.float64) for one in gradients)])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for gradient, mean in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


class DDP(FSDP2):
    """``DistributedDataParallel`` around the module whose forward runs first."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: list[nn.Module] = []
        self.replicas: list[DistributedDataParallel] = []

    def _replace_ddp(self) -> None:
        """Leaves DDP in the script as it is."""

    def shard(self, module: Any, **options: Any) -> Any:
        policy = options.get("mp_policy")
        if policy is not None and policy.param_dtype is not None:
            raise NotImplementedError(
                f"fsdp2x compare: DDP has no mixed precision like {policy}. Use --against unsharded, fsdp2, or fsdp2x."
            )
        for one in module if isinstance(module, list) else [module]:
            self._modules.append(one)
            vars(one)["_compare_engine"] = self
            one.__class__ = _replicated_class(type(one))
        return module

    def before_root(self, module: nn.Module) -> None:
        if "forward" in vars(module) or not any(one is module for one in self._modules):
            return
        inner: Any = nn.Module()  # what DDP calls, because the module's own forward calls DDP
        inner.module, inner.forward = module, module.forward
        replica = _DDP(inner, find_unused_parameters=True)
        self.replicas.append(replica)
        vars(module)["forward"] = functools.wraps(module.forward)(lambda *args, **options: replica(*args, **options))


class _Replicated(FSDPModule):
    """Has FSDP2's methods for a module that DDP replicates. They do nothing, except for gradient synchronization."""

    _compare_engine: DDP

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        for replica in self._compare_engine.replicas:
            replica.require_backward_grad_sync = requires_gradient_sync

    def _apply(self, *args: Any, **options: Any) -> Any:
        return nn.Module._apply(self, *args, **options)  # type: ignore[arg-type]


def _do_nothing(self: Any, *args: Any, **options: Any) -> None: ...


for _name in vars(FSDPModule):
    if not _name.startswith("_") and _name not in vars(_Replicated):
        setattr(_Replicated, _name, _do_nothing)


@functools.cache
def _replicated_class(cls: type) -> type:
    return type(f"FSDP{cls.__name__}", (_Replicated, cls), {})


class _Wrapper(DistributedDataParallel):
    """Stands for DDP in a script whose model another engine shards."""

    engine: FSDP2

    def __init__(self, module: nn.Module, *args: Any, broadcast_buffers: bool = True, **options: Any) -> None:
        nn.Module.__init__(self)
        self._broadcasts = broadcast_buffers
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self.module = self.engine.shard(module)

    def forward(self, *args: Any, **options: Any) -> Any:
        if self._broadcasts and self.training:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, 0)
        return self.module(*args, **options)

    def no_sync(self) -> Any:
        return _accumulate(self.module, last=False)


@contextlib.contextmanager
def _accumulate(model: nn.Module, *, last: bool, before_last: str = "nothing") -> Iterator[None]:
    """``fsdp2x.accumulate`` for other engines."""
    shards: Any = [module for module in model.modules() if isinstance(module, FSDPModule) and not last]
    for module in shards:
        module.set_requires_gradient_sync(False, recurse=False)
    yield
    for module in shards:
        module.set_requires_gradient_sync(True, recurse=False)


def _stock_options(options: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in options.items() if name in _STOCK_OPTIONS}
    if not isinstance(kept.get("offload_policy"), CPUOffloadPolicy):
        kept.pop("offload_policy", None)
    return kept


def _with_known_options(cls: type) -> Callable:
    known = inspect.signature(cls).parameters
    return lambda params, **options: cls(params, **{name: one for name, one in options.items() if name in known})


ENGINES: dict[str, type[AsScript]] = {
    "script": AsScript, "unsharded": Unsharded, "fsdp2": FSDP2, "fsdp2x": FSDP2x, "ddp": DDP,
}  # fmt: skip
