"""The reference kernels in place of the device's, on CPU memory: steps and clipping as on a device, without one."""

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2x.base.native import _C
from fsdp2x.optim import clip
from testing_extension import testing


def step_by_reference(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer._on_device = _C.DeviceSteps(testing.reference_kernels())
    return optimizer


@contextlib.contextmanager
def clip_by_reference():
    """While it lasts, ``fsdp2x.clip_grad_norm_`` takes CPU memory for a device's; gives what it keeps."""
    kept, before = _C.DeviceClip(testing.reference_kernels()), clip._kernels_for
    clip._kernels_for = lambda params: kept
    try:
        yield kept
    finally:
        clip._kernels_for = before


class Operations(TorchDispatchMode):
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))
