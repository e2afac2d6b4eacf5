"""One rank cannot share memory: all of them take the process group together, warn once, and say the same with "shm"."""

import builtins
import contextlib
import os
import resource
import time
import warnings
from unittest import mock

import pytest
import torch

import fsdp2x
from fsdp2x import export
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import grads, same, shard


@contextlib.contextmanager
def limited(which: int, value: int):
    """A soft limit of this process."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(which, (soft, hard))


@contextlib.contextmanager
def hidden_boot_id():
    true_open = builtins.open

    def refuse(path, *args, **kwargs):
        if "boot_id" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return true_open(path, *args, **kwargs)

    with mock.patch.object(builtins, "open", refuse):
        yield


def next_descriptor() -> int:
    file = os.open("/dev/null", os.O_RDONLY)
    os.close(file)
    return file


def fault_of(name: str):
    """(what makes it, what the ranks say of it)."""
    return {
        "file size": (lambda: limited(resource.RLIMIT_FSIZE, 1024), "ulimit -f"),
        "boot id": (hidden_boot_id, "boot_id"),
        "descriptors": (lambda: limited(resource.RLIMIT_NOFILE, next_descriptor()), "Too many open files"),
    }[name]


# The file is rank 0's alone.
FAULTS = [("file size", 0), ("boot id", 0), ("boot id", 1), ("descriptors", 0), ("descriptors", 1)]


def step(ctx, model):
    model(inputs(ctx.rank)).square().mean().backward()
    return grads(model)


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(("name", "victim"), FAULTS)
def test_all_ranks_take_the_process_group(ctx, name, victim):
    make, said = fault_of(name)
    expected = step(ctx, shard(ctx, Stack(), STACK_UNITS, transport="process_group"))
    model = shard(ctx, Stack(), STACK_UNITS)
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with make() if ctx.rank == victim else contextlib.nullcontext():
            found = step(ctx, model)
    assert time.monotonic() - started < 10
    same(found, expected)
    assert fsdp2x.describe(model).transport == "process_group"
    texts = [str(warning.message) for warning in caught if "do not share memory" in str(warning.message)]
    assert len(texts) == (1 if ctx.rank == 0 else 0), texts
    assert all(said in text and f"rank {victim}" in text for text in texts), texts
    # The fault is over: the next model shares memory again.
    other = shard(ctx, Stack(), STACK_UNITS)
    same(step(ctx, other), expected, rtol=1e-6, atol=1e-7)
    assert fsdp2x.describe(other).transport == "shm"


@distributed(world_sizes=(3,))
@pytest.mark.parametrize(("name", "victim"), FAULTS)
def test_all_ranks_say_the_same(ctx, name, victim):
    make, said = fault_of(name)
    model = shard(ctx, Stack(), STACK_UNITS, transport="shm")
    with make() if ctx.rank == victim else contextlib.nullcontext(), pytest.raises(ValueError) as error:
        model(inputs(ctx.rank))
    sentences = [None] * ctx.world
    torch.distributed.all_gather_object(sentences, str(error.value))
    assert len(set(sentences)) == 1 and said in sentences[0] and f"rank {victim}" in sentences[0], sentences


@distributed(world_sizes=(2,))
@pytest.mark.parametrize(("name", "victim"), FAULTS)
def test_an_export_takes_the_process_group(ctx, name, victim):
    make, _ = fault_of(name)
    model = shard(ctx, Stack(), STACK_UNITS, transport="process_group")

    def whole(transport):
        stream = export.stream(model, names="model", transport=transport)
        return {spec.name: t.clone() for bucket in stream for spec, t in zip(bucket.specs, bucket.tensors, strict=True)}

    with make() if ctx.rank == victim else contextlib.nullcontext():
        found = whole("auto")
        with pytest.raises(ValueError, match="not possible"):
            whole("shm")
    same(found, whole("shm"))
