"""Backward hooks of modules see the gradients of their weights, as with upstream and without sharding."""

import gc

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2x
from harness import distributed
from models import STACK_UNITS, Mlp, Stack, inputs
from reference import both_transports, full, grads, only_fsdp2x, parity, same, shard

HOOKED = ("blocks.1", "blocks.1.up", "blocks.2.down", "norm", "head")


def watch(model, paths=HOOKED):
    """Registers hooks that record the full gradient of each weight of each module. Returns the records and handles."""
    seen = []

    def hook(path, module):
        found = full([param.grad for param in module.parameters()])
        seen.append((path, [type(param).__name__ for param in module.parameters()], found))

    handles = []
    for path in paths:
        module = model.get_submodule(path)
        handles.append(module.register_full_backward_hook(lambda module, *args, path=path: hook(path, module)))
    return seen, handles


def steps(ctx, model, num=3, sync=lambda number: True):
    for number in range(num):
        model.set_requires_gradient_sync(sync(number))
        model(inputs(ctx.rank, number)).square().mean().backward()


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("sync", ["always", "last"])
@both_transports
def test_full_backward_hooks_see_gradients(ctx, sync, transport):
    """This includes hooks added after the first step and removed before the last one.

    Without gradient synchronization, fsdp2x's hooks see the micro-batch's gradient. FSDP2's hooks see the sum so far.
    """

    def run(model):
        steps(ctx, model)
        model.zero_grad()
        seen, handles = watch(model)
        steps(ctx, model, sync=lambda number: sync == "always" or number == 2)
        for handle in handles:
            handle.remove()
        steps(ctx, model)
        watched.append(seen)
        return seen if sync == "always" else None, grads(model)

    watched = []
    parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    seen = watched[-1]
    assert len(seen) == 3 * len(HOOKED) and all(grad is not None for _, _, found in seen for grad in found)


@distributed(world_sizes=(2,))
@both_transports
def test_a_hook_of_all_modules(ctx, transport):
    def run(model):
        seen = []

        def hook(module, *args):
            if isinstance(module, nn.Linear):
                seen.append(full(module.weight.grad))

        handle = nn.modules.module.register_module_full_backward_hook(hook)
        try:
            steps(ctx, model, num=2)
        finally:
            handle.remove()
        return seen, grads(model)

    seen, _ = parity(ctx, Stack(), run, STACK_UNITS, transport=transport)
    # The first module's inputs need no gradients, so its hook runs before its weights' gradients in any implementation.
    assert len(seen) == 2 * 7 and sum(grad is not None for grad in seen) == 2 * 6


class Shared(Stack):
    """A weight that two modules use, a unit that runs twice and one that is recomputed."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[1].up.weight

    def forward(self, x):
        x = self.blocks[0](self.blocks[0](x))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return self.head(self.norm(self.blocks[2](x)))


@distributed(world_sizes=(2,))
@both_transports
def test_hooks_of_units_that_run_twice(ctx, transport):
    """Hooks that read the gradients do not change their sums."""
    only_fsdp2x(ctx)
    results = []
    for hooked in (False, True):
        model = shard(ctx, Shared(), ("blocks.0", "blocks.1+blocks.2"), transport=transport)
        if hooked:
            watch(model)
        steps(ctx, model)
        results.append(grads(model))
        assert fsdp2x.describe(model).stats["scratch_slots_owned"] == 0
    same(results[1], results[0], rtol=1e-6, atol=1e-7)


@distributed(world_sizes=(2,))
def test_a_module_that_leaves(ctx):
    """The engine refers to the hooks of modules that may be gone."""
    only_fsdp2x(ctx)
    model = shard(ctx, nn.Sequential(Mlp(), nn.Dropout(0.0), nn.Linear(6, 3)))
    model(inputs(ctx.rank)).sum().backward()
    model[1] = nn.Identity()
    gc.collect()
    model(inputs(ctx.rank)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


MOVES = {
    "to": lambda model: model.to("cpu"),
    "float": lambda model: model.float(),
    "apply": lambda model: model._apply(lambda tensor: tensor),
    "requires_grad": lambda model: model.requires_grad_(True),
    "state_dict": lambda model: model.load_state_dict(model.state_dict()),
}


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.each_pair
def test_hooks_of_gradients_outlive_moves(ctx, move, late):
    """An optimizer that runs in backward still works after `.to()`, before the first forward or later."""
    model = shard(ctx, Stack(), STACK_UNITS)
    seen = {name: 0 for name, _ in model.named_parameters()}
    params = dict(model.named_parameters())

    def count(name):
        def hook(param):
            assert param is params[name] and param.grad is not None
            seen[name] += 1

        return hook

    handles = [param.register_post_accumulate_grad_hook(count(name)) for name, param in params.items()]
    if late:
        steps(ctx, model, 1)
    MOVES[move](model)
    steps(ctx, model, 2)
    assert set(seen.values()) == {2 + late}, seen
    for handle in handles:
        handle.remove()
    steps(ctx, model, 1)
    assert set(seen.values()) == {2 + late}, seen
