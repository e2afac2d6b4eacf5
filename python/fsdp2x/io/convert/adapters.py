"""Extracts LoRA adapters from a training checkpoint: separately, or merged into the weights of their base."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from fsdp2x.base.failures import CheckpointError, reworded
from fsdp2x.io.formats.tensors import Computed, Source
from fsdp2x.io.hf.empty import empty_model
from fsdp2x.io.hf.lora import add_lora, read_adapter_config
from fsdp2x.io.hf.save import refuse_bias
from fsdp2x.io.merged import MergedLayer, MergedModel
from fsdp2x.io.names import ForeignModel, hf_base, is_adapter

# Inside a checkpoint's folder of config and tokenizer, so that no folder with full weights gets it.
ADAPTER_FOLDER = "adapter"
_TRAINED = re.compile(r"model\..*\.(lora_[AB]|lora_embedding_[AB]|modules_to_save|trainable_tokens_delta)\.")


def holds_adapters(keys: Mapping[str, Source]) -> bool:
    """Returns whether these are the weights of a model with LoRA adapters."""
    return any(".lora_" in key for key in keys)


class StoredAdapters:
    """The adapters among a checkpoint's ``tensors``. ``assets`` is its folder of config and tokenizer."""

    def __init__(self, tensors: Mapping[str, Source], aliases: Mapping[str, str], assets: Path, where: str) -> None:
        self.folder = assets / ADAPTER_FOLDER
        if not (self.folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{where}: holds LoRA adapters, but {self.folder / 'adapter_config.json'} is missing")
        with reworded(CheckpointError, str(self.folder), ValueError, ImportError), warnings.catch_warnings():
            # The empty model is the base, though it comes from another folder than the adapter's config names.
            warnings.filterwarnings("ignore", message=".*base_model_name_or_path")
            settings = read_adapter_config(self.folder)
            settings.inference_mode = False
            settings.init_lora_weights = True  # others compute with weights of the base, which are not here
            self._model: ForeignModel = add_lora(empty_model(assets), settings)
        _, self._to_source = hf_base(self._model)
        self._where = where
        params = [fqn for fqn, _ in self._model.named_parameters()]
        fqns = [*params, *(fqn for fqn, _ in self._model.named_buffers(remove_duplicate=False))]
        keys = {fqn: f"model.{aliases.get(fqn, fqn)}" for fqn in fqns}
        self._stored = {fqn: tensors[key] for fqn, key in keys.items() if key in tensors}
        self._names = {fqn: self._to_source(fqn) for fqn in dict.fromkeys([*params, *self._stored])}
        tied = {f"model.{alias}" for alias in aliases}
        made = {f"model.{fqn}" for fqn, _ in self._model.named_parameters(remove_duplicate=False)}
        unknown = {key for key in {*tensors} - tied - {*keys.values()} | tied - made if _TRAINED.match(key)}
        if unknown:
            raise CheckpointError(
                f"{where}: holds {min(unknown)}, but PEFT makes no such weight from {self.folder}. Load the checkpoint "
                "into the model that saved it, and use PEFT's merge_and_unload there."
            )

    def alone(self) -> dict[str, Source]:
        """Returns the adapter in the form of PEFT's files."""
        with reworded(CheckpointError, str, NotImplementedError):
            refuse_bias(self._where, self._model)
        return {name: self._source(fqn) for fqn, name in self._names.items() if is_adapter(name)}

    def merged(self) -> tuple[dict[str, Source], bool]:
        """Returns weights of the base by name, and whether some that are tied in the base differ.

        PEFT merges the adapters when they are read, one layer at a time.

        Raises:
            CheckpointError: PEFT cannot merge an adapter.
        """
        with reworded(CheckpointError, str, NotImplementedError):
            merged = MergedModel(self._where, self._model)

        @functools.lru_cache(maxsize=1)
        def merge(layer: MergedLayer) -> dict[str, torch.Tensor]:
            return layer.merge({fqn: self._source(fqn).whole() for fqn in layer.params.values()})

        found: dict[str, Source] = {}
        for fqn, source in merged.sources.items():
            layer = merged.layers.get(fqn)
            if layer is not None:
                stored = self._source(source)
                take = lambda layer=layer, fqn=fqn: merge(layer)[fqn]  # noqa: E731
                found[self._to_source(fqn)] = Computed(stored.shape, stored.dtype, take)
            elif source in self._stored:
                found[self._to_source(fqn)] = self._stored[source]
        return found, bool(merged.untied)

    def _source(self, fqn: str) -> Source:
        if fqn not in self._stored:
            raise CheckpointError(f"{self._where}: lacks {fqn}, a part of the adapter that {self.folder} describes")
        return self._stored[fqn]
