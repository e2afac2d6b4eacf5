"""The model of a run: built from a HuggingFace config or a local directory, and sharded."""

from __future__ import annotations

import datetime
import difflib
from pathlib import Path
from typing import Any

import torch

from .config import ConfigError, ModelConfig, ParallelConfig
from .tokenizer import Tokenizer

# Spellings of earlier transformers that its configs still take, but no longer list.
OLDER_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "num_labels", "tokenizer_class"}


def build_model(config: ModelConfig, tokenizer: Tokenizer, seed: int) -> torch.nn.Module:
    """A causal language model on the CPU with equal weights on every rank; raises `ConfigError`."""
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    if config.path is not None:
        folder = Path(config.path).expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: got {config.path!r}, expected a local directory with a config.json")
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, **options
        )
    else:
        hf_config = make_hf_config(config.config, tokenizer)
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(hf_config, **options)
    num_rows = model.get_input_embeddings().weight.shape[0]
    if num_rows < tokenizer.vocab_size:
        raise ConfigError(
            f"model: its vocabulary has {num_rows} entries, the tokenizer {tokenizer.vocab_size}; raise vocab_size"
        )
    return model


def make_hf_config(settings: dict, tokenizer: Tokenizer) -> Any:
    """A transformers config; vocabulary and end-of-text ids follow the tokenizer unless they are given."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    settings = dict(settings)
    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING_NAMES:
        near = _nearest(str(model_type), CONFIG_MAPPING_NAMES)
        raise ConfigError(f"model.config.model_type: transformers knows no {model_type!r}; the nearest is {near}")
    defaults = AutoConfig.for_model(model_type)
    known = {*defaults.to_dict(), *defaults.attribute_map, *OLDER_KEYS}
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"unknown key model.config.{key}; the nearest known one of {model_type} is {_nearest(key, known)}"
            )
    settings.setdefault("vocab_size", tokenizer.vocab_size)
    for name in ("bos_token_id", "eos_token_id"):
        settings.setdefault(name, tokenizer.eos_id)
    return AutoConfig.for_model(model_type, **settings)


def recompute_activations(model: torch.nn.Module) -> None:
    """Turns on the model's own activation checkpointing, without reentrance; call before `shard`."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:  # its name in earlier transformers
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def shard(model: torch.nn.Module, config: ParallelConfig) -> torch.nn.Module:
    """Applies `fsdp2x.fully_shard` in place and returns the model."""
    import fsdp2x

    param_dtype = getattr(torch, config.param_dtype) if config.param_dtype else None
    reduce_dtype = getattr(torch, config.reduce_dtype) if config.reduce_dtype else None
    return fsdp2x.fully_shard(
        model,
        mp_policy=fsdp2x.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
        reshard_after_forward=config.reshard_after_forward,
        auto_wrap=config.auto_wrap,
        transport=config.transport,
        timeout=datetime.timedelta(seconds=config.timeout_s),
    )


def _nearest(word: str, known: Any) -> str:
    return difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.0)[0]
