"""Operations on a sharded parameter, its gradient, or its local tensor, and the results to compare."""

import copy
import io
import multiprocessing.reduction
import pickle

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate


def _saved(tensor, **options):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, **options)


def _sent(tensor):
    """A torch.multiprocessing queue moves the storage to memory that it shares with the receiver."""
    import torch.multiprocessing  # noqa: F401 (registers how tensors are sent)

    return multiprocessing.reduction.ForkingPickler.dumps(tensor).nbytes > 0


def _double_grad(param):
    param.grad.mul_(2)


READS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": lambda x: _saved(x, weights_only=False),
    "save_weights_only": lambda x: _saved(x, weights_only=True),
    "clone": torch.clone,
    "detach": torch.Tensor.detach,
    "data": lambda x: x.data,
    "to_float64": lambda x: x.to(torch.float64),
    "to_same": lambda x: x.to(x.dtype),
    "to_copy": lambda x: x.to(x.dtype, copy=True),
    "to_meta": lambda x: x.to("meta"),
    "cpu": lambda x: x.cpu(),
    "half": lambda x: x.half(),
    "contiguous": lambda x: x.contiguous(),
    "view": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x),
    "view_bytes": lambda x: x.view(torch.uint8),
    "flatten": lambda x: x.flatten(),
    "transposed": lambda x: x.t(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.expand_as(x),
    "narrow": lambda x: x.narrow(0, 0, 1),
    "slice": lambda x: x[:1],
    "split": lambda x: list(x.split(1)),
    "chunk": lambda x: list(x.chunk(2)),
    "cat": lambda x: torch.cat([x, x]),
    "numpy": lambda x: x.detach().numpy().tolist(),
    "numpy_force": lambda x: x.numpy(force=True).tolist(),
    "tolist": lambda x: x.tolist(),
    "as_tensor": torch.as_tensor,
    "storage_offset": lambda x: x.storage_offset(),
    "stride": lambda x: x.stride(),
    "is_contiguous": lambda x: x.is_contiguous(),
    "address": lambda x: x.data_ptr() if isinstance(x, DTensor) else x.data_ptr() == 0,
    "storage_address": lambda x: x.untyped_storage().data_ptr() == x.data_ptr(),
    "storage_is_shared": lambda x: x.untyped_storage().is_shared(),
    "storage_is_pinned": lambda x: x.untyped_storage().is_pinned(),
    "storage_of_alias": lambda x: x.detach().untyped_storage()._cdata == x.untyped_storage()._cdata,
    "is_set_to": lambda x: x.is_set_to(x.detach()),
    "is_shared": lambda x: x.is_shared(),
    "is_pinned": lambda x: x.is_pinned(),
    "is_inference": lambda x: x.is_inference(),
    "facts": lambda x: (x.nelement(), x.element_size(), x.nbytes, x.ndim, x.layout, x.type(), x.requires_grad),
    "hash": lambda x: hash(x) == hash(x),
    "repr": repr,
    "len": len,
    "rows": lambda x: len(list(x)),
    "bool": lambda x: bool((x == x).all()),
    "equal": lambda x: torch.equal(x, x.detach()),
    "sum": lambda x: x.sum(),
    "norm": lambda x: x.detach().double().norm(),
    "foreach_norm": lambda x: torch._foreach_norm([x.detach().double()]),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(2),
    "parameter": lambda x: nn.Parameter(x.detach(), requires_grad=x.requires_grad),
    "grad_dtype": lambda x: getattr(x, "grad_dtype", None),
    "full_tensor": lambda x: x.full_tensor(),
    "to_local": lambda x: x.to_local(),
    "replicated": lambda x: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim),
    "dlpack": torch.from_dlpack,
}
WRITES = {
    "zero_": lambda x: x.detach().zero_(),
    "add_": lambda x: x.detach().add_(1),
    "copy_": lambda x: x.detach().copy_(x.detach() * 2),
    "uniform_": lambda x: x.detach().uniform_(),
    "foreach_add_": lambda x: torch._foreach_add_([x.detach()], 1),
    "clamp_": lambda x: x.detach().clamp_(0),
    "data_assigned": lambda x: setattr(x, "data", x.data.clone()),
    "resize_same": lambda x: x.resize_(x.shape),
    "share_memory_": lambda x: x.share_memory_(),
    "sent_to_a_process": _sent,
    "attribute": lambda x: setattr(x, "of_the_user", 1),
    "hook": lambda x: x.register_hook(lambda grad: grad * 2) is not None,
    "accumulated_hook": lambda x: x.register_post_accumulate_grad_hook(_double_grad) is not None,
    "requires_grad_": lambda x: x.requires_grad_(x.requires_grad),
}
# Stock ends the process: a DTensor has no memory of its own to share.
CRASHES = {"share_memory_", "sent_to_a_process", "dlpack"}
# FSDP2 continues to use the earlier memory.
UNSEEN = {"data_assigned"}


def shown(value, *, places: bool = True):
    """Returns the parts of a result that must agree on both engines. places: include a tensor's storage offset."""
    if isinstance(value, DTensor):
        facts = value.placements, value.stride(), shown(value._local_tensor, places=places)
        kind = type(value).__name__, tuple(value.shape), value.dtype, value.requires_grad, value.is_leaf
        return (*kind, value.storage_offset() if places else None, *facts)
    if isinstance(value, torch.Tensor):
        kind = type(value).__name__, tuple(value.shape), value.dtype, value.requires_grad, str(value.device)
        place = (value.storage_offset(), value.stride()) if places else ()
        return (*kind, *place, value.is_meta or value.detach().tolist())
    if isinstance(value, (list, tuple)):
        return [shown(item, places=places) for item in value]
    return value


def outcome(operation, value, *, places: bool = True):
    """("ok", what it returned, what became of ``value``), or the kind of the error."""
    torch.manual_seed(3)
    try:
        result = operation(value)
        return "ok", shown(result, places=places), shown(value, places=places)
    except Exception as error:
        return type(error).__name__, str(error)
