"""A disk that is full at any write of a save, in each form: every rank is told, no half checkpoint is left."""

import builtins
import errno
import os

import pytest
import torch.distributed as dist

import fsdp2x
from fsdp2x import checkpoint
from fsdp2x.checkpoint import CheckpointError
from harness import distributed
from models import Stack
from reference import only_fsdp2x
from training import shared_folder

# Of the places of a save, every third is the first to fail.
STRIDE = 3


class Disk:
    """Below `folder` the `room`-th opening for writing, write or sync fails, and all that follow."""

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
    """What is neither a whole checkpoint nor names one."""
    return [name for name in os.listdir(path) if not (name in ("latest", "whole.pt") or name.startswith("step-"))]


@distributed(world_sizes=(2,), timeout=180)
@pytest.mark.parametrize("form", ["sharded", "full", "per_rank", "file"])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.each_value
def test_full_disk(ctx, form, asynchronous):
    only_fsdp2x(ctx)
    model = fsdp2x.fully_shard(Stack(), auto_wrap=True)
    optimizer = fsdp2x.optim.AdamW(model.parameters())
    options = {"form": "full" if form == "file" else form, "async_save": asynchronous}

    def save(path, step):
        target = path / "whole.pt" if form == "file" else path
        saved = checkpoint.save(target, model, optimizer, step=step, **options)
        if asynchronous:
            saved.wait()

    with shared_folder(ctx) as folder:
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
        checkpoint.load(path / "whole.pt" if form == "file" else path, twin)
