"""Defines what a unit keeps in CPU memory: the policy, and a mark on parameters whose optimizer state stays there."""

from __future__ import annotations

import difflib
import functools
import itertools
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp2x.base.arguments import checked

OffloadMode = Literal["none", "optimizer", "gradients", "all"]
OFFLOAD_MODES = typing.get_args(OffloadMode)
# One policy for all parameters, or those of some by name.
OffloadPolicies = OffloadPolicy | Mapping[str, OffloadPolicy]


@checked
@dataclass
class HostOffloadPolicy(OffloadPolicy):
    """Keeps shards, gradients, or optimizer state in CPU memory. On a CPU mesh only ``pin_memory`` has an effect.

    ```
    ========== ============ ============= ================== ========================================== ==========
    mode       shards       gradients     optimizer state    transfers per step and parameter           step runs
    ========== ============ ============= ================== ========================================== ==========
    none       device       device        device             none                                       device
    optimizer  device       device        CPU                moments to the device and back             device
    gradients  CPU, and a   CPU           CPU                shard per forward, gradient back           CPU
               copy on the
               device
    all        CPU          CPU           CPU                shard per gather, gradient back            CPU
    ========== ============ ============= ================== ========================================== ==========
    ```

    Each unit moves in one copy per direction, overlapped with compute.

    ``optimizer``: needs ``fsdp2x.optim.AdamW``, which moves its moments unit by unit while it steps. ``step`` returns
    when they are back in CPU memory, and results equal those without offloading bit for bit. Other optimizers raise
    in ``step`` unless they keep no state (SGD without momentum).

    ``gradients``: works with any optimizer; DeepSpeed calls it offloading the optimizer. The optimizer sees parameters
    and ``.grad`` in CPU memory. The first gather of each forward (and of each ``unshard()``) updates the copy on the
    device, and backward gathers from that copy.


    ``all``: like ``torch.distributed.fsdp.CPUOffloadPolicy``. The device keeps no shards between gathers.

    Attributes:
        mode: ``"none"``, ``"optimizer"``, ``"gradients"``, or ``"all"``.
        pin_memory: whether to page-lock the copied memory, so that copies overlap. Needs an accelerator. torch rounds
            page-locked blocks up to powers of two, up to twice what ``memory_report`` counts. After torch 2.11, set
            ``PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1`` to avoid it.

    Raises:
        ValueError: ``mode`` is unknown.
        TypeError: ``pin_memory`` is not a bool.
    """

    mode: OffloadMode = "all"
    pin_memory: bool = True


@checked
def cpu_offload_by_budget(module: nn.Module, budget_bytes: int, *, pin_memory: bool = True) -> dict[str, OffloadPolicy]:
    """Chooses the parameters to offload, for ``fully_shard(module, offload_policy=...)``.

    Takes the largest parameters first and stops at the first that exceeds the budget. So a larger budget only adds
    parameters. Of parameters of equal size, it takes the first by name. Call it before ``fully_shard``. It communicates
    nothing, and changes nothing.

    Args:
        module: the module to shard.
        budget_bytes: most bytes of the chosen parameters together, each in full, not divided by the number of ranks.
        pin_memory: see ``CPUOffloadPolicy``.

    Returns:
        A ``CPUOffloadPolicy`` by fully qualified name, relative to ``module``. Other parameters stay on the device.

    Raises:
        ValueError: ``budget_bytes`` is negative.
    """
    if budget_bytes < 0:
        raise ValueError(f"fsdp2x.cpu_offload_by_budget: budget_bytes must be non-negative, got {budget_bytes}")
    named = sorted(module.named_parameters(), key=lambda one: (-one[1].nbytes, one[0]))
    used = itertools.accumulate(param.nbytes for _, param in named)
    policy = CPUOffloadPolicy(pin_memory=pin_memory)
    fit = itertools.takewhile(lambda pair: pair[1] <= budget_bytes, zip(named, used, strict=True))
    return {name: policy for (name, _), _ in fit}


class Offload(NamedTuple):
    """An offload policy as the runtime reads it."""

    mode: str = "none"
    pin_memory: bool = False

    @property
    def of_shards(self) -> bool:
        """Whether the optimizer sees parameters and gradients in CPU memory."""
        return self.mode in ("gradients", "all")

    def pool_key(self, has_streams: bool) -> Offload | bool:
        """Parameters with equal keys can share a pool. Without streams, only pinning has an effect."""
        return self if has_streams else self.of_shards and self.pin_memory


def mode_of(policy: OffloadPolicy | None) -> OffloadMode:
    """Returns the mode of ``HostOffloadPolicy`` that does what ``policy`` does."""
    if isinstance(policy, CPUOffloadPolicy):
        return "all"
    return policy.mode if isinstance(policy, HostOffloadPolicy) else "none"


def offload_of(policy: OffloadPolicy | None) -> Offload:
    """Reads one policy.

    Raises:
        TypeError: it is no policy.
        RuntimeError: the policy pins memory on a machine without an accelerator.
    """
    if policy is not None and not isinstance(policy, OffloadPolicy):
        raise TypeError(f"fully_shard: values of offload_policy must be OffloadPolicy, got {policy!r}")
    if not isinstance(policy, CPUOffloadPolicy | HostOffloadPolicy) or mode_of(policy) == "none":
        return Offload()
    offload = Offload(mode_of(policy), policy.pin_memory)
    if offload.pin_memory and not torch.accelerator.is_available():
        name, mode = type(policy).__name__, f"mode={policy.mode!r}, " if hasattr(policy, "mode") else ""
        raise RuntimeError(
            f"fully_shard: offload_policy={name}({mode}pin_memory=True) pins memory for an accelerator, and this "
            f"machine has none. Use {name}({mode}pin_memory=False)."
        )
    return offload


def named_offloads(
    policies: OffloadPolicies | None,
    modules: Collection[nn.Module],
    managed: set[nn.Parameter],
    read: Callable[[OffloadPolicy | None], Offload] = offload_of,
) -> tuple[Offload, dict[nn.Parameter, Offload]]:
    """Reads the ``offload_policy`` of a call for ``modules`` that shards the parameters ``managed``.

    Returns the policy of all parameters but those in the dict, and theirs. ``read``: reads one.

    Raises:
        RuntimeError: see ``offload_of``.
        ValueError: a name belongs to none of the parameters or to several, or a parameter has two policies.
    """
    if not isinstance(policies, Mapping):
        return read(policies), {}
    by_name: dict[str, dict[nn.Parameter, None]] = {}
    for name, param in (one for module in modules for one in module.named_parameters(remove_duplicate=False)):
        by_name.setdefault(name, {})[param] = None
    found: dict[nn.Parameter, Offload] = {}
    for name, policy in policies.items():
        params = [param for param in by_name.get(name, ()) if param in managed]
        if not params:
            near = difflib.get_close_matches(name, [known for known, of in by_name.items() if managed & of.keys()], 1)
            hint = f"Did you mean {near[0]!r}?" if near else "Use names of the module's named_parameters()."
            raise ValueError(
                f"fully_shard: offload_policy names {name!r}, which is no parameter that this call shards. {hint}"
            )
        if len(params) > 1:
            raise ValueError(
                f"fully_shard: offload_policy names {name!r}, which {len(params)} modules of the list have. Pass one "
                "policy for the list, or shard the modules by separate calls."
            )
        offload = read(policy)
        if found.setdefault(params[0], offload) != offload:
            raise ValueError(
                f"fully_shard: offload_policy gives {name!r} two policies, because it is tied to another name. Give "
                "both names the same one."
            )
    return Offload(), found


class HostState(NamedTuple):
    """Mark of a parameter whose optimizer state stays in CPU memory: its transfer group, and how it is copied."""

    group: int
    pin_memory: bool


# The attribute that holds the mark: a plain tuple, so files may contain it.
MARK = "_fsdp2x_host_state"
_numbers = itertools.count(1)


def new_mark(pin_memory: bool) -> HostState:
    """Makes the mark of another transfer group. From now on, optimizers that ignore marks raise in ``step``."""
    _refuse_other_optimizers()
    return HostState(next(_numbers), pin_memory)


def mark(param: torch.Tensor, state: HostState | None) -> None:
    """Sets or removes the mark of ``param``."""
    if state is not None:
        param.__dict__[MARK] = tuple(state)
    else:
        param.__dict__.pop(MARK, None)


def host_state(param: torch.Tensor) -> HostState | None:
    """Returns the mark of ``param``."""
    found = param.__dict__.get(MARK)
    return None if found is None else HostState(*found)


def marks_exist() -> bool:
    """Whether this process ever marked a parameter. Optimizers check it before they look at each parameter."""
    return _refuse_other_optimizers.cache_info().currsize > 0


@functools.cache
def _refuse_other_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_if_other)


def _refuse_if_other(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if getattr(optimizer, "keeps_host_state", False):
        return
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            continue  # keeps no state
        if any(MARK in param.__dict__ for param in group["params"]):
            raise RuntimeError(
                f"fsdp2x: {type(optimizer).__name__} would keep its state on the device, but its parameters were "
                "sharded with HostOffloadPolicy(mode='optimizer'). Use fsdp2x.optim.AdamW, or "
                "mode='gradients' or 'all', where any optimizer steps on the CPU."
            )
