"""HuggingFace folders to DCP directories, which torch alone loads into a sharded model of any world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.errors import CheckpointError
from fsdp2x.io.checkpoint.directory import ASSETS_FOLDER
from fsdp2x.io.checkpoint.disk import bytes_of
from fsdp2x.io.checkpoint.forms import Contents, Sharded
from fsdp2x.io.checkpoint.plan import plan_alone
from fsdp2x.io.convert.to_hf import copy_assets
from fsdp2x.io.formats.tensors import Source
from fsdp2x.io.hf.empty import empty_model
from fsdp2x.io.hf.files import Checkpoint
from fsdp2x.io.hf.folder import refuse_existing, refuse_inside, written
from fsdp2x.io.hf.recipes import make_recipes
from fsdp2x.io.hf.targets import find_targets


@checked
def hf_to_dcp(
    hf_dir: str | Path, output_dir: str | Path, *, dtype: torch.dtype | None = None, force: bool = False
) -> Path:
    """Writes the weights of a HuggingFace folder as a DCP directory with the keys ``model.<name in the model>``.

    ``dcp.load({"model": model.state_dict()}, checkpoint_id=output_dir)`` fills a model that was sharded by stock
    FSDP2 or by fsdp2x. Experts are fused as the model's class has them; tied weights have all their keys and are stored
    once. Config and tokenizer go to ``hf/`` in it. Memory: 16 MiB and one weight at a time.

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
        with written(out, "convert", force) as folder:
            paths = {f"model.{name}": ("model", name) for name in sources}
            form, contents = Sharded(plan_alone(state, paths), 0), Contents({}, paths, aliases, {"step": 0})
            data = (bytes_of(sources[c.name.removeprefix("model.")].whole(c.dtype)) for c in form.chunks)
            form.finish(folder, contents, [form.write(folder, contents, data)])
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
