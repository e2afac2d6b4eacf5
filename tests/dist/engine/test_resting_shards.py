"""Shards stored in the buffer that gathers use: gathers copy nothing, and no rank sees values before their gather.

The tests compare every result, bit for bit, with the same model whose gathers copy. A test holds that model's shards,
so they stay in their flat buffers.
"""

import os
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from test_fork import in_child

import fsdp2x
import memory
from fsdp2x.base import torch_private
from harness import distributed
from models import STACK_UNITS, Stack, inputs, step
from reference import params, same, shard


def groups_of(model) -> list:
    return [group for state in model._get_fsdp_state().shared.tree for group in state.groups]


def resting(model) -> list[bool]:
    return [group.engine.has_resting_shards for group in groups_of(model)]


def local(model, name: str) -> torch.Tensor:
    return torch_private.local_tensor(dict(model.named_parameters())[name])


def make(ctx, optimizer=torch.optim.SGD, *, model=None, copies=False, **options):
    """`copies`: the shards stay in their pools."""
    model = shard(ctx, Stack() if model is None else model, STACK_UNITS, transport="shm", **options)
    if copies:
        hold(model)
    return model, optimizer(model.parameters(), lr=0.05)


def hold(model) -> None:
    model.__dict__["held"] = [torch_private.local_tensor(param).detach() for param in model.parameters()]


def private_bytes(before: set[int]) -> int:
    """Bytes of shared memory mapped since `before` whose pages this rank has copied privately by writing."""
    return memory.copied_shared_bytes(set(memory.shared_files()) - before)


OPTIMIZERS = {
    "torch.AdamW": torch.optim.AdamW,
    "torch.SGD": torch.optim.SGD,
    "fused": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
    "AdamW": fsdp2x.optim.AdamW,
    "local": lambda params, lr: fsdp2x.local_optimizer(torch.optim.Adagrad(params, lr=lr)),
}


@distributed(world_sizes=(2, 3, 4))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_writes_where_peers_read(ctx, name):
    """No page of the shards is this rank's alone after a step: the next gather has nothing to copy."""
    before = set(memory.shared_files())
    model, optimizer = make(ctx, OPTIMIZERS[name])
    twin, of_twin = make(ctx, OPTIMIZERS[name], copies=True)
    for number in range(3):
        same(step(ctx, model, optimizer, number), step(ctx, twin, of_twin, number))
        assert all(resting(model)) and private_bytes(before) == 0
    assert not any(resting(twin))
    same(params(model), params(twin))


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("how", ["step", "in place", "data", "numpy", "copy_", "load"])
def test_a_rank_that_is_ahead_writes(ctx, how):
    """It has left the model and changes its shards, while the others still compute with what was gathered."""
    model, optimizer = make(ctx, lambda params, lr: torch.optim.SGD(params, lr=1.0))
    plain = Stack()
    x = inputs(0)
    with torch.no_grad():
        expected = plain(x)
        model(x)
        arrays = {name: local(model, name).numpy() for name, _ in model.named_parameters()} if how == "numpy" else {}
        last = ctx.rank == ctx.world - 1
        handles = [block.up.register_forward_pre_hook(lambda *_: time.sleep(0.05 * last)) for block in model.blocks]
        for number in range(3):
            same(model(x), expected, f"round {number}", rtol=1e-6, atol=1e-6)
            for name, param in model.named_parameters():
                if how == "in place":
                    param.mul_(1.5)
                elif how == "data":
                    param.data.mul_(1.5)
                elif how == "numpy":
                    arrays[name] *= np.float32(1.5)
                elif how == "copy_":
                    param.copy_(param * 1.5)
                elif how == "step":
                    param.grad = param * -0.5
            if how == "step":
                optimizer.step()
            if how == "load":
                model.load_state_dict({name: value.detach() * 1.5 for name, value in model.state_dict().items()})
            for param in plain.parameters():
                param.mul_(1.5)
            expected = plain(x)
        same(model(x), expected, "after all", rtol=1e-6, atol=1e-6)
        for handle in handles:
            handle.remove()


@distributed(world_sizes=(2, 3))
def test_a_closure_that_is_ahead(ctx):
    """A step runs the model and writes while the others still compute with what was gathered in it."""
    model, _ = make(ctx)
    model(inputs(0)).sum().backward()  # from now on shards rest
    model.zero_grad()
    dist.barrier()
    plain = Stack()
    tensors = [torch_private.local_tensor(param) for param in model.parameters()]
    last = ctx.rank == ctx.world - 1
    for block in model.blocks:
        block.up.register_forward_pre_hook(lambda *_: time.sleep(0.05 * last))

    @torch.no_grad()
    def closure():
        for _ in range(2):
            same(model(inputs(0)), plain(inputs(0)), rtol=1e-6, atol=1e-6)
            for tensor in (*tensors, *plain.parameters()):
                tensor.mul_(1.5)

    torch.optim.SGD(tensors, lr=0.1).step(closure)
    with torch.no_grad():
        same(model(inputs(0)), plain(inputs(0)), rtol=1e-6, atol=1e-6)


@distributed(world_sizes=(2,))
def test_a_child_has_the_shards_as_they_were(ctx):
    """Also those that are stepped after the fork, and a child that steps changes nothing for its parent."""
    before = set(memory.shared_files())
    model, optimizer = make(ctx)
    step(ctx, model, optimizer)
    values = {name: local(model, name).clone() for name, _ in model.named_parameters()}
    read, write = os.pipe()
    said_read, said_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)  # the parent has trained on
        mine = {name: local(model, name).clone() for name, _ in model.named_parameters()}
        equal = all(torch.equal(mine[name], value) for name, value in values.items())
        with torch.no_grad():
            for name in mine:
                local(model, name).add_(1)
        moved = all(torch.equal(local(model, name), value + 1) for name, value in values.items())
        os.write(said_write, bytes([equal, moved]))
        os._exit(0)
    expected = None
    for number in range(2):
        expected = step(ctx, model, optimizer, number)
    os.write(write, b"x")
    assert os.read(said_read, 2) == b"\x01\x01"
    assert os.waitpid(pid, 0)[1] == 0
    for descriptor in (read, write, said_read, said_write):
        os.close(descriptor)
    assert expected is not None
    step(ctx, model, optimizer, 3)
    assert private_bytes(before) == 0
    text = in_child(lambda: [optimizer.step(), model.load_state_dict(model.state_dict())] and "stepped")
    assert "'stepped'" in text, text
    step(ctx, model, optimizer, 4)


@distributed(world_sizes=(2,))
def test_memory_is_once_for_the_host(ctx):
    """A trained model without optimizer state: whole weights once for all ranks, gradients, a scratch each."""
    width, num = 256, 4
    model = Stack(num=num, width=width, hidden=2 * width)
    num_bytes = sum(param.numel() for param in model.parameters()) * 4
    before = set(memory.shared_files())
    model, optimizer = make(ctx, model=model)
    for _ in range(2):
        model(torch.randn(2, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    (pages,) = [size for inode, size in memory.shared_files().items() if inode not in before]
    scratch = ctx.world * fsdp2x.describe(model).stats["scratch_bytes"]
    assert num_bytes <= pages <= num_bytes + scratch + 2**18
    assert fsdp2x.describe(model).stats["gather_slot_bytes"] == 0


WRITES = {
    "nothing": lambda model, optimizer: None,
    "in place": lambda model, optimizer: [param.mul_(1.125) for param in model.parameters()],
    "one by data": lambda model, optimizer: model.head.weight.data.add_(0.25),
    "one row": lambda model, optimizer: local(model, "blocks.1.down.weight")[:1].fill_(0.5),
    "numpy": lambda model, optimizer: np.multiply(a := local(model, "blocks.0.up.bias").numpy(), 2, out=a),
    "load": lambda model, optimizer: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
    "assign": lambda model, optimizer: model.load_state_dict(
        {k: v.clone() for k, v in model.state_dict().items()}, assign=True
    ),
    "sleep": lambda model, optimizer: [optimizer.zero_grad(), fsdp2x.sleep(model), fsdp2x.wake(model)],
    "unsharded": lambda model, optimizer: write_unsharded(model),
    "share": lambda model, optimizer: local(model, "blocks.0.up.weight").untyped_storage().share_memory_(),
    "fork": lambda model, optimizer: in_child(lambda: [param.mul_(2) for param in model.parameters()] and 1),
}
RUNS = {
    "train": lambda ctx, model, optimizer, number: step(ctx, model, optimizer, number),
    "backward": lambda ctx, model, optimizer, number: model(inputs(ctx.rank, number)).square().mean().backward(),
    "evaluate": lambda ctx, model, optimizer, number: evaluate(model, ctx, number),
    "step": lambda ctx, model, optimizer, number: optimizer.step(),
    "zero": lambda ctx, model, optimizer, number: optimizer.zero_grad(),
    "keep": lambda ctx, model, optimizer, number: model.__dict__.setdefault("kept", []).append(model.state_dict()),
    "let go": lambda ctx, model, optimizer, number: model.__dict__.pop("kept", None),
}


@torch.no_grad()
def evaluate(model, ctx, number):
    return model(inputs(ctx.rank, number)).sum()


def write_unsharded(model) -> None:
    """A write to gathered parameters is lost when they are resharded."""
    model.blocks[1].unshard()
    model.blocks[1].up.weight.add_(1)
    model.blocks[1].reshard()


programs = st.lists(st.one_of(st.sampled_from(sorted(RUNS)), st.sampled_from(sorted(WRITES))), min_size=4, max_size=14)


def run_programs(ctx, num: int) -> None:
    """After each operation of a drawn program all values are those of a model whose gathers copy."""

    @seed(0)
    @settings(
        max_examples=num,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs)
    def check(program):
        sides = [make(ctx, torch.optim.AdamW, copies=copies) for copies in (False, True)]
        for number, name in enumerate(program):
            found = []
            for model, optimizer in sides:
                if name in RUNS:
                    found.append(RUNS[name](ctx, model, optimizer, number))
                else:
                    with torch.no_grad():
                        WRITES[name](model, optimizer)
            where = f"{program[: number + 1]}"
            if found and isinstance(found[0], torch.Tensor):
                same(*found, where)
            same(params(sides[0][0]), params(sides[1][0]), where)
            hold(sides[1][0])

    check()


@distributed(world_sizes=(2, 3))
def test_any_order_of_writes_and_runs(ctx):
    run_programs(ctx, 6)


@pytest.mark.full
@distributed(world_sizes=(2, 3, 4), timeout=600)
def test_many_orders_of_writes_and_runs(ctx):
    run_programs(ctx, 200)
