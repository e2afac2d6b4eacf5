"""Finding the part of a HuggingFace model that attends over tokens, and refusing what layouts cannot be right for.

Read-only: nothing here changes a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Layers that carry information from token to token by attention alone.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}
# RoPE whose frequencies depend on the longest position of a call, which packing and slicing change.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_MIXING_MODULES = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


def base_model(model: nn.Module) -> nn.Module:
    """The transformers model itself, without the wrapper of PEFT."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def find_decoder(model: nn.Module) -> nn.Module:
    """The language model that runs the decoder layers: what a causal LM or a vision-language model contains.

    Raises:
        TypeError: not a transformers model. NotImplementedError: a model whose attention a layout cannot steer; the
            message says why.
    """
    outer = base_model(model)
    if not hasattr(outer, "get_decoder") or not hasattr(outer, "config"):
        raise TypeError(
            f"{type(outer).__name__} is not a transformers model: layouts reach attention through transformers' "
            "attention interface, so pass the PreTrainedModel (or its PEFT wrapper) itself"
        )
    decoder = outer.get_decoder()
    name = type(outer).__name__
    if not getattr(decoder, "_supports_attention_backend", False):
        raise NotImplementedError(
            f"{name}: its attention does not go through transformers' attention interface "
            "(_supports_attention_backend is not set), so it can neither be packed nor cut over ranks"
        )
    _check_config(name, decoder.config)
    for path, module in decoder.named_modules():
        if isinstance(module, _MIXING_MODULES):
            raise NotImplementedError(
                f"{name}: {path} ({type(module).__name__}) carries information between tokens outside of attention; "
                "packed samples would leak into each other there, and slices of a sequence would miss their neighbours"
            )
    return decoder


def _check_config(name: str, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError(f"{name}: encoder-decoder models are not supported, only causal decoders")
    if not getattr(config, "is_causal", True):
        raise NotImplementedError(f"{name}: config.is_causal is False; only causal attention is supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if kinds:
        raise NotImplementedError(
            f"{name}: layers of type {', '.join(sorted(kinds))} are not supported; only full and sliding causal "
            "attention keeps packed samples apart and is right when heads are exchanged for positions"
        )


def attention_configs(decoder: nn.Module) -> list[Any]:
    """The config objects from which the decoder's attention modules read which implementation to call."""
    found: dict[int, Any] = {}
    for module in decoder.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            found.setdefault(id(config), config)
    return list(found.values())


def head_counts(config: Any) -> tuple[int, int]:
    """Query and key-value heads of a layer.

    Raises:
        NotImplementedError: layers that have different numbers of heads.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not (isinstance(heads, int) and isinstance(kv_heads, int)):
        raise NotImplementedError(
            f"{type(config).__name__}: layers with different numbers of heads ({heads}, {kv_heads}) are not supported"
        )
    return heads, kv_heads


def rope_limit(config: Any) -> int | None:
    """The longest sample whose RoPE frequencies do not depend on the call's length; None where they never do."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    limits = [
        int(one.get("original_max_position_embeddings") or config.max_position_embeddings)
        for one in nested
        if one.get("rope_type") in _LENGTH_DEPENDENT_ROPE
    ]
    return min(limits) if limits else None


def check_rope(config: Any, longest: int) -> None:
    """Refuses samples whose rotary frequencies would differ from those the same sample gets alone and whole.

    Raises:
        NotImplementedError: dynamic or long RoPE and a sample longer than the model's original length.
    """
    limit = rope_limit(config)
    if limit is not None and longest > limit:
        raise NotImplementedError(
            f"{type(config).__name__}: rope_type dynamic or longrope chooses its frequencies by the longest position "
            f"of a call; a sample of {longest} tokens is beyond the original {limit}, where packing and sequence "
            "parallelism would change them. Shorten the samples, or use another rope_type (yarn, linear)"
        )


# ---- inputs of a decoder, cut to a range of positions

_IGNORED = {"attention_mask", "cache_position", "labels", "past_key_values", "use_cache"}
_SECOND_DIM = {"input_ids", "inputs_embeds", "token_type_ids", "mm_token_type_ids", "per_layer_inputs"}


def cut_decoder_inputs(inputs: dict[str, Any], start: int, stop: int, length: int) -> dict[str, Any]:
    """``inputs`` of a decoder's forward with everything that runs along the sequence cut to ``start:stop``.

    Knows token ids, embeddings, positions of any number of kinds, and Qwen3-VL's deep visual features.

    Raises:
        NotImplementedError: a tensor that runs along the sequence but is not known.
    """
    cut = dict(inputs)
    visual = inputs.get("visual_pos_masks")
    for name, value in inputs.items():
        if name in _SECOND_DIM and isinstance(value, torch.Tensor):
            cut[name] = value[:, start:stop]
        elif name == "position_ids" and value is not None:
            cut[name] = value[..., start:stop]
        elif name == "visual_pos_masks" and visual is not None:
            cut[name] = visual[:, start:stop]
        elif name == "deepstack_visual_embeds" and value is not None:
            # Features lie in the order of the image tokens: row by row, then by position.
            places = visual.nonzero()[:, 1]
            mine = (places >= start) & (places < stop)
            cut[name] = [features[mine] for features in value]
        elif isinstance(value, torch.Tensor) and name not in _IGNORED and length in value.shape[:3]:
            raise NotImplementedError(
                f"the decoder's input {name} of shape {tuple(value.shape)} seems to run along the sequence of "
                f"{length}, but how it is cut over ranks is not known"
            )
    return cut
