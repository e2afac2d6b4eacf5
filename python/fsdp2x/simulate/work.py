"""What modules compute: floating-point operations of a forward, from a model without weights and its config."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Work:
    """One module's own work in a forward, and the operations of its backward."""

    flops: float
    backward_flops: float
    weight_bytes: int  # read each time


def work_of(model: nn.Module, tokens: int, sequence_length: int) -> dict[nn.Module, Work]:
    """Of every module that has parameters of its own, and of attention.

    Twice a parameter's elements for each token; none for embeddings; of experts those that a token chooses. In backward
    as many for the gradients of the inputs, and of the weights that are trained. Attention takes 4 operations for each
    pair of tokens and element of a head, as if it were not causal: that is how published MFU counts (torchtitan, PaLM's
    appendix B).
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    num_experts = next((value for name in _NUM_EXPERTS if (value := getattr(config, name, None))), 1)
    chosen = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    head_numel = (getattr(config, "num_attention_heads", None) or 0) * _head_dim(config)
    work = {}
    for name, module in model.named_modules():
        params = list(module.parameters(recurse=False))
        matrices = [param for param in params if param.dim() > 1]
        numel = sum(param.numel() for param in matrices)
        trained = sum(param.numel() for param in matrices if param.requires_grad)
        is_expert = "experts" in name.split(".") and "shared" not in name
        per_element = 0.0 if isinstance(module, nn.Embedding) else 2.0 * tokens * (chosen if is_expert else 1)
        flops, backward_flops = per_element * numel, per_element * (numel + trained)
        if type(module).__name__.endswith("Attention"):
            flops += 4.0 * head_numel * tokens * sequence_length
            backward_flops += 8.0 * head_numel * tokens * sequence_length
        weight_bytes = sum(param.numel() * param.itemsize for param in params)
        if flops or weight_bytes:
            work[module] = Work(flops, backward_flops, 0 if isinstance(module, nn.Embedding) else weight_bytes)
    return work


def _head_dim(config: object) -> int:
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not heads or not hidden:
        return 0
    return getattr(config, "head_dim", None) or math.ceil(hidden / heads)
