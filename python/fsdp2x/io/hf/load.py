"""``load_hf`` fills a model from HuggingFace files. ``from_pretrained`` builds a sharded model from a folder.

All ranks make the same plan from names and shapes. Then each rank reads its own rows, or rank 0 reads and sends each
rank its rows, one bucket of parameters at a time. Between two synchronizations nothing is collective, so an error on
any rank is raised on all. For a bucket, rank r gets these bytes, of equal length on every rank and with aligned starts:

    rows of r of p0 |pad| rows of r of p1 |pad| ...

Rank 0 holds one bucket (or one larger parameter) at a time, and the other ranks their part of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.base import torch_private
from fsdp2x.base.arguments import checked, with_memory
from fsdp2x.base.failures import (
    CheckpointError,
    exchange,
    named_call,
    on_rank_0,
    rank_and_size,
    reworded,
    run_on_all_ranks,
)
from fsdp2x.base.memory_file import aligned_starts, tensor_at
from fsdp2x.base.optimizer_hooks import why_swapped
from fsdp2x.io.conversions import is_transformers, kind_of, original_classes
from fsdp2x.io.formats.safe_files import read_json
from fsdp2x.io.formats.tensors import Source, differ
from fsdp2x.io.hf.empty import build_empty, dtype_of_files, read_hf_config, told_of
from fsdp2x.io.hf.files import Checkpoint
from fsdp2x.io.hf.layout import ProgressBar, in_runs
from fsdp2x.io.hf.recipes import Recipes, make_recipes
from fsdp2x.io.hf.targets import Target, check_buffers, find_targets, initial_values, materialize
from fsdp2x.io.names import ForeignModel, hf_base, is_adapter, is_quantized, remember_source
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.lifecycle.replicas import check_again
from fsdp2x.lifecycle.tree import unit_states
from fsdp2x.sharding.wrap import unsharded_class

BUCKET_BYTES = 16 << 20

Box = tuple[list[int], list[int]]  # start and sizes
# A target and what fills it. A tied weight may be stored several times.
Step = tuple[Target, list[Source]]


@torch.no_grad()
def _send_from_rank_0(steps: list[Step], bar: ProgressBar, what: str) -> None:
    """Fills the targets of all ranks from the sources of rank 0. Collective over the default process group."""
    rank, _ = rank_and_size()
    boxes = exchange([target.box() for target, _ in steps])
    for bucket in in_runs(range(len(steps)), lambda index: steps[index][0].num_bytes, BUCKET_BYTES):
        chosen, parts = [steps[index] for index in bucket], [[of_rank[index] for index in bucket] for of_rank in boxes]
        read = functools.partial(_read_parts, chosen, parts)
        received = _scatter(run_on_all_ranks(read, what=what))
        for (target, _), values in zip(chosen, _tensors_in(received, chosen, parts[rank]), strict=True):
            target.fill(values)
            bar.add(target.num_bytes)


def _read_parts(steps: list[Step], parts: list[list[Box]]) -> list[torch.Tensor]:
    """Returns the buffers to send on rank 0, and one to receive into on the others."""
    num_bytes = max(_places(steps, of_rank)[1] for of_rank in parts)
    if rank_and_size()[0] != 0:
        return [torch.empty(num_bytes, dtype=torch.uint8, device="cpu")]
    buffers = []
    for of_rank in parts:
        buffers.append(torch.zeros(num_bytes, dtype=torch.uint8, device="cpu"))
        for (_, sources), (start, _), values in zip(
            steps, of_rank, _tensors_in(buffers[-1], steps, of_rank), strict=True
        ):
            sources[0].read(start, values)
    return buffers


def _places(steps: list[Step], boxes: list[Box]) -> tuple[list[int], int]:
    return aligned_starts(
        math.prod(sizes) * target.dtype.itemsize for (target, _), (_, sizes) in zip(steps, boxes, strict=True)
    )


def _tensors_in(buffer: torch.Tensor, steps: list[Step], boxes: list[Box]) -> Iterator[torch.Tensor]:
    for (target, _), (_, sizes), start in zip(steps, boxes, _places(steps, boxes)[0], strict=True):
        yield tensor_at(buffer, start, sizes, target.dtype)


def _scatter(buffers: list[torch.Tensor]) -> torch.Tensor:
    """Returns this rank's buffer of those on rank 0. Other ranks pass one of the same size."""
    rank, world = rank_and_size()
    if world == 1:
        return buffers[0]
    device = torch_private.object_device(None)
    buffers = [buffer.to(device) for buffer in buffers]
    received = torch.empty_like(buffers[0])
    dist.scatter(received, buffers if rank == 0 else None, src=0)
    return received.cpu()


logger = logging.getLogger("fsdp2x")
Mode = Literal["auto", "each", "broadcast"]


@dataclass
class LoadReport:
    """Result of ``load_hf``. The first two fields are named as in transformers. ``read_bytes`` is this rank's."""

    missing_keys: set[str] = field(default_factory=set)
    unexpected_keys: set[str] = field(default_factory=set)
    read_bytes: int = 0


@checked
@named_call("fsdp2x.load_hf", "mode")
def load_hf(
    model: nn.Module,
    path: str | Path | Sequence[str | Path],
    *,
    mode: Mode = "auto",
    strict: bool | None = None,
    progress: bool = True,
) -> LoadReport:
    """Fills ``model`` in place from safetensors or ``.bin`` files. Each rank reads its own rows.

    The model may be on the meta device and sharded there: its shards then get memory here. The model's dtypes stay, so
    a float32 model keeps float32 masters of bfloat16 files. transformers' tables map renamed and fused weights. Weights
    that the files may lack, such as another head or a new adapter, are reported and initialized by the model's class,
    equal on all ranks. Nothing changes before all files fit. Buffers are compared between ranks.

    Collective over the default process group, with the same arguments on every rank.

    Args:
        model: a transformers model, a PEFT model around one, or any module with the files' names in its state dict.
        path: a folder, a weight file, or an index, or several of them, such as a base model and an adapter.
        mode: ``"each"``: every rank reads its rows. ``"broadcast"``: rank 0 reads and sends, for files that only rank 0
            sees. ``"auto"``: ``"each"``, but ``"broadcast"`` for ``.bin`` files.
        strict: True raises for missing and unexpected names. False reports and initializes missing weights. None raises
            only for weights that the files must have: they belong to the model's class or to its adapter.
        progress: whether rank 0 shows a bar if standard error is a terminal and tqdm is installed.

    Returns:
        Missing and unexpected names, and the bytes that this rank read.

    Raises:
        CheckpointError: on every rank if files are missing, damaged or do not fit, tied weights differ in the files,
            integers would become floating-point weights, or the class does not initialize a missing weight.
        NotImplementedError: the model is quantized, and the files hold more than its adapter.
        ValueError: ``mode`` is unknown.
    """
    paths = [path] if isinstance(path, (str, Path)) else list(path)
    what = f"loading {', '.join(map(str, paths))}"
    base, _ = hf_base(model)
    targets = find_targets(model)
    with contextlib.ExitStack() as stack:
        opened, tensors, mode, seed, classes = _open(paths, mode, what, stack)
        if is_quantized(base) and not all(map(is_adapter, tensors)):
            raise NotImplementedError(
                "fsdp2x.load_hf: the model's config asks for quantized weights, which are not supported. Load them "
                "with transformers and shard the result."
            )
        plan = run_on_all_ranks(lambda: _plan(model, base, targets, tensors), what=what)
        report = _report(base, plan, what, strict, classes)
        if twice := [step for step in plan.steps if len(step[1]) > 1]:
            reads = mode == "each" or rank_and_size()[0] == 0
            run_on_all_ranks(lambda: _check_ties(twice, mode) if reads else None, what=what)
        bar = ProgressBar(sum(target.num_bytes for target, _ in plan.steps), "Loading weights", progress)

        def prepare() -> Callable[[], None]:
            materialize(model, targets)
            return initial_values(model, targets, plan.missing, seed)

        def fill() -> None:
            if mode == "each":
                _read(plan.steps, bar)
            place_initial()

        place_initial = run_on_all_ranks(prepare, what=what)
        # Later errors, such as those of a disk, come after all checks.
        partly = "A part of the weights is filled, so load again before you use the model."
        with reworded(CheckpointError, lambda error: f"{error}. {partly}", CheckpointError):
            if mode == "broadcast":
                _send_from_rank_0(plan.steps, bar, what)
            run_on_all_ranks(fill, what=what)
        bar.close()
        report.read_bytes = 0 if opened is None else opened.read_bytes
    for state in unit_states(model):
        check_again(state)
    check_buffers(model)
    loaded = {target.names[0]: sources[0].dtype for target, sources in plan.steps}
    if any(not is_adapter(name) for name in loaded):
        remember_source(base, plan.recipes.conversions, loaded, paths[0])
    return report


def _open(
    paths: list, mode: Mode, what: str, stack: contextlib.ExitStack
) -> tuple[Checkpoint | None, Mapping[str, Source], Mode, int, set[str]]:
    """Opens the files on the ranks that read. The others get names and shapes from rank 0.

    Returns the files, which ``stack`` closes, their tensors, the mode ("auto" resolved), rank 0's current seed, and the
    classes that configs next to the files name.
    """
    opened: list[Checkpoint] = []

    def on_first() -> tuple[Mode, int, dict, set[str]]:
        opened.append(stack.enter_context(Checkpoint(paths)))
        guessed = "broadcast" if opened[0].is_pickled and dist.is_initialized() else "each"
        return guessed if mode == "auto" else mode, torch.initial_seed(), described(), _classes(opened[0].folders)

    def described() -> dict:
        return {name: (source.shape, source.dtype) for name, source in opened[0].tensors.items()}

    def on_each() -> None:
        if chosen == "each" and not opened:
            opened.append(stack.enter_context(Checkpoint(paths)))
        if opened and described() != of_first:
            raise CheckpointError(
                f"rank {rank_and_size()[0]} sees other files than rank 0. Use mode='broadcast' if only rank 0 has the "
                "files."
            )

    chosen, seed, of_first, classes = on_rank_0(on_first, what=what)
    run_on_all_ranks(on_each, what=what)
    if opened:
        return opened[0], opened[0].tensors, chosen, seed, classes
    return None, {name: Source(*one) for name, one in of_first.items()}, chosen, seed, classes


def _classes(folders: list[Path]) -> set[str]:
    """Returns the classes of the folders' weights. Empty if no config names one."""
    named: set[str] = set()
    for folder in folders:
        if (folder / "config.json").is_file():
            found = read_json(folder / "config.json", unique=False).get("architectures")
            named |= {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()
    return named


@dataclass
class _Plan:
    recipes: Recipes
    steps: list[Step] = field(default_factory=list)
    missing: list[Target] = field(default_factory=list)


def _plan(model: nn.Module, base: nn.Module, targets: list[Target], tensors: Mapping[str, Source]) -> _Plan:
    if why := why_swapped(model.parameters()):
        raise CheckpointError(why)
    shapes = {name: target.shape for target in targets for name in target.names}
    plan = _Plan(make_recipes(base, tensors, shapes))
    # An adapter without a base goes into a model whose base already has its weights, and the other way round.
    holds_base = any(not is_adapter(name) for name in plan.recipes.sources)
    holds_adapter = any(is_adapter(name) for name in plan.recipes.sources)
    for target in targets:
        sources = [plan.recipes.sources[name] for name in target.names if name in plan.recipes.sources]
        if sources:
            kinds = {kind_of(one.dtype) for one in (target, *sources)}
            if len(kinds) > 1:
                raise CheckpointError(
                    f"{target.names[0]} has dtype {sources[0].dtype} in the files, but {target.dtype} in the model. "
                    "Integers are not converted to floating point, nor back."
                )
            plan.steps.append((target, sources))
        elif target.tensor.is_meta or (holds_adapter if is_adapter(target.names[0]) else holds_base):
            plan.missing.append(target)
    return plan


def _report(base: nn.Module, plan: _Plan, what: str, strict: bool | None, classes: set[str]) -> LoadReport:
    """Reports mismatches on rank 0 in transformers' form. Raises alike on every rank."""
    recipes = plan.recipes
    if mismatched := sorted(recipes.mismatched.items()):
        told = "; ".join(f"{name} has {there} in the files and {here} here" for name, (there, here) in mismatched)
        raise CheckpointError(f"{what}: shapes differ: {told}. Build the model with the config of the files.")
    report = LoadReport({target.names[0] for target in plan.missing}, set(recipes.unexpected))
    if is_transformers(base):
        report = _as_transformers(base, report, what)
    if strict and (report.missing_keys or report.unexpected_keys):
        raise CheckpointError(
            f"{what}: missing: {sorted(report.missing_keys)}; "
            f"unexpected: {sorted(report.unexpected_keys)} (strict=True)"
        )
    lost = sorted(name for name in report.missing_keys if strict is None and _must_hold(name, base, plan, classes))
    if lost:
        raise CheckpointError(
            f"{what}: the files lack {len(lost)} weights of the model: {', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}"
            + (f"; unexpected: {', '.join(sorted(report.unexpected_keys)[:5])}" if report.unexpected_keys else "")
            + ". Pass strict=False to initialize them."
        )
    return report


def _must_hold(name: str, base: nn.Module, plan: _Plan, classes: set[str]) -> bool:
    """Returns whether files that lack this weight are incomplete."""
    if is_adapter(name):
        return any(is_adapter(one) for one in plan.recipes.sources)
    return not is_transformers(base) or not classes or unsharded_class(base).__name__ in classes


def _as_transformers(base: ForeignModel, report: LoadReport, what: str) -> LoadReport:
    from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report

    info = LoadStateDictInfo(
        missing_keys=report.missing_keys,
        unexpected_keys=report.unexpected_keys,
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    with original_classes(base):
        # The class knows names that may be missing or left over from older versions.
        base._adjust_missing_and_unexpected_keys(info)
        if rank_and_size()[0] == 0:
            log_state_dict_report(base, what.removeprefix("loading "), True, info, logger)
    return LoadReport(info.missing_keys, info.unexpected_keys)


def _check_ties(steps: list[Step], mode: str) -> None:
    """Raises if a tied weight is stored several times, and differs in what this rank reads."""
    for target, (first, *others) in steps:
        box = target.box() if mode == "each" else ([0] * len(target.shape), target.shape)
        if any(differ(first, other, *box) for other in others):
            raise CheckpointError(
                f"{' and '.join(target.names)} are tied in the model, but differ in the files. Build the model with "
                "tie_word_embeddings=False in its config to keep both."
            )


@torch.no_grad()
def _read(steps: list[Step], bar: ProgressBar) -> None:
    for target, sources in steps:
        if target.is_box:
            sources[0].read(target.box()[0], target.local)
        else:
            target.fill(sources[0].whole(target.dtype))
        bar.add(target.num_bytes)


@checked
@with_memory()
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
    progress: bool = True,
    **sharding: Any,
) -> nn.Module:
    """Builds the model on the meta device, shards it there, and loads each rank's rows with :func:`load_hf`.

    ``from_pretrained(folder)`` takes the class from the folder's config, ``from_pretrained(Class, folder)`` that class.
    The model is in eval mode, as with transformers. It downloads nothing and runs no code of the folder. Collective.

    Args:
        path_or_model_class: a local folder with config.json, or a transformers model class.
        path: the folder, if the first argument is a class.
        config: a config that replaces the folder's.
        dtype: dtype of parameters. ``"auto"`` takes the config's, else that of the files, as in transformers.
            ``torch.float32`` keeps float32 masters of lower-precision files.
        attn_implementation: the attention of transformers, such as ``"sdpa"``.
        prepare: a function that gets the model on the meta device and returns the model to shard, such as a PEFT model
            around it (adapters are initialized after loading).
        mode, strict, progress: see :func:`load_hf`.
        **sharding: arguments of :func:`fully_shard`, such as mesh, mp_policy, reshard_after_forward, and auto_wrap.

    Returns:
        The sharded model with its weights.

    Raises:
        TypeError: a class without a path, or two paths.
        CheckpointError: on every rank if the folder, its config or its weights are missing or do not fit.
    """
    if isinstance(path_or_model_class, type):
        if path is None:
            raise TypeError(
                f"fsdp2x.from_pretrained: got the class {path_or_model_class.__name__} without a path. Pass a folder."
            )
        model_class, folder = path_or_model_class, Path(path).expanduser()
    else:
        if path is not None:
            raise TypeError(
                f"fsdp2x.from_pretrained: got two paths, {path_or_model_class!r} and {path!r}. Pass one folder, or a "
                "model class and a folder."
            )
        model_class, folder = None, Path(path_or_model_class).expanduser()
    what = f"loading {folder}"

    def describe() -> tuple[Any, torch.dtype, Any]:
        with told_of(folder):
            from transformers import GenerationConfig

            found = read_hf_config(folder) if config is None else config
            generation = None
            if (folder / "generation_config.json").is_file():
                read_json(folder / "generation_config.json", unique=False)
                generation = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
            return found, (found.dtype or dtype_of_files(folder)) if dtype == "auto" else dtype, generation

    def build() -> nn.Module:
        with told_of(folder):
            return build_empty(model_class, *described[:2], attn_implementation)

    # Only rank 0 may see the folder.
    described = on_rank_0(describe, what=what)
    generation = described[2]
    model: ForeignModel = run_on_all_ranks(build, what=what)
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
        progress=progress,
    )
    return model.eval()
