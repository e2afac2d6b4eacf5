"""A model on a second device computes what it computes on the first and on the CPU. The first device is current.

The devices are the fake ones of `accelerator.py`. As on a GPU, the engine uses torch's own streams and events there. A
rank of `alike.py`'s world needs no other process.
"""

import contextlib
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

import accelerator
import alike
import fsdp2x
from arrangements import CASES, WIDTH, run
from fsdp2x.base import torch_private
from fsdp2x.base.native import _C
from fsdp2x.rl.sync.delta import Snapshot
from fsdp2x.sharding import transport
from harness import distributed
from models import Stack, inputs
from one_gpu import CLOSE
from reference import same, shard, shard_stock


@pytest.fixture(scope="module")
def library() -> str:
    return accelerator.library()


@contextlib.contextmanager
def sharded(ctx, name: str, device: torch.device, on_cpu: Callable) -> Iterator:
    """Yields a case's sharded model. Then makes the first device current, as other code might."""
    case, is_fake = CASES[name], device.type == "fake"
    with alike.world_of(device.type, None if is_fake else "gloo", case.sizes, case.pack_below) as (mesh, _):
        if is_fake:
            torch.fake.set_device(device.index)
        make = functools.partial(shard, ctx) if is_fake else on_cpu
        model = make(case.make().to(device), case.units, mesh=mesh, **case.options)
        if is_fake:
            torch.fake.set_device(0)
        yield model


def on_host(tensors: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [tensor if tensor is None else tensor.cpu() for tensor in tensors]


def check(library: str, train: Callable[[str, torch.device], list], names: Iterable[str], close: Callable) -> None:
    """`train(name, device)` on the CPU, on the first device, and on the second one, which it leaves to itself."""
    expected = {name: train(name, torch.device("cpu")) for name in names}
    devices = accelerator.Accelerator(library)
    for name in names:
        first = on_host(train(name, torch.device("fake", 0)))
        same(first, expected[name], f"{name}, of the CPU", **close(name))
        gc.collect()  # what is freed asks its device for an event
        before = [devices.counts(index) for index in range(2)]
        second = on_host(train(name, torch.device("fake", 1)))
        same(second, first, f"{name}, of the first device", rtol=0, atol=0)
        assert torch.fake.current_device() == 0, name
        assert devices.counts(0) == before[0], f"{name}: the first device was asked"
        assert devices.counts(1)["events"] > before[1]["events"], name
        assert devices.num_faults == 0, name
    assert bin(devices.counts(1)["streams"]).count("1") > 2, "the lanes have streams of their own"


# Products of bf16 round elsewhere on the fake devices: torch has other kernels for the CPU's own tensors.
HOST_CLOSE = {"fp32": CLOSE["fp32"], "bf16": {"rtol": 5e-2, "atol": 4e-3}}


@distributed(world_sizes=(1,), timeout=180, fresh=True)
def test_steps_are_stocks(ctx, library):
    def train(name: str, device: torch.device) -> list:
        with sharded(ctx, name, device, shard_stock) as model:
            return run(model, CASES[name], device)

    # Other dtypes and launches of many parameters ask the device for nothing else.
    others = ("many", "f64", "reduced", "replicas, bf16", "stacked experts, packed", "of a unit", "divided")
    names = [name for name in CASES if not any(one in name for one in others)]
    check(library, train, names, lambda name: HOST_CLOSE[CASES[name].close])


OPTIMIZERS = {
    "ours": lambda params: fsdp2x.optim.AdamW(params, lr=1e-2),
    "torch's": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
}


@distributed(world_sizes=(1,), timeout=180, fresh=True)
def test_optimizers_clipping_and_sleep(ctx, library):
    def train(name: str, device: torch.device) -> list:
        found = []
        ours = functools.partial(shard, ctx, transport="process_group")
        with sharded(ctx, "fp32", device, ours) as model:
            optimizer = OPTIMIZERS[name](model.parameters())
            for step in range(4):
                model(inputs(0, step, rows=16, width=WIDTH).to(device)).float().square().mean().backward()
                found.append(fsdp2x.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                optimizer.zero_grad()
                if step == 1:
                    fsdp2x.sleep(model, optimizer)
                    fsdp2x.wake(model, optimizer)
            found += [param.detach() for param in model.parameters()]
            found += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
            return [value.to_local() if isinstance(value, DTensor) else value for value in found]

    check(library, train, OPTIMIZERS, lambda name: CLOSE["fp32"])


SPANNING = {
    "ours": OPTIMIZERS["ours"],
    "ours, alone": OPTIMIZERS["ours"],
    "torch's, alone": OPTIMIZERS["torch's"],
    "torch's default": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "local": lambda params: fsdp2x.local_optimizer(torch.optim.RMSprop(params, lr=1e-2)),
    "Muon, alone": lambda params: fsdp2x.optim.Muon([one for one in params if one.ndim == 2], lr=1e-2),
}


@distributed(world_sizes=(1,), timeout=240, fresh=True, only_fsdp2x=True)
def test_units_that_span_a_device_and_the_cpu(ctx, library):
    """Clipping, optimizers, checkpoints and exports of units of which some parameters are offloaded."""

    def policy_of(number: int, mode: str):
        return fsdp2x.HostOffloadPolicy(("none", mode, "gradients")[number % 3], pin_memory=False)

    def train(name: str, device: torch.device) -> list:
        found, sizes = [], (1,) if "alone" in name else (2,)
        with (
            alike.world_of(device.type, None if device.type == "fake" else "gloo", sizes, None) as (mesh, _),
            tempfile.TemporaryDirectory() as folder,
        ):
            model = Stack(width=WIDTH).to(device)
            mode = "optimizer" if "ours" in name else "all"  # other optimizers keep moments where shards are
            policies = {key: policy_of(number, mode) for number, key in enumerate(dict(model.named_parameters()))}
            if device.type == "fake":
                torch.fake.set_device(device.index)
            fsdp2x.fully_shard(model, mesh=mesh, auto_wrap=True, transport="process_group", offload_policy=policies)
            optimizer = SPANNING[name](list(model.parameters()))
            for step in range(3):
                model(inputs(0, step, rows=16, width=WIDTH).to(device)).square().mean().backward()
                found.append(fsdp2x.clip_grad_norm_(model.parameters(), 0.5))
                for key, param in model.named_parameters():
                    is_host = policies[key].mode in ("gradients", "all") or device.type == "cpu"
                    assert param.to_local().is_cpu == param.grad.to_local().is_cpu == is_host, key
                optimizer.step()
                model.zero_grad()
                if step == 1:
                    fsdp2x.sleep(model, optimizer)
                    fsdp2x.wake(model, optimizer)
            found += [param.detach() for param in model.parameters()]
            if sizes == (1,):  # exchanges of other values need real ranks
                fsdp2x.checkpoint.save(folder, model, optimizer, step=3)
                for param in model.parameters():
                    param.detach().to_local().zero_()
                fsdp2x.checkpoint.load(folder, model, optimizer)
                found += [param.detach() for param in model.parameters()]
                found += [tensor for _, tensor in fsdp2x.full_tensors(model)]
            states = [optimizer.state.get(param, {}) for param in model.parameters()]
            found += [state[key] for state in states for key in sorted(state) if torch.is_tensor(state[key])]
            if device.type == "fake":
                torch.fake.set_device(0)
            return [value.to_local() if isinstance(value, DTensor) else value for value in found]

    check(library, train, SPANNING, lambda name: CLOSE["fp32"])


@distributed(world_sizes=(1,), timeout=60, fresh=True, only_fsdp2x=True)
def test_copy_engines(ctx, library):
    """The switch needs NCCL's setting. Buffers then come from symmetric memory, until it is off."""
    accelerator.Accelerator(library)
    zero = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2)
    with sharded(ctx, "fp32", torch.device("fake", 0), shard_stock) as model:
        comms = model._get_fsdp_state().comms
        run(model, CASES["fp32"], "fake:0")
        with pytest.raises(ValueError, match="NCCL_CTA_POLICY=2 before init_process_group"):
            model.set_copy_engine_all_gather(True)
        for policy, kind in ((0, None), (2, "symmetric")):
            backend = SimpleNamespace(options=SimpleNamespace(config=SimpleNamespace(cta_policy=policy)))
            group = SimpleNamespace(_get_backend=lambda device, backend=backend: backend)
            with mock.patch.object(torch.distributed, "ProcessGroupNCCL", zero, create=True):
                assert torch_private.may_use_copy_engines(group, torch.device("fake", 0)) == (kind is not None)
        with mock.patch.dict(os.environ, NCCL_CTA_POLICY="2"):
            model.set_copy_engine_all_gather(True)
        assert comms.memory == "symmetric"
        run(model, CASES["fp32"], "fake:0")
        with pytest.raises(ValueError, match="set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group(True)
        model.set_copy_engine_all_gather(False)
        assert comms.memory is None
        model.set_copy_engine_all_gather(False)


@distributed(world_sizes=(1,), timeout=60, fresh=True)
def test_deltas_are_those_of_the_cpu(ctx, library):
    """There the engine looks for what changed, on devices torch does."""
    torch.manual_seed(0)
    before = torch.randn(1003).mul(40)
    after = torch.where(torch.rand(1003) < 0.02, torch.tensor([float("nan"), -0.0, 1.0]).repeat(335)[:1003], before)
    accelerator.Accelerator(library)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex128)
    for held in dtypes:
        for share, now in ((0.02, after), (1.0, before + 1)):
            found = []
            for device in ("cpu", "fake:1"):
                local = before.nan_to_num().to(device, held)
                entry = SimpleNamespace(name="weight", local=local, dtype=held)
                snapshot = Snapshot([SimpleNamespace(entries=[entry])])
                snapshot.hold(entry, entry.local)
                local.copy_(now if held != torch.int64 else now.nan_to_num())
                changes = snapshot.take_changes(entry)
                found.append(changes and [part.cpu() for part in changes])
            assert (found[0] is None) == (found[1] is None) == (share == 1.0), held
            if found[0] is not None:
                assert torch.equal(found[0][0], found[1][0]) and found[0][0].numel() > 0, held
                assert torch.equal(found[0][1].view(torch.uint8), found[1][1].view(torch.uint8)), held


@distributed(world_sizes=(1,), timeout=60, fresh=True)
def test_streams_of_the_wrong_device_are_found(ctx, library):
    """The fault that these tests are for: an engine that takes the streams of the current device."""
    devices = accelerator.Accelerator(library)
    wrong = mock.Mock(return_value=lambda: _C.TorchLayer(torch.device("fake", 0)))
    second = torch.device("fake", 1)
    model_on = sharded(ctx, "fp32", second, shard_stock)
    with mock.patch.object(transport, "layer_maker", wrong), model_on as model, contextlib.suppress(RuntimeError):
        run(model, CASES["fp32"], second)
    assert devices.num_faults or any(devices.counts(0).values())
