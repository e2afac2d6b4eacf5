"""Maps parameters to the names and layout of a model's original files.

transformers renames and fuses weights while it loads (experts become one tensor per layer). Its public tables say how,
and how to undo it. A *family* is the parameters that one such conversion needs together, usually one parameter.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2x.sharding.wrap import clean_name, unsharded_class

# A model of transformers or PEFT. By torch's annotations each of its attributes is a Tensor or a Module.
ForeignModel = Any


@dataclass(frozen=True)
class TensorSpec:
    """A full tensor to hand out or to write."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Family:
    """``params`` are FQNs that are converted together. ``outputs`` are the results, in this order."""

    params: tuple[str, ...]
    outputs: tuple[TensorSpec, ...]
    convert: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    is_renamed_only: bool = True


def plain_families(params: Mapping[str, tuple[torch.Size, torch.dtype]]) -> list[Family]:
    """Returns a family for each parameter, under its FQN."""
    return [Family((name,), (TensorSpec(name, *described),), list) for name, described in params.items()]


def source_families(model: nn.Module, params: Mapping[str, tuple[torch.Size, torch.dtype]]) -> list[Family]:
    """Returns the families of ``params`` (FQN -> shape and dtype), in the order of their first members.

    Names are those of the model's original files if the model comes from transformers. Adapter weights of a PEFT model
    have the names of PEFT's adapter files. Any other parameter keeps its FQN, without wrappers.
    """
    base, to_source = hf_base(model)
    names = {fqn: to_source(fqn) for fqn in params}
    quantized = [name for name in names.values() if not is_adapter(name)] if is_quantized(base) else []
    if quantized:
        raise NotImplementedError(
            f"fsdp2x: {type(base).__name__} is quantized. Under the names of files, weights such as {quantized[0]!r} "
            "could not be read without their quantization data. Save or push only adapters "
            '(fsdp2x.save_adapter, params=lambda name, param: "lora_" in name), or take unconverted tensors with '
            'names="model".'
        )
    reverse = _Reverse(base, [name for name in names.values() if not is_adapter(name)])
    members: dict[Any, list[str]] = {}
    for fqn, name in names.items():
        members.setdefault(reverse.key(name), []).append(fqn)
    families = []
    for key, fqns in members.items():
        specs = [TensorSpec(names[fqn], *params[fqn]) for fqn in fqns]
        families.append(reverse.family(key, tuple(fqns), specs))
    return families


def is_quantized(base: nn.Module) -> bool:
    """Returns whether transformers loads ``base`` in another form than its weights, such as 4 bits."""
    return getattr(getattr(base, "config", None), "quantization_config", None) is not None


def is_adapter(name: str) -> bool:
    """Returns whether ``name`` (of ``hf_base``) belongs to a PEFT adapter and not to the model inside it."""
    return name.startswith("base_model.model.")


def hf_base(model: nn.Module) -> tuple[ForeignModel, Callable[[str], str]]:
    """Returns the model whose files the names refer to, and the map from FQN to the name in it.

    For a PEFT model that is the base model. Its adapter weights keep the prefix of PEFT's files. A model with
    transformers' ``add_adapter`` is its own base.
    """
    outer = _unwrapped(model)
    if not has_adapters(outer):
        return outer, clean_name
    wraps = hasattr(outer, "get_base_model")
    adapters = "|".join(re.escape(name) for name in outer.peft_config)
    prefix = re.compile(r"base_model\.model\.")

    def to_source(fqn: str) -> str:
        name = clean_name(fqn)
        if "lora_" in name or ".modules_to_save." in name or ".trainable_tokens_delta." in name:
            name = name.replace(".modules_to_save.", ".")
            name = re.sub(rf"\.(?:{adapters})(?=\.|$)", "", name, count=1)
            return name if wraps else f"base_model.model.{name}"
        name = re.sub(r"\.(?:token_adapter|base_layer|original_module)(?=\.)", "", name)
        return prefix.sub("", name, count=1)

    return _unwrapped(outer.get_base_model()) if wraps else outer, to_source


def has_adapters(model: nn.Module) -> bool:
    """Returns whether PEFT has attached adapters to ``model``, in place or in a model around it."""
    return bool(getattr(_unwrapped(model), "peft_config", None))


def _unwrapped(model: ForeignModel) -> ForeignModel:
    while (inner := model._modules.get("_orig_mod")) is not None:
        model = inner
    return model


def is_transformers(model: nn.Module) -> bool:
    """Returns whether transformers knows the names of the model's files. Imports nothing for other models."""
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__) and hasattr(model, "config")


@contextlib.contextmanager
def original_classes(model: nn.Module) -> Iterator[None]:
    """Restores the classes from before ``fully_shard``, because transformers finds conversions by class name."""
    swapped = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, _ in swapped:
            module.__class__ = unsharded_class(module)
        yield
    finally:
        for module, cls in swapped:
            module.__class__ = cls


def remember_source(base: ForeignModel, conversions: list | None, dtypes: dict[str, torch.dtype], path) -> None:
    """Stores on the model what saving in the form of its files needs. ``dtypes`` is by name in ``base``."""
    if conversions is not None:
        base._weight_conversions = conversions
    known = getattr(base, "_fsdp2x_source_dtypes", {})
    base._fsdp2x_source_dtypes = {**known, **dtypes}
    base._fsdp2x_source = str(path)


class _Reverse:
    """transformers' conversions of a model, reversed: from names in memory to those of files."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self._model = model
        self._renamings, self._converters = _reversed_conversions(model)
        # Some renamings depend on earlier names, in transformers' order.
        self._renamed: dict[str, str] = {}
        self._patterns: dict[str, str] = {}
        self._layers: dict[str, str] = {}
        if not self._renamings and not self._converters:
            return
        from transformers.core_model_loading import dot_natural_key

        for name in sorted(names, key=dot_natural_key):
            matches = (converter.rename_source_key(name) for converter in self._converters)
            layer, pattern = next((match for match in matches if match[1] is not None), (name, None))
            if pattern is None:
                self._renamed[name] = _renamed_by(self._renamings, name)
            else:
                self._layers[name], self._patterns[name] = layer, pattern

    def key(self, name: str) -> Any:
        """Returns a key that is equal for parameters that are converted together."""
        return ("converted", self._layers[name]) if name in self._layers else ("renamed", name)

    def family(self, key: Any, fqns: tuple[str, ...], specs: list[TensorSpec]) -> Family:
        kind, layer = key
        if kind == "renamed":
            spec = specs[0]
            if len(specs) > 1:
                raise ValueError(
                    f"{fqns[0]!r} and {fqns[1]!r} are both {spec.name!r} in files. Select one adapter by params."
                )
            name = self._renamed.get(spec.name, spec.name)
            return Family(fqns, (TensorSpec(name, spec.shape, spec.dtype),), list)
        patterns = [self._patterns[spec.name] for spec in specs]
        converter = next(one for one in self._converters if patterns[0] in one.source_patterns)
        names = [spec.name for spec in specs]

        def run(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            return run_converter(converter, self._model, layer, zip(names, patterns, tensors, strict=True))

        outputs = [
            TensorSpec(_renamed_by(self._renamings, name), value.shape, value.dtype)
            for name, value in run([torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs]).items()
        ]
        return Family(fqns, tuple(outputs), lambda tensors: list(run(tensors).values()), is_renamed_only=False)


def run_converter(
    converter: Any, model: nn.Module, layer: str, tensors: Iterable[tuple[str, str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Returns what transformers' ``converter`` makes of (name, pattern, tensor) for ``layer``, by result name."""
    fresh = copy.deepcopy(converter)
    for name, pattern, tensor in tensors:
        fresh.add_tensor(layer, name, pattern, tensor)
    made = fresh.convert(layer, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _renamed_by(renamings: list, name: str) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _reversed_conversions(model: ForeignModel) -> tuple[list, list]:
    """Returns (renamings, converters) from memory to files: those that loading used, else those of the class."""
    if not is_transformers(model):
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        with original_classes(model):
            conversions = get_model_conversion_mapping(model, add_legacy=False)
        # It is unknown whether the files of a model made from a config would have the prefix.
        conversions = [one for one in conversions if not isinstance(one, PrefixChange)]
    reverse = [one.reverse_transform() for one in reversed(conversions)]
    return (
        [one for one in reverse if isinstance(one, WeightRenaming)],
        [one for one in reverse if isinstance(one, WeightConverter)],
    )
