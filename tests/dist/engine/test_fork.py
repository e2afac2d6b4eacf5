"""A forked child of a rank: every use of the sharded model is refused there, and the parent's rank does not notice."""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp2x
from fsdp2x import checkpoint, export
from harness import distributed
from models import STACK_UNITS, Stack, inputs, step
from reference import both_transports, params, same, shard


def in_child(body) -> str:
    """Runs ``body`` in a forked child of this rank and returns its result or error as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = f"returned {body()!r}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        os.write(write, text.encode()[:30000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(pid, 0)[1] == 0, text
    return text


def make(ctx, transport, **options):
    torch.manual_seed(0)
    model = shard(ctx, Stack(), STACK_UNITS, transport=transport, **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def uses(ctx, model, optimizer, loss) -> dict:
    """Operations that a child might try, by name. ``loss`` still needs its backward."""
    x = inputs(ctx.rank, 9)
    return {
        "forward": lambda: torch.no_grad()(model)(x),
        "forward under grad": lambda: model(x),
        "forward of a block": lambda: model.blocks[0](x),
        "backward": loss.backward,
        "unshard": lambda: [model.blocks[1].unshard(), model.blocks[1].reshard()],
        "reset": model.reset_iter_state,
        "clip": lambda: fsdp2x.clip_grad_norm_(model.parameters(), 1.0),
        "export": lambda: [bucket.tensors for bucket in export.stream(model)],
        "save": lambda: checkpoint.save(tempfile.gettempdir() + "/fsdp2x-never", model, optimizer, step=1),
        "wait": lambda: checkpoint.wait(model),
        "a model of its own": lambda: shard(ctx, Stack(), STACK_UNITS)(x),
    }


@distributed(world_sizes=(2,))
@both_transports
def test_every_use_in_a_child_is_refused(ctx, transport):
    """One child for all uses; the parent's losses are those of a run without it, bit for bit."""
    expected, twin = [], make(ctx, transport)
    for number in range(4):
        expected.append(step(ctx, *twin, number))
    model, optimizer = make(ctx, transport)
    losses = [step(ctx, model, optimizer, 0)]
    checkpoint.wait(model)  # a save of this model may run: what a child sees of it has stopped
    loss = model(inputs(ctx.rank, 1)).square().mean()

    def try_all() -> dict:
        said = {}
        for name, use in uses(ctx, model, optimizer, loss).items():
            try:
                said[name] = f"returned {use()!r}"
            except BaseException as error:
                said[name] = f"{type(error).__name__}: {error}"
        return said

    said = eval(in_child(try_all).removeprefix("returned "))
    assert "autograd's threading in combination with fork" in said.pop("backward")  # torch's own sentence
    for name, text in said.items():
        assert text.startswith("RuntimeError: fsdp2x: a forked child (pid ") and "spawn" in text, (name, text)
        assert f"belong to process {os.getpid()}" in text, (name, text)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses += [loss.detach(), step(ctx, model, optimizer, 2), step(ctx, model, optimizer, 3)]
    same(losses, expected)
    same(params(model), params(twin[0]))


@distributed(world_sizes=(2,))
@both_transports
@pytest.mark.parametrize("end", ["del", "exit", "exception in forward"])
def test_the_end_of_a_child_is_not_the_parents(ctx, transport, end):
    expected, twin = [], make(ctx, transport)
    for number in range(3):
        expected.append(step(ctx, *twin, number))
    models = [make(ctx, transport)]
    losses = [step(ctx, *models[0], 0)]

    def drop():
        models.clear()
        gc.collect()

    def fail():
        models[0][0].blocks[0].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
        models[0][0](inputs(ctx.rank))

    text = in_child({"del": drop, "exit": sys.exit, "exception in forward": fail}[end])
    assert ("returned" if end == "del" else "Exit" if end == "exit" else "forked child") in text, text
    losses += [step(ctx, *models[0], 1), step(ctx, *models[0], 2)]
    same(losses, expected)


@distributed(world_sizes=(2,))
def test_unsharded_weights_are_not_there(ctx):
    """Between forward and backward the root has whole weights: in a child they are an error that says why, no crash."""
    model, _ = make(ctx, "shm")
    loss = model(inputs(ctx.rank)).sum()
    weight = model.head.weight
    text = in_child(lambda: weight.sum().item())
    assert "RuntimeError" in text and "'head.weight'" in text and "forked child" in text, text
    assert "returned" in in_child(lambda: model.blocks[0].up.weight.to_local().sum().item())  # shards are a child's own
    weight.sum().item()
    loss.backward()


class UsesTheModel(torch.utils.data.Dataset):
    """A dataset that has the model, as a data loader's worker gets it."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(inputs(0, index)).sum()


@distributed(world_sizes=(2,), timeout=120)
def test_a_worker_of_a_data_loader(ctx):
    model, optimizer = make(ctx, "shm")
    step(ctx, model, optimizer, 0)
    # Ranks of the harness are daemons, which may have no children; those of a job are not.
    if ctx.rank == 0:
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False).start()
        # How long torch waits for the end of a worker.
        mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2).start()
        loader = torch.utils.data.DataLoader(UsesTheModel(model), num_workers=1, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match="forked child .* cannot run"):
            list(loader)
        gc.collect()  # ends the worker
    dist.barrier()
    step(ctx, model, optimizer, 1)
