"""One GPU: a model's memory does not grow over hundreds of steps, whatever the steps leave out."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch

import alike
import fsdp2x
from harness import distributed
from models import Branches, inputs
from one_gpu import POLICIES, device_of, each_backend
from reference import shard

pytestmark = pytest.mark.shows("flat memory")

WIDTH, WORLD, LAYERS = 64, 4, 5
SETS = 2**LAYERS - 1  # sets of gradients of a step
# Complete rounds, so that the last step before each count lacks the same gradients: kept plans depend on them.
WARM_UP = 2 * SETS
STEPS = {"cuda": 7 * SETS, "streams": SETS}
# Allowed growth of CPU memory, because allocators and libraries make it unsteady.
SLACK_BYTES = 16 << 20


def chosen(step: int) -> tuple[int, ...]:
    """Returns another set of layers in each of 31 steps."""
    return tuple(i for i in range(LAYERS) if (step % SETS + 1) >> i & 1)


def held(place: str, model) -> dict[str, int]:
    """Returns numbers of bytes and of allocations, which no step may raise."""
    gc.collect()
    stats = model._get_fsdp_state().root.stats()
    counts = {key: stats[key] for key in ("scratch_bytes", "gather_slots_owned", "scratch_slots_owned")}
    if place == "cuda":
        torch.cuda.synchronize()
        of_device = torch.cuda.memory_stats()
        keys = ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_device_alloc", "num_ooms")
        counts |= {key: of_device[key] for key in keys}
        if hasattr(torch.cuda, "host_memory_stats"):
            of_host = torch.cuda.host_memory_stats()
            counts |= {f"pinned {key}": of_host[key] for key in of_host if key.startswith("allocated_bytes.current")}
    return counts


def host_bytes() -> int:
    """Returns the CPU bytes of this process, without those that malloc could free."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@distributed(world_sizes=(1,), timeout=280, fresh=True)
@each_backend
@pytest.mark.parametrize("sizes", [(1,), (WORLD,), (2, 2)], ids=["alone", "shards", "replicas"])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat(ctx, place, backend, sizes, policy):
    """Each step lacks other gradients than the one before."""
    device = device_of(place)
    with alike.world_of(device, backend, sizes) as (mesh, _):
        options = {"mesh": mesh, "mp_policy": POLICIES[policy], "transport": place if place == "streams" else "auto"}
        model = shard(ctx, Branches(WIDTH), ("layers.0", "layers.1"), **options)
        optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-3)
        x = inputs(0, rows=16, width=WIDTH).to(device)

        def train(first: int, last: int) -> None:
            for step in range(first, last):
                model(x, chosen(step)).float().square().mean().backward()
                fsdp2x.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if place == "streams":
                    recorder().clear()

        train(0, WARM_UP)
        before, host_before = held(place, model), host_bytes()
        train(WARM_UP, WARM_UP + STEPS[place])
        after = held(place, model)
        more = {key: after[key] - before[key] for key in before if after[key] != before[key]}
        # The number of plans in pinned memory depends on how far the host runs ahead.
        pinned = sum(more.pop(key) for key in [*more] if key.startswith("pinned"))
        assert not more and pinned < SLACK_BYTES, (more, pinned)
        assert host_bytes() - host_before < SLACK_BYTES


def recorder():
    """The rehearsal's recorder, without records of its many steps."""
    import streams

    return streams.install()
