"""The only importer of private torch names; a test fails when one of them vanishes.

Owns no state. Each name says why the public surface does not do.
"""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

# torch.compiler.disable would import Dynamo with us, not at the first call.
from torch._compile import _disable_dynamo as never_compiled
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor  # the functions that files of torch.save name
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_of_dtype
from torch.distributed._composable.contract import (  # where composable functions look for one another
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
    _get_registry,
)
from torch.distributed._composable_state import _State as State  # the base class of states
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # a gradient may still be on its way
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions  # whether groups block the host
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # the values of upstream's private attributes
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # from_local would run checks per call
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset

# Rows cut by tensor parallelism, then by us.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.distributed.utils import _get_root_modules as root_modules  # those of a list that are below no other
from torch.utils._python_dispatch import (  # whether somebody watches the collectives
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,  # tensors that have inner tensors instead of memory
)
from torch.utils._pytree import tree_leaves  # the order of a call's inputs, as the engine walks them

S = TypeVar("S", bound=State)

# What is torch's own, beside the functions below.
__all__ = [
    "DTensorSpec", "State", "StridedShard", "TrainingState", "is_traceable_wrapper_subclass",
    "local_shape_and_offset", "never_compiled", "rebuild_tensor", "rebuild_tensor_of_dtype", "root_modules",
    "tree_leaves",
]  # fmt: skip


def backward_hooks(modules: list[nn.Module]) -> list[dict]:
    """The dicts in which ``modules``, and all modules together, keep their backward hooks."""
    found = [nn.modules.module._global_backward_hooks, *(getattr(m, "_backward_hooks", None) for m in modules)]
    return [hooks for hooks in found if isinstance(hooks, OrderedDict)]  # which can be referred to weakly


def is_replicated(module: nn.Module) -> bool:
    """Whether torch's composable ``replicate`` manages this module."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def state_of(module: nn.Module, kind: type[S]) -> S | None:
    """The state of class ``kind`` that is registered on ``module``, if any."""
    states = module.__dict__.get(STATE_KEY, {}).values()
    return next((state for state in states if isinstance(state, kind)), None)


def register_state(modules: Iterable[nn.Module], function: str, state: State) -> None:
    """Records on ``modules`` that the composable ``function`` was applied, without the checks of ``contract``.

    Raises:
        AssertionError: it was applied to one of them before, or one is listed twice (torch's message).
    """
    seen: set[int] = set()
    for module in modules:
        registry = module.__dict__.get(REGISTRY_KEY, ())  # getattr of a wrapper finds that of the wrapped module
        if id(module) in seen or function in registry:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{function} has already been applied to the following module:\n{module}"
            )
        seen.add(id(module))
    for module in modules:
        module.__dict__.setdefault(STATE_KEY, OrderedDict())[function] = state
        module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())[function] = RegistryItem()


def forget_state(modules: Iterable[nn.Module], function: str) -> None:
    """Undoes ``register_state``."""
    for module in modules:
        del module.__dict__[STATE_KEY][function], module.__dict__[REGISTRY_KEY][function]


def dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor over ``local`` itself: unlike ``from_local`` without a view, checks or communication."""
    return DTensor(local, spec, requires_grad=local.requires_grad)


def dtensor_like(whole: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor over ``local``, of its dtype, that is cut like ``whole``."""
    return dtensor(local, spec_with_dtype(whole._spec, local.dtype))


def dtensor_spec(mesh: DeviceMesh, placements: tuple, shape, stride, dtype: torch.dtype) -> DTensorSpec:
    """Spec of a tensor of global ``shape`` and ``stride``."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def spec_of(tensor: DTensor) -> DTensorSpec:
    """The whole spec; the public attributes give its parts only."""
    return tensor._spec


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """``spec`` for a tensor of ``dtype``."""
    meta = spec.tensor_meta
    assert meta is not None, "made by dtensor_spec"
    if meta.dtype == dtype:
        return spec
    return dtensor_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def storage_info(file_name: str, offset: int, length: int):
    """Where an entry lies, in DCP's ``.metadata``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # importing DCP takes its time

    return _StorageInfo(file_name, offset, length)


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """The local tensor itself: ``to_local()`` of a parameter that requires a gradient gives an alias."""
    return param._local_tensor if isinstance(param, DTensor) else param.detach()


def set_local_tensor(param: torch.Tensor, local: torch.Tensor) -> None:
    """Re-points a parameter at another local tensor of the same shape and dtype, keeping the object."""
    if isinstance(param, DTensor):
        param._local_tensor = local
    else:
        param.data = local


def restore_gradient_hooks(param: torch.Tensor) -> None:
    """Post-accumulate hooks stay with the Python object when ``Module._apply`` swaps the tensor under it."""
    if hooks := param._post_accumulate_grad_hooks:
        param._post_accumulate_grad_hooks = hooks


def inside_backward() -> bool:
    """Whether this thread runs nodes or hooks of a backward."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of the backward that runs in this thread; what it raises, the backward raises."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def set_spec(param: Any, spec: DTensorSpec) -> None:
    """Gives a DTensor an equal spec: an operation makes one of its own."""
    param._spec = spec


def wait_if_async(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a functional collective that may still run."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_observed() -> bool:
    """Whether a dispatch mode is active: CommDebugMode, FakeTensorMode, a memory tracker."""
    return bool(_get_current_dispatch_mode_stack())


def unobserved():
    """Context: no dispatch mode sees what runs inside."""
    return _disable_current_modes()


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh whose axes are those of ``meshes``, cut out of one root mesh."""
    return DeviceMesh._concatenate(meshes)


def mesh_info(mesh: DeviceMesh, shard_axis: int | None, replicate_axis: int | None, **spmd):
    """Upstream's description of the data-parallel axes of ``mesh``."""
    if replicate_axis is None:
        return FSDPMeshInfo(mesh, shard_mesh_dim=shard_axis, **spmd)
    if shard_axis is None:
        return DDPMeshInfo(mesh, replicate_mesh_dim=replicate_axis, **spmd)
    return HSDPMeshInfo(mesh, shard_mesh_dim=shard_axis, replicate_mesh_dim=replicate_axis, **spmd)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A 1-D mesh over all ranks of ``mesh``."""
    return mesh._flatten(name)


def all_gather_group(group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Several all-gathers as one operation, ordered by the current stream.

    What ``dist._coalescing_manager`` ends in, without its bookkeeping per tensor.
    """
    options = AllgatherOptions()
    options.asyncOp = False
    gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    work = gather(outputs, sources, options)
    if work is not None:
        work.wait()


def gathers_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """How the backend of ``device`` runs many all-gathers: ``"grouped"``, in one launch; ``"in turn"``; ``"unknown"``.

    "nccl" names another class from torch 2.15 on, unless TORCH_DIST_USE_NCCL2 is 0, and that one loops over them.
    """
    try:
        name = "" if group is None else type(group._get_backend(device)).__name__
    except RuntimeError:  # none for this device
        return "unknown"
    if name == "ProcessGroupNCCL":
        return "grouped"
    return "in turn" if name.startswith("ProcessGroupNCCL") else "unknown"


def gathers_of_nccl() -> str:
    """Likewise, of the class that this torch makes for "nccl", which a torch without CUDA lacks."""
    is_new = hasattr(dist.distributed_c10d, "_create_nccl2_process_group")
    return "in turn" if is_new and os.environ.get("TORCH_DIST_USE_NCCL2") != "0" else "grouped"


def _make_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """NCCL has one from the first collective of a device on; memory is registered with it. Collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def comm_allocator(kind: str | None, group: dist.ProcessGroup, device: torch.device):
    """A function of a number of bytes that allocates memory for collectives of ``group``; None: torch's allocator.

    ``"process_group"``: what the backend registers with its network, None where it has no such memory. ``"symmetric"``:
    torch's pool of symmetric memory; the function is collective then. Collective.
    """
    if kind == "process_group":
        backend = group._get_backend(device)
        if not backend.supports_tensor_alloc(device):
            return None
        _make_communicator(group, device)
        return lambda num_bytes: backend.allocate_tensor(num_bytes, dtype=torch.uint8, device=device)
    if kind == "symmetric":
        import torch.distributed._symmetric_memory as symmetric

        symmetric.set_backend("NCCL")
        _make_communicator(group, device)
        pool = symmetric.get_mem_pool(device)

        def allocate(num_bytes: int) -> torch.Tensor:
            with torch.get_device_module(device).use_mem_pool(pool):
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            symmetric.rendezvous(memory, group=group.group_name)
            return memory

        return allocate
    return None


def has_symmetric_pool() -> bool:
    """Whether this torch has a pool of symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    return hasattr(symmetric, "get_mem_pool")


def start_memory_history() -> None:
    """CUDA's allocator keeps what it allocates and frees, and from where, from now on."""
    torch.cuda.memory._record_memory_history()


def stop_memory_history(path: str) -> None:
    """Writes the allocator's snapshot and its history to ``path``, for pytorch.org/memory_viz; ends the record."""
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


def _allocator_settings() -> str:
    """What PYTORCH_CUDA_ALLOC_CONF said, or whoever has changed it since."""
    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if tell is not None:
        return tell()
    snapshot: dict = dict(torch.cuda.memory._snapshot())  # of torch 2.11
    return snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]


@contextlib.contextmanager
def outside_expandable_segments() -> Iterator[None]:
    """What is allocated inside can be shared by CUDA IPC with any process.

    Torch shares an expandable segment whole, and by ``pidfd_getfd``, which containers and Yama refuse.
    """
    before = _allocator_settings()
    if "expandable_segments:true" not in before.lower().replace(" ", ""):
        yield
        return
    others = [one for one in before.split(",") if not one.strip().startswith("expandable_segments")]
    torch._C._accelerator_setAllocatorSettings(",".join([*others, "expandable_segments:False"]))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)


def accelerator_type() -> str:
    """Device type of the default mesh: the machine's accelerator, else ``cpu``."""
    return torch._C._get_accelerator().type


def next_group_name(ranks: list[int]) -> str:
    """How torch will name the next group over ``ranks`` that is made without the other ranks.

    The members meet under this name. Torch makes it of counts of each process, so that it can differ between them.
    """
    return dist.distributed_c10d._hash_ranks_to_str(ranks)


@contextlib.contextmanager
def without_splits() -> Iterator[torch.device | None]:
    """Inside, new groups have communicators that only their members make; gives the device to bind them to.

    Where the default group has a device, as all of NCCL's have from torch 2.15 on, torch splits its communicator
    instead, and that waits for all ranks of the world.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield device
    finally:
        world.bound_device_id = device


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """The store that the ranks of ``group`` met through; None where it has no peers, or is not of torch's making."""
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return None if dist.get_backend(group) in ("fake", "threaded") else store


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether gloo runs the collectives of ``group`` on a CPU."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except (RuntimeError, AttributeError):  # none for the CPU
        return False


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """The timeout of a process group's collectives on ``device``; 30 minutes where its backend does not tell.

    The backends of a group differ in it: by default NCCL has 10 minutes, gloo beside it 30.
    """
    try:
        return group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return timedelta(minutes=30)
