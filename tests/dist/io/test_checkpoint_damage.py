"""Damaged checkpoints and disks that refuse: each rank is told clearly, an older one is taken, nothing is lost."""

import os
import pickle
import struct
from unittest import mock

import pytest
import torch

import damage
from checkpoints import Training, on_first, shared_folder
from harness import distributed
from reference import full
from training import Said

FORMS = ("sharded", "full", "per_rank")
DATA = {"sharded": "__1_0.distcp", "full": "checkpoint.pt", "per_rank": "rank-00001.pt"}


def weights(training):
    return full(list(training.model.parameters()))


def flip(path):
    """One bit of the first tensor in an archive, or of any other file."""
    content = bytearray(path.read_bytes())
    name_bytes, extra_bytes = struct.unpack("<HH", content[26:30])
    content[30 + name_bytes + extra_bytes if content[:2] == b"PK" else 200] ^= 4
    path.write_bytes(content)


def shorten(path):
    os.truncate(path, path.stat().st_size - 100)


@distributed
@pytest.mark.parametrize("form", FORMS)
def test_an_older_whole_one_is_taken_and_said(ctx, form):
    from fsdp2x import checkpoint

    agreed = mock.patch("fsdp2x.base.failures.name_ended", side_effect=AssertionError("no rank is lost"))
    for hurt, reason in ((flip, "CRC-32 differs"), (shorten, "damaged, got"), (os.unlink, "missing")):
        with shared_folder() as folder:
            training = Training()
            training.steps(1)
            training.save(folder, form=form)
            first = weights(training)
            training.steps(1)
            training.save(folder, form=form)
            broken = folder / "step-000002" / DATA[form]
            on_first(lambda broken=broken, hurt=hurt: hurt(broken))
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
            if hurt is flip:
                assert fresh.load(folder / "step-000002", verify=False).step == 2
            else:
                with pytest.raises(checkpoint.CheckpointError, match=DATA[form]):
                    fresh.load(folder / "step-000002", verify=False)


def _take_former(folder, places):
    (folder / "step-000002/__0_0.distcp").write_bytes((folder / "step-000001/__0_0.distcp").read_bytes())


def _swap_ranks(folder, places):
    one, other = [key for key in places if key.fqn == "model.adapter.weight"]
    places[one], places[other] = places[other], places[one]


def _swap_places(one, other):
    def swap(folder, places):
        keys = [[key for key in places if key.fqn == name] for name in (one, other)]
        for mine, theirs in zip(*keys, strict=True):
            places[mine], places[theirs] = places[theirs], places[mine]

    return swap


def _take_label_away(folder, places):
    path = folder / "step-000002/__0_0.distcp"
    path.write_bytes(path.read_bytes().replace(b"/label", b"/lapel"))


MOMENTS = ("optimizer.state.stack.norm.weight.exp_avg", "optimizer.state.stack.norm.weight.exp_avg_sq")
MISPLACED = {
    "of the step before": (_take_former, r"labelled b'0{19}1 .*', expected b'0{19}2 "),
    "of another rank": (_swap_ranks, r"labelled b'0*2 model.adapter.weight \[\d, 0\]'"),
    "of another name": (_swap_places(*MOMENTS), rf"labelled b'0*2 {MOMENTS[1]} .*expected b'0*2 {MOMENTS[0]} "),
    "of a value": (_swap_places("optimizer.param_groups.0.lr", "optimizer.param_groups.1.lr"), "labelled"),
    "without a label": (_take_label_away, "it is labelled b''"),
}


@distributed
@pytest.mark.parametrize("kind", MISPLACED)
def test_an_archive_in_the_place_of_another_is_found_out(ctx, kind):
    from fsdp2x import checkpoint

    misplace, reason = MISPLACED[kind]
    with shared_folder() as folder:
        training = Training()
        for _ in range(2):
            training.steps(1)
            training.save(folder)

        def hurt():
            path = folder / "step-000002/.metadata"
            table = pickle.loads(path.read_bytes())
            misplace(folder, table.storage_data)
            path.write_bytes(pickle.dumps(table))
            damage.fit(folder / "step-000002")

        on_first(hurt)
        other = Training()
        other.steps(1)
        before = weights(other)
        with pytest.raises(checkpoint.CheckpointError, match=reason):
            checkpoint.load(folder / "step-000002", other.model, other.optimizer)
        assert all(map(torch.equal, weights(other), before))
        assert checkpoint.load(folder, other.model, other.optimizer).step == 1


@distributed
def test_all_damaged_ones_are_named(ctx):
    from fsdp2x import checkpoint

    with shared_folder() as folder:
        training = Training()
        for step in (1, 2):
            training.save(folder, step=step)
        on_first(lambda: [flip(folder / f"step-00000{step}" / ".metadata") for step in (1, 2)])
        with pytest.raises(checkpoint.CheckpointError, match="step-000002/.metadata.*step-000001/.metadata"):
            training.load(folder)


@distributed
def test_a_damaged_lone_file_is_told(ctx):
    from fsdp2x import checkpoint

    with shared_folder() as folder:
        training = Training()
        training.save(folder / "one.pt", form="full")
        on_first(lambda: flip(folder / "one.pt"))
        with pytest.raises(checkpoint.CheckpointError, match=r"one.pt: damaged, Bad CRC-32 for file"):
            training.load(folder / "one.pt")
        on_first(lambda: shorten(folder / "one.pt"))
        with pytest.raises(checkpoint.CheckpointError, match=r"one.pt: damaged"):
            training.load(folder / "one.pt")


@distributed
def test_a_folder_that_takes_nothing(ctx):
    from fsdp2x import checkpoint

    training = Training()
    # Nobody can make a folder there, root neither.
    for form, name in (("sharded", "/proc/fsdp2x"), ("full", "/proc/fsdp2x/one.pt")):
        for in_background in (False, True):
            with pytest.raises(checkpoint.CheckpointError, match="rank 0: /proc/fsdp2x: "):
                training.save(name, form=form, async_save=in_background).wait()


@distributed
def test_arguments_are_checked(ctx):
    from fsdp2x import checkpoint

    training = Training()
    for keywords, message in (
        ({"form": "whole"}, "form must be 'sharded', 'full' or 'per_rank', got 'whole'"),
        ({"step": -1}, "step is -1"),
        ({"keep": 0}, "keep is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoint.save("/nowhere", training.model, **{"step": 1, **keywords})
    with pytest.raises(ValueError, match="one file, which only form='full' writes"):
        checkpoint.save("/nowhere/one.pt", training.model, step=1)
    with pytest.raises(TypeError, match=r"optimizer must be Optimizer, a collection of Optimizer or None, got \[3\]"):
        checkpoint.save("/nowhere", training.model, [3], step=1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    with pytest.raises(checkpoint.CheckpointError, match=r"the optimizer steps a parameter of shape \(3,\)"):
        checkpoint.save("/nowhere", training.model, other, step=1)
    with pytest.raises(checkpoint.CheckpointError, match="no such checkpoint"):
        checkpoint.load("/nowhere", training.model)
