"""What a unit keeps in host memory: the policy, and the mark of parameters whose optimizer state belongs there."""

from __future__ import annotations

import functools
import itertools
import typing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp2x.base.arguments import checked

OffloadMode = Literal["none", "optimizer", "gradients", "all"]
OFFLOAD_MODES = typing.get_args(OffloadMode)


@checked
@dataclass
class HostOffloadPolicy(OffloadPolicy):
    """What ``fully_shard`` keeps in host memory on an accelerator; on a CPU mesh nothing changes but pinning.

    ```
    ========== ============ ============= ================== ========================================== ==========
    mode       shards       gradients     optimizer state    over the bus in a step, per parameter      step runs
    ========== ============ ============= ================== ========================================== ==========
    none       device       device        device             nothing                                    device
    optimizer  device       device        host               its moments, there and back                device
    gradients  host, and a  host          host               its shard per forward, its gradient back   host
               copy on the
               device
    all        host         host          host               its shard per gather, its gradient back    host
    ========== ============ ============= ================== ========================================== ==========
    ```

    Everything moves in one copy per unit each way, beside the compute.

    ``optimizer``: ``fsdp2x.optim.AdamW`` keeps its moments in one block of host memory per unit, brings them to the
    device unit by unit while it steps (two units at a time, the largest first), and takes them back; ``step`` returns
    when they are back. It computes what it computes without offloading, bit for bit. Other optimizers would make their
    state on the device: their ``step`` raises, unless they keep none (SGD without momentum).

    ``gradients``: what DeepSpeed calls offloading the optimizer. The parameters that the optimizer sees are the host's,
    and so are ``.grad`` and, with any optimizer, the state: the step runs on the host. The device keeps a copy of the
    shards, which is brought up to date by the first gather of each forward (and of each ``unshard()``), whoever wrote
    to the parameters and how; backward gathers from that copy.

    With ``gradients`` and ``all``, ``fsdp2x.optim.AdamW(step_in_backward=True)`` steps on the host while backward runs.

    ``all``: ``torch.distributed.fsdp.CPUOffloadPolicy``. The device keeps nothing of the shards between gathers.

    Attributes:
        mode: one of the above.
        pin_memory: page-lock what is copied, so that copies overlap; needs an accelerator. torch takes page-locked
            memory in powers of two, up to twice what ``memory_report`` counts; later versions than 2.11 do not with
            ``PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1`` in the environment.

    Raises:
        ValueError: another ``mode``.
        TypeError: ``pin_memory`` is no bool.
    """

    mode: OffloadMode = "all"
    pin_memory: bool = True


class Offload(NamedTuple):
    """A policy as the runtime reads it."""

    mode: str = "none"
    pin_memory: bool = False

    @property
    def of_shards(self) -> bool:
        """Whether the parameters that an optimizer sees, and their gradients, are the host's."""
        return self.mode in ("gradients", "all")


def offload_of(policy: OffloadPolicy | None) -> Offload:
    """Reads an ``offload_policy``.

    Raises:
        RuntimeError: it pins memory, and there is no accelerator to pin it for.
    """
    if isinstance(policy, CPUOffloadPolicy):
        offload = Offload("all", policy.pin_memory)
    elif isinstance(policy, HostOffloadPolicy) and policy.mode != "none":
        offload = Offload(policy.mode, policy.pin_memory)
    else:
        return Offload()
    if offload.pin_memory and not torch.accelerator.is_available():
        name, mode = type(policy).__name__, f"mode={policy.mode!r}, " if hasattr(policy, "mode") else ""
        raise RuntimeError(
            f"fully_shard: offload_policy={name}({mode}pin_memory=True) pins memory for an accelerator, and this "
            f"machine has none; use {name}({mode}pin_memory=False)"
        )
    return offload


class HostState(NamedTuple):
    """The mark of a parameter whose optimizer state belongs to the host: which ones travel together, and how."""

    group: int
    pin_memory: bool


# The attribute of a marked parameter: a plain tuple, which files may hold.
MARK = "_fsdp2x_host_state"
_numbers = itertools.count(1)


def new_mark(pin_memory: bool) -> HostState:
    """The mark of one more group of parameters. From now on optimizers that do not know it are refused."""
    _refuse_other_optimizers()
    return HostState(next(_numbers), pin_memory)


def mark(param: torch.Tensor, state: HostState | None) -> None:
    """Marks ``param``, or takes the mark away."""
    if state is not None:
        param.__dict__[MARK] = tuple(state)
    else:
        param.__dict__.pop(MARK, None)


def host_state(param: torch.Tensor) -> HostState | None:
    """The mark of ``param``."""
    found = param.__dict__.get(MARK)
    return None if found is None else HostState(*found)


def marks_exist() -> bool:
    """Whether any parameter of this process was ever marked: what optimizers ask before they look at each."""
    return _refuse_other_optimizers.cache_info().currsize > 0


@functools.cache
def _refuse_other_optimizers() -> None:
    register_optimizer_step_pre_hook(_refuse_if_other)


def _refuse_if_other(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if getattr(optimizer, "keeps_host_state", False):
        return
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            continue  # keeps nothing
        if any(MARK in param.__dict__ for param in group["params"]):
            raise RuntimeError(
                f"fsdp2x: {type(optimizer).__name__} would keep its state on the device, but its parameters were "
                "sharded with HostOffloadPolicy(mode='optimizer'); use fsdp2x.optim.AdamW, or "
                "mode='gradients' or 'all', with which every optimizer steps on the host"
            )
