"""``from_pretrained``: a HuggingFace folder as a sharded model; no rank ever holds the whole."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fsdp2x.api import fully_shard
from fsdp2x.arguments import checked
from fsdp2x.checkpoint.agree import CheckpointError, on_rank_0, together
from fsdp2x.hf.config import read_config
from fsdp2x.hf.files import Checkpoint
from fsdp2x.hf.load import load_hf
from fsdp2x.reading.errors import first_line
from fsdp2x.reading.json_file import read_json


@checked
def from_pretrained(
    path_or_model_class: str | Path | type[nn.Module],
    path: str | Path | None = None,
    *,
    config: Any = None,
    dtype: torch.dtype | Literal["auto"] = "auto",
    attn_implementation: str | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    mode: Literal["auto", "each", "broadcast"] = "auto",
    strict: bool | None = None,
    ignore_mismatched_sizes: bool = False,
    progress: bool = True,
    **sharding: Any,
) -> nn.Module:
    """Builds the model on the meta device, shards it there and loads each rank's rows: see :func:`load_hf`.

    ``from_pretrained(folder)`` takes the class from the folder's config, ``from_pretrained(Class, folder)`` that class.
    The model is in eval mode, as with transformers. Nothing is downloaded and no code of the folder is run.

    Args:
        path_or_model_class: a local folder with config.json, or a transformers model class.
        path: the folder, when a class was given.
        config: a config to use instead of the folder's.
        dtype: of parameters; ``"auto"`` as in transformers: the config's, else that of the files. ``torch.float32``
            keeps float32 masters of lower-precision files.
        attn_implementation: as in transformers.
        prepare: called with the model on the meta device before it is sharded; returns the model to shard, such as a
            PEFT model around it (adapters are initialised after loading).
        mode, strict, ignore_mismatched_sizes, progress: as for :func:`load_hf`.
        **sharding: arguments of :func:`fully_shard`: mesh, mp_policy, reshard_after_forward, auto_wrap and others.

    Raises:
        TypeError: a class was given without a path, or a path with a path.
        CheckpointError: on every rank: the folder, its config or its weights are missing or do not fit.
    """
    if isinstance(path_or_model_class, type):
        if path is None:
            raise TypeError(f"fsdp2x.from_pretrained: {path_or_model_class.__name__} was given, but no path")
        model_class, folder = path_or_model_class, Path(path).expanduser()
    else:
        if path is not None:
            raise TypeError(
                f"fsdp2x.from_pretrained: got two paths, {path_or_model_class!r} and {path!r}; the first argument may "
                "be a model class instead"
            )
        model_class, folder = None, Path(path_or_model_class).expanduser()
    what = f"loading {folder}"

    def describe() -> tuple[Any, torch.dtype, Any]:
        with _told(folder):
            return describe_folder(folder, config, dtype)

    def build() -> nn.Module:
        with _told(folder):
            return build_empty(model_class, *described[:2], attn_implementation)

    # Rank 0 alone may see the folder.
    described = on_rank_0(describe, what=what)
    generation = described[2]
    model = together(build, what=what)
    if generation is not None and model.can_generate():
        model.generation_config = generation
    model.name_or_path = model.config.name_or_path = str(folder)
    model = model if prepare is None else prepare(model)
    fully_shard(model, **sharding)
    load_hf(
        model,
        folder,
        mode=mode,
        strict=strict,
        ignore_mismatched_sizes=ignore_mismatched_sizes,
        progress=progress,
    )
    return model.eval()


def empty_model(folder: Path) -> nn.Module:
    """The model of a folder's config, on the meta device, with parameters of the config's dtype or that of the files.

    Raises:
        CheckpointError: no config.json, one of quantized weights, or of a model that transformers does not have.
    """
    with _told(folder):
        config, dtype, _ = describe_folder(folder, None, "auto")
        if getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(f"{folder / 'config.json'}: asks for quantized weights, which are not supported")
        return build_empty(None, config, dtype, None)


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Whatever transformers raises about what a folder says is told as one sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        if error.strerror is None:
            raise CheckpointError(f"{folder}: {first_line(error)}") from None
        raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from None
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{folder / 'config.json'}: transformers cannot build the model: {reason}") from None


def describe_folder(folder: Path, config: Any, dtype: torch.dtype | str) -> tuple[Any, torch.dtype, Any]:
    """Config, dtype and generation config (or None) of a folder."""
    import transformers

    options = {"local_files_only": True}
    if config is None:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                2, "no such file; a local HuggingFace folder is needed", str(folder / "config.json")
            )
        read_config(folder / "config.json")
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False, **options)
    generation = None
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json", unique=False)
        generation = transformers.GenerationConfig.from_pretrained(str(folder), **options)
    return config, (config.dtype or _dtype_of_files(folder)) if dtype == "auto" else dtype, generation


def build_empty(
    model_class: type | None, config: Any, dtype: torch.dtype, attn_implementation: str | None
) -> nn.Module:
    """A model on the meta device; without a class the one that the config names."""
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
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = make(config, **options)
    _keep_in_float32(model, dtype)
    return model


def _dtype_of_files(folder: Path) -> torch.dtype:
    with Checkpoint([folder]) as files:
        floating = (source.dtype for source in files.tensors.values() if source.dtype.is_floating_point)
        return next(floating, torch.float32)


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Weights that the model's class wants in float32 whatever the dtype."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return
    pattern = re.compile("|".join(f"(?:{key.replace('*', '.*')})" for key in plan))
    for name, param in model.named_parameters():
        if pattern.search(name):
            param.data = param.data.to(torch.float32)
