"""A run's folders: no run loses another run's work or mixes with it, and no lock outlives its process."""

import hashlib
import shutil

import pytest
import torch.distributed as dist

import fsdp2x
from fsdp2x.checkpoint import CheckpointError
from fsdp2x.train import ConfigError, Trainer, parse_config
from fsdp2x.train.run_folder import LOCK, RunFolder
from harness import distributed
from models import Stack
from training import losses, run, settings, shared_folder

STEPS = {"steps": 3}
WAYS = ("checkpoint.resume_from=", "--resume_from", "logging.output=FOLDER", "delete the folder")


def digest(folder):
    """Every file of a folder and what is in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def config(folder, output="run", **sections):
    sections = {"train": STEPS, "checkpoint": {"save_every": 1}, **sections}
    return settings(folder / "text", folder / output, **sections)


def refused(ctx, config, *said, error=ConfigError):
    """The same sentence on every rank, before anything was read, and the work that is there is as it was."""
    with pytest.raises(error) as found:
        Trainer(parse_config(config))
    sentences = [None] * ctx.world
    dist.all_gather_object(sentences, str(found.value))
    assert len(set(sentences)) == 1 and "\n" not in sentences[0]
    assert all(part in sentences[0] for part in said), sentences[0]


# How the folders of an earlier run may be named again.
SAME = {
    "the same": lambda folder: {},
    "another spelling": lambda folder: {"logging": {"output": f"{folder}/text/../run/", "progress": "off"}},
    "a link": lambda folder: {"logging": {"output": str(folder / "link"), "progress": "off"}},
    "its checkpoints": lambda folder: {
        "logging": {"output": str(folder / "other"), "progress": "off"},
        "checkpoint": {"folder": str(folder / "run/checkpoints")},
    },
    "its metrics": lambda folder: {"checkpoint": {"folder": str(folder / "elsewhere")}},
    "no saving": lambda folder: {"checkpoint": {"save_every": 0, "save_last": False}},
    "resumed from elsewhere": lambda folder: {"checkpoint": {"resume_from": str(folder / "copy")}},
}


@distributed
@pytest.mark.parametrize("case", SAME)
def test_a_new_run_leaves_an_earlier_ones_work_alone(ctx, case):
    with shared_folder(ctx) as folder:
        run(config(folder))
        if ctx.rank == 0:
            (folder / "link").symlink_to(folder / "run")
            shutil.copytree(folder / "run", folder / "copy")
        dist.barrier()
        before = digest(folder / "run")
        changes = {name: {**config(folder)[name], **values} for name, values in SAME[case](folder).items()}
        refused(ctx, {**config(folder), **changes}, "of an earlier run", *WAYS)
        assert digest(folder / "run") == before


@distributed
@pytest.mark.parametrize("resume_from", ["run", "run/checkpoints", "run/checkpoints/step-000002"])
def test_a_resumed_run_goes_on_in_its_folder(ctx, resume_from):
    with shared_folder(ctx) as folder:
        run(config(folder))
        more = {"save_every": 1, "resume_from": str(folder / resume_from)}
        run(config(folder, train={"steps": 4}, checkpoint=more))
        dist.barrier()
        assert list(losses(folder / "run")) == [1, 2, 3, 4]


@distributed
def test_a_run_that_only_evaluates_adds_to_the_folder_it_reads(ctx):
    with shared_folder(ctx) as folder:
        run(config(folder))
        before = digest(folder / "run/checkpoints")
        run(config(folder, train={"mode": "evaluate"}, checkpoint={"resume_from": str(folder / "run")}))
        assert digest(folder / "run/checkpoints") == before


@distributed
def test_two_runs_in_one_folder(ctx):
    with shared_folder(ctx) as folder:
        first = Trainer(parse_config(config(folder)))
        refused(ctx, config(folder), "logging.output: another run", "is still running", "logging.output=FOLDER")
        elsewhere = config(folder, "other", checkpoint={"folder": str(folder / "run/checkpoints")})
        refused(ctx, elsewhere, "checkpoint.folder: another run")
        first.run()
        first.close()
        dist.barrier()
        assert list(losses(folder / "run")) == [1, 2, 3]


def test_a_lock_ends_with_its_run(tmp_path):
    (tmp_path / LOCK).write_text("left from a run that was killed")

    def folder():
        return RunFolder(tmp_path, tmp_path, saves=False)

    first = folder()
    for _ in range(2):
        first.claim([3, 4])
        with pytest.raises(ConfigError, match=r"is still running.*\(kill 3 4\)"):
            folder().claim([5])
        first.release()


@distributed
def test_saves_of_a_loop_of_ones_own(ctx):
    """`checkpoint.save` into a folder with later steps that this model does not know of."""

    def make():
        return fsdp2x.fully_shard(Stack())

    with shared_folder(ctx) as folder:
        first = make()
        for step in (10, 20):
            fsdp2x.checkpoint.save(folder, first, step=step)
        before = digest(folder)
        for step in (5, 20):
            with pytest.raises(CheckpointError, match="has step-000020"):
                fsdp2x.checkpoint.save(folder, make(), step=step)
        assert digest(folder) == before
        fsdp2x.checkpoint.save(folder, first, step=15)  # it knows what it saved
        loaded = make()
        fsdp2x.checkpoint.load(folder / "step-000015", loaded)
        fsdp2x.checkpoint.save(folder, loaded, step=16)
        fsdp2x.checkpoint.save(folder, make(), step=1, overwrite=True)
        fsdp2x.checkpoint.save(folder, make(), step=30)  # later than all that is there
        dist.barrier()
