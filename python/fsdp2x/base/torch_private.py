"""Imports private torch names, and is the only module that does. A test fails if one of them vanishes.

Owns no state. Each name says why the public surface is not enough.
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

# torch.compiler.disable would import Dynamo together with fsdp2x, not at the first call.
from torch._compile import _disable_dynamo as never_compiled
from torch.distributed._composable.contract import (  # where composable functions find one another
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
    _get_registry,
)
from torch.distributed._composable_state import _State as State  # the base class of states
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # a gradient that is still in transit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions  # whether groups block the host
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # values of FSDP2's private attributes
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # from_local would run checks per call
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local_shape_and_offset

# Rows cut by tensor parallelism first, then by fsdp2x.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.distributed.utils import _get_root_modules as root_modules  # modules of a list that no other one contains
from torch.utils._python_dispatch import (  # whether a mode watches the collectives
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,  # tensors that have inner tensors instead of memory
)
from torch.utils._pytree import (
    tree_leaves,  # the order in which the engine walks a call's inputs
    tree_map_only,  # so that all traces look into the same containers
)

# The flash kernels of a CPU. Unlike scaled_dot_product_attention, they return the logarithms of the sums.
cpu_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

S = TypeVar("S", bound=State)

# Names of torch, in addition to the functions below.
__all__ = [
    "DTensorSpec", "State", "StridedShard", "TrainingState", "cpu_flash", "cpu_flash_backward",
    "is_traceable_wrapper_subclass",
    "local_shape_and_offset", "never_compiled", "root_modules",
    "tree_leaves", "tree_map_only",
]  # fmt: skip


def outside_graphs(hook: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """Returns a function that calls ``hook``. Dynamo compiles neither of them, nor what they call.

    ``torch.compiler.disable`` does the same, but takes microseconds per call if nothing is compiled.
    """
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._dynamo.decorators import skip

    @skip
    def call(module: Any, args: Any, more: Any) -> Any:
        compiler = set_eval_frame(None)
        try:
            return hook(module, args, more)
        finally:
            if compiler is not None:
                set_eval_frame(compiler)

    return call


def has_saved_tensors_hooks() -> bool:
    """Returns whether hooks pack what autograd saves now, such as those of activation checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def backward_hooks(modules: list[nn.Module]) -> list[dict]:
    """Returns the dicts in which ``modules``, and all modules together, keep their backward hooks."""
    found = [nn.modules.module._global_backward_hooks, *(getattr(m, "_backward_hooks", None) for m in modules)]
    return [hooks for hooks in found if isinstance(hooks, OrderedDict)]  # only these support weak references


def is_replicated(module: nn.Module) -> bool:
    """Returns whether torch's composable ``replicate`` manages this module."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def state_of(module: nn.Module, kind: type[S]) -> S | None:
    """Returns the state of class ``kind`` that is registered on ``module``, if any."""
    states = module.__dict__.get(STATE_KEY, {}).values()
    return next((state for state in states if isinstance(state, kind)), None)


def register_state(modules: Iterable[nn.Module], function: str, state: State) -> None:
    """Records on ``modules`` that the composable ``function`` was applied, without the checks of ``contract``.

    Raises:
        AssertionError: it was already applied to one of them, or one is listed twice (torch's message).
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
    """Returns a DTensor over ``local`` itself. Unlike ``from_local``, it needs no view, checks or communication."""
    return DTensor(local, spec, requires_grad=local.requires_grad)


def dtensor_like(whole: DTensor, local: torch.Tensor) -> DTensor:
    """Returns a DTensor over ``local``, in its dtype, that is cut like ``whole``."""
    return dtensor(local, spec_with_dtype(whole._spec, local.dtype))


def dtensor_spec(mesh: DeviceMesh, placements: tuple, shape, stride, dtype: torch.dtype) -> DTensorSpec:
    """Returns the spec of a tensor of global ``shape`` and ``stride``."""
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), dtype))


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Returns the full spec. The public attributes give only its parts."""
    return tensor._spec


def spec_with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Returns ``spec`` for a tensor of ``dtype``."""
    meta = spec.tensor_meta
    assert meta is not None, "made by dtensor_spec"
    if meta.dtype == dtype:
        return spec
    return dtensor_spec(spec.mesh, spec.placements, meta.shape, meta.stride, dtype)


def storage_info(file_name: str, offset: int, length: int):
    """Returns the place of an entry in DCP's ``.metadata``."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # imported here because importing DCP is slow

    return _StorageInfo(file_name, offset, length)


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor itself. ``to_local()`` of a parameter that requires a gradient returns an alias."""
    return param._local_tensor if isinstance(param, DTensor) else param.detach()


def set_local_tensor(param: torch.Tensor, local: torch.Tensor) -> None:
    """Points a parameter to another local tensor of the same shape and dtype. Keeps the object."""
    if isinstance(param, DTensor):
        param._local_tensor = local
    else:
        param.data = local


def restore_gradient_hooks(param: torch.Tensor) -> None:
    """Restores post-accumulate hooks, which stay with the Python object when ``Module._apply`` swaps its tensor."""
    if hooks := param._post_accumulate_grad_hooks:
        param._post_accumulate_grad_hooks = hooks


def grad_dtype_of(param: torch.Tensor) -> tuple[torch.dtype | None, ...]:
    """Returns the ``grad_dtype`` that was set on ``param``, as a tuple. Empty if it was not set."""
    dtype = getattr(param, "grad_dtype", param.dtype)
    is_set = getattr(param, "_has_grad_dtype_override", dtype != param.dtype)  # new in torch 2.15
    return (dtype,) if is_set else ()


def set_grad_dtype(param: Any, grad_dtype: tuple[torch.dtype | None, ...]) -> None:
    """Sets what ``grad_dtype_of`` returned. An empty tuple changes nothing, since torch cannot unset it."""
    for dtype in grad_dtype:
        param.grad_dtype = dtype


def set_spec(param: Any, spec: DTensorSpec) -> None:
    """Gives a DTensor an equal spec object, because an operation makes a new one."""
    param._spec = spec


def wait_if_async(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the plain tensor of a functional collective that may still run."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_observed() -> bool:
    """Returns whether a dispatch mode is active: CommDebugMode, FakeTensorMode, a memory tracker."""
    return bool(_get_current_dispatch_mode_stack())


def unobserved():
    """Returns a context in which no dispatch mode sees operations."""
    return _disable_current_modes()


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Returns one mesh with the axes of ``meshes``, which are slices of one root mesh."""
    return DeviceMesh._concatenate(meshes)


def mesh_info(mesh: DeviceMesh, shard_axis: int | None, replicate_axis: int | None, **spmd):
    """Returns FSDP2's description of the data-parallel axes of ``mesh``."""
    if replicate_axis is None:
        return FSDPMeshInfo(mesh, shard_mesh_dim=shard_axis, **spmd)
    if shard_axis is None:
        return DDPMeshInfo(mesh, replicate_mesh_dim=replicate_axis, **spmd)
    return HSDPMeshInfo(mesh, shard_mesh_dim=shard_axis, replicate_mesh_dim=replicate_axis, **spmd)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Returns a 1-D mesh over all ranks of ``mesh``."""
    return mesh._flatten(name)


def all_gather_group(group: dist.ProcessGroup, outputs: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Runs several all-gathers as one operation, ordered by the current stream.

    It does what ``dist._coalescing_manager`` does, without its work per tensor.
    """
    options = AllgatherOptions()
    options.asyncOp = False
    gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    work = gather(outputs, sources, options)
    if work is not None:
        work.wait()


def gathers_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Returns how the backend of ``device`` runs many all-gathers: ``"grouped"`` in one launch, ``"in turn"``,
    ``"messages"`` of each rank to each other rank, for gloo on a CPU, or ``"unknown"``.

    From torch 2.15 on, "nccl" is another class that loops over them, unless TORCH_DIST_USE_NCCL2 is 0.
    """
    try:
        name = "" if group is None else type(group._get_backend(device)).__name__
    except RuntimeError:  # there is none for this device
        return "unknown"
    if name == "ProcessGroupNCCL":
        return "grouped"
    if device.type == "cpu" and group is not None and is_gloo(group):
        return "messages"
    return "in turn" if name.startswith("ProcessGroupNCCL") else "unknown"


def gathers_of_nccl() -> str:
    """Returns the same for the class that this torch makes for "nccl", which a torch without CUDA lacks."""
    is_new = hasattr(dist.distributed_c10d, "_create_nccl2_process_group")
    return "in turn" if is_new and os.environ.get("TORCH_DIST_USE_NCCL2") != "0" else "grouped"


def _make_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """Makes NCCL create a communicator, which otherwise comes with a device's first collective. Collective."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)


def comm_allocator(kind: str | None, group: dist.ProcessGroup, device: torch.device):
    """Returns a function that allocates bytes for collectives of ``group``. None: torch's allocator. Collective.

    ``"process_group"``: memory that the backend registers with its network, or None if it has none. ``"symmetric"``:
    torch's pool of symmetric memory. That function is collective.
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
    """Returns whether this torch has a pool of symmetric memory."""
    import torch.distributed._symmetric_memory as symmetric

    return hasattr(symmetric, "get_mem_pool")


def may_use_copy_engines(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Returns whether the settings of NCCL let it run collectives of ``group`` without blocks of a kernel."""
    if group is None or os.environ.get("NCCL_CTA_POLICY") == "2":
        return True
    zero = getattr(getattr(dist, "ProcessGroupNCCL", None), "NCCL_CTA_POLICY_ZERO", None)
    try:
        config = getattr(getattr(group._get_backend(device), "options", None), "config", None)
    except RuntimeError:  # there is none for this device
        return False
    return zero is not None and getattr(config, "cta_policy", None) == zero


def start_memory_history() -> None:
    """Makes CUDA's allocator record allocations, frees and their stacks from now on."""
    torch.cuda.memory._record_memory_history()


def stop_memory_history(path: str) -> None:
    """Writes the allocator's snapshot and history to ``path``, for pytorch.org/memory_viz, and ends the recording."""
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)


def _allocator_settings() -> str:
    """Returns the setting of PYTORCH_CUDA_ALLOC_CONF, or its later replacement."""
    tell = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if tell is not None:
        return tell()
    snapshot: dict = dict(torch.cuda.memory._snapshot())  # of torch 2.11
    return snapshot["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]


@contextlib.contextmanager
def outside_expandable_segments() -> Iterator[None]:
    """Makes memory that is allocated inside shareable with any process by CUDA IPC.

    torch shares an expandable segment as a whole by ``pidfd_getfd``, which containers and Yama forbid.
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
    """Returns the device type of the default mesh: the machine's accelerator, else ``cpu``."""
    return torch._C._get_accelerator().type


def next_group_name(ranks: list[int]) -> str:
    """Returns the name torch will give the next group over ``ranks`` that is made without the other ranks.

    The members connect under this name. torch derives it from counts of each process, which can differ.
    """
    return dist.distributed_c10d._hash_ranks_to_str(ranks)


@contextlib.contextmanager
def without_splits() -> Iterator[torch.device | None]:
    """Makes new groups inside have communicators that only their members create. Yields the device to bind them to.

    If the default group has a device, as all of NCCL's have from torch 2.15 on, torch splits its communicator
    instead, which waits for all ranks of the world.
    """
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield device
    finally:
        world.bound_device_id = device


def nccl_options_like(group: Any, device: torch.device) -> Any:
    """Returns options for another group of NCCL: the stream priority and communicator configuration of ``group``.

    None if another backend serves ``device``.
    """
    kind = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)
    try:
        given = getattr(group._get_backend(device), "options", None)
    except RuntimeError:  # there is none for this device
        return None
    if kind is None or not isinstance(given, kind):
        return None
    options = kind(given.is_high_priority_stream)
    options.config, options._timeout = given.config, given._timeout
    return options


def store_of(group: dist.ProcessGroup) -> dist.Store | None:
    """Returns the store through which the ranks of ``group`` connected. None without other ranks or torch's store."""
    _, store = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return None if dist.get_backend(group) in ("fake", "threaded") else store


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Returns whether gloo runs the collectives of ``group`` on a CPU."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except (RuntimeError, AttributeError):  # there is none for the CPU
        return False


def abort(group: dist.ProcessGroup) -> None:
    """Ends the collectives of ``group``, which cannot be used again. Does nothing for backends that cannot abort."""
    group.abort()


def object_device(group: dist.ProcessGroup | None) -> torch.device:
    """Returns where the ranks of ``group`` exchange objects."""
    return torch.device("cpu" if "cpu" in dist.get_backend_config(group) else accelerator_type())


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """Returns the timeout of a process group's collectives on ``device``, or 30 minutes if its backend has none.

    The backends of a group have different ones: by default 10 minutes for NCCL, and 30 for gloo in the same group.
    """
    try:
        return group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):
        return timedelta(minutes=30)
