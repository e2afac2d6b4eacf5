"""LoRA through PEFT: adapters from plain settings, and adapter-only save and load of sharded models."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError, first_line, on_rank_0
from fsdp2x.io.formats.safe_files import read_json
from fsdp2x.io.hf.load import LoadReport, load_hf
from fsdp2x.io.hf.save import save_hf

# What training frameworks call PEFT's settings.
_ALIASES = {
    "rank": "r",
    "lora_rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target": "target_modules",
    "lora_target": "target_modules",
    "additional_target": "modules_to_save",
}
_LISTS = ("target_modules", "modules_to_save", "target_parameters", "exclude_modules")
# What an adapter's numbers depend on besides its tensors' shapes.
_SCALING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


@checked
def add_lora(model: nn.Module, settings: Any) -> nn.Module:
    """Freezes ``model`` and adds LoRA adapters; returns the PEFT model. Call it on every rank, before ``fully_shard``.

    The base may be float32, bfloat16 or of 8-bit-typed weights (frozen ``int8`` or ``uint8`` parameters of a layer that
    knows how to use them): base and adapters share units, whatever their dtypes. Adapters over bfloat16 and float16
    weights are float32, so that optimizers work in float32; ``MixedPrecisionPolicy(param_dtype=...)`` chooses the
    compute dtype of both, 8-bit weights excepted. Seed torch alike on every rank before: adapters start at random.

    Args:
        model: a transformers model, or any module; not sharded yet. May be on the meta device.
        settings: a ``peft.LoraConfig``; a mapping of its arguments, in which ``rank``, ``lora_rank``, ``alpha``,
            ``dropout``, ``lora_target`` and ``additional_target`` are also known; or a folder with an
            ``adapter_config.json``. Lists may be strings with commas. Among ``target_modules`` "all-linear" means
            every linear layer but the head, "all-embedding" every embedding, "all-router" every router that is a
            linear layer.

    Raises:
        ValueError: an unknown setting (the nearest known one is named); nothing to adapt; a folder of no LoRA adapter.
        CheckpointError: the folder's adapter_config.json is damaged.
        RuntimeError: the model is sharded already.
        ImportError: PEFT is not installed.
    """
    from peft import LoraConfig, get_peft_model

    sharded = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if sharded is not None:
        raise RuntimeError(
            f"fsdp2x.add_lora: {sharded or 'the model'} is sharded already; add adapters first, then call fully_shard"
        )
    if isinstance(settings, (str, Path)):
        settings = _read_config(Path(settings))
        settings.inference_mode = False
    elif isinstance(settings, Mapping):
        settings = LoraConfig(**_arguments(model, settings))
    if not isinstance(settings, LoraConfig):
        raise TypeError(f"fsdp2x.add_lora: settings must be a LoraConfig, a mapping or a folder, got {settings!r}")
    peft_model = get_peft_model(model, settings)
    if not any(param.requires_grad for param in peft_model.parameters()):
        raise ValueError(f"fsdp2x.add_lora: no adapter was added for target_modules={settings.target_modules!r}")
    return peft_model


def _arguments(model: nn.Module, settings: Mapping[str, Any]) -> dict[str, Any]:
    from peft import LoraConfig

    known = {field.name for field in dataclasses.fields(LoraConfig)}
    arguments: dict[str, Any] = {}
    for key, value in settings.items():
        name = _ALIASES.get(key, key)
        if name not in known:
            near = difflib.get_close_matches(key, [*known, *_ALIASES], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"fsdp2x.add_lora: unknown setting {key!r}{hint}")
        if name in arguments:
            raise ValueError(f"fsdp2x.add_lora: {key!r} and another setting both say {name}")
        if name in _LISTS and isinstance(value, str) and value != "all-linear":
            value = [part.strip() for part in value.split(",") if part.strip()]
        arguments[name] = value
    if isinstance(arguments.get("target_modules"), list):
        arguments["target_modules"] = _resolve_targets(model, arguments["target_modules"])
    return arguments


def _resolve_targets(model: nn.Module, targets: list[str]) -> list[str] | str:
    """Replaces the names of kinds by the modules of that kind."""
    if targets == ["all-linear"]:
        return "all-linear"  # PEFT knows it
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    resolved: list[str] = []
    for target in targets:
        if target == "all-linear":
            found = list(linears)
        elif target == "all-embedding":
            found = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
        elif target == "all-router":
            found = [name for name in linears if name.rpartition(".")[2] in ("gate", "router")]
        else:
            found = [target]
        if not found:
            raise ValueError(
                f"fsdp2x.add_lora: {target!r} matches nothing in {type(model).__name__}; routers and experts that are "
                "no linear layers are adapted by target_parameters"
            )
        resolved += found
    return list(dict.fromkeys(resolved))


@checked
def save_adapter(model: nn.Module, folder: str | Path, *, force: bool = False) -> Path:
    """Writes the adapter of a PEFT model alone: what ``peft.PeftModel.from_pretrained(base, folder)`` loads.

    All ranks write their rows at once where they share a file system; the base is not gathered. The folder appears
    when it is whole. Collective, between two steps, sharded or not. Returns the folder.

    Args:
        force: replace what is at ``folder``.

    Raises:
        ValueError: the model has no adapter.
        NotImplementedError: it has several.
        CheckpointError: on every rank: the folder exists, or cannot be written.
    """
    return save_hf(model, folder, weights="adapter", force=force)


@checked
def load_adapter(model: nn.Module, folder: str | Path) -> LoadReport:
    """Fills the adapter of a PEFT model, sharded or not, from a folder that PEFT or ``save_adapter`` wrote.

    Each rank reads its own rows; the base stays as it is. Collective, with the same arguments on every rank.

    Raises:
        ValueError: the model has no adapter, or one whose scaling differs from the folder's.
        CheckpointError: on every rank: the folder is damaged, or its weights are not those of the adapter.
    """
    folder = Path(folder)
    configs = getattr(model, "peft_config", None)
    if not configs:
        raise ValueError(
            f"fsdp2x.load_adapter: {type(model).__name__} has no adapter; fsdp2x.add_lora(model, "
            f"{str(folder)!r}), called before fully_shard, makes the one that the folder describes"
        )
    (name, config), *others = configs.items()
    if others:
        raise NotImplementedError(f"fsdp2x.load_adapter: the model has the adapters {', '.join(configs)}; expected one")

    def read() -> dict[str, Any]:
        try:
            return _read_config(folder).to_dict()
        except ValueError as error:
            raise CheckpointError(str(error)) from None

    stored = on_rank_0(read, what=f"loading the adapter {folder}")
    for key in _SCALING:
        here, there = getattr(config, key, None), stored.get(key)
        if (here or None) != (there or None):
            raise ValueError(
                f"fsdp2x.load_adapter: {key} is {there!r} in {folder} and {here!r} in the model's adapter {name!r}; "
                "make the model's adapter from the folder with fsdp2x.add_lora(model, folder)"
            )
    return load_hf(model, folder, strict=True, progress=False)


def _read_config(folder: Path) -> Any:
    from peft import LoraConfig

    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no adapter_config.json: no folder of an adapter")
    written = read_json(path, unique=False)
    if written.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {written.get('peft_type')!r}, expected 'LORA'")
    try:
        return LoraConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ValueError(f"{path}: PEFT cannot read it: {type(error).__name__}: {first_line(error)}") from None
