"""Maps parameters to the names and layout of a model's original files.

transformers renames and fuses weights while it loads (experts become one tensor per layer), and undoes it when it
saves. A *family* is the parameters that one such conversion needs together, usually one parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp2x.io.conversions import Traced, evaluate, saved_form
from fsdp2x.sharding.wrap import clean_name

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
    fqns: dict[str, str] = {}
    for fqn, name in names.items():
        if name in fqns:
            raise ValueError(f"{fqns[name]!r} and {fqn!r} are both {name!r} in files. Select one adapter by params.")
        fqns[name] = fqn
    weights = {name: Traced.of(name, *params[fqn]) for name, fqn in fqns.items()}
    saved = dict(saved_form(base, {name: one for name, one in weights.items() if not is_adapter(name)}))
    saved |= {name: one for name, one in weights.items() if is_adapter(name)}
    together: dict[str, dict[str, None]] = {}  # name of a weight -> weights of its family
    for made in saved.values():
        joined = {one: None for name in made.inputs for one in together.get(name, {name: None})}
        together.update(dict.fromkeys(joined, joined))
    outputs: dict[int, dict[str, Traced]] = {}
    for name, made in saved.items():
        outputs.setdefault(id(together[made.inputs[0]]), {})[name] = made
    members: dict[int, list[str]] = {}
    for name in fqns:
        members.setdefault(id(together[name]), []).append(name)
    return [_family(ins, [fqns[name] for name in ins], outputs[key]) for key, ins in members.items()]


def _family(inputs: list[str], fqns: list[str], outputs: Mapping[str, Traced]) -> Family:
    def convert(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        values, known = dict(zip(inputs, tensors, strict=True)), {}
        return [evaluate(made, values, known) for made in outputs.values()]

    specs = tuple(TensorSpec(name, made.shape, made.dtype) for name, made in outputs.items())
    return Family(tuple(fqns), specs, convert, all(made.call is None for made in outputs.values()))


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


def remember_source(base: ForeignModel, conversions: list | None, dtypes: dict[str, torch.dtype], path) -> None:
    """Stores on the model what saving in the form of its files needs. ``dtypes`` is by name in ``base``."""
    if conversions is not None:
        base._weight_conversions = conversions
    known = getattr(base, "_fsdp2x_source_dtypes", {})
    base._fsdp2x_source_dtypes = {**known, **dtypes}
    base._fsdp2x_source = str(path)
