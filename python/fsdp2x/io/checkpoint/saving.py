"""`save` writes a checkpoint of this moment, at once or in the background. `wait` waits until it is written.

Order of a save, whatever its form: collect on every rank (errors reach all ranks before anything is written), agree who
writes what, [async: copy the shards and return], temporary folder, data, small files, manifest, fsync of each, rename,
fsync of the folder, `latest`, retention. `directory.py` lists what a killed job may leave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import (
    CheckpointError,
    Group,
    calling,
    current_call,
    gather_all,
    gather_on_rank_0,
    named_call,
    on_rank_0,
    rank_and_size,
    run_on_all_ranks,
)
from fsdp2x.io.checkpoint import directory
from fsdp2x.io.checkpoint.background import Saved, Saver
from fsdp2x.io.checkpoint.disk import bytes_of
from fsdp2x.io.checkpoint.manifest import FormName, make_manifest
from fsdp2x.io.checkpoint.optimizer import as_optimizers, require_same_cut
from fsdp2x.io.checkpoint.plan import Plan, State, collect, local_data, make_plan
from fsdp2x.io.checkpoint.sinks import SINKS, Contents, finish, write_chunks
from fsdp2x.io.checkpoint.trees import same
from fsdp2x.io.hf.layout import Layout

logger = logging.getLogger(__name__)


@checked
@named_call("fsdp2x.checkpoint.save", "step", "form", "async_save")
def save(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    extra: Any = None,
    form: Literal["sharded", "full", "per_rank"] = "sharded",
    keep: int = 2,
    marked: bool = False,
    overwrite: bool = False,
    async_save: bool = False,
    trusted: bool = False,
    write_assets: Callable[[Path], None] | None = None,
) -> Saved:
    """Saves a checkpoint to `path/step-<step>`, points `path/latest` to it, and deletes old ones. Collective.

    It saves the model's state dict (tied weights once), optimizer state under parameter names, the other arguments,
    and the random generators of all ranks. If the job is killed, the previous checkpoint stays intact. All ranks must
    see the folder.

    Args:
        path: the folder of the run's checkpoints.
        model: a model sharded by fsdp2x or FSDP2, or an unsharded one. Tensors that are not sharded, such as buffers,
            come from the first rank that has them, except with `form="per_rank"`.
        optimizer: one or several optimizers of torch or fsdp2x, or wrapped by `local_optimizer`. None saves none.
        step: the number that names the checkpoint, at least 0.
        scheduler, scaler, data: objects with `state_dict()`, or values of plain Python and tensors. `data` may differ
            between ranks, and then loads on the same number of ranks only. Others come from rank 0.
        extra: another such value.
        form: `"sharded"`, a `torch.distributed.checkpoint` directory for any world size. `"full"`, one safetensors
            file with full tensors, for any world size. `"per_rank"`, a sharded one that also keeps what each rank has
            for itself, for the same number of ranks.
        keep: number of checkpoints to keep in the folder in addition to marked ones.
        marked: whether later saves never delete this checkpoint. See `mark`.
        overwrite: whether saves may replace and delete checkpoints of `step` and later that this model was not loaded
            from. False raises an error if there are such checkpoints, or if another model is saving them.
        async_save: whether to return after copying the shards. A thread writes the copy, which stays in memory, and
            the next save waits for it. Ranks then agree over a separate process group.
        trusted: whether to allow parts that execute code when read. `load` then needs `trusted=True` as well.
        write_assets: a function that gets a folder on rank 0 and adds files such as configurations. It runs in the
            thread if `async_save`.

    Returns:
        Path, bytes, and seconds. For an asynchronous save also `wait()`.

    Raises:
        CheckpointError: on every rank if any rank fails, if the previous asynchronous save failed, or if the folder has
            checkpoints of another run. In the latter two cases nothing is written.
        ValueError, TypeError: an argument is wrong.
    """
    begun = time.perf_counter()
    target = SaveTarget(Path(path).expanduser(), int(step), keep, marked)
    _check(target)
    optimizers = as_optimizers(optimizer)
    what = f"saving checkpoint {target.final}"
    saver = Saver.of(model)
    lost_ranks = saver.known_ranks()
    with lost_ranks.named(what):
        saver.wait()
        root = target.path.resolve()
        small = {"scheduler": scheduler, "scaler": scaler, "data": data, "extra": extra}

        def begin() -> State:
            if rank_and_size()[0] == 0:
                _make_way(saver, target, root, is_refused=not (overwrite or root in saver.roots))
            return collect(model, optimizers, small, trusted, keeps_own=form == "per_rank")

        state, plan, sources = _agree(saver, begin, what)
        saver.roots.add(root)
    manifest = make_manifest(
        step=target.step,
        world_size=rank_and_size()[1],
        aliases=state.aliases,
        form=form,
        layouts=state.layouts,
    )
    job = Job(target, form, plan, state, what, lost_ranks, manifest, write_assets)
    data = [bytes_of(sources[chunk.name]) for chunk in plan.mine]
    saved = Saved(target.final, target.step, form, sum(part.numel() for part in data))
    if async_save:
        saved._saver, saver.writing_to, saver.writing_step = saver, root, target.step
        saver.start(data, job.run, saved, begun)
    else:
        job.run(data, None)
        saved.seconds = saved.stall_s = time.perf_counter() - begun
    return saved


@checked
def wait(model: torch.nn.Module) -> None:
    """Waits until the asynchronous save of `model` is written, if there is one. Raises its `CheckpointError`."""
    Saver.of(model).wait()


@dataclass(frozen=True)
class SaveTarget:
    """Target of a checkpoint: a folder inside a root."""

    path: Path
    step: int
    keep: int
    marked: bool

    @property
    def final(self) -> Path:
        return self.path / directory.step_name(self.step)


class Job:
    """One save after its state was collected. Any thread can run the rest at any later time."""

    def __init__(self, target, form: FormName, plan: Plan, state: State, what, lost_ranks, manifest, write_assets):
        self.target, self.form, self.plan, self.what, self.lost_ranks = target, form, plan, what, lost_ranks
        self.call = current_call(what)
        self.small, self.rng = state.small, state.rng
        self.values = {name: state.flat[name] for name in plan.objects}
        self.contents = Contents(manifest, write_assets=write_assets)

    def run(self, data: list[torch.Tensor], group: Group) -> None:
        """Writes and publishes the data of the plan's chunks. Collective over `group`."""
        with calling(self.call), self.lost_ranks.named(self.what):
            what = self.what
            rank, _ = rank_and_size(group)
            gathered = gather_on_rank_0(lambda: (self.small.get("data"), self.rng, self.values), group=group)
            try:
                layout = on_rank_0(lambda: self._begin(gathered), what=what, group=group)
                written = gather_on_rank_0(lambda: self._write(layout, data), what=what, group=group)
                on_rank_0(lambda: self._finish(written), what=what, group=group)
            except CheckpointError:
                # Raised on every rank, and only after it has stopped writing.
                on_rank_0(self._discard, what=what, group=group)
                raise
            except BaseException:
                if rank == 0:
                    self._discard()  # a rank is gone, or this one must end, so there is no agreement
                raise

    def _begin(self, gathered: list[tuple[Any, dict, dict]]) -> Layout | None:
        """Collects on rank 0 what all ranks add to the small files, makes the folder, and lays out its files."""
        contents, small = self.contents, self._small([data for data, *_ in gathered])
        contents.parts = {**small, "step": self.target.step, "rng": [rng for _, rng, _ in gathered]}
        contents.values = {name: value for *_, values in gathered for name, value in values.items()}
        return SINKS[self.form].lay_out(directory.prepare(self.target.path, self.target.step), self.plan)

    def _small(self, positions: list[Any]) -> dict[str, Any]:
        """Returns the small parts of all ranks, with one data position if all ranks have the same."""
        if all(same(positions[0], other) for other in positions[1:]):
            return self.small
        return {**{k: v for k, v in self.small.items() if k != "data"}, "data_of_ranks": positions}

    def _write(self, layout: Layout | None, data: list[torch.Tensor]) -> Any:
        folder = directory.temporary_path(self.target.path, self.target.step)
        rank, _ = rank_and_size()
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {rank} does not see the folder {folder}, which rank 0 made. All ranks must save to one shared "
                "file system."
            )
        return write_chunks(SINKS[self.form], folder, rank, layout, self.plan.mine, data)

    def _finish(self, written: list) -> None:
        target = self.target
        folder = directory.temporary_path(target.path, target.step)
        finish(folder, self.form, self.plan, self.contents, written)
        if target.marked:
            directory.write_file(folder / directory.MARKED, "")
        directory.publish(target.path, target.step)
        for old in directory.retain(target.path, target.keep):
            logger.info("deleted old checkpoint %s", old)

    def _discard(self) -> None:
        directory.discard(self.target.path, self.target.step)


def _check(target: SaveTarget) -> None:
    if target.step < 0:
        raise ValueError(f"checkpoint.save: step must be at least 0, got {target.step}")
    if target.keep < 1:
        raise ValueError(f"checkpoint.save: keep must be at least 1, got {target.keep}")
    if target.path.suffix in (".pt", ".pth"):
        raise ValueError(
            f"checkpoint.save: {target.path} is a file, but a checkpoint is a folder. Pass a folder and form='full', "
            "whose safetensors file has the full tensors."
        )


def _make_way(saver: Saver, target: SaveTarget, root: Path, is_refused: bool) -> None:
    """Makes sure, on rank 0, that no other model writes to this folder, and that no other work is replaced."""
    others = saver.others_writing(root)
    if is_refused:
        if ahead := [one.writing_step for one in others if one.writing_step >= target.step]:
            raise CheckpointError(
                f"{target.path}: another model's {directory.step_name(ahead[0])} is being written there. Save to "
                "another folder, or pass overwrite=True."
            )
        there = [path.name for path in directory.whole_checkpoints(target.path)]
        if later := [name for name in there if (directory.step_of(name) or 0) >= target.step]:
            raise CheckpointError(
                f"{target.path} has {later[-1]}, which this model was not loaded from. It belongs to another run, and "
                f"saves from step {target.step} on would replace it. Load from it first, choose another folder, or "
                "pass overwrite=True."
            )
    for other in others:
        other.finish_writing()


def _agree(saver: Saver, work: Callable[[], State], what: str) -> tuple[State, Plan, dict[str, torch.Tensor]]:
    """Returns state and data of this rank and the plan, which is the last save's if nothing changed on any rank.

    The ranks then synchronize only once, because training waits for it.
    """
    collected: list[State] = []
    sources: dict[str, torch.Tensor] = {}

    def data_of(plan: Plan) -> dict[str, torch.Tensor]:
        return {chunk.name: local_data(collected[0].flat, chunk) for chunk in plan.mine}

    def is_known() -> tuple[bool, dict[str, str]]:
        collected.append(state := work())
        if saver.plan is None or saver.plan.signature != state.signature:
            return False, state.plain
        sources.update(data_of(saver.plan))
        return True, state.plain

    known, plain = zip(*gather_all(is_known, what=what), strict=True)
    (state,), plan = collected, saver.plan
    if plan is None or not all(known):
        require_same_cut(plain, what)
        saver.plan = plan = make_plan(state.flat, state.paths, state.signature)
        sources = run_on_all_ranks(lambda: data_of(plan), what=what)
    return state, plan, sources
