"""Which parameters of a model are matrices for ``Muon``."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdp2x.base.arguments import checked

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


def named_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """What ``Muon`` steps of a model by ``muon_param_groups``, which raises."""
    groups = muon_param_groups(model)
    return [pair for group in groups if group["use_muon"] for pair in group["params"]]


@checked
def muon_param_groups(model: nn.Module, exclude: Sequence[str] | None = None, **adamw: Any) -> list[dict[str, Any]]:
    """The trainable parameters of ``model`` in two groups for ``Muon``: matrices, and what AdamW steps.

    AdamW gets what has fewer than two dims, embeddings, the output head, convolutions, and what ``exclude`` names.
    Stacks of matrices [num, m, n], such as fused experts, are matrices. Works before and after ``fully_shard``; the
    optimizer is made after it.

    Args:
        exclude: patterns of names (``fnmatch``) of further parameters for AdamW, the output head among them where
            the model has no ``get_output_embeddings()``. None: nothing further.
        **adamw: settings of AdamW's group, such as ``lr``, ``betas`` or ``weight_decay``.

    Returns:
        Groups with ``params``, pairs of name and parameter, and ``use_muon``; one that would be empty is left out.

    Raises:
        ValueError: ``exclude`` is None and the model does not say which module is its output head; a pattern that
            names no parameter; no parameter is trainable.
    """
    for_adamw = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS))
        for param in module.parameters(recurse=False)
    }
    output_head = getattr(model, "get_output_embeddings", None)
    head = output_head() if output_head is not None else None
    if head is not None:
        for_adamw |= {id(param) for param in head.parameters()}
    elif output_head is None and exclude is None:
        raise ValueError(
            f"fsdp2x.optim.muon_param_groups: {type(model).__name__} has no get_output_embeddings(), so its output "
            "head is not known; pass exclude with a pattern for its parameters, such as exclude=['lm_head.*'], or "
            "exclude=[] if it has none"
        )
    named: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}
    unused = set(exclude or ())
    for name, param in model.named_parameters():
        fitting = {pattern for pattern in exclude or () if fnmatch.fnmatchcase(name, pattern)}
        unused -= fitting
        if param.requires_grad:
            is_matrix = param.ndim in (2, 3) and id(param) not in for_adamw and not fitting
            named[is_matrix].append((name, param))
    if unused:
        raise ValueError(
            f"fsdp2x.optim.muon_param_groups: {sorted(unused)} in exclude name no parameter of {type(model).__name__}"
        )
    groups = [
        {"params": named[is_matrix], "use_muon": is_matrix, **settings}
        for is_matrix, settings in ((True, {}), (False, adamw))
        if named[is_matrix]
    ]
    if not groups:
        raise ValueError("fsdp2x.optim.muon_param_groups: no parameter has requires_grad=True")
    return groups
