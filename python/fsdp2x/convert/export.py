"""Checkpoints of ``fsdp2x train`` in HuggingFace form: safetensors, config, generation config and tokenizer.

By one process, a few rows at a time. Tied weights are written once, names and layout of the tensors are those of the
model's original files, and the folder gets its name only when it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from fsdp2x.arguments import checked
from fsdp2x.checkpoint.directory import ASSETS_FOLDER, resolve
from fsdp2x.convert.inverse import undo_loading, values_of
from fsdp2x.convert.stored import open_dcp
from fsdp2x.errors import CheckpointError
from fsdp2x.hf.empty import empty_model
from fsdp2x.hf.folder import refuse_existing, refuse_inside, written
from fsdp2x.hf.layout import plan_layout
from fsdp2x.hf.names import TensorSpec, source_families
from fsdp2x.hf.sources import RemoteTensor
from fsdp2x.hf.targets import Target, find_targets
from fsdp2x.hf.writer import Writer, make_files
from fsdp2x.reading.regular import OpenFiles
from fsdp2x.reading.tensors import Source


@checked
def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, max_shard_size: int | str = "5GB", force: bool = False
) -> Path:
    """Writes a checkpoint of `fsdp2x train` in HuggingFace form, in one process and without a process group.

    Memory: a few MiB; where transformers has to convert whole weights to write them, two of those.

    Raises `FileExistsError` when `out` exists and not `force`, `CheckpointError` when the checkpoint cannot be read.
    """
    out = Path(out).expanduser()
    refuse_existing(out, force)
    source = resolve(checkpoint)
    refuse_inside(out, source)
    assets = source / ASSETS_FOLDER
    if not (assets / "config.json").is_file():
        raise CheckpointError(f"{assets / 'config.json'}: missing, without the model's config nothing can be exported")
    with OpenFiles() as files:
        tensors, aliases = open_dcp(source, files)
        model = empty_model(assets)
        targets = find_targets(model)
        held = _held(tensors, aliases, targets, str(source))
        values, specs = _tensors(model, targets, held)
        layout = plan_layout(specs, max_shard_size, "model")
        with written(out, "export", force) as folder:
            make_files(folder, layout)
            with Writer(folder, layout) as writer:
                for spec in specs:
                    writer.copy(spec.name, values[spec.name], spec.dtype)
            for file in assets.iterdir():
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
    return out


def _held(
    tensors: Mapping[str, Source], aliases: Mapping[str, str], targets: list[Target], where: str
) -> dict[str, Source]:
    """The weights by every name of each target."""
    names = [name for target in targets for name in target.names]
    stored = {name: tensors[f"model.{name}"] for name in names if f"model.{name}" in tensors}
    stored |= {alias: stored[kept] for alias, kept in aliases.items() if kept in stored and alias not in stored}
    held = values_of(targets, stored, where)
    missing = [target.fqn for target in targets if target.names[0] not in held]
    if missing:
        raise CheckpointError(f"{where}: lacks {len(missing)} weights of its model: {', '.join(missing[:5])}")
    return held


def _tensors(
    model: torch.nn.Module, targets: list[Target], held: Mapping[str, Source]
) -> tuple[dict[str, Source], list[TensorSpec]]:
    """What the files will hold: values by name, and the tensors in the order of the model's weights."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = [target for target in targets if not set(target.names) & ignored]
    described = {
        target.names[0]: (torch.Size(target.shape), held[target.names[0]].dtype)
        for target in kept
        if not target.is_buffer
    }
    specs = [spec for family in source_families(model, described) for spec in family.outputs]
    specs += [
        TensorSpec(target.names[0], torch.Size(target.shape), target.dtype) for target in kept if target.is_buffer
    ]
    written = {spec.name: RemoteTensor(tuple(spec.shape), spec.dtype) for spec in specs}
    values = undo_loading(model, written, targets, held).values
    lost = sorted(set(written) - set(values))
    if lost:
        raise CheckpointError(f"{type(model).__name__} would not load {', '.join(lost[:5])} from the files it writes")
    return values, specs
