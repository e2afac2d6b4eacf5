"""One GPU: the formulas of memory_report against the allocator's counts, and peaks against FSDP2's."""

import pytest
import torch
from torch import nn

import fsdp2x
import one_gpu
from harness import distributed
from one_gpu import POLICIES, clean_base, measured, on_gpu, requested_bytes
from reference import shard

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("memory")]

WIDTH, NUM = 1024, 6
# Uploaded plans, flags, the activations of 8 rows, and losses.
SLACK_BYTES = 2 * 2**20


class Block(nn.Module):
    """Two fp32 weights of 4 MiB, so that a unit's gradients take more than one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM)))


@distributed(world_sizes=(1,), timeout=300)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["ours", "torch"])
def test_the_report_is_what_the_allocator_counts(ctx, policy, name):
    mesh = on_gpu(ctx)
    x = torch.randn(8, WIDTH, device="cuda")
    base = clean_base(POLICIES[policy].param_dtype)
    units = [str(i) for i in range(NUM)]
    model = shard(ctx, blocks(), units, mesh=mesh, mp_policy=POLICIES[policy])
    report = fsdp2x.memory_report(model)
    assert abs(requested_bytes() - base - report.shard_bytes) < SLACK_BYTES, "shards"

    make = fsdp2x.optim.AdamW if name == "ours" else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=1e-3)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        peak = requested_bytes("peak") - base
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    report = fsdp2x.memory_report(model, optimizer)
    for key, value in (report.measured or {}).items():
        assert value == getattr(report, key), key
    assert abs(requested_bytes() - base - report.resting_bytes) < SLACK_BYTES, "at rest"
    assert abs(peak - report.peak_bytes) < SLACK_BYTES, "in forward and backward"


@pytest.mark.parametrize("ranks", [1, 8])
def test_peak_of_a_llama_against_stock(ranks):
    """A 1B model on one rank, and as rank 0 of a fake world of 8. Tables have the numbers, this test the limits."""
    for result in measured("bench_memory.py", "memory", "--cases", f"llama-1b:512:{ranks}"):
        stock, ours, policy = result["stock"], result["fsdp2x"], result["case"]["policy"]
        assert ours["model"] <= 1.01 * stock["model"], policy
        assert abs(ours["resting"] - ours["plan_resting"]) < 0.02 * ours["resting"], policy
        assert ours["plan_peak"] <= 1.01 * ours["backward"], policy  # the report knows no activations
        # Only activations are added: at most FSDP2's, above weights, moments, and gradients.
        assert ours["backward"] - ours["plan_peak"] <= stock["backward"] - stock["model"], policy
