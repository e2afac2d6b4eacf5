"""Merges adapters into the weights of their base, layer by layer, with PEFT's ``merge`` on full tensors.

It does not change the model, but merges a stand-in of each layer that has the gathered tensors as parameters. The
results have the names of the base and its dtype on the wire. They are rounded once, at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp2x.api import named_params, unsharded_class
from fsdp2x.io.names import Family, TensorSpec


class AdapterMerge:
    """The parameters of a PEFT model that are merged, and the resulting families."""

    def __init__(self, caller: str, model: nn.Module, chosen: Mapping[str, torch.Tensor]) -> None:
        """Collects the adapted layers.

        Raises:
            ValueError: the model has no adapter, or ``chosen`` omits a part of an adapted layer.
            NotImplementedError: adapters are not LoRA, or an adapted layer cannot be merged separately.
        """
        self._caller = caller
        fqns = {id(param): name for name, param, _ in named_params(model)}
        self._layers: list[tuple[Any, dict[str, nn.Parameter]]] = []
        self._replaced: dict[str, tuple[str, torch.dtype]] = {}  # FQN -> FQN and dtype of the trained replacement
        # FQNs of weights in fully trained modules, and of buffers of adapters.
        buffers = {name for name, weight in chosen.items() if not isinstance(weight, nn.Parameter)}
        self._copies = {name for name in buffers if "lora_" in name or ".modules_to_save." in name}
        for path, module in _adapted(caller, model):
            params = {fqns[id(param)]: param for param in module.parameters()}
            missing = next((name for name in params if name not in chosen), None)
            if missing is not None:
                raise ValueError(f"{caller}: params omits {missing!r}, which the merge of {path!r} needs")
            if hasattr(module, "modules_to_save"):
                self._replace(module, path, fqns, buffers)
            else:
                self._layers.append((module, params))
        if not self._layers and not self._replaced:
            raise ValueError(f"{caller}: merge_adapters=True, but {type(model).__name__} has no adapter")
        claimed = [name for _, params in self._layers for name in params]
        twice = next((name for name in claimed if claimed.count(name) > 1), None)
        if twice is not None:
            raise NotImplementedError(f"{caller}: {twice!r} is the base of two adapted layers. Untie them.")
        self._touched = {*claimed, *self._replaced}

    def _replace(self, wrapper: Any, path: str, fqns: Mapping[int, str], buffers: set[str]) -> None:
        if len(wrapper.active_adapters) != 1:
            raise NotImplementedError(
                f"{self._caller}: {path!r} has {len(wrapper.active_adapters)} active copies, not 1"
            )
        trained = dict(wrapper.modules_to_save[wrapper.active_adapters[0]].named_parameters())
        for name, param in wrapper.original_module.named_parameters():
            self._replaced[fqns[id(param)]] = fqns[id(trained[name])], trained[name].dtype
        self._copies |= {fqns[id(param)] for param in wrapper.modules_to_save.parameters()}
        copy_of = f"{path}.modules_to_save.{wrapper.active_adapters[0]}."
        for name, buffer in wrapper.original_module.named_buffers():
            if (held := f"{path}.original_module.{name}") in buffers:
                self._replaced[held] = copy_of + name, buffer.dtype

    @property
    def uncast(self) -> set[str]:
        """FQNs of parameters that are gathered unchanged and cast when merged."""
        return {name for _, params in self._layers for name in params}

    @property
    def adapters(self) -> set[str]:
        """FQNs of parameters without a name in the base's files."""
        bases = {id(param) for module, _ in self._layers for param in module.get_base_layer().parameters()}
        parts = (params.items() for _, params in self._layers)
        return self._copies | {name for part in parts for name, param in part if id(param) not in bases}

    def arrange(self, families: list[Family], dtypes: Mapping[str, torch.dtype | None]) -> list[Family]:
        """Returns ``families`` (without ``adapters``) with merged layers. ``dtypes`` are those on the wire."""
        together = next((f for f in families if len(f.params) > 1 and not self._touched.isdisjoint(f.params)), None)
        if together is not None:
            raise NotImplementedError(
                f"{self._caller}: {together.params[0]!r} is stored together with other weights. Merge the adapter "
                "first, with merge_and_unload."
            )
        by_param = {name: family for family in families for name in family.params}
        made = {name: _replaced(by_param[name], trained, dtypes) for name, trained in self._replaced.items()}
        hidden: set[str] = set()
        for module, params in self._layers:
            bases = [name for name in params if name in by_param]
            made[bases[0]] = _merged(module, params, [by_param[name] for name in bases], dtypes)
            hidden.update(bases[1:])
        return [made.get(family.params[0], family) for family in families if family.params[0] not in hidden]


def _adapted(caller: str, model: Any) -> list[tuple[str, Any]]:
    """Returns the outermost adapted layers and wrappers of fully trained modules. PEFT has no types."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    kinds = sorted({str(getattr(config.peft_type, "value", config.peft_type)) for config in model.peft_config.values()})
    if kinds != ["LORA"]:
        raise NotImplementedError(f"{caller}: merge_adapters=True merges LoRA, not {', '.join(kinds)}")
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer, _ in found):
            continue
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise NotImplementedError(f"{caller}: {path!r} is a {type(module).__name__}, which cannot be merged here")
        if isinstance(module, ModulesToSaveWrapper):
            found.append((path, module))
        elif isinstance(module, BaseTunerLayer):
            layer: Any = module
            if not any(True for _ in layer.parameters()):
                continue
            if isinstance(layer.base_layer, BaseTunerLayer) or not hasattr(layer.get_base_layer(), "weight"):
                raise NotImplementedError(f"{caller}: {path!r} adapts parameters of {type(layer.get_base_layer())}")
            found.append((path, layer))
    return found


def _replaced(family: Family, trained: tuple[str, torch.dtype], dtypes: Mapping[str, torch.dtype | None]) -> Family:
    name, held = trained
    outputs = tuple(TensorSpec(spec.name, spec.shape, dtypes.get(name) or held) for spec in family.outputs)
    return Family((name,), outputs, family.convert, family.is_renamed_only)


def _merged(
    module: Any,
    params: Mapping[str, nn.Parameter],
    bases: list[Family],
    dtypes: Mapping[str, torch.dtype | None],
) -> Family:
    """Returns one family of all parameters of an adapted layer. Those of its base come first and are the result."""
    first = [family.params[0] for family in bases]
    names = (*first, *(name for name in params if name not in first))
    ids = [id(params[name]) for name in names]
    outputs = tuple(
        TensorSpec(family.outputs[0].name, family.outputs[0].shape, dtypes.get(name) or params[name].dtype)
        for name, family in zip(first, bases, strict=True)
    )

    @torch.no_grad()
    def convert(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        # Merging bypasses version counters, which detect writes to gathered memory, so it gets copies.
        twin = _stand_in(module, {key: tensor.clone() for key, tensor in zip(ids, tensors, strict=True)})
        twin.merge()
        before, after = module.get_base_layer().parameters(), twin.get_base_layer().parameters()
        held = {id(param): merged for param, merged in zip(before, after, strict=True)}
        return [held[key].detach().to(spec.dtype) for key, spec in zip(ids, outputs, strict=False)]

    return Family(names, outputs, convert, is_renamed_only=False)


def _stand_in(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Copies the module with these tensors as parameters (by their ids), without hooks and with separate state."""
    twin = object.__new__(unsharded_class(module))
    for name, value in vars(module).items():
        value = type(value)() if name.endswith("_hooks") else value
        vars(twin)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    for name, param in module._parameters.items():
        twin._parameters[name] = None if param is None else nn.Parameter(tensors[id(param)], requires_grad=False)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _stand_in(child, tensors)
    return twin
