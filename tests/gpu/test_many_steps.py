"""One GPU: after hundreds of steps a model holds what it held after the first, whatever its steps have left out."""

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
from reference import only_fsdp2x, shard

pytestmark = pytest.mark.shows("flat memory")

WIDTH, WORLD, LAYERS = 64, 4, 5
SETS = 2**LAYERS - 1  # of gradients that a step may have
# Whole rounds, so that the last step before each count lacks the same gradients: what plans it keeps depends on them.
WARM_UP = 2 * SETS
STEPS = {"cuda": 7 * SETS, "streams": SETS}
# Of the host's memory, which allocators and libraries make unsteady.
SLACK_BYTES = 16 << 20


def chosen(step: int) -> tuple[int, ...]:
    """Another set of layers in each of 31 steps."""
    return tuple(i for i in range(LAYERS) if (step % SETS + 1) >> i & 1)


def held(place: str, model) -> dict[str, int]:
    """Numbers of bytes, and of times that memory was asked for, which no step may raise."""
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
    """Of this process, without what malloc could give back."""
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@distributed(world_sizes=(1,), timeout=280, fresh=True)
@each_backend
@pytest.mark.parametrize("sizes", [(1,), (WORLD,), (2, 2)], ids=["alone", "shards", "replicas"])
@pytest.mark.parametrize("policy", POLICIES)
def test_memory_is_flat(ctx, place, backend, sizes, policy):
    """Each of the steps lacks other gradients than the one before."""
    only_fsdp2x(ctx)
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
        # How far the host runs ahead of the device decides how many plans wait in pinned memory at once.
        pinned = sum(more.pop(key) for key in [*more] if key.startswith("pinned"))
        assert not more and pinned < SLACK_BYTES, (more, pinned)
        assert host_bytes() - host_before < SLACK_BYTES


def recorder():
    """The rehearsal's, whose record of many steps nobody needs."""
    import streams

    return streams.install()
