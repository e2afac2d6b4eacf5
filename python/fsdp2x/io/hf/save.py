"""``save_hf`` writes a sharded model as a HuggingFace folder, with all ranks at once if they share a file system.

The layout of the files is known before the bytes, so each rank writes its rows of each weight without communication.
Weights that are not stored by rows (un-fused experts, other shard dims, tensor parallelism) are gathered through
``export.stream`` and written by rank 0. Without a shared file system, all weights are.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import CheckpointError, exchange, named_call, on_rank_0, rank_and_size, run_on_all_ranks
from fsdp2x.io.export.rings import Entry
from fsdp2x.io.export.stream import BUCKET_BYTES, chosen_params, stream_as
from fsdp2x.io.hf.empty import plain_config
from fsdp2x.io.hf.folder import make_temporary, publish, refuse_existing, temporary
from fsdp2x.io.hf.layout import Layout, Writer, make_files, parse_size, plan_layout
from fsdp2x.io.names import Family, ForeignModel, has_adapters, hf_base, is_adapter, source_families
from fsdp2x.lifecycle.api import method_makers
from fsdp2x.lifecycle.module import FSDPModule

logger = logging.getLogger("fsdp2x")

# A folder with one of these has a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# Other files of a tokenizer or processor, copied from the folder the model was loaded from.
_BESIDES = (
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip


@checked
@named_call("fsdp2x.save_hf", "weights")
def save_hf(
    model: nn.Module,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    weights: Literal["auto", "base", "adapter"] = "auto",
    force: bool = False,
) -> Path:
    """Writes safetensors, index, config, generation config and tokenizer, with the names and layout of the source.

    Call it between two steps, also for models that are not sharded. The folder appears when it is complete and synced.
    It needs memory for two buckets and 4 MiB. Every rank writes its rows if all see rank 0's folder, else rank 0 writes
    everything.

    Collective over the default process group, with the same arguments on every rank.

    Args:
        model: a transformers model, a PEFT model around one, or any module (for which no config is written).
        path: the folder to write.
        dtype: dtype of floating-point weights. Default: the one that ``load_hf`` found in the files, else the
            parameter's.
        max_shard_size: bytes per file, or a size such as ``"5GB"``.
        tokenizer: an object with ``save_pretrained``. Default: the files of the folder the model was loaded from.
        weights: part of a PEFT model to save: ``"adapter"`` (also ``"auto"``) with adapter_config.json, or ``"base"``.
        force: whether to replace an existing ``path``.

    Returns:
        The path of the folder.

    Raises:
        CheckpointError: on every rank if the folder exists or cannot be written. An existing ``path`` stays intact.
        ValueError: a choice or size is unknown.
        RuntimeError: a parameter is on the meta device.
        NotImplementedError: a PEFT model with several adapters or trained biases, or weights of a quantized model.
    """
    out = Path(path).expanduser()
    what = f"saving to {out}"
    job = _Job(model, dtype, max_shard_size, weights)

    def start() -> None:
        refuse_existing(out, force)
        folder = make_temporary(out, "save")
        job.write_assets(folder, tokenizer)
        make_files(folder, job.layout)

    folder = temporary(out, "save")
    try:
        on_rank_0(start, what=what)
        sees = run_on_all_ranks(lambda: (folder / job.layout.files[0].name).is_file(), what=what)
        job.write(folder, by_rows=all(exchange(sees)), what=what)
        on_rank_0(lambda: publish(out, folder, force), what=what)
    except CheckpointError:
        # Raised on every rank, after the folder is gone.
        on_rank_0(lambda: shutil.rmtree(folder, ignore_errors=True), what=what)
        raise
    finally:
        if rank_and_size()[0] == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return out


def save_adapter_config(model: ForeignModel, folder: Path) -> None:
    """Writes the adapter_config.json of a PEFT model with one adapter."""
    (config,) = model.peft_config.values()
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.save_pretrained(str(folder))


def write_config(config: Any, path: Path) -> None:
    """Writes a config of transformers. Warns if transformers refuses it, so that the weights are saved."""
    try:
        config.save_pretrained(str(path.parent))
    except ValueError as error:
        reason = " ".join(str(error).split())
        logger.warning("fsdp2x: saved %s although transformers refuses it. Correct it: %s", path.name, reason)
        config.to_json_file(str(path))


def refuse_bias(caller: str, model: ForeignModel) -> None:
    """Raises if an adapter trains biases of the base, which have no place among its weights."""
    found = next((one.bias for one in model.peft_config.values() if getattr(one, "bias", "none") != "none"), None)
    if found is not None:
        raise NotImplementedError(
            f"{caller}: the adapter has bias={found!r}. It trains biases of the base, which its own file would lack. "
            "Save a checkpoint, and merge it by fsdp2x export --merge."
        )


class _Job:
    """What to write and where. Equal on all ranks."""

    def __init__(self, model: ForeignModel, dtype: torch.dtype | None, max_shard_size: int | str, weights: str) -> None:
        self.model = model
        self.base, to_source = hf_base(model)
        is_peft = has_adapters(model)
        self.adapter = is_peft and weights != "base"
        if self.adapter and len(model.peft_config) > 1:
            raise NotImplementedError(
                f"fsdp2x.save_hf: only one adapter can be saved, the model has {', '.join(model.peft_config)}"
            )
        if self.adapter:
            refuse_bias("fsdp2x.save_hf", model)
        if weights == "adapter" and not is_peft:
            raise ValueError(f'fsdp2x.save_hf: weights="adapter", but {type(model).__name__} is not a PEFT model')
        ignored = set(getattr(self.base, "_keys_to_ignore_on_save", None) or ())
        source_dtypes = getattr(self.base, "_fsdp2x_source_dtypes", {})
        self.dtypes: dict[str, torch.dtype] = {}
        self.entries: dict[str, Entry] = {}
        for fqn, param in chosen_params("fsdp2x.save_hf", model, None).items():
            name = to_source(fqn)
            if is_adapter(name) != self.adapter or name in ignored:
                continue
            wanted = dtype or source_dtypes.get(name, param.dtype)
            is_cast = isinstance(param, nn.Parameter) and wanted.is_floating_point and param.is_floating_point()
            self.dtypes[fqn] = wanted if is_cast else param.dtype
            self.entries[fqn] = Entry.of(fqn, param, self.dtypes[fqn])
        self.families: list[Family] = source_families(
            model, {fqn: (entry.param.shape, entry.dtype) for fqn, entry in self.entries.items()}
        )
        specs = [spec for family in self.families for spec in family.outputs]
        parse_size(max_shard_size)
        # PEFT reads adapters from a single file.
        file = (sys.maxsize, "adapter_model") if self.adapter else (max_shard_size, "model")
        self.layout: Layout = plan_layout(specs, *file)
        self._written_dtype = next((spec.dtype for spec in specs if spec.dtype.is_floating_point), None)

    def write_assets(self, folder: Path, tokenizer: Any) -> None:
        """Writes config and tokenizer on rank 0."""
        if self.adapter:
            save_adapter_config(self.model, folder)
        elif hasattr(self.base, "config"):
            config = plain_config(self.base)
            config.dtype = self._written_dtype or config.dtype
            write_config(config, folder / "config.json")
            if getattr(self.base, "generation_config", None) is not None:
                write_config(self.base.generation_config, folder / "generation_config.json")
        source = Path(getattr(self.base, "_fsdp2x_source", None) or os.devnull)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
        elif source.is_dir():
            for name in (*TOKENIZER_FILES, *_BESIDES):
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)

    def write(self, folder: Path, *, by_rows: bool, what: str) -> None:
        """Writes all tensors. Collective. Raises on every rank."""
        rows = [family for family in self.families if by_rows and self._is_rows(family)]
        done = {name for family in rows for name in family.params}
        rank, world = rank_and_size()
        num_writers = world if by_rows else 1
        with Writer(folder, self.layout, num_writers=num_writers) as writer:
            run_on_all_ranks(lambda: self._write_rows(rows, writer), what=what)
            rest = {name for name in self.entries if name not in done}
            buckets = stream_as(
                "fsdp2x.save_hf",
                self.model,
                BUCKET_BYTES,
                self.dtypes,
                "hf",
                lambda name, param: name in rest,
                rank == 0,
                "auto",
            )
            failed: Exception | None = None
            for bucket in buckets:
                for name, tensor in bucket.items():
                    if failed is None:
                        try:
                            writer.write(name, tensor)
                        except OSError as error:
                            failed = error  # the other ranks already are in the next gather

            def finish() -> None:
                if failed is not None:
                    raise failed
                writer.sync()

            run_on_all_ranks(finish, what=what)

    def _is_rows(self, family: Family) -> bool:
        """Returns whether the weight is written unchanged and a rank's shard is a run of its bytes."""
        if not family.is_renamed_only:
            return False
        entry = self.entries[family.params[0]]
        return not isinstance(entry.param, DTensor) or entry.group is not None and entry.shard_dim == 0

    @torch.no_grad()
    def _write_rows(self, families: list[Family], writer: Writer) -> None:
        for family in families:
            entry, (spec,) = self.entries[family.params[0]], family.outputs
            if not isinstance(entry.param, DTensor):
                if rank_and_size()[0] == 0:
                    writer.write(spec.name, entry.param.detach(), dtype=entry.dtype)
                continue
            mesh = entry.param.device_mesh
            coordinate = mesh.get_coordinate()
            assert coordinate is not None, "this rank is in the mesh"
            replicas = (
                here for here, one in zip(coordinate, entry.param.placements, strict=True) if one == Replicate()
            )
            if any(replicas):
                continue
            first, _ = entry.rows(dist.get_rank(entry.group), dist.get_world_size(entry.group))
            writer.write(spec.name, entry.local, dtype=entry.dtype, skip_bytes=entry.num_bytes(first))


# ---- save_pretrained of a sharded transformers or PEFT model

# Arguments for which a sharded save needs no other behavior.
_HARMLESS = {"save_directory", "is_main_process", "max_shard_size", "token", "selected_adapters"}


def _save_pretrained_of(cls: type) -> Callable | None:
    _cover_wrappers()
    original = getattr(cls, "save_pretrained", None)
    return None if original is None else _save_of_shards(original, cls.__name__, _own_arguments(cls, original))


def _own_arguments(cls: type, original: Callable) -> set[str]:
    """Returns the arguments that ``cls`` adds to the ``save_pretrained`` of transformers or PEFT."""
    libraries = ("transformers", "peft")
    theirs = (
        vars(one)["save_pretrained"]
        for one in cls.__mro__
        if "save_pretrained" in vars(one) and one.__module__.partition(".")[0] in libraries
    )
    known = next(theirs, original)
    return set(inspect.signature(original).parameters) - set(inspect.signature(known).parameters)


def _save_of_shards(original: Callable, class_name: str, own_arguments: Iterable[str] = ()) -> Callable:
    signature = inspect.signature(original)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @functools.wraps(original)
    def save_pretrained(self: ForeignModel, *args: Any, **kwargs: Any) -> Any:
        """Saves full weights with ``fsdp2x.save_hf``, as the unsharded model would. Collective.

        The class's own method runs if you pass a state dict, if transformers itself sharded the model, or if you pass
        an argument that only this class has, such as NeMo Automodel's ``checkpointer``.

        Raises:
            NotImplementedError: an argument changes the files, such as ``push_to_hub=True``.
        """
        given = signature.bind(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        by_transformers = getattr(getattr(self, "config", None), "distributed_config", None) is not None
        by_class = any(given.get(name) != defaults[name] for name in own_arguments if name in given)
        given_state = given.get("state_dict") is not None or given.get("distributed_checkpoint")
        if given_state or by_transformers or by_class:
            return original(self, *args, **kwargs)
        for name in list(given)[1:]:
            if name not in _HARMLESS and given[name] != defaults.get(name):
                raise NotImplementedError(
                    f"{class_name}.save_pretrained: {name}={given[name]!r} is not supported for a sharded model. "
                    "Call fsdp2x.save_hf(model, folder) on every rank, then use the folder."
                )
        chosen = given.get("selected_adapters") or list(getattr(self, "peft_config", ()))
        out = Path(given["save_directory"]).expanduser()
        if hasattr(self, "get_base_model") and len(chosen) == 1 and chosen != ["default"]:
            out /= chosen[0]  # like PEFT
        size = given.get("max_shard_size", defaults.get("max_shard_size", "5GB"))
        folder = save_hf(self, out / ".new", max_shard_size=size, force=True)
        on_rank_0(lambda: _move_into(folder, out), what=f"saving to {out}")
        return None

    return save_pretrained


def _cover_wrappers() -> None:
    """Lets a PEFT model save its adapters if it wraps a model that was sharded before it had any.

    Its class is PEFT's own, which would write the shards of one rank.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None or hasattr(peft.PeftModel.save_pretrained, "__wrapped__"):
        return
    original = peft.PeftModel.save_pretrained
    of_shards = _save_of_shards(original, "PeftModel")

    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_sharded = any(isinstance(module, FSDPModule) for module in self.modules())
        return (of_shards if is_sharded else original)(self, *args, **kwargs)

    peft.PeftModel.save_pretrained = save_pretrained


def _move_into(folder: Path, out: Path) -> None:
    """Replaces config and weights in ``out``, which may hold checkpoints or a tokenizer, by those in ``folder``."""
    new = {file.name for file in folder.iterdir()}
    stem = "adapter_model" if "adapter_config.json" in new else "model"
    for old in [*out.glob(f"{stem}*.safetensors"), *out.glob(f"{stem}.safetensors.index.json")]:
        if old.name not in new:
            old.unlink()
    for name in new - {*TOKENIZER_FILES, *_BESIDES}:
        os.replace(folder / name, out / name)
    shutil.rmtree(folder)


def _push_to_hub_of(cls: type) -> Callable | None:
    def push_to_hub(self: ForeignModel, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{cls.__name__}.push_to_hub: a sharded model cannot be uploaded. Call model.save_pretrained(folder) on "
            "every rank, then upload the folder by `hf upload REPOSITORY FOLDER`."
        )

    return push_to_hub if hasattr(cls, "push_to_hub") else None


method_makers["save_pretrained"] = _save_pretrained_of
method_makers["push_to_hub"] = _push_to_hub_of
