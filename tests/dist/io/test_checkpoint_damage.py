"""Damaged checkpoints, full disks, and kills: each rank raises, an older checkpoint is taken, nothing is left."""

import builtins
import errno
import json
import os
import random
import shutil
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import damage
import fsdp2x
from checkpoints import FORMS, Training, on_first, shared_folder
from fsdp2x import checkpoint
from fsdp2x.checkpoint import CheckpointError
from harness import dist_run, distributed
from models import Stack
from reference import full
from training import Said

DATA = {"sharded": "__1_0.distcp", "full": "checkpoint.safetensors", "per_rank": "__1_0.distcp"}


def weights(training):
    return full(list(training.model.parameters()))


def shorten(path):
    os.truncate(path, path.stat().st_size - 100)


@distributed
@pytest.mark.parametrize("form", FORMS)
def test_an_older_whole_one_is_taken_and_said(ctx, form):
    agreed = mock.patch("fsdp2x.base.failures.name_ended", side_effect=AssertionError("no rank is lost"))
    with shared_folder() as folder:
        training, first = Training(), None
        for _ in range(2):
            training.steps(1)
            training.save(folder, form=form)
            first = first or weights(training)
        broken = folder / "step-000002" / DATA[form]
        content = broken.read_bytes()
        for hurt, reason in (
            (damage.flip, "CRC-32 differs"),
            (shorten, "damaged, the manifest says"),
            (os.unlink, "missing"),
        ):
            on_first(lambda hurt=hurt: (broken.write_bytes(content), hurt(broken)))
            fresh = Training()
            before = weights(fresh)
            with agreed, pytest.raises(checkpoint.CheckpointError, match=f"{DATA[form]}: .*{reason}"):
                fresh.load(folder / "step-000002")
            assert all(map(torch.equal, weights(fresh), before)) and not fresh.optimizer.state
            with Said() as messages:
                assert fresh.load(folder).step == 1
            assert all(map(torch.equal, weights(fresh), first))
            assert any(DATA[form] in said and "using" in said and "step-000001 instead" in said for said in messages)
            # Without looking at checksums a flipped bit goes by; what is short does not.
            if hurt is damage.flip:
                assert fresh.load(folder / "step-000002", verify=False).step == 2
            else:
                with pytest.raises(checkpoint.CheckpointError, match=DATA[form]):
                    fresh.load(folder / "step-000002", verify=False)


def _take_former(root, manifest):
    (root / "step-000002/__0_0.distcp").write_bytes((root / "step-000001/__0_0.distcp").read_bytes())


def _swap(place):
    """Exchanges where two chunks are. `place` chooses them among the tensors of the manifest."""

    def swap(root, manifest):
        one, other = place(manifest["tensors"])
        for key in ("file", "first_byte"):
            one[key], other[key] = other[key], one[key]

    return swap


MOMENT = "optimizer.state.stack.norm.weight.exp_avg"
MISPLACED = {
    "of the step before": _take_former,
    "of another rank": _swap(lambda tensors: tensors["model.adapter.weight"]["chunks"]),
    "of another name": _swap(lambda tensors: [tensors[name]["chunks"][0] for name in (MOMENT, f"{MOMENT}_sq")]),
}


@distributed
def test_a_chunk_in_the_place_of_another_is_found_out(ctx):
    with shared_folder() as root:
        training = Training()
        for _ in range(2):
            training.steps(1)
            training.save(root / "saved")
        for kind, misplace in MISPLACED.items():
            folder = root / kind

            def hurt(folder=folder, misplace=misplace):
                shutil.copytree(root / "saved", folder)
                path = folder / "step-000002/manifest.json"
                manifest = json.loads(path.read_text())
                misplace(folder, manifest)
                path.write_text(json.dumps(manifest))
                damage.fit(folder / "step-000002")

            on_first(hurt)
            other = Training()
            other.steps(1)
            before = weights(other)
            with pytest.raises(checkpoint.CheckpointError, match=r"distcp: \w+\.\S+ at .* damaged, .*CRC-32 differs"):
                checkpoint.load(folder / "step-000002", other.model, other.optimizer)
            assert all(map(torch.equal, weights(other), before)), kind
            assert checkpoint.load(folder, other.model, other.optimizer).step == 1


@distributed
def test_all_damaged_ones_are_named(ctx):
    with shared_folder() as folder:
        training = Training()
        for step in (1, 2):
            training.save(folder, step=step)
        on_first(lambda: [damage.flip(folder / f"step-00000{step}" / ".metadata") for step in (1, 2)])
        with pytest.raises(checkpoint.CheckpointError, match="step-000002/.metadata.*step-000001/.metadata"):
            training.load(folder)


@distributed
def test_a_folder_that_takes_nothing(ctx):
    training = Training()
    # Not even root can create a folder there.
    for in_background in (False, True):
        with pytest.raises(checkpoint.CheckpointError, match="rank 0: /proc/fsdp2x: "):
            training.save("/proc/fsdp2x", async_save=in_background).wait()


@distributed
def test_arguments_are_checked(ctx):
    training = Training()
    for keywords, message in (
        ({"form": "whole"}, "form must be 'sharded', 'full' or 'per_rank', got 'whole'"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"keep": 0}, "keep must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.save("/nowhere", training.model, **{"step": 1, **keywords})
    with pytest.raises(TypeError, match=r"optimizer must be .*got \[3\]"):
        checkpoint.save("/nowhere", training.model, [3], step=1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer steps .*\(3,\)"):
        checkpoint.save("/nowhere", training.model, other, step=1)
    with pytest.raises(checkpoint.CheckpointError, match="no such checkpoint"):
        checkpoint.load("/nowhere", training.model)


# Tests every fifth file operation of a save as the first one that fails.
STRIDE = 5


class Disk:
    """Fails file operations below `folder` (open for writing, write, sync) after the first `room` of them."""

    def __init__(self, patch, folder, room):
        self.folder, self.room, self.num_tried = str(folder), room, 0
        patch.setattr(builtins, "open", self.limited(open, lambda file, mode="r", *_, **__: set(mode) & set("wax+")))
        writes = os.O_WRONLY | os.O_RDWR
        patch.setattr(os, "open", self.limited(os.open, lambda file, flags, *_, **__: flags & writes))
        for name in ("pwrite", "fsync"):
            patch.setattr(os, name, self.limited(getattr(os, name), lambda *_: True))

    def limited(self, function, writes):
        def call(file, *args, **options):
            path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
            if path.startswith(self.folder) and writes(file, *args, **options):
                self.num_tried += 1
                if self.num_tried > self.room:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            return function(file, *args, **options)

        return call


def remains(path):
    """Names that are neither a complete checkpoint nor the file that names the latest one."""
    return [name for name in os.listdir(path) if not (name == "latest" or name.startswith("step-"))]


@distributed(world_sizes=(2,), timeout=180)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_full_disk(ctx, form, asynchronous):
    model = fsdp2x.fully_shard(Stack(), auto_wrap=True)
    optimizer = fsdp2x.optim.AdamW(model.parameters())

    def save(path, step):
        saved = checkpoint.save(path, model, optimizer, step=step, form=form, async_save=asynchronous)
        if asynchronous:
            saved.wait()

    with shared_folder() as folder:
        path, num_failures = folder / "checkpoints", 0
        save(path, 1)
        for victim in range(ctx.world):
            for room in range(0, 60, STRIDE):
                dist.barrier()
                with pytest.MonkeyPatch.context() as patch:
                    disk = Disk(patch, folder, room if ctx.rank == victim else 10**6)
                    try:
                        save(path, room + 2)
                    except CheckpointError as error:
                        failed, said = True, str(error)
                    else:
                        failed = False
                fails = [None] * ctx.world
                dist.all_gather_object(fails, failed)
                assert len(set(fails)) == 1
                if not failed:
                    break
                num_failures += 1
                assert f"rank {victim}" in said or ctx.world == 1
                assert "No space left on device" in said and "\n" not in said, said
                assert not remains(path), said
                dist.barrier()
            assert not failed and disk.num_tried < 60
        assert num_failures
        twin = fsdp2x.fully_shard(Stack(), auto_wrap=True)
        checkpoint.load(path, twin)


# Long enough for a handful of saves; the kill falls anywhere into them.
LONGEST_S = 0.8


def fill_with(training, value):
    """Every number that a checkpoint holds becomes `value`."""
    with torch.no_grad():
        for tensor in [*training.model.parameters(), *training.model.buffers()]:
            tensor.fill_(value)
        for state in training.optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(value)


def save_until_killed(ctx, root, kill_after_s, victims, is_async):
    """Saves one checkpoint after the other; a victim dies at its moment, the others return what they were told."""
    training = Training("adamw")
    training.steps(1)
    fill_with(training, 1)
    training.save(root, step=1)
    if ctx.rank in victims:
        threading.Timer(kill_after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    step = 2
    begun = time.monotonic()
    try:
        while time.monotonic() - begun < 25:
            fill_with(training, step)
            training.save(root, step=step, keep=2, async_save=is_async)
            (root.parent / f"returned-{ctx.rank}").write_text(str(step))
            step += 1
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "never told", time.monotonic() - begun


def check(tmp_path, seed, victims, is_async):
    root = tmp_path / "checkpoints"
    moment = random.Random(seed).uniform(0, LONGEST_S)
    died = dict.fromkeys(victims, -signal.SIGKILL)
    outcomes = dist_run(save_until_killed, 2, root, moment, victims, is_async, expect_exit=died)
    for outcome in outcomes:
        if outcome.rank not in victims:
            said, seconds = outcome.value
            assert "lost rank 1" in said, said
            assert seconds < moment + 10
    returned = [tmp_path / f"returned-{rank}" for rank in range(2)]
    # Once save() returns, its checkpoint is on disk. An asynchronous one is there once the next save() returns.
    known = max([int(path.read_text() or 0) for path in returned if path.exists()], default=1)
    training = Training("adamw", impl=None)
    loaded = training.load(root)
    assert known - is_async <= loaded.step <= known + 1
    values = {float(v) for tensor in training.model.state_dict().values() for v in tensor.unique()}
    values |= {float(v) for s in training.optimizer.state.values() for tensor in s.values() for v in tensor.unique()}
    assert values == {float(loaded.step)}
    training.save(root, step=loaded.step + 10, keep=1)
    assert sorted(path.name for path in root.iterdir()) == ["latest", f"step-{loaded.step + 10:06d}"]


@pytest.mark.parametrize(("victims", "is_async"), [((1,), True), ((0, 1), False)])
def test_kill(tmp_path, victims, is_async):
    check(tmp_path, f"{victims} {is_async}", victims, is_async)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(30))
def test_kill_at_random_moments(tmp_path, seed):
    check(tmp_path, seed, ((1,), (0, 1))[seed % 2], seed % 4 >= 2)
