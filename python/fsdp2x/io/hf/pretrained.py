"""``from_pretrained``: a HuggingFace folder as a sharded model; no rank ever holds the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import on_rank_0, run_on_all_ranks
from fsdp2x.io.formats.safe_files import read_json
from fsdp2x.io.hf.empty import build_empty, dtype_of_files, read_hf_config, told_of
from fsdp2x.io.hf.load import load_hf
from fsdp2x.lifecycle.api import fully_shard


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
        with told_of(folder):
            return _describe(folder, config, dtype)

    def build() -> nn.Module:
        with told_of(folder):
            return build_empty(model_class, *described[:2], attn_implementation)

    # Rank 0 alone may see the folder.
    described = on_rank_0(describe, what=what)
    generation = described[2]
    model = run_on_all_ranks(build, what=what)
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


def _describe(folder: Path, config: Any, dtype: torch.dtype | str) -> tuple[Any, Any, Any]:
    """Config, dtype and generation config (or None) of a folder."""
    from transformers import GenerationConfig

    config = read_hf_config(folder) if config is None else config
    generation = None
    if (folder / "generation_config.json").is_file():
        read_json(folder / "generation_config.json", unique=False)
        generation = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return config, (config.dtype or dtype_of_files(folder)) if dtype == "auto" else dtype, generation
