"""Ranges in traces under upstream's names, and fsdp2x.profile."""

import gzip
import json

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
import streams
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import shard, shard_stock


def names_of(run) -> set[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        run()
    return {event.name for event in profiler.events() if event.name.startswith("FSDP::")}


POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
# Upstream waits for a free reduction buffer; over shared memory and process groups on the CPU there are none. Before
# torch 2.15 it adds gradients up in a range of its own, at the end of each unit's backward; we do so as they come.
NOT_OURS = {"FSDP::post_backward_rs_wait", "FSDP::post_backward_accumulate"}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["shm", "process_group", "streams"])
def test_ranges_have_upstreams_names(ctx, transport):
    def step(model):
        model(inputs(ctx.rank)).square().mean().backward()

    found = []
    for model in (
        shard_stock(Stack(), STACK_UNITS, mp_policy=POLICY),
        shard(ctx, Stack(), STACK_UNITS, transport=transport, mp_policy=POLICY),
    ):
        step(model)
        found.append(names_of(lambda model=model: step(model)))
    stock, ours = found
    missing = {name for name in stock - ours if not any(name.startswith(other) for other in NOT_OURS)}
    assert not missing, missing
    assert {"FSDP::all_gather (blocks.1)", "FSDP::pre_forward", "FSDP::post_backward_reduce (blocks.0)"} <= ours
    # Process groups on the CPU gather nothing ahead in forward.
    assert ("FSDP::forward_prefetch for blocks.1" in ours) == (transport != "process_group")
    if transport == "streams":
        assert "FSDP::reduce_scatter (blocks.2)" in ours


@distributed(world_sizes=(2,))
def test_files(ctx, tmp_path):
    streams.install()
    model = shard(ctx, Stack(), STACK_UNITS, transport="streams")
    with fsdp2x.profile(tmp_path / "profile", model=model, memory=True) as profiler:
        model(inputs(ctx.rank)).square().mean().backward()
    assert isinstance(profiler, torch.profiler.profile)
    folder = tmp_path / "profile"
    trace = json.loads(gzip.decompress((folder / f"trace-rank{ctx.rank}.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert "FSDP::all_gather (blocks.0)" in names
    memory = json.loads((folder / f"memory-rank{ctx.rank}.json").read_text())
    kinds = {entry["kind"] for entry in memory}
    assert kinds == {"shard pool", "gradient pool"}  # slots and buffers are the allocator's again
    pools = {entry["unit"]: entry for entry in memory if entry["kind"] == "shard pool"}
    group = model.blocks[0]._get_fsdp_state().groups[0]
    assert pools["blocks.0"]["address"] == group.pool.data_ptr()
    assert pools["blocks.0"]["bytes"] == group.pool.nbytes


@distributed(world_sizes=(2,))
def test_an_exception_leaves_the_trace(ctx, tmp_path):
    model = shard(ctx, Stack(), STACK_UNITS)
    with pytest.raises(ValueError, match="on purpose"), fsdp2x.profile(tmp_path):
        model(inputs(ctx.rank))
        raise ValueError("on purpose")
    assert (tmp_path / f"trace-rank{ctx.rank}.json.gz").is_file()
    with pytest.raises(ValueError, match="sharded model"), fsdp2x.profile(tmp_path, model=Stack(), memory=True):
        pass
