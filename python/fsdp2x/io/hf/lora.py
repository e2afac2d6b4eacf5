"""LoRA through PEFT: makes adapters from plain settings, and saves and loads adapters of sharded models."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError, first_line, on_rank_0, reworded
from fsdp2x.io.formats.safe_files import read_json
from fsdp2x.io.hf.load import LoadReport, load_hf
from fsdp2x.io.hf.save import save_hf

# Names that training frameworks give to PEFT's settings.
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
# Settings that change an adapter's values in addition to its tensors.
_SCALING = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


@checked
def add_lora(model: nn.Module, settings: Any) -> nn.Module:
    """Freezes ``model``, adds LoRA adapters, and returns the PEFT model. Call it before ``fully_shard`` on every rank.

    Seed torch alike on every rank first, because adapters start at random. The base may be float32, bfloat16, or have
    8-bit weights (frozen ``int8`` or ``uint8`` parameters). Adapters over bfloat16 and float16 weights are float32.
    ``MixedPrecisionPolicy(param_dtype=...)`` sets the compute dtype of base and adapters, except for 8-bit weights.

    Args:
        model: a transformers model, or any module, not sharded yet. May be on the meta device.
        settings: a ``peft.LoraConfig``, a mapping of its arguments, or a folder with an ``adapter_config.json``. A
            mapping may also use ``rank``, ``lora_rank``, ``alpha``, ``dropout``, ``lora_target`` and
            ``additional_target``, and strings with commas for lists. In ``target_modules``, "all-linear" means every
            linear layer except the head, "all-embedding" every embedding, and "all-router" every linear router.

    Returns:
        The PEFT model around ``model``.

    Raises:
        ValueError: a setting is unknown (the message names the nearest), no module matches, or the folder has no LoRA
            adapter.
        TypeError: ``settings`` has another type.
        CheckpointError: the folder's adapter_config.json is damaged.
        RuntimeError: the model is already sharded.
        ImportError: PEFT is not installed.
    """
    from peft import LoraConfig, get_peft_model

    sharded = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if sharded is not None:
        raise RuntimeError(
            f"fsdp2x.add_lora: {sharded or 'the model'} is sharded already. Add adapters before fully_shard."
        )
    if isinstance(settings, (str, Path)):
        settings = read_adapter_config(Path(settings))
        settings.inference_mode = False
    elif isinstance(settings, Mapping):
        settings = LoraConfig(**_arguments(model, settings))
    if not isinstance(settings, LoraConfig):
        raise TypeError(f"fsdp2x.add_lora: settings must be a LoraConfig, a mapping or a folder, got {settings!r}")
    with warnings.catch_warnings():
        # PEFT 0.21 reads a name that transformers 5 deprecates, which no caller can change.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
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
            raise ValueError(f"fsdp2x.add_lora: {key!r} and another setting both set {name}. Pass only one of them.")
        if name in _LISTS and isinstance(value, str) and value != "all-linear":
            value = [part.strip() for part in value.split(",") if part.strip()]
        arguments[name] = value
    if isinstance(arguments.get("target_modules"), list):
        arguments["target_modules"] = _resolve_targets(model, arguments["target_modules"])
    return arguments


def _resolve_targets(model: nn.Module, targets: list[str]) -> list[str] | str:
    """Replaces names of kinds by the modules of that kind."""
    if targets == ["all-linear"]:
        return "all-linear"  # PEFT knows this name
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
                f"fsdp2x.add_lora: {target!r} matches nothing in {type(model).__name__}. For routers and experts that "
                "are not linear layers, use target_parameters."
            )
        resolved += found
    return list(dict.fromkeys(resolved))


@checked
def save_adapter(model: nn.Module, folder: str | Path, *, force: bool = False) -> Path:
    """Saves only the adapter of a PEFT model, for ``peft.PeftModel.from_pretrained(base, folder)``. Collective.

    Call it between two steps, for a sharded or unsharded model. Ranks that share a file system write their rows at
    once, and the base is not gathered. The folder appears when it is complete.

    Args:
        model: a PEFT model.
        folder: the folder to write.
        force: whether to replace an existing ``folder``.

    Returns:
        The path of the folder.

    Raises:
        ValueError: the model has no adapter.
        NotImplementedError: the model has several adapters.
        CheckpointError: on every rank if the folder exists or cannot be written.
    """
    return save_hf(model, folder, weights="adapter", force=force)


@checked
def load_adapter(model: nn.Module, folder: str | Path) -> LoadReport:
    """Fills the adapter of a PEFT model from a folder that PEFT or ``save_adapter`` wrote. Collective.

    Each rank reads its own rows. The base does not change. Pass the same arguments on every rank.

    Args:
        model: a PEFT model, sharded or not.
        folder: the folder of the adapter.

    Returns:
        The same report as :func:`load_hf`.

    Raises:
        ValueError: the model has no adapter, or its scaling differs from the folder's.
        NotImplementedError: the model has several adapters.
        CheckpointError: on every rank if the folder is damaged or its weights do not fit the adapter.
    """
    folder = Path(folder)
    configs = getattr(model, "peft_config", None)
    if not configs:
        raise ValueError(
            f"fsdp2x.load_adapter: {type(model).__name__} has no adapter. Call fsdp2x.add_lora(model, "
            f"{str(folder)!r}) before fully_shard to make the one that the folder describes."
        )
    (name, config), *others = configs.items()
    if others:
        raise NotImplementedError(f"fsdp2x.load_adapter: expected one adapter, the model has {', '.join(configs)}")

    def read() -> dict[str, Any]:
        with reworded(CheckpointError, str, ValueError):
            return read_adapter_config(folder).to_dict()

    stored = on_rank_0(read, what=f"loading the adapter {folder}")
    for key in _SCALING:
        here, there = getattr(config, key, None), stored.get(key)
        if (here or None) != (there or None):
            raise ValueError(
                f"fsdp2x.load_adapter: {key} is {there!r} in {folder}, but {here!r} in the model's adapter {name!r}. "
                "Make the model's adapter from the folder with fsdp2x.add_lora(model, folder)."
            )
    return load_hf(model, folder, strict=True, progress=False)


def read_adapter_config(folder: Path) -> Any:
    """Returns the `LoraConfig` of an adapter's folder."""
    from peft import LoraConfig

    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not the folder of an adapter: adapter_config.json is missing")
    written = read_json(path, unique=False)
    if written.get("peft_type") != "LORA":
        raise ValueError(f"{path}: expected the peft_type 'LORA', got {written.get('peft_type')!r}")
    try:
        return LoraConfig.from_pretrained(str(folder))
    except Exception as error:
        raise ValueError(f"{path}: PEFT cannot read it: {type(error).__name__}: {first_line(error)}") from None
