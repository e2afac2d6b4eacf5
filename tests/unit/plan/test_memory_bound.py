"""Checks that no row of a random plan is below its bound, or above it by more than padding and units in flight."""

from collections.abc import Container

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2x.plan.plan import planned_facts, planned_report
from fsdp2x.plan.request import PlanRequest
from memory_bound import memory_bound

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = [MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16, BF16)]
PLACES = [
    *({"device": "cuda", "offload": mode} for mode in ("none", "gradients", "all", "optimizer")),
    {"device": "cpu", "transport": "process_group"},
    {"device": "cpu", "transport": "shm"},
]
OPTIMIZERS = ["adamw", "adamw_int8", "adamw_bfloat16", "sgd"]
# A parameter may take more than its rows for alignment and a step count, and a unit for flags of its gradients.
PARAM_SLACK_BYTES, UNIT_SLACK_BYTES = 64 + 4, 64
# So many more full units than the bound, and full gradients of so many more units, may be in flight.
NUM_FULL, NUM_REDUCED = 2, 2
PAGES_BYTES = 12 * 4096  # shared memory is of whole pages

sizes = st.lists(st.sampled_from([1, 2, 3, 16, 64, 257, 1000]), min_size=1, max_size=3)
params = st.tuples(sizes, st.sampled_from([FP32, FP32, BF16, torch.uint8]), st.booleans())
runs = st.fixed_dictionaries(
    {
        "world": st.sampled_from([1, 2, 3, 8, 64]),
        "replicas": st.sampled_from([1, 2]),
        "place": st.sampled_from(PLACES),
        "mp_policy": st.sampled_from(POLICIES),
        "reshard": st.sampled_from([None, True, False, 2]),
        "optimizer": st.sampled_from([*OPTIMIZERS, "sgd_momentum"]),
    }
)


class Unit(nn.Module):
    """Parameters of a shape, a dtype, and whether they train."""

    def __init__(self, params):
        super().__init__()
        for index, (shape, dtype, trains) in enumerate(params):
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(f"p{index}", nn.Parameter(tensor, trains and dtype.is_floating_point))
        self.register_buffer("buffer", torch.empty(5, device="meta"))


@settings(
    max_examples=150,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(units=st.lists(st.lists(params, max_size=4), min_size=1, max_size=5), ties=st.booleans(), run=runs)
def test_drawn_plans(units, ties, run):
    check(units, ties, **run)


def check(units, ties, world, replicas, place, mp_policy, reshard, optimizer):
    model = nn.Sequential(*map(Unit, units), nn.Linear(3, 2, device="meta"))
    if ties:
        model[-1].register_parameter("tied", next(model.parameters()))
    if place.get("offload") == "optimizer" and optimizer not in OPTIMIZERS:
        optimizer = "adamw"
    reshard = reshard if reshard != 2 or world % 2 == 0 else None
    options = {"replicas": replicas, "auto_wrap": ["Unit"], "mp_policy": mp_policy, "reshard_after_forward": reshard}
    request = PlanRequest(world * replicas, optimizer=optimizer, **options, **place)
    facts = planned_facts(model, request)
    report = planned_report(facts, request)
    bound = memory_bound(facts, optimizer, mp_policy)

    def padded(param: nn.Parameter, copies: int) -> int:
        """Rank 0 may have a row more than the average."""
        return PARAM_SLACK_BYTES + copies * 4 * (param.numel() // param.shape[0])

    said = f"{report}\n{bound}"
    slack = sum(padded(param, 1) for param in model.parameters()) + UNIT_SLACK_BYTES * len(model)
    for name in ("shard_bytes", "gradient_bytes", "optimizer_bytes", "resident_shard_bytes", "unsharded_bytes"):
        lower, found = getattr(bound, name), getattr(report, name)
        moments = 2 if name == "optimizer_bytes" else 1
        assert lower <= found <= lower + moments * slack, f"{name}: {said}"
    assert bound.host_bytes <= report.host_bytes, said
    assert bound.resting_bytes <= report.resting_bytes, said
    assert report.resting_bytes - report.after_forward_bytes <= bound.resting_bytes + 5 * slack, said
    assert bound.peak_bytes <= report.peak_bytes, said
    # Ranks that share memory have room for gradients of all parameters: they may differ in what trains.
    has_room = world == 1 or place.get("transport") == "shm"
    reduced = {param for param in model.parameters() if param.requires_grad or has_room}

    def largest(params: Container[nn.Parameter]) -> int:
        """Bytes of the largest unit, of these parameters in full."""
        return UNIT_SLACK_BYTES + max(
            sum(padded(param, world) + 4 * param.numel() for param in unit.parameters() if param in params)
            for unit in model
        )

    above = report.peak_bytes - report.after_forward_bytes - report.replica_bytes - bound.peak_bytes
    in_flight = NUM_FULL * largest(set(model.parameters())) + NUM_REDUCED * largest(reduced)
    assert above <= 5 * slack + PAGES_BYTES + in_flight, said
    waiting = sum(4 * param.numel() / world for param in model.parameters() if param.requires_grad)
    assert report.replica_bytes <= waiting + 4 * slack + PAGES_BYTES + 2 * largest(reduced), said
