"""Describes a LoRA adapter that is pushed without its base: its parameters, and what engines must know.

Names are those of PEFT's files: ``base_model.model.`` + module + ``.lora_A.weight`` or ``.lora_B.weight``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fsdp2x.io.names import ForeignModel, has_adapters, hf_base

# Initializations with which PEFT changes the base. Engines have the unchanged base.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
_INSTEAD = 'Use merge_adapters=True with weights="all", which pushes the adapter merged into its base.'


def describe_adapter(
    caller: str, model: ForeignModel, chosen: Mapping[str, torch.Tensor], name: str | None
) -> dict[str, Any]:
    """Returns the adapter's description for engines in JSON types. Its parameters in ``chosen`` contain "lora_".

    ``name`` identifies the adapter in requests. ``r``, ``lora_alpha``, ``target_modules``, ``use_rslora``,
    ``rank_pattern``, ``alpha_pattern`` are those of PEFT's adapter_config.json. ``layers`` is the factor of each
    product, by module.

    Raises:
        ValueError: the model has no adapter, or the name is empty.
        NotImplementedError: the adapter is more than two factors of linear layers. The message names what else it has.
    """
    if not has_adapters(model):
        raise ValueError(
            f'{caller}: weights="adapter", but {type(model).__name__} has no adapter. Call fsdp2x.add_lora before '
            'fully_shard, or push weights="all".'
        )
    configs = model.peft_config
    if len(configs) > 1:
        raise NotImplementedError(f"{caller}: expected one adapter, the model has {', '.join(configs)}. Keep one.")
    (own_name, config), *_ = configs.items()
    name = own_name if name is None else name
    if not name:
        raise ValueError(f"{caller}: adapter_name is empty. Pass the name that requests use.")
    problem = _find_problem(config)
    layers: dict[str, float] = {}
    _, to_source = hf_base(model)
    for path, module in model.named_modules():
        scaling = getattr(module, "scaling", None)
        if problem or not isinstance(scaling, dict) or own_name not in scaling:
            continue
        names = [f"{path}.lora_{part}.{own_name}.weight" for part in "AB"]
        if not all(one in chosen and chosen[one].ndim == 2 for one in names):
            problem = f"{path!r} adapts something else than a linear layer"
        elif own_name in (getattr(module, "lora_variant", None) or {}):
            problem = f"{path!r} is a variant of LoRA ({type(module.lora_variant[own_name]).__name__})"
        layers[to_source(names[0]).removesuffix(".lora_A.weight")] = float(scaling[own_name])
    num_params = sum("lora_" in one for one in chosen)
    if not problem and num_params != 2 * len(layers):
        problem = f"it has {num_params} parameters, not two for each of {len(layers)} linear layers"
    if problem:
        raise NotImplementedError(
            f"{caller}: {problem}, and only plain LoRA of linear layers is pushed without its base. {_INSTEAD}"
        )
    return {
        "name": name,
        "peft_type": "LORA",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "use_rslora": bool(config.use_rslora),
        "rank_pattern": dict(config.rank_pattern or {}),
        "alpha_pattern": dict(config.alpha_pattern or {}),
        "layers": layers,
    }


def _find_problem(config: Any) -> str | None:
    """Returns what the adapter has in addition to factors of linear layers, or None."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"the adapter is {kind}"
    initial = config.init_lora_weights
    if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
        return f"init_lora_weights={initial!r} has changed the base"
    settings = ("modules_to_save", "use_dora", "lora_bias", "trainable_token_indices", "target_parameters")
    found = next((one for one in (*settings, "layer_replication") if getattr(config, one, None)), None)
    if found is not None:
        return f"the adapter has {found}={getattr(config, found)!r}"
    return None if config.bias == "none" else f"the adapter has bias={config.bias!r}"
