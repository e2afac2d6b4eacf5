"""Builds models of HuggingFace configs on the meta device, without weights.

It checks a config before transformers reads it.
"""

from __future__ import annotations

import copy
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp2x.base.failures import CheckpointError, first_line, reworded
from fsdp2x.io.formats.safe_files import how_to_download, read_json
from fsdp2x.io.hf.files import Checkpoint
from fsdp2x.io.names import ForeignModel
from fsdp2x.sharding.wrap import kept_in_float32, unsharded_class

# Config keys that count things which are made one by one. The limit is more than any model has.
_COUNTED = re.compile(r"(?:^|_)(layers?|depths?|blocks?|experts|heads|labels|codebooks)(?:_|$)")
_MOST = 100_000
_MOST_LAYERS = 10_000


def read_config(file: Path) -> dict[str, Any]:
    """Reads a config.json and checks that its counts are plausible, so that transformers can read the file safely."""
    settings = read_json(file, unique=False)
    _check_counts(settings, str(file))
    return settings


def _check_counts(settings: dict[str, Any], where: str) -> None:
    for key, value in settings.items():
        if isinstance(value, dict):
            _check_counts(value, f"{where}: {key}")
        elif found := _COUNTED.search(key):
            most = _MOST_LAYERS if found[1].startswith(("layer", "depth", "block")) else _MOST
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, int | float) and not number <= most:
                    raise CheckpointError(f"{where}: expected {key} of at most {most}, got {number:g}")


def plain_config(model: ForeignModel) -> Any:
    """Copies the model's config and sets the unsharded class and the dtype, as `save_pretrained` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [unsharded_class(model).__name__]
    config.dtype = next(p.dtype for p in model.parameters())
    return config


def empty_model(folder: Path, *, unties: bool = False) -> nn.Module:
    """Builds the model of a folder's config on the meta device, in the dtype of the config or else of the files.

    With ``unties`` its embeddings are not tied.
    """
    with told_of(folder):
        config = read_hf_config(folder)
        if getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(f"{folder / 'config.json'}: asks for quantized weights, which are not supported")
        if unties:
            config.tie_word_embeddings = False
        return build_empty(None, config, config.dtype or dtype_of_files(folder))


def told_of(path: Path) -> AbstractContextManager[None]:
    """Turns any exception of transformers about a config.json, or the one in a folder, into a `CheckpointError`."""

    def say(error: Exception) -> str:
        if isinstance(error, OSError):
            return f"{error.filename or path if error.strerror else path}: {error.strerror or first_line(error)}"
        return f"{_file_of(path)}: transformers cannot build the model: {type(error).__name__}: {first_line(error)}"

    return reworded(CheckpointError, say, Exception)


def read_hf_config(path: Path) -> Any:
    """Returns transformers' config of a config.json, or of a folder with one. Runs no code that it names."""
    from transformers import AutoConfig

    file = _file_of(path)
    if not file.is_file():
        hint = how_to_download(path)
        said = f"no such file; a local HuggingFace folder is needed{'.' * bool(hint)}{hint}"
        raise FileNotFoundError(2, said, str(file))
    read_config(file)
    return AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _file_of(path: Path) -> Path:
    return path if path.is_file() or path.suffix == ".json" else path / "config.json"


def build_empty(
    model_class: type | None,
    config: Any,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    *,
    keeps_float32: bool = True,
) -> nn.Module:
    """Builds a model on the meta device. `keeps_float32`: weights that its class wants in float32 keep that dtype."""
    import transformers

    if model_class is None:
        names = config.architectures or []
        found = (getattr(transformers, name, None) for name in names if isinstance(name, str))
        is_model = lambda one: isinstance(one, type) and issubclass(one, transformers.PreTrainedModel)  # noqa: E731
        model_class = next(filter(is_model, found), None)
        model_class = model_class or transformers.AutoModelForCausalLM
    options: dict[str, Any] = {"dtype": dtype}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    make = getattr(model_class, "_from_config", None)
    if make is None:
        make, options["trust_remote_code"] = model_class.from_config, False
    with torch.device("meta"):
        model = make(config, **options)
    for param in kept_in_float32(model, dtype) if keeps_float32 else ():
        param.data = param.data.to(torch.float32)
    return model


def dtype_of_files(folder: Path) -> torch.dtype:
    """Returns the dtype of the first floating-point weight."""
    with Checkpoint([folder]) as files:
        floating = (source.dtype for source in files.tensors.values() if source.dtype.is_floating_point)
        return next(floating, torch.float32)
