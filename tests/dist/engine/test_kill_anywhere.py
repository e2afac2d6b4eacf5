"""A rank is killed at a random place: every survivor ends soon, and its error names the rank that has ended.

Over a process group also its own rank, the operation, and the unit; over shared memory no file is left.
"""

import contextlib
import os
import random
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2x
from fsdp2x.base import collectives
from fsdp2x.lifecycle import transport_choice
from harness import dist_run
from large_gathers import everything_is_large
from models import STACK_UNITS, Stack, inputs
from reference import shard

LIMIT_S = 40.0
GROUP_TIMEOUT_S = 6.0  # gloo notifies the victim's neighbors at once, the others after this timeout
MODULES = ("", "blocks.0", "blocks.1", "blocks.2", "norm", "head")
MOMENTS = ("forward", "backward", "gradient", "between", "clip", "step", "export")
SHARED = {"transport": "shm", "timeout": timedelta(seconds=LIMIT_S)}
# Name of a setting -> (world size, options of fully_shard).
SETTINGS = {
    "plain": (2, {}),
    "three": (3, {}),
    "in place": (3, {}),
    "kept": (2, {"reshard_after_forward": False}),
    "accumulating": (3, {}),
    "smaller after forward": (4, {"reshard_after_forward": 2}),
    "replicas": (4, {}),
    "shared memory": (2, SHARED),
    "shared by three": (3, SHARED),
    "shared replicas": (2, SHARED),
}
SAID = re.compile(
    r"process group: rank (\d+)(?: of \d+|, which is \d of the 2 of its group,) was in the "
    r"(?:(?:all-gather|reduction|all-reduce) of unit '(?:|blocks\.\d)[^'.]*'"
    r"|norm of gradients|export of '[\w.]+' to '[\w.]+'|fsdp2x\.export\.stream of [^:]+"
    r"|synchronization of the ranks(?: for an export)?)"
    r", when it failed: rank (\d+) \(pid \d+\) ended meanwhile"
)


def drawn(seed: int, settings: tuple[str, ...]) -> tuple:
    """(setting, victim, moment, module, step) of a case."""
    random_of = random.Random(seed)
    setting = settings[seed % len(settings)]
    victim = random_of.randrange(SETTINGS[setting][0])
    # Ranks can only report the end of a rank that has synchronized with them, and not every step reduces.
    return setting, victim, MOMENTS[seed % len(MOMENTS)], random_of.choice(MODULES), random_of.choice([1, 3])


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def mesh_of(ctx, setting: str) -> DeviceMesh:
    patience = timedelta(seconds=GROUP_TIMEOUT_S)
    if setting == "replicas":
        rows = [[0, 1], [2, 3]]
        groups = [dist.new_subgroups_by_enumeration(part, timeout=patience)[0] for part in ([[0, 2], [1, 3]], rows)]
        return DeviceMesh.from_group(groups, "cpu", mesh=rows, mesh_dim_names=("replicate", "shard"))
    if setting == "smaller after forward":
        return init_device_mesh("cpu", (ctx.world,))
    if setting == "shared replicas":
        return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh.from_group(dist.new_group(timeout=patience), "cpu")


def train_until_killed(ctx, setting: str, *case):
    with everything_is_large() if setting == "in place" else contextlib.nullcontext():
        return train(ctx, setting, *case)


def train(ctx, setting: str, victim: int, moment: str, name: str, when: float):
    options = {"transport": "process_group", **SETTINGS[setting][1], "mesh": mesh_of(ctx, setting)}
    model = shard(ctx, Stack(), STACK_UNITS, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dies = ctx.rank == victim
    module = model.get_submodule(name)
    started, at_hand = time.monotonic(), -1
    here = lambda *_: die() if dies and at_hand == when else None  # noqa: E731
    if moment == "forward":
        module.register_forward_pre_hook(here)
    elif moment == "backward":
        module.register_full_backward_pre_hook(here)
    elif moment == "gradient":
        next(module.parameters()).register_post_accumulate_grad_hook(here)
    try:
        for at_hand in range(10_000 if moment == "any" else 5):
            if moment == "between":
                here()
            if moment == "any" and dies and at_hand == 2:
                threading.Timer(when, die).start()
            if setting == "accumulating":
                model.set_requires_gradient_sync(at_hand % 2 == 1)
            model(inputs(ctx.rank, at_hand)).square().mean().backward()
            if moment == "clip":
                here()
                fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
            if moment == "step":
                here()
            optimizer.step()
            optimizer.zero_grad()
            if moment == "export":
                here()
                for _ in fsdp2x.export.stream(model, names="model", transport="process_group"):
                    pass
    except RuntimeError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def in_shared_memory() -> set[Path]:
    return {path for path in Path("/dev/shm").iterdir() if "fsdp2x" in path.name}


def kill(setting: str, victim: int, moment: str, module: str, when: float) -> None:
    """`when`: the step of the moment, or the seconds until any moment."""
    world, options = SETTINGS[setting]
    before = in_shared_memory()
    outcomes = dist_run(
        train_until_killed, world, setting, victim, moment, module, when, timeout=90, expect_exit={victim: -9}
    )
    for outcome in outcomes:
        if outcome.rank == victim:
            continue
        message, seconds = outcome.value
        if options is SHARED:
            assert f"rank {victim}" in message and seconds < LIMIT_S / 2, f"{seconds:.1f} s: {message}"
            continue
        said = SAID.match(message)
        assert said and said.groups() == (str(outcome.rank), str(victim)), message
        assert seconds < LIMIT_S, f"{seconds:.1f} s: {message}"
    assert in_shared_memory() <= before


def gather_until_killed(ctx, victim: int):
    """The victim dies while it sends messages of over 80 MiB. gloo notifies one survivor."""
    large = nn.utils.skip_init(nn.Linear, 8192, 8190, bias=False)  # 2 and 3 ranks divide its rows
    model = shard(ctx, nn.Sequential(large), ("0",), transport="process_group")
    store = dist.distributed_c10d._get_default_store()

    def die_soon():
        store.wait(["a peer sends"])
        time.sleep(0.01)
        die()

    def gather_in_place(group, outputs, sources, count):
        if ctx.rank == victim:
            threading.Thread(target=die_soon).start()
        else:  # Without the delay, this rank's one-byte message waits behind those of the gather.
            time.sleep(0.3)
            store.set("a peer sends", "")
        return collectives.gather_in_place(group, outputs, sources, count)

    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_choice, "gather_in_place", gather_in_place)
        try:
            for _ in range(3):  # in case that it all arrived before
                model(torch.ones(1, 8192))
        except RuntimeError as error:
            return str(error), time.monotonic() - begin
    return "no error", 0.0


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_is_killed_while_it_sends(world):
    outcomes = dist_run(gather_until_killed, world, 1, timeout=90, expect_exit={1: -9})
    for outcome in outcomes:
        if outcome.rank != 1:
            message, seconds = outcome.value
            assert "rank 1 (pid" in message and "ended" in message and seconds < 15, f"{seconds:.1f} s: {message}"


KINDS = (
    ("plain", "kept", "replicas", "smaller after forward", "accumulating", "three", "in place"),
    ("shared memory", "shared by three", "shared replicas"),
)


@pytest.mark.parametrize(
    ("seed", "kind"),  # each moment over a process group or shared memory; with --full both
    [pytest.param(seed, (seed + k) % 2, marks=[pytest.mark.full] * k) for seed in range(7) for k in (0, 1)],
)
def test_survivors_name_the_victim(seed, kind):
    kill(*drawn(seed, KINDS[kind]))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 142))
def test_survivors_name_the_victim_everywhere(seed):
    kill(*drawn(seed, tuple(SETTINGS)))


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 50))])
def test_survivors_of_a_kill_at_any_moment(seed):
    draw, setting = random.Random(seed), KINDS[1][seed % 3]
    kill(setting, draw.randrange(SETTINGS[setting][0]), "any", "", 0.3 * draw.random())
