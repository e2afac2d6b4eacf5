"""Saving in the background: what is written is the moment of the call, training is not disturbed, errors arrive."""

import threading
import time

import pytest
import torch.distributed as dist

import fsdp2x
from checkpoints import FORMS, Training, full_disk, shared_folder
from fsdp2x import checkpoint
from fsdp2x.io.checkpoint import saving
from harness import distributed, programs


class Held:
    """Writers stop at their first write until `go`."""

    def __init__(self, patch):
        self.go = threading.Event()
        original = saving.Job._write

        def wait(job, *args):
            assert self.go.wait(30)
            return original(job, *args)

        patch.setattr(saving.Job, "_write", wait)


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)))
def test_training_goes_on_bit_for_bit(ctx):
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        undisturbed = Training("adamw")
        expected = undisturbed.steps(6)
        for form in FORMS:
            held = Held(patch)
            training = Training("adamw")
            losses = training.steps(2)
            saved = training.save(folder / form, form=form, async_save=True)
            assert not saved.done and saved.seconds is None and 0 < saved.stall_s < 30
            losses += training.steps(3)  # changes every tensor that is being written
            held.go.set()
            assert saved.wait() == folder / form / "step-000002"
            assert saved.done and saved.seconds > saved.stall_s
            losses += training.steps(1)
            assert losses == expected
            fresh = Training("adamw")
            fresh.load(folder / form)
            assert fresh.steps(4) == expected[2:]
            patch.undo()


@distributed
def test_the_next_save_waits(ctx):
    with shared_folder() as folder, pytest.MonkeyPatch.context() as patch:
        held = Held(patch)
        training = Training()
        first = training.save(folder, step=1, async_save=True)
        assert not first.done
        threading.Timer(0.3, held.go.set).start()
        second = training.save(folder, step=3, async_save=True)
        assert first.done and (folder / "step-000001").exists()
        third = training.save(folder, step=4)  # a synchronous one waits too
        assert second.done and third.done
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["latest", "step-000003", "step-000004"]


@distributed(world_sizes=(2, pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize("second_is_async", [False, True])
def test_two_models_write_to_one_folder_one_after_the_other(ctx, second_is_async):
    """While the first is being written, the second is refused as if it had been, or waits for it."""
    actor, critic = Training(), Training()
    actor.steps(1)

    def kept(path):
        return Training().load(path).step

    with shared_folder() as folder:
        for step in (1, 2):
            with pytest.MonkeyPatch.context() as patch:
                held = Held(patch)
                first = actor.save(folder / "run", step=step, async_save=True)
                with pytest.raises(checkpoint.CheckpointError, match=f"step-00000{step} is being written"):
                    critic.save(folder / "run", step=1, async_save=second_is_async)
                held.go.set()
                first.wait()
                assert kept(folder / "run") == step
        for way, options in {
            "later": {"step": 3},
            "overwritten": {"step": 1, "overwrite": True},
        }.items():
            with pytest.MonkeyPatch.context() as patch:
                held = Held(patch)
                first = actor.save(folder / way, step=1, async_save=True, overwrite=True)
                threading.Timer(0.2, held.go.set).start()
                second = critic.save(folder / way, async_save=second_is_async, **options)
                assert first.wait() and second.wait()
            fresh = Training()
            assert fresh.load(folder / way).step == options["step"]
            for mine, theirs in zip(fresh.model.parameters(), critic.model.parameters(), strict=True):
                assert mine.to_local().equal(theirs.to_local())
            assert not [path for path in (folder, folder / way) if path.is_dir() and list(path.glob(".*"))]


@distributed
def test_an_error_reaches_all_ranks_at_the_next_call(ctx):
    with shared_folder() as folder:
        training = Training()
        training.steps(1)
        training.save(folder, step=1, async_save=True).wait()
        for how in ("wait", "next", "sync"):
            with full_disk(1):
                saved = training.save(folder, step=2, async_save=True)
                while not saved.done:
                    time.sleep(0.01)
            with pytest.raises(checkpoint.CheckpointError, match="rank 1: .*step-000002/.*: File too large"):
                if how == "wait":
                    saved.wait()
                else:
                    training.save(folder, step=3, async_save=how == "next")
            checkpoint.wait(training.model)  # said once
            dist.barrier()
            assert (folder / "latest").read_text() == "step-000001\n"
        training.save(folder, step=4, async_save=True).wait()
        assert training.load(folder).step == 4
        assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000001", "step-000004"]


@distributed
def test_the_model_of_a_finished_writer_can_go(ctx):
    import gc
    import weakref

    with shared_folder() as folder:
        training = Training()
        training.save(folder, async_save=True).wait()
        gone = weakref.ref(training.model)
        del training
        gc.collect()
        assert gone() is None
        assert not [t for t in threading.enumerate() if t.name.startswith("fsdp2x-")]


LAST_LINE = """
import os, sys, torch, fsdp2x
store = f"file://{sys.argv[1]}/store"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
model = fsdp2x.fully_shard(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)]))
def refuse(*_):
    raise OSError(28, "no space left")
if sys.argv[2] == "fails":
    os.fsync = refuse
fsdp2x.checkpoint.save(sys.argv[1], model, step=1, async_save=True)
"""


@pytest.mark.parametrize("ends", ["well", "fails"])
def test_a_save_that_runs_at_the_end_of_the_program(tmp_path, ends):
    """The process waits for it. If it fails, its error has nowhere to be raised, so the exit code tells."""
    done = programs.run("-c", LAST_LINE, tmp_path, ends)
    if ends == "well":
        assert done.returncode == 0, done.stderr
        assert fsdp2x.checkpoint.resolve(tmp_path).name == "step-000001"
    else:
        assert done.returncode == 1
        assert "no space left" in done.stderr and "Its checkpoint does not exist" in done.stderr
        assert not (tmp_path / "step-000001").exists()
