"""Groups a model's parameters for ``Muon``: matrices by the settings of their blocks, and what AdamW steps."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import rank_and_size
from fsdp2x.optim.muon.split import WAYS, splits_of

logger = logging.getLogger(__name__)

_CONVOLUTIONS = (nn.modules.conv._ConvNd,)


def named_matrices(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns what ``Muon`` steps of a model by ``muon_param_groups``, which raises."""
    groups = muon_param_groups(model)
    return [pair for group in groups if group["use_muon"] for pair in group["params"]]


@checked
def muon_param_groups(
    model: nn.Module, exclude: Sequence[str] | None = None, split: str = "blocks", **adamw: Any
) -> list[dict[str, Any]]:
    """Groups the trainable parameters of ``model`` for ``Muon``: matrices first, and last what AdamW steps.

    AdamW gets what has fewer than two dims, biases, embeddings, the output or task head, convolutions, Mamba's
    ``A_log``, PEFT's adapters, and what ``exclude`` names. For adapters a warning says so: Orthogonal factors do not
    make the update of a LoRA product orthogonal. Stacks of matrices [num, m, n], such as fused experts, are matrices.
    Matrices that fall into the same blocks share a group. Works before and after ``fully_shard``. Make the optimizer
    after it.

    Args:
        split: "blocks" orthogonalizes each matrix of a fused parameter separately, as if the model did not fuse them.
            Examples are ``qkv_proj``, ``gate_up_proj``, GPT-2's ``c_attn``, ``kv_b_proj``, and fused experts. "heads"
            also separates the heads of queries, keys, and values, like GLM-5 and Kimi K3. "none" takes each parameter
            as one matrix. fsdp2x knows the sizes of many model families. ``fsdp2x.describe(model, optimizer)`` lists
            them. For other models, set ``split_sizes`` on a group, see ``Muon``.
        exclude: name patterns (``fnmatch``) of further parameters for AdamW. They must match the head if fsdp2x does
            not know it. fsdp2x knows that of ``get_output_embeddings()``, and what transformers' task models have
            outside of their ``base_model``. None: nothing further.
        **adamw: settings of AdamW's group, such as ``lr``, ``betas`` or ``weight_decay``.

    Returns:
        Groups with ``params``, pairs of name and parameter, ``use_muon``, and settings of blocks. Empty ones are left
        out.

    Raises:
        ValueError: ``exclude`` is None and the head is not known. A pattern matches no parameter. No parameter is
            trainable. ``split`` is unknown. Blocks do not fit a parameter's size.
    """
    if split not in WAYS:
        raise ValueError(f"fsdp2x.optim.muon_param_groups: split is {split!r}. Pass one of {', '.join(WAYS)}.")
    for_adamw = {
        id(param)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, *_CONVOLUTIONS))
        for param in module.parameters(recurse=False)
    }
    head = _head_params(model)
    if head is None and exclude is None:
        raise ValueError(
            f"fsdp2x.optim.muon_param_groups: {type(model).__name__} has no get_output_embeddings(), or it returns "
            "None, so its output head is not known. Pass exclude with a pattern for its parameters, such as "
            "exclude=['lm_head.*'], or exclude=[] if it has none."
        )
    adapters = _adapter_params(model)
    for_adamw |= {id(param) for param in (*(head or ()), *adapters)}
    if adapters and rank_and_size()[0] == 0:
        logger.warning(
            "fsdp2x.optim.muon_param_groups: AdamW steps the %d parameters of adapters. Muon steps matrices of a "
            "model's own modules only.", len(adapters)
        )  # fmt: skip
    splits = splits_of(model, split)
    matrices: dict[tuple, list[tuple[str, nn.Parameter]]] = {}  # by the settings of their blocks
    rest: list[tuple[str, nn.Parameter]] = []
    unused = set(exclude or ())
    for name, param in model.named_parameters():
        fitting = {pattern for pattern in exclude or () if fnmatch.fnmatchcase(name, pattern)}
        unused -= fitting
        if param.requires_grad:
            is_matrix = _is_hidden_matrix(name, param) and id(param) not in for_adamw and not fitting
            blocks = tuple(splits.get(id(param), {}).items())
            (matrices.setdefault(blocks, []) if is_matrix else rest).append((name, param))
    if unused:
        raise ValueError(
            f"fsdp2x.optim.muon_param_groups: {sorted(unused)} in exclude name no parameter of {type(model).__name__}"
        )
    groups = [{"params": params, "use_muon": True, **dict(blocks)} for blocks, params in matrices.items()]
    if rest:
        groups.append({"params": rest, "use_muon": False, **adamw})
    if not groups:
        raise ValueError("fsdp2x.optim.muon_param_groups: no parameter has requires_grad=True")
    return groups


def _adapter_params(model: nn.Module) -> list[nn.Parameter]:
    """Returns what PEFT adds to modules that it adapts, but not copies of modules that it trains in full."""
    found: list[nn.Parameter] = []
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            part = getattr(module, name, None)
            if name != "modules_to_save" and isinstance(part, nn.Module | nn.Parameter):
                found += [part] if isinstance(part, nn.Parameter) else part.parameters()
    return [param for param in found if param.requires_grad]


# Ends of names of biases, of embeddings that are parameters of modules with other parameters, and of Mamba's rates.
_NOT_MATRICES = re.compile(r"(bias|bias_table|tokens?|embed|embeds|embeddings?|A_log)$")
_TASK_HEADS = ("score", "classifier", "qa_outputs")


def _is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """Whether a parameter is a matrix, or a stack, by its name and shape. [1, m, n] is one only of experts."""
    is_broadcast = param.ndim == 3 and param.shape[0] == 1 and "expert" not in name
    return param.ndim in (2, 3) and not is_broadcast and not _NOT_MATRICES.search(name)


def _head_params(model: Any) -> list[nn.Parameter] | None:
    """Returns the parameters of the output or task head, none for a model without one, None if it is not known."""
    get_head = getattr(model, "get_output_embeddings", None)
    if get_head is None:
        return None
    if (head := get_head()) is not None:
        return list(head.parameters())
    if hasattr(model, "get_base_model"):  # peft's
        model = model.get_base_model()
    base = getattr(model, "base_model", model)  # of transformers: the model itself if it has no head
    if base is not model:
        inside = {id(param) for param in base.parameters()}
        return [param for param in model.parameters() if id(param) not in inside]
    heads = [getattr(model, name) for name in _TASK_HEADS if isinstance(getattr(model, name, None), nn.Module)]
    if not heads and re.search(r"For[A-Z]", type(model).__name__):  # such as a ForSequenceClassification
        return None
    return [param for head in heads for param in head.parameters()]
