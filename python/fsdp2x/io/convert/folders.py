"""Converts checkpoints to HuggingFace folders and back, offline, a few rows at a time from file to file.

The origin's files define which tensors there are, in which file and of which dtype. The checkpoint has their values. So
memory does not grow with the model.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.checkpoint.directory import ASSETS_FOLDER, resolve
from fsdp2x.io.checkpoint.sinks import Contents, DcpSink
from fsdp2x.io.checkpoint.sources import Opened
from fsdp2x.io.convert.adapters import StoredAdapters, holds_adapters
from fsdp2x.io.convert.checkpoints import copy_tensors
from fsdp2x.io.convert.stored import match, open_dcp, open_ranks, without_groups
from fsdp2x.io.formats.safe_files import OpenFiles
from fsdp2x.io.formats.tensors import Source, differ
from fsdp2x.io.hf.empty import empty_model, read_config
from fsdp2x.io.hf.files import Checkpoint
from fsdp2x.io.hf.folder import refuse_existing, refuse_inside, written
from fsdp2x.io.hf.layout import Layout, Writer, layout_of, make_files, plan_layout
from fsdp2x.io.hf.recipes import Recipes, file_values, make_recipes
from fsdp2x.io.hf.targets import Target, find_targets
from fsdp2x.io.names import ForeignModel, TensorSpec, remember_source

logger = logging.getLogger("fsdp2x")

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ckpt"}


@checked
def dcp_to_hf(
    input_dir: str | Path,
    output_dir: str | Path,
    origin_hf_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    prefix: str | None = None,
    force: bool = False,
) -> Path:
    """Converts a DCP directory of any program to a HuggingFace folder like ``origin_hf_dir``.

    Names, files, index, dtypes, and fused or separate experts are the origin's, and its other files are copied. Keys
    may be names of the model or of the origin's files after any prefix (``model.``, ``model_state.model.``). Weights of
    the origin that the model's class does not have are copied. It needs no process group and a few MiB of memory, or
    one full weight if transformers must convert them.

    Args:
        input_dir: a folder with .metadata, directly or in ``model/`` or ``dcp/``, or a folder of checkpoints.
        output_dir: a new folder, which appears when it is complete.
        origin_hf_dir: a folder with config and weights of the same architecture, safetensors or ``.bin``.
        dtype: dtype of floating-point weights. Default: the origin's.
        prefix: prefix of the model's keys. Default: the one that matches most weights.
        force: whether to replace ``output_dir``.

    Returns:
        The path of the new folder.

    Raises:
        FileExistsError: ``output_dir`` exists and ``force`` is False.
        CheckpointError: something is missing, damaged, of another model, or ambiguous. No output is left.
    """
    source, origin = Path(input_dir).expanduser(), Path(origin_hf_dir).expanduser()
    out = _output(output_dir, [source, origin], force)
    with OpenFiles() as files, Checkpoint([origin]) as opened:
        tensors, aliases = open_dcp(source, files)
        return _write_like(opened, out, tensors, aliases, prefix, str(source), dtype, force)


@checked
def ranks_to_hf(
    hf_dir: str | Path,
    ckpt_dir: str | Path,
    save_dir: str | Path,
    iteration: int,
    *,
    groupgemm: bool = False,
    dtype: torch.dtype | None = None,
    prefix: str | None = None,
    force: bool = False,
) -> Path:
    """Converts the files ``ckpt_dir/iteration/model_world_size_W_rank_R.pt`` as ``dcp_to_hf`` does.

    Each file is a state dict of DTensors (any mesh of sharded and replicated axes) and plain tensors. The files are
    never unpickled into objects, whichever version of torch wrote them.

    Args:
        hf_dir: a HuggingFace folder of the same architecture. Single files without an index and tied weights work too.
        ckpt_dir: the folder of checkpoints.
        save_dir: a new folder, which appears when it is complete.
        iteration: the name of the checkpoint's folder in ``ckpt_dir``.
        groupgemm: True for experts trained as ``group_mlp`` weights, with all experts of a layer stacked row-wise.
        dtype, prefix, force: see ``dcp_to_hf``.

    Returns:
        The path of the new folder.

    Raises:
        FileExistsError, CheckpointError: see ``dcp_to_hf``.
    """
    source, origin = Path(ckpt_dir).expanduser() / str(iteration), Path(hf_dir).expanduser()
    out = _output(save_dir, [source, origin], force)
    with OpenFiles() as files, Checkpoint([origin]) as opened:
        tensors: Mapping[str, Source] = open_ranks(source, files)
        if groupgemm:
            tensors = without_groups(tensors, _num_experts(origin), str(source))
        return _write_like(opened, out, tensors, {}, prefix, str(source), dtype, force)


def _output(out: str | Path, inputs: list[Path], force: bool) -> Path:
    """Returns the path of the new folder. Raises `FileExistsError` if it may not be written."""
    path = Path(out).expanduser()
    refuse_existing(path, force)
    for one in inputs:
        refuse_inside(path, one)
    return path


def _num_experts(origin: Path) -> int | None:
    path = origin / "config.json"
    config = read_config(path) if path.is_file() else {}
    found = config.get("num_experts") or config.get("num_local_experts")
    return found if type(found) is int and found > 0 else None


def _write_like(
    opened: Checkpoint,
    out: Path,
    tensors: Mapping[str, Source],
    aliases: Mapping[str, str],
    prefix: str | None,
    where: str,
    dtype: torch.dtype | None,
    force: bool,
) -> Path:
    """Writes a checkpoint's tensors in the files and under the names of the origin, whose files are ``opened``."""
    (origin,) = opened.folders
    values, extra = _like_origin(origin, opened.tensors, tensors, aliases, prefix, where)
    parts: dict[str, list[TensorSpec]] = {}
    for file, names in opened.names_in.items():
        name = file.name
        if file.suffix != ".safetensors":
            name = file.with_suffix(".safetensors").name.replace("pytorch_model", "model")
        parts[name] = [_spec(one, opened.tensors[one], dtype) for one in names]
    last = next(reversed(parts.values()))
    last += [_spec(one, value, dtype) for one, value in extra.items()]
    specs = [spec for part in parts.values() for spec in part]
    is_indexed = len(parts) > 1 or any(origin.glob("*.index.json"))
    layout = layout_of(parts, is_indexed=is_indexed)
    changes = {} if dtype is None else {"dtype": str(dtype).removeprefix("torch."), "torch_dtype": None}
    return _write(out, force, layout, specs, {**values, **extra}, origin, changes)


def _spec(name: str, source: Source, dtype: torch.dtype | None = None) -> TensorSpec:
    kept = dtype is None or not source.dtype.is_floating_point
    return TensorSpec(name, torch.Size(source.shape), source.dtype if kept else dtype)


def _like_origin(
    origin: Path,
    stored_in: Mapping[str, Source],
    tensors: Mapping[str, Source],
    aliases: Mapping[str, str],
    prefix: str | None,
    where: str,
) -> tuple[dict[str, Source], dict[str, Source]]:
    """Returns the values of the origin's tensors, and further ones that only the checkpoint has, by name in files."""
    model: ForeignModel = empty_model(origin)
    targets = find_targets(model)
    keys = match(tensors, {name for target in targets for name in target.names} | set(stored_in), prefix, where)
    stored = {name: tensors[key] for name, key in keys.items()}
    held = _values_of(targets, stored, aliases, where)
    recipes = make_recipes(model, stored_in, {name: target.shape for target in targets for name in target.names})
    if recipes.mismatched:
        name, (there, here) = next(iter(recipes.mismatched.items()))
        raise CheckpointError(
            f"the origin's config.json and files disagree: {name} is {there} in the files, but {here} by the config"
        )
    remember_source(model, recipes.conversions, {}, origin)
    values, extra = _named_as_in_files(model, targets, recipes, stored_in, held)
    # Also accept keys that are names in the files, such as single experts that the class fuses today.
    values = {**{name: stored[name] for name in stored_in if name in stored}, **values}
    missing = sorted(recipes.used - set(values))
    if missing:
        hint = "; it holds LoRA weights: fsdp2x export --merge merges them" if holds_adapters(tensors) else ""
        raise CheckpointError(f"{where}: lacks {len(missing)} tensors of {origin}: {_some(missing)}{hint}")
    if copied := [name for name in stored_in if name not in values]:
        logger.warning(
            "%s: %d tensors that %s does not have are copied from the origin: %s",
            where, len(copied), type(model).__name__, _some(copied),
        )  # fmt: skip
        values |= {name: stored_in[name] for name in copied}
    for name, value in values.items():
        if tuple(value.shape) != tuple(stored_in[name].shape):
            raise CheckpointError(
                f"{where}: {name} would have shape {list(value.shape)}, but the origin's has "
                f"{list(stored_in[name].shape)}"
            )
    if extra:
        logger.warning("%s: not in the origin, added: %s", where, ", ".join(extra))
    return values, extra


def _named_as_in_files(
    model: ForeignModel,
    targets: list[Target],
    recipes: Recipes,
    stored_in: Mapping[str, Source],
    held: Mapping[str, Source],
) -> tuple[dict[str, Source], dict[str, Source]]:
    """Returns values of weights by the names of the origin's tensors, and those of weights that no file holds."""
    names = {id(source): name for name, source in stored_in.items()}
    values, extra = {}, {}
    converted: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for target in targets:
        loaded = [name for name in target.names if name in recipes.sources]
        for name in loaded:
            source = recipes.sources[name]
            if id(source) not in names:
                converted[name] = torch.Size(source.shape), held.get(name, source).dtype
            elif name in held:
                values[names[id(source)]] = held[name]
        if not loaded and target.names[0] in held:  # trained weights are not lost
            extra[target.names[0]] = held[target.names[0]]
    prefix = f"{model.base_model_prefix}."
    for name, value in file_values(model, converted, held).items():
        # The files may be those of the model inside this one, or of one around it.
        known = next((one for one in (name, name.removeprefix(prefix), prefix + name) if one in stored_in), None)
        if known is not None:
            values[known] = value
    return values, extra


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _write(
    out: Path,
    force: bool,
    layout: Layout,
    specs: list[TensorSpec],
    values: Mapping[str, Source],
    assets: Path,
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a folder that appears when it is complete. ``changes`` are to its config.json, and None removes a key."""
    with written(out, "convert", force) as folder:
        make_files(folder, layout)
        with Writer(folder, layout) as writer:
            for spec in specs:
                writer.copy(spec.name, values[spec.name], spec.dtype)
        copy_assets(assets, folder)
        if changes:
            config = {**read_config(folder / "config.json"), **changes}
            config = {key: value for key, value in config.items() if changes.get(key, "") is not None}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return out


def copy_assets(origin: Path, folder: Path) -> None:
    """Copies config, tokenizer and all other files of a folder except weights and hidden ones."""
    for file in origin.iterdir():
        is_weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not is_weights and not file.name.startswith("."):
            shutil.copyfile(file, folder / file.name)


@checked
def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    lora: Literal["merge", "adapter"] | None = None,
    max_shard_size: int | str = "5GB",
    force: bool = False,
) -> Path:
    """Exports a checkpoint of `fsdp2x train` as a HuggingFace folder, in one process without a process group.

    It needs a few MiB of memory, or one full weight if transformers must convert them.

    Args:
        checkpoint: a checkpoint of any form, or a folder of checkpoints, whose latest is used.
        out: a new folder, which appears when it is complete.
        lora: what to export of a run with LoRA adapters, which needs a choice. "merge": the full model with merged
            adapters, one layer in memory at a time. Its config unties embeddings that differ. "adapter": only the
            adapter, for PEFT.
        max_shard_size: bytes per file, or a size such as ``"5GB"``.
        force: whether to replace ``out``.

    Returns:
        The path of the new folder.

    Raises:
        FileExistsError: ``out`` exists and ``force`` is False.
        CheckpointError: the checkpoint cannot be read, or ``lora`` does not fit it.
    """
    source = resolve(checkpoint)
    out = _output(out, [source], force)
    assets = source / ASSETS_FOLDER
    if not (assets / "config.json").is_file():
        raise CheckpointError(f"{assets / 'config.json'}: missing, but an export needs the model's config")
    with OpenFiles() as files:
        tensors, aliases = open_dcp(source, files)
        adapters = _adapters(tensors, aliases, assets, lora, str(source))
        if adapters is not None and lora == "adapter":
            values = adapters.alone()
            specs = [_spec(name, value) for name, value in values.items()]
            layout = plan_layout(specs, sys.maxsize, "adapter_model")  # PEFT reads one file only
            return _write(out, force, layout, specs, values, adapters.folder)
        stored, unties = (None, False) if adapters is None else adapters.merged()
        model = empty_model(assets, unties=unties)
        targets = find_targets(model)
        if stored is None:
            names = (name for target in targets for name in target.names)
            stored = {name: tensors[f"model.{name}"] for name in names if f"model.{name}" in tensors}
        held = _values_of(targets, stored, aliases, str(source))
        missing = [target.fqn for target in targets if target.names[0] not in held]
        if missing:
            raise CheckpointError(f"{source}: lacks {len(missing)} weights of its model: {', '.join(missing[:5])}")
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        kept = [target for target in targets if not set(target.names) & ignored]
        described = {target.names[0]: (torch.Size(target.shape), held[target.names[0]].dtype) for target in kept}
        values = file_values(model, described, held)
        specs = [_spec(name, value) for name, value in values.items()]
        changes = {"tie_word_embeddings": False} if unties else {}
        return _write(out, force, plan_layout(specs, max_shard_size, "model"), specs, values, assets, changes)


def _adapters(
    tensors: Mapping[str, Source], aliases: Mapping[str, str], assets: Path, lora: str | None, where: str
) -> StoredAdapters | None:
    if not holds_adapters(tensors):
        if lora is not None:
            raise CheckpointError(f"{where}: holds no LoRA adapters, leave out lora={lora!r} (--merge, --adapter)")
        return None
    if lora is None:
        raise CheckpointError(
            f"{where}: holds LoRA adapters. Choose lora='merge' (--merge) for the full model with merged adapters, "
            "or lora='adapter' (--adapter) for only the adapter."
        )
    return StoredAdapters(tensors, aliases, assets, where)


def _values_of(
    targets: list[Target], stored: Mapping[str, Source], aliases: Mapping[str, str], where: str
) -> dict[str, Source]:
    """Returns name of a target -> its values, from ``stored`` under any of its names."""
    stored = {**{alias: stored[kept] for alias, kept in aliases.items() if kept in stored}, **stored}
    found: dict[str, Source] = {}
    for target in targets:
        held = [name for name in target.names if name in stored]
        if not held:
            continue
        first = stored[held[0]]
        for name in held:
            if stored[name].shape != target.shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {list(stored[name].shape)}, but {list(target.shape)} in the origin's "
                    "model"
                )
            is_other = stored[name] is not first
            if is_other and differ(first, stored[name], [0] * len(target.shape), target.shape):
                raise CheckpointError(
                    f"{where}: {held[0]} and {name} are tied in the origin's model, but differ. Set "
                    "tie_word_embeddings to false in its config.json to keep both."
                )
        found.update(dict.fromkeys(target.names, first))
    return found


@checked
def hf_to_dcp(
    hf_dir: str | Path, output_dir: str | Path, *, dtype: torch.dtype | None = None, force: bool = False
) -> Path:
    """Converts the weights of a HuggingFace folder to a DCP directory with keys ``model.<name in the model>``.

    ``dcp.load({"model": model.state_dict()}, checkpoint_id=output_dir)`` then fills a model that FSDP2 or fsdp2x
    sharded. Experts are fused as in the model's class. Tied weights are stored once under all their keys. Config and
    tokenizer go to ``hf/`` inside the directory. It needs 16 MiB of memory and one weight at a time.

    Args:
        hf_dir: a folder with config and weights, safetensors or ``.bin``.
        output_dir: a new folder, which appears when it is complete.
        dtype: dtype of floating-point weights. Default: that of the files.
        force: whether to replace ``output_dir``.

    Returns:
        The path of the new folder.

    Raises:
        FileExistsError: ``output_dir`` exists and ``force`` is False.
        CheckpointError: files are missing, damaged, or lack weights of the model.
    """
    origin = Path(hf_dir).expanduser()
    out = _output(output_dir, [origin], force)
    with Checkpoint([origin]) as files:
        sources, aliases = _sources(origin, files)
        tensors = {f"model.{name}": source for name, source in sources.items()}
        paths = {f"model.{name}": ("model", name) for name in sources}
        with written(out, "convert", force) as folder:
            plan, done = copy_tensors(Opened(tensors, {}, paths, {}), folder, "sharded", dtype)
            DcpSink.finish(folder, plan, done[0][0], Contents({"tied": aliases}))
            (folder / ASSETS_FOLDER).mkdir()
            copy_assets(origin, folder / ASSETS_FOLDER)
    return out


def _sources(origin: Path, files: Checkpoint) -> tuple[dict[str, Source], dict[str, str]]:
    """Returns weights of the model by name, ties once, and alias -> kept name for the others."""
    model = empty_model(origin)
    targets = find_targets(model)
    recipes = make_recipes(model, files.tensors, {name: target.shape for target in targets for name in target.names})
    sources, aliases, missing = {}, {}, []
    for target in targets:
        kept, *others = target.names
        source = next((recipes.sources[name] for name in target.names if name in recipes.sources), None)
        if source is None:
            missing.append(kept)
            continue
        sources[kept] = source
        aliases |= dict.fromkeys(others, kept)
    if missing:
        raise CheckpointError(f"{origin}: lacks {len(missing)} weights of the model: {', '.join(missing[:5])}")
    return sources, aliases
