"""The self-test passes on a right engine at every world size, and each of three injected faults makes it fail."""

import subprocess

import pytest
import torch
import torch.distributed as dist

from fsdp2x.train.selftest import run_suite, shard_layers
from harness import distributed, programs

CPU = torch.device("cpu")


def suite(**options) -> dict[str, str]:
    return dict(run_suite(CPU, num_steps=3, **options))


@pytest.mark.full  # the command's test also runs it
@distributed(world_sizes=(1, 2, 3, 4), timeout=110)
def test_passes(ctx):
    assert suite() == {}


def unscaled(model, **options):
    """Sums over the ranks where the mean belongs."""
    model = shard_layers(model, **options)
    model.layers[1].set_gradient_divide_factor(1.0)
    return model


def unsynced(model, **options):
    """Rank 1 keeps a gradient of its own for one parameter."""
    model = shard_layers(model, **options)
    if dist.get_rank() == 1:
        weight = model.layers[2].linear1.weight

        def keep_own(param):
            param.grad.to_local().mul_(1.5)

        weight.register_post_accumulate_grad_hook(keep_own)
    return model


def stale(model, **options):
    """One layer computes with the weights of its first forward for ever."""
    model = shard_layers(model, **options)
    layer, first = model.layers[3], []

    def use_first(module, args):
        weight = module.linear2.weight
        if not first:
            first.append(weight.detach().clone())
        with torch.no_grad():
            weight.copy_(first[0])

    layer.register_forward_pre_hook(use_first)
    return model


@distributed(world_sizes=(2,), timeout=110)
@pytest.mark.parametrize(
    ("fault", "caught_by", "message"),
    [
        (unscaled, "Gradient Synchronization", "layers.1.*is off by"),
        (unsynced, "Gradient Synchronization", "layers.2.linear1.weight.*is off by"),
        (stale, "Loss Consistency", "loss .* expected"),
    ],
)
def test_faults_are_found(ctx, fault, caught_by, message):
    import re

    failures = suite(shard=fault)
    assert caught_by in failures, failures
    assert re.search(message, failures[caught_by]), failures


def run_command(*words: str) -> subprocess.CompletedProcess:
    return programs.run("-m", "fsdp2x", "selftest", "--device", "cpu", *words)


def test_command():
    done = run_command("--world", "2", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✅") == 6 and "❌" not in done.stdout
    assert done.stdout.count("=== Testing ") == 5 and "✅ All tests passed!" in done.stdout


def test_a_run_that_takes_too_long_is_ended():
    done = run_command("--world", "2", "--timeout", "0.5")
    assert done.returncode == 1 and "Timeout (0:00:00.500000)!" in done.stderr
