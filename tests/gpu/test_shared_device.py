"""Two ranks on one GPU whose collectives come late at random: steps are FSDP2's, and the delays change no bit.

The rehearsal on the CPU runs the same body on recorded streams and over shared memory, and compares it with gloo.
"""

import copy
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import shared_device
from arrangements import CASES, run
from fsdp2x.sharding import transport
from harness import distributed
from one_gpu import CLOSE, device_of, needs_gpu
from reference import same, shard, shard_stock

NUM_SEEDS = {"cuda": 3, "streams": 1}
# Every collective, in all dtypes and forms.
REHEARSED = ("bf16", "small packed", "replicas, bf16", "last dim", "missing gradients", "divided")


@distributed(world_sizes=(2,), timeout=200, fresh=True)
@pytest.mark.parametrize(
    "place", [pytest.param("cuda", marks=needs_gpu), pytest.param("streams", marks=pytest.mark.full)]
)
@pytest.mark.shows("shared device")
def test_steps_do_not_depend_on_delays(ctx, place):
    device, wrong = torch.device(device_of(place)), {}
    for name in CASES if place == "cuda" else REHEARSED:
        case = CASES[name]
        names = ("replicate", "shard")[-len(case.sizes) :]
        ranks = torch.arange(2).view((2, 1)[: len(case.sizes)])
        options = {"mesh": DeviceMesh(device.type, ranks, mesh_dim_names=names), **case.options}
        first = case.make()

        def steps(case=case, first=first, options=options) -> list:
            to = {"transport": "streams"} if place == "streams" else {}
            model = shard(ctx, copy.deepcopy(first), case.units, **to, **options)
            return run(model, case, device.type, rank=ctx.rank)

        with mock.patch.object(transport, "pack_below_bytes", lambda gathers, world, case=case: case.pack_below):
            if place == "streams":
                expected = steps()
            else:
                with shared_device.ranks(device, None):
                    expected = steps()
            found = {}
            for seed in range(NUM_SEEDS[place]):
                with shared_device.ranks(device, seed) as world:
                    found[seed] = steps()
                assert world.num_calls > 0, name
        with shared_device.ranks(device, 0):
            stock = run(shard_stock(first, case.units, **options), case, device.type, rank=ctx.rank)
        try:
            same(expected, stock, "FSDP2", **CLOSE[case.close])
            for seed, results in found.items():
                same(results, expected, f"delays {seed}")
        except AssertionError as error:
            wrong[name] = str(error)[:300]
    assert wrong == {}


@distributed(world_sizes=(2,), timeout=100, fresh=True)
@pytest.mark.parametrize("place", [pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.shows("shared device")
def test_delays_show_a_missing_wait(ctx, place):
    """A control: a stream that does not wait for a gather mostly reads what was there before it."""
    device, lane = torch.device(device_of(place)), torch.cuda.Stream()
    num_stale = 0
    with shared_device.ranks(device, 0):
        for number in range(1, 21):
            output = torch.zeros(2, device=device)
            lane.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(lane):
                torch.distributed.all_gather_into_tensor(output, torch.full((1,), float(number), device=device))
            found = output.clone()
            torch.cuda.synchronize()
            assert output.tolist() == [number, number]
            num_stale += found.tolist() != output.tolist()
    assert num_stale > 0
