"""Random module trees, cuttings and world sizes: the sharded model computes what the unsharded one computes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import trees
from drawn import explore
from reference import TRANSPORTS, grads, params, same
from trees import WIDTH, Case

# Ranks -> examples; more ranks than cores are slow.
NUM_EXAMPLES = {1: 1, 2: 3, 3: 2, 4: 1}
STEPS = 2
# Sums in another order than the unsharded model's; bf16 gradients are rounded once more than the reference's mean.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.uint8: 0.0}


@pytest.mark.parametrize("world", NUM_EXAMPLES)
def test_random_trees(request, world):
    explore(request, world, check, NUM_EXAMPLES[world], shrink=False, cases=trees.cases(world))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [*NUM_EXAMPLES, 5])
def test_many_random_trees(request, world):
    explore(request, world, check, 100, shrink=True, cases=trees.cases(world, depth=3))


def _input(case: Case, step: int, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + 100 * step + 10 * number + rank)
    x = torch.tanh(torch.randn(4, WIDTH, generator=generator)).to(case.dtype)
    return x.requires_grad_(case.input_grad)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer | None:
    trainable = [param for param in model.parameters() if param.requires_grad]
    if not trainable:
        return None
    if case.optimizer == "SGD":
        return torch.optim.SGD(trainable, lr=0.1, momentum=0.9)
    # A large eps: with the usual one the first step is a sign, which rounding decides where a gradient is zero.
    return torch.optim.AdamW(trainable, lr=1e-2, eps=1e-2)


def _forward(case: Case, model: nn.Module, step: int, number: int, rank: int) -> list[torch.Tensor | None]:
    """Forward and backward of one micro-batch: the loss, and the input's gradient if it has one."""
    x = _input(case, step, number, rank)
    loss = torch.tanh(model(x)).square().mean()
    if loss.requires_grad:
        loss.backward()
    return [loss.detach(), x.grad]


def _reference_step(case: Case, model: nn.Module, step: int, rank: int, world: int) -> list:
    """The same on the unsharded model; leaves the mean over ranks of the accumulated gradients in .grad. Collective."""
    results = [_forward(case, model, step, number, rank) for number in range(case.micro_batches)]
    with_grad = [param for param in model.parameters() if param.grad is not None]
    if with_grad:
        mean = torch.cat([param.grad.double().flatten() for param in with_grad])
        dist.all_reduce(mean)
        parts = (mean / world).split([param.numel() for param in with_grad])
        for param, part in zip(with_grad, parts, strict=True):
            param.grad.copy_(part.view(param.shape))
    return results


def _sharded_step(case: Case, model: nn.Module, step: int, rank: int) -> list:
    results = []
    for number in range(case.micro_batches):
        model.set_requires_gradient_sync(number == case.micro_batches - 1)
        results.append(_forward(case, model, step, number, rank))
    return results


def check(ctx, case: Case) -> None:
    """Body: losses, gradients and parameters of two optimizer steps, over both transports."""
    import fsdp2x

    for transport in TRANSPORTS:
        if ctx.impl == "torch":
            pytest.skip("stock refuses mixed dtypes and parameters without an element")
        reference = trees.build(case)
        model = trees.build(case)
        names = [name for name, _ in reference.named_parameters()]
        for modules, reshard in trees.units_of(case, model):
            target = modules[0] if len(modules) == 1 else modules
            fsdp2x.fully_shard(target, reshard_after_forward=reshard, transport=transport, auto_wrap=False)
        assert [name for name, _ in model.named_parameters()] == names
        optimizers = [one for one in (_optimizer(case, reference), _optimizer(case, model)) if one is not None]
        for step in range(STEPS):
            where = f"{transport}, step {step}"
            expected = _reference_step(case, reference, step, ctx.rank, ctx.world)
            got = _sharded_step(case, model, step, ctx.rank)
            same(got, expected, f"{where}: losses", **_tolerance(case, case.dtype))
            _compare(f"{where}: gradient of ", case, grads(model), grads(reference))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            theirs = dict(reference.named_parameters())
            ours = params(model)
            _compare(f"{where}: parameter ", case, ours, theirs)
            with torch.no_grad():  # the next step starts from equal bits, so that differences do not add up
                for name, param in theirs.items():
                    param.copy_(ours[name])
        assert fsdp2x.describe(model).stats["scratch_slots_owned"] == 0


def _tolerance(case: Case, dtype: torch.dtype) -> dict[str, float]:
    """By the less exact of the tensor's dtype and the activations'."""
    worst = max(TOLERANCES[dtype], TOLERANCES[case.dtype])
    return {"rtol": worst, "atol": worst}


def _compare(where: str, case: Case, ours: dict, theirs: dict) -> None:
    for name, expected in theirs.items():
        if expected is None:
            assert ours[name] is None, f"{where}{name}: {ours[name]} instead of None"
        else:
            same(ours[name], expected.detach(), where + name, **_tolerance(case, expected.dtype))
