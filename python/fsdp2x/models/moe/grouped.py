"""``use_grouped_gemm``: one grouped matrix product for all experts of a block, where torch has it for them."""

from __future__ import annotations

import logging

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.models.moe.units import ExpertGroup, experts_of

logger = logging.getLogger("fsdp2x")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16  # torch's grouped product demands rows of whole multiples


@checked
def use_grouped_gemm(model: nn.Module, enabled: bool = True, *, compute_dtype: torch.dtype | None = None) -> str:
    """Chooses how fused experts multiply: ``"grouped_mm"`` or ``"eager"``, a loop over them; returns the choice.

    Sets the experts implementation of transformers 5, which acts at every later forward and may be called again at any
    time. Where torch's grouped product does not fit, the loop is chosen and the reason logged: float64, widths whose
    rows are no multiples of 16 bytes, a CUDA device before compute capability 8.0. Experts of other libraries, and
    lists of expert modules, keep their own loop and are refused.

    Args:
        model: a transformers model, or a wrapper around one, sharded or not.
        enabled: False chooses the loop.
        compute_dtype: dtype of the weights in forward, where a mixed precision policy changes it.

    Raises:
        ValueError: no experts, or experts that transformers' interface does not reach.
    """
    groups = experts_of(model, "use_grouped_gemm")
    outer = next((module for module in model.modules() if hasattr(module, "set_experts_implementation")), None)
    foreign = [group for group in groups if not (group.is_fused and hasattr(group.experts, "is_concatenated"))]
    if outer is None or foreign:
        raise ValueError(
            f"fsdp2x.use_grouped_gemm: the experts {(foreign or groups)[0].name} are not those of transformers 5, "
            "which are fused and have an experts implementation; load the model with a class of transformers "
            "5, or leave the loop over its experts"
        )
    choice = "grouped_mm"
    if not enabled:
        choice = "eager"
    elif reason := next((why for group in groups if (why := _unfit(group, compute_dtype))), None):
        choice = "eager"
        logger.warning("use_grouped_gemm: a loop over the experts instead: %s", reason)
    outer.set_experts_implementation(choice)
    return choice


def _unfit(group: ExpertGroup, compute_dtype: torch.dtype | None) -> str | None:
    """Why torch's grouped product cannot be used, or None."""
    if not hasattr(torch.nn.functional, "grouped_mm") and not hasattr(torch, "_grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    for name, param in group.experts.named_parameters(recurse=False):
        if param.dim() != 3:
            continue
        dtype = compute_dtype or param.dtype
        if dtype not in _DTYPES:
            return f"{group.name}.{name} is computed in {dtype}, grouped_mm knows {', '.join(map(str, _DTYPES))}"
        odd = [size for size in param.shape[1:] if size * dtype.itemsize % _ALIGNMENT_BYTES]
        if odd:
            return (
                f"{group.name}.{name} has the shape {tuple(param.shape)}: rows of {odd[0]} x {dtype} are no multiple "
                f"of {_ALIGNMENT_BYTES} bytes"
            )
        if param.device.type == "cuda" and torch.cuda.get_device_capability(param.device) < (8, 0):
            return f"compute capability {torch.cuda.get_device_capability(param.device)}, grouped_mm needs 8.0"
    return None
