"""Runs the checks in one process group: banner, one heading a check, and one verdict that all ranks share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import exchange
from fsdp2x.lifecycle.api import fully_shard
from fsdp2x.train.selftest.checks import CHECKS, CheckFailed, Setting, print_on_first

_LINE = "=" * 60


@checked
def shard_layers(model: nn.Module, mp_policy=None, transport: str = "auto") -> nn.Module:
    """One unit per layer and one for the rest: what the checks shard with."""
    options = {"mp_policy": mp_policy} if mp_policy is not None else {}
    for layer in model.layers:
        fully_shard(layer, transport=transport, **options)
    return fully_shard(model, auto_wrap=False, transport=transport, **options)


@checked
def run_suite(
    device: torch.device, *, shard: Callable[..., nn.Module] = shard_layers, num_steps: int = 20
) -> list[tuple[str, str]]:
    """Runs all checks; collective over the default process group. Prints on rank 0.

    Returns the failures as (name of the check, sentences of the ranks that failed), the same on every rank. After a
    failure the remaining checks still run, unless a rank could not finish: then its error is raised everywhere.
    """
    setting = Setting(shard, device, dist.get_rank(), dist.get_world_size(), num_steps)
    print_on_first(f"{_LINE}\nFSDP2 Integration Test Suite\n{_LINE}")
    failures = []
    for name, check in CHECKS.items():
        print_on_first(f"\n=== Testing {name} ===")
        verdict, wrong = "", None
        try:
            verdict = check(setting)
        except CheckFailed as error:
            wrong = f"rank {setting.rank}: {error}"
        sentences = list(dict.fromkeys(sentence for sentence in exchange(wrong) if sentence is not None))
        if sentences:
            failures.append((name, "; ".join(sentences)))
            print_on_first("\n".join(f"❌ Test failed on {sentence}" for sentence in sentences))
        else:
            print_on_first(f"✅ {verdict}")
    verdict = "✅ All tests passed!" if not failures else f"❌ {len(failures)} of {len(CHECKS)} tests failed"
    print_on_first(f"\n{_LINE}\n{verdict}\n{_LINE}")
    return failures
