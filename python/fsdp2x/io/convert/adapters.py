"""Extracts LoRA adapters from a training checkpoint: separately, or merged into the weights of their base."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.formats.tensors import Computed, Source
from fsdp2x.io.hf.empty import empty_model
from fsdp2x.io.hf.lora import add_lora
from fsdp2x.io.names import ForeignModel, hf_base, is_adapter
from fsdp2x.sharding.wrap import clean_name

# Inside a checkpoint's folder of config and tokenizer, so that no folder with full weights gets it.
ADAPTER_FOLDER = "adapter"


def holds_adapters(keys: Mapping[str, Source]) -> bool:
    """Returns whether these are the weights of a model with LoRA adapters."""
    return any(".lora_" in key for key in keys)


class StoredAdapters:
    """The adapters among a checkpoint's ``tensors``. ``assets`` is its folder of config and tokenizer."""

    def __init__(self, tensors: Mapping[str, Source], assets: Path, where: str) -> None:
        self.folder = assets / ADAPTER_FOLDER
        if not (self.folder / "adapter_config.json").is_file():
            raise CheckpointError(f"{where}: holds LoRA adapters, but {self.folder / 'adapter_config.json'} is missing")
        try:
            with warnings.catch_warnings():
                # The empty model is the base, though it comes from another folder than the adapter's config names.
                warnings.filterwarnings("ignore", message=".*base_model_name_or_path")
                self._model: ForeignModel = add_lora(empty_model(assets), self.folder)
        except (ValueError, ImportError) as error:
            raise CheckpointError(f"{self.folder}: {error}") from None
        _, to_source = hf_base(self._model)
        self._where = where
        self._names: dict[str, str] = {}  # FQN without wrappers -> name in the base's files, or in the adapter's
        self._stored: dict[str, Source] = {}
        for fqn, _ in self._model.named_parameters(remove_duplicate=False):
            fqn = clean_name(fqn)
            self._names[fqn] = to_source(fqn)
            if f"model.{fqn}" in tensors:
                self._stored[fqn] = tensors[f"model.{fqn}"]

    def base_name(self, fqn: str) -> str:
        """Returns the name of a weight in the base model."""
        return self._names.get(fqn, fqn)

    def alone(self) -> dict[str, Source]:
        """Returns the adapter in the form of PEFT's files."""
        return {name: self._source(fqn) for fqn, name in self._names.items() if is_adapter(name)}

    def merged(self) -> dict[str, Source]:
        """Returns weights of the base by name. PEFT merges the adapters when they are read, one layer at a time.

        Raises:
            CheckpointError: adapters of fused experts, or an adapted weight that is tied to another.
        """
        from peft.tuners.tuners_utils import BaseTunerLayer

        found = {self._names[fqn]: source for fqn, source in self._stored.items() if not is_adapter(self._names[fqn])}
        for path, layer in self._model.named_modules():
            if not isinstance(layer, BaseTunerLayer):
                continue
            module: Any = layer
            if not any(True for _ in module.parameters()):
                continue
            base = module.get_base_layer()
            if isinstance(module.base_layer, BaseTunerLayer) or not hasattr(base, "weight"):
                raise CheckpointError(
                    f"{self._where}: the adapter of {path} is on parameters of a {type(base).__name__} and cannot be "
                    "merged offline. Export it with lora='adapter' (--adapter), and merge it with PEFT's "
                    "merge_and_unload."
                )
            names = [fqn for fqn, one in self._model.named_parameters(remove_duplicate=False) if one is base.weight]
            if len(names) > 1:
                raise CheckpointError(
                    f"{self._where}: {' and '.join(names)} are tied, so the adapter cannot be merged. Export it with "
                    "lora='adapter' (--adapter)."
                )
            source = self._source(f"{path}.base_layer.weight")
            take = lambda path=path, module=module: self._merge(path, module)  # noqa: E731
            found[self._names[f"{path}.base_layer.weight"]] = Computed(source.shape, source.dtype, take)
        return found

    def _source(self, fqn: str) -> Source:
        if fqn not in self._stored:
            raise CheckpointError(f"{self._where}: lacks {fqn}, a part of the adapter that {self.folder} describes")
        return self._stored[fqn]

    @torch.no_grad()
    def _merge(self, path: str, layer: nn.Module) -> torch.Tensor:
        twin: Any = copy.deepcopy(layer)  # on the meta device
        for name, _ in list(twin.named_parameters()):
            owner, _, last = name.rpartition(".")
            whole = nn.Parameter(self._source(f"{path}.{name}").whole(), requires_grad=False)
            twin.get_submodule(owner)._parameters[last] = whole
        twin.merge()
        return twin.get_base_layer().weight.detach()
