"""HuggingFace folders to DCP directories, which torch alone loads into a sharded model of any world size."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fsdp2x.arguments import checked
from fsdp2x.checkpoint.directory import ASSETS_FOLDER
from fsdp2x.convert.to_hf import copy_assets
from fsdp2x.errors import CheckpointError
from fsdp2x.hf.empty import empty_model
from fsdp2x.hf.files import Checkpoint
from fsdp2x.hf.folder import refuse_existing, refuse_inside, written
from fsdp2x.hf.layout import in_runs
from fsdp2x.hf.recipes import make_recipes
from fsdp2x.hf.targets import find_targets
from fsdp2x.reading.tensors import Source

_FILE_BYTES = 32 << 20


@checked
def hf_to_dcp(
    hf_dir: str | Path, output_dir: str | Path, *, dtype: torch.dtype | None = None, force: bool = False
) -> Path:
    """Writes the weights of a HuggingFace folder as a DCP directory with the keys ``model.<name in the model>``.

    ``dcp.load({"model": model.state_dict()}, checkpoint_id=output_dir)`` fills a model that was sharded by stock
    FSDP2 or by fsdp2x. Experts are fused as the model's class has them; tied weights have all their keys and are stored
    once. Config and tokenizer go to ``hf/`` in it. Memory: a file of 32 MiB, or one larger weight, at a time.

    Args:
        hf_dir: config and weights, safetensors or ``.bin``.
        output_dir: appears when it is whole.
        dtype: of floating-point weights instead of that of the files.
        force: replace ``output_dir``.

    Raises:
        FileExistsError: ``output_dir`` exists and not ``force``.
        CheckpointError: files that are missing, damaged, or lack weights of the model.
    """
    out, origin = Path(output_dir).expanduser(), Path(hf_dir).expanduser()
    refuse_existing(out, force)
    refuse_inside(out, origin)
    with Checkpoint([origin]) as files:
        sources, aliases = _sources(origin, files)
        state: dict[str, Any] = {}
        for name, source in sources.items():
            wanted = dtype if dtype is not None and source.dtype.is_floating_point else source.dtype
            state[f"model.{name}"] = torch.empty(source.shape, dtype=wanted, device="meta")
        with written(out, "convert", force) as folder, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            try:
                dcp.save(
                    state,
                    storage_writer=_Writing(folder, {f"model.{a}": f"model.{b}" for a, b in aliases.items()}),
                    planner=_Reading({f"model.{name}": source for name, source in sources.items()}),
                    no_dist=True,
                )
            except dcp.api.CheckpointException as error:
                inner = next(iter(error.failures.values()))[0]
                raise CheckpointError(f"{out}: {inner}") from None
            (folder / ASSETS_FOLDER).mkdir()
            copy_assets(origin, folder / ASSETS_FOLDER)
    return out


def _sources(origin: Path, files: Checkpoint) -> tuple[dict[str, Source], dict[str, str]]:
    """Weights of the model by name, ties once, and the names left out: alias -> the name that is kept."""
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


class _Reading(dcp.DefaultSavePlanner):
    """Plans from tensors on the meta device and reads each one when it is written."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__()
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn
        return self._sources[name].whole(self.state_dict[name].dtype)


class _Writing(dcp.FileSystemWriter):
    """Several files, since DCP keeps what it writes to one in memory; more names of tensors without more bytes."""

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(folder, single_file_per_rank=True, thread_count=1, sync_files=True)
        self._aliases = aliases

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        def bytes_of(item: WriteItem) -> int:
            return item.tensor_data.size.numel() * item.tensor_data.properties.dtype.itemsize

        results: list[WriteResult] = []
        for number, items in enumerate(in_runs(plan.items, bytes_of, _FILE_BYTES)):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{number}_")
            part = dataclasses.replace(plan, items=items, storage_data=prefix)
            results += super().write_data(part, planner).wait()
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        by_name: dict[str, list[str]] = {}
        for alias, kept in self._aliases.items():
            by_name.setdefault(kept, []).append(alias)
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[kept]
            metadata.planner_data[alias] = (alias,)
        more = [
            dataclasses.replace(one, index=MetadataIndex(alias, one.index.offset, one.index.index))
            for results_of_rank in results
            for one in results_of_rank
            for alias in by_name.get(one.index.fqn, ())
        ]
        super().finish(metadata, [*results, more])
