"""Says what a PEFT model holds under each name of its base after its adapters are merged, for files and pushes.

PEFT itself merges: as ``merge_and_unload`` does, but on a stand-in of each adapted layer that has full tensors as
parameters. The model does not change. Results are rounded once, to the dtype of the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2x.base.failures import first_line
from fsdp2x.io.names import Family, ForeignModel, has_adapters, hf_base, source_families
from fsdp2x.lifecycle.tree import named_params
from fsdp2x.sharding.wrap import unsharded_class

_ADAPTER_ITSELF = "Save the adapter itself instead (fsdp2x.save_adapter, export --adapter)."


@dataclass(frozen=True, eq=False)
class MergedLayer:
    """A layer that PEFT merges. ``params`` is name in the layer -> FQN of the parameter. PEFT has no types."""

    path: str
    module: Any
    params: Mapping[str, str]

    def unload(self, held: Mapping[str, nn.Parameter]) -> nn.Module:
        """Returns what PEFT makes of the layer with these parameters, by FQN. It writes to them."""
        twin = _stand_in(self.module, {name: held[fqn] for name, fqn in self.params.items()})
        if hasattr(twin, "unload_and_optionally_merge_module"):
            return twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        twin.merge()
        return twin.get_base_layer()

    @torch.no_grad()
    def merge(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the merged layer's tensors by FQN in the merged model. Writes to ``whole``, which is by FQN."""
        held = {fqn: nn.Parameter(whole[fqn], requires_grad=False) for fqn in self.params.values()}
        return {f"{self.path}.{name}": param.detach() for name, param in _params(self.unload(held)).items()}


class MergedModel:
    """The parameters of a merged PEFT model by FQN, ties once, and its buffers.

    ``sources`` is FQN -> FQN of the tensor that it is, or that it replaces if ``layers`` has the FQN. ``untied`` are
    pairs of FQNs that are one parameter of the base, but differ after merging.
    """

    def __init__(self, caller: str, model: ForeignModel) -> None:
        """Tries each merge on the meta device, so that what PEFT cannot merge raises `NotImplementedError` here."""
        if not has_adapters(model):
            raise ValueError(f"{caller}: merge_adapters=True, but {type(model).__name__} has no adapter")
        self._caller, self._model = caller, model
        self.sources: dict[str, str] = {}
        self.layers: dict[str, MergedLayer] = {}
        self.untied: list[tuple[str, str]] = []
        self._described: dict[str, tuple[torch.Size, torch.dtype]] = {}  # by FQN of the source
        self._tied: dict[str, dict[Any, str]] = {}  # FQN in the base -> what replaces it -> FQN
        self._check_settings()
        fqns: dict[int, str] = {}
        for fqn, param, record in named_params(model):
            self._described[fqn] = param.shape, param.dtype
            places = [] if record is None else [owner._parameters[name] for owner, name in record.owners]
            fqns.update((id(one), fqn) for one in (param, *places))  # a unit may be unsharded now
        self._collect(fqns)

    def _check_settings(self) -> None:
        configs = self._model.peft_config.values()
        kinds = sorted({str(getattr(config.peft_type, "value", config.peft_type)) for config in configs})
        if kinds != ["LORA"]:
            raise NotImplementedError(f"{self._caller}: merge_adapters=True merges LoRA, not {', '.join(kinds)}")
        if any(config.layer_replication for config in configs):
            raise NotImplementedError(
                f"{self._caller}: layer_replication makes layers with other adapters on the same weights, which "
                f"cannot be merged. {_ADAPTER_ITSELF}"
            )

    def _collect(self, fqns: Mapping[int, str]) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        inside = "."
        buffers: dict[str, tuple[str, torch.Tensor]] = {}
        for path, module in self._model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            if path.startswith(inside):
                continue
            if not isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
                for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                    fqn = fqns[id(param)]
                    self._add(f"{prefix}{name}", fqn, fqn, fqn)
                buffers |= {f"{prefix}{name}": (f"{prefix}{name}", one) for name, one in module._buffers.items()}
                continue
            inside = prefix
            layer = MergedLayer(path, module, {name: fqns[id(param)] for name, param in _params(module).items()})
            is_copy = isinstance(module, ModulesToSaveWrapper)
            merged, sources = self._try(layer)
            held = {id(one): f"{prefix}{name}" for name, one in layer.module.named_buffers(remove_duplicate=False)}
            buffers |= {f"{prefix}{name}": (held[id(one)], one) for name, one in merged.named_buffers()}
            if any(isinstance(one, BaseTunerLayer) for one in merged.modules()):
                raise NotImplementedError(
                    f"{self._caller}: {path!r} is trained by modules_to_save or trainable_token_indices and has other "
                    f"adapters inside of it, which PEFT does not merge. {_ADAPTER_ITSELF}"
                )
            changed = set() if is_copy else _changed(module, sources)
            for name, source in sources.items():
                value = (source, *sorted(layer.params.values())) if name in changed else source
                base = layer.params.get(f"original_module.{name}", source)
                if self._add(f"{prefix}{name}", base, source, value) and not is_copy:
                    self.layers[f"{prefix}{name}"] = layer
        for fqn, (source, buffer) in buffers.items():
            if buffer is not None:
                self.sources[fqn], self._described[source] = source, (buffer.shape, buffer.dtype)

    def _add(self, fqn: str, base: str, source: str, value: Any) -> bool:
        """Adds a parameter, unless it is tied to an earlier one, also after merging."""
        tied = self._tied.setdefault(base, {})
        if value in tied:
            return False
        self.untied += [(first, fqn) for first in list(tied.values())[:1]]
        tied[value], self.sources[fqn] = fqn, source
        return True

    def _try(self, layer: MergedLayer) -> tuple[nn.Module, dict[str, str]]:
        """Returns the merged layer on the meta device, and name in it -> FQN of the parameter that is there."""
        if layer.module.disable_adapters:
            raise NotImplementedError(
                f"{self._caller}: the adapters of {layer.path!r} are disabled. Call enable_adapter_layers() before "
                "merging, or push the base alone."
            )
        held = {}
        for fqn in layer.params.values():
            shape, dtype = self._described[fqn]
            held[fqn] = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
        inside = {id(param): fqn for fqn, param in held.items()}
        try:
            with torch.no_grad():
                merged = layer.unload(held)
            found = {name: inside.get(id(param), "") for name, param in _params(merged).items()}
            if not all(found.values()):
                raise NotImplementedError("PEFT makes new parameters of it.")
        except Exception as error:  # PEFT says in many ways that it cannot
            raise NotImplementedError(
                f"{self._caller}: the adapter of {layer.path!r} cannot be merged: {first_line(error)} {_ADAPTER_ITSELF}"
            ) from error
        return merged, found

    def inputs(self, fqn: str) -> list[str]:
        """Returns the parameters that a parameter of the merged model is made of."""
        return list(self.layers[fqn].params.values()) if fqn in self.layers else [self.sources[fqn]]

    def families(self, chosen: Mapping[str, Any], dtypes: Mapping[str, torch.dtype | None]) -> list[Family]:
        """Returns the families of files that ``chosen`` parameters make. ``dtypes`` on the wire are those by FQN.

        Raises:
            ValueError: ``chosen`` omits a part of an adapted layer.
            NotImplementedError: engines would tie parameters that differ.
        """
        if self.untied:
            first, second = map(hf_base(self._model)[1], self.untied[0])
            raise NotImplementedError(
                f"{self._caller}: {first!r} and {second!r} are tied in the base, but the adapter changes only one of "
                "them, or each in another way, and engines tie them. Use modules_to_save with ensure_weight_tying=True "
                "for both, train a base with tie_word_embeddings=False, or write both by fsdp2x export --merge."
            )
        described = {}
        for fqn, source in self.sources.items():
            inputs = self.inputs(fqn)
            missing = next((one for one in inputs if one not in chosen), None)
            if missing is None:
                shape, held = self._described[source]
                wanted = dtypes.get(source) if held.is_floating_point else None
                described[fqn] = shape, wanted or held
            elif any(one in chosen for one in inputs):
                layer = self.layers[fqn].path
                raise ValueError(f"{self._caller}: params omits {missing!r}, which the merge of {layer!r} needs")
        groups: dict[str, list[Family]] = {}  # FQN of a source -> the families that need it
        for family in source_families(self._model, described):
            near = {id(group): group for fqn in self._needs(family) if (group := groups.get(fqn))}
            together = [*(one for group in near.values() for one in group), family]
            groups.update((fqn, together) for one in together for fqn in self._needs(one))
        return [self._joined(group, described) for group in {id(one): one for one in groups.values()}.values()]

    def _needs(self, family: Family) -> list[str]:
        return list(dict.fromkeys(one for fqn in family.params for one in self.inputs(fqn)))

    def _joined(self, families: list[Family], described: Mapping[str, tuple[torch.Size, torch.dtype]]) -> Family:
        fqns = [fqn for family in families for fqn in family.params]
        layers = {id(layer): layer for fqn in fqns if (layer := self.layers.get(fqn))}.values()
        inputs = tuple(dict.fromkeys(one for family in families for one in self._needs(family)))
        outputs = tuple(spec for family in families for spec in family.outputs)
        if not layers:
            return Family(inputs, outputs, families[0].convert, families[0].is_renamed_only)

        def convert(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            # Merging bypasses version counters, which detect writes to gathered memory, so it gets copies.
            whole = {fqn: tensor.clone() for fqn, tensor in zip(inputs, tensors, strict=True)}
            held = {fqn: whole[self.sources[fqn]] for fqn in fqns}
            for layer in layers:
                held |= layer.merge(whole)
            cast = {fqn: held[fqn].to(described[fqn][1]) for fqn in fqns}
            return [made for family in families for made in family.convert([cast[fqn] for fqn in family.params])]

        return Family(inputs, outputs, convert, is_renamed_only=False)


def _params(module: Any) -> dict[str, nn.Parameter]:
    return dict(module.named_parameters(remove_duplicate=False))


def _changed(layer: Any, names: Mapping[str, str]) -> set[str]:
    """Returns those of the merged layer's parameters that merging may change."""
    if not set(layer.active_adapters) - set(getattr(layer, "token_adapter", layer).merged_adapters):
        return set()
    wrapped = {one.parameter_name for one in layer.modules() if hasattr(one, "parameter_name")}
    has_bias = any(getattr(layer, "lora_bias", {}).values())
    return wrapped or {name for name in names if name != "bias" or has_bias}


def _stand_in(module: nn.Module, params: Mapping[str, nn.Parameter], prefix: str = "") -> Any:
    """Copies the module with these parameters (by name in it), without hooks and with separate state."""
    twin = object.__new__(unsharded_class(module))
    for name, value in vars(module).items():
        value = type(value)() if name.endswith("_hooks") else value
        vars(twin)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    for name, param in module._parameters.items():
        twin._parameters[name] = None if param is None else params[f"{prefix}{name}"]
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _stand_in(child, params, f"{prefix}{name}.")
    return twin
