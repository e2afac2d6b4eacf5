"""Values for what no file holds: missing weights and non-persistent buffers, as the model's own class makes them.

transformers' ``_init_weights`` runs once over the model, with whole plain tensors in the places of the missing weights
and everything else marked as initialised; each rank then keeps its part. Ranks draw from one seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from fsdp2x.base.errors import CheckpointError
from fsdp2x.base.failures import exchange, rank_and_size
from fsdp2x.io.hf.targets import Target
from fsdp2x.io.names import hf_base, is_transformers, original_classes
from fsdp2x.lifecycle.replicas import checksum

_MARK = "_is_hf_initialized"


@torch.no_grad()
def initial_values(model: nn.Module, targets: list[Target], missing: list[Target], seed: int) -> Callable[[], None]:
    """Values for ``missing`` and all buffers that are on the meta device; what is returned puts them in their places.

    The missing weights are whole in memory until then.

    Raises:
        CheckpointError: the model's class does not initialise one of them.
    """
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not missing and not buffers:
        return lambda: None
    device = next((t.local.device for t in targets if not t.local.is_meta), torch.device("cpu"))
    wholes = [(target, _undefined(target.shape, target.dtype)) for target in missing]
    made = [(module, name, _undefined(buffer.shape, buffer.dtype)) for module, name, buffer in buffers]
    placed = {id(value) for *_, value in made}
    with contextlib.ExitStack() as stack:
        for target, whole in wholes:
            value = whole if target.is_buffer else nn.Parameter(whole, requires_grad=False)
            placed.add(id(value))
            for module, name in target.owners:
                stack.enter_context(_replaced(module._buffers if target.is_buffer else module._parameters, name, value))
        for module, name, value in made:
            stack.enter_context(_replaced(module._buffers, name, value))
        stack.enter_context(_marked(model, placed))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(seed)
        _run(model)
    unset = [target.fqn for target, whole in wholes if _is_undefined(whole)]
    paths = {module: path for path, module in model.named_modules()}
    unset += [f"{paths[module]}.{name}".lstrip(".") for module, name, value in made if _is_undefined(value)]
    if unset:
        raise CheckpointError(
            f"no file holds {', '.join(unset)}, and {type(model).__name__} does not initialise them; give them values "
            "before loading (a model whose buffers are not on the meta device keeps them)"
        )

    @torch.no_grad()
    def place() -> None:
        for target, whole in wholes:
            target.fill_from_whole(whole)
        for module, name, value in made:
            module._buffers[name] = value.to(device)

    return place


def _run(model: nn.Module) -> None:
    base, _ = hf_base(model)
    if is_transformers(base):
        with original_classes(base):
            base.initialize_weights()
    for module in model.modules():
        if hasattr(module, "reset_lora_parameters") and hasattr(module, "active_adapters"):
            for adapter in module.r:
                parts = [layers[adapter] for layers in (module.lora_A, module.lora_B) if adapter in layers]
                params = [param for part in parts for param in part.parameters()]
                if params and not any(getattr(param, _MARK, False) for param in params):
                    module.reset_lora_parameters(adapter, model.peft_config[adapter].init_lora_weights)


def _undefined(shape, dtype: torch.dtype) -> torch.Tensor:
    """Filled with what no initialisation leaves everywhere: NaN, or the smallest integer."""
    tensor = torch.empty(shape, dtype=dtype)
    return tensor.fill_(_sentinel(dtype))


def _sentinel(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _is_undefined(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0 or tensor.dtype in (torch.bool, torch.uint8):
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().all())
    return bool((tensor == _sentinel(tensor.dtype)).all())


@contextlib.contextmanager
def _replaced(registry: dict, name: str, value: torch.Tensor) -> Iterator[None]:
    before = registry[name]
    registry[name] = value
    try:
        yield
    finally:
        registry[name] = before


@contextlib.contextmanager
def _marked(model: nn.Module, unmarked: set[int]) -> Iterator[None]:
    """Everything but the tensors with these ids counts as initialised, and no module does."""
    marked: list[torch.Tensor] = []
    for module in model.modules():
        module.__dict__.pop(_MARK, None)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in unmarked and not getattr(tensor, _MARK, False):
                setattr(tensor, _MARK, True)
                marked.append(tensor)
    try:
        yield
    finally:
        for tensor in marked:
            delattr(tensor, _MARK)


def check_buffers(model: nn.Module) -> None:
    """Raises on every rank when a buffer differs between ranks. Collective.

    Raises:
        CheckpointError: which buffers differ from rank 0's, and where.
    """
    if rank_and_size()[1] == 1:
        return  # nobody to compare with
    mine = {name: checksum(buffer.detach()) for name, buffer in model.named_buffers() if not buffer.is_meta}
    everyone = exchange(mine)
    wrong = {
        name: [rank for rank, other in enumerate(everyone) if other.get(name) != digest]
        for name, digest in everyone[0].items()
    }
    told = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in wrong.items() if ranks]
    if told:
        raise CheckpointError(f"buffers differ from rank 0's: {'; '.join(told)}")
