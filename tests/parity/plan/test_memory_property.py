"""Random module trees: what memory_report and its replay of the schedule predict is what the engine counted."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

import streams
import trees
from drawn import explore
from fsdp2x.base.native import _C
from fsdp2x.lifecycle.contexts import BEFORE_LAST
from memory import LEDGER
from reference import TRANSPORTS, only_fsdp2x
from trees import WIDTH, Case

# Ranks -> examples; more ranks than cores are slow.
NUM_EXAMPLES = {1: 3, 2: 4, 3: 2, 4: 2}
# After as many steps no ledger grows any more.
NUM_STEPS = 4


@st.composite
def cases(draw: st.DrawFn, world: int, depth: int = 2) -> Case:
    case = draw(trees.cases(world, depth))
    options = {
        "pack_below_bytes": draw(st.sampled_from([0, 64, 3000])),
        "grouped": draw(st.booleans()),
        "pieces": draw(st.sampled_from([_C.PIECES, (600, 300)])),
        "before_last": draw(st.sampled_from(BEFORE_LAST)),
        "optimizer": draw(st.booleans()),
    }
    return replace(case, options=options)


@pytest.mark.parametrize("world", NUM_EXAMPLES)
def test_random_trees(request, world):
    explore(request, world, check, NUM_EXAMPLES[world], shrink=False, cases=cases(world))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", NUM_EXAMPLES)
def test_many_random_trees(request, world):
    explore(request, world, check, 100, shrink=True, cases=cases(world, depth=3))


def check(ctx, case: Case) -> None:
    """Body: bytes of slots and scratches, gathers and reductions of a steady step, of all three transports."""
    import fsdp2x

    only_fsdp2x(ctx)
    for transport in (*TRANSPORTS, "streams"):
        if transport == "streams":
            streams.install(case.options["pack_below_bytes"], case.options["grouped"], pieces=case.options["pieces"])
        model = trees.build(case)
        for modules, reshard in trees.units_of(case, model):
            target = modules[0] if len(modules) == 1 else modules
            fsdp2x.fully_shard(target, reshard_after_forward=reshard, transport=transport, auto_wrap=False)
        trainable = [param for param in model.parameters() if param.requires_grad]
        if not trainable:
            return
        optimizer = fsdp2x.optim.AdamW(trainable) if case.options["optimizer"] else None
        micro_batches = {"micro_batches": case.micro_batches, "before_last": case.options["before_last"]}
        plan = fsdp2x.memory_report(model, optimizer, **micro_batches)
        steps = []
        for _ in range(NUM_STEPS):
            train(case, model)
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
            steps.append(Counter(fsdp2x.describe(model).stats))
        after = fsdp2x.memory_report(model, optimizer, **micro_batches)
        predicted, found = plan.to_dict(), {**after.to_dict(), "measured": None}
        assert found == predicted, {
            name: (predicted[name], found[name]) for name in found if found[name] != predicted[name]
        }
        expected = {name: getattr(plan, name) for name in LEDGER}
        said = f"{transport}: planned {expected}, measured {after.measured}\n{plan}\n{steps[-1]}"
        for name in LEDGER:
            # Over shared memory scratches are those of the worst order of ranks.
            late = transport == "shm" and name == "scratch_bytes"
            assert after.measured[name] == expected[name] or (late and after.measured[name] < expected[name]), said
        for name in ("gathers", "reductions"):
            assert steps[-1][name] - steps[-2][name] == getattr(plan.traffic, name), f"{name}: {said}"


def train(case: Case, model) -> None:
    import fsdp2x

    for number in range(case.micro_batches):
        last = number == case.micro_batches - 1
        with fsdp2x.accumulate(model, last=last, before_last=case.options["before_last"]):
            x = torch.tanh(torch.randn(4, WIDTH)).to(case.dtype)
            torch.tanh(model(x)).square().mean().backward()
