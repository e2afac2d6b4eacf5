"""Common mistakes, each made: one sentence on every rank, at once, and nothing of the model is touched.

Most sentences are rows of the page of troubleshooting.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp2x
from fsdp2x.train import parse_config
from fsdp2x.train.translate import translate
from harness import distributed, programs
from mistakes import said_by
from models import Stack
from training import Said, shared_folder

PAGE = Path(__file__).resolve().parents[3] / "docs" / "troubleshooting.md"
shard = fsdp2x.fully_shard


def rows() -> list[str]:
    """The messages that the page quotes, as patterns: what it leaves out with dots may be anything."""
    quoted = re.findall(r"^\| `(.*?)` \|", PAGE.read_text(), flags=re.MULTILINE)
    return [".*".join(map(re.escape, message.split("…"))) for message in quoted]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model of three units whose first step is done, and its optimizer."""
    model = shard(Stack(), auto_wrap=["Mlp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def backward(model: nn.Module) -> None:
    model(inputs(model)).square().mean().backward()


def inputs(model: nn.Module) -> torch.Tensor:
    return torch.ones(2, model.norm.weight.numel())


def changed(change) -> Stack:
    model = Stack()
    change(model)
    return model


# ---- what makes each mistake


def optimizer_before_sharding(ctx):
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    backward(model)
    optimizer.step()


def optimizer_in_unsharded(ctx):
    model, _ = trained()
    with fsdp2x.unsharded(model):
        optimizer = torch.optim.SGD(list(model.parameters()), lr=0.1)
    backward(model)
    optimizer.step()


def weight_outside_of_its_forward(ctx):
    class Borrows(Stack):
        def forward(self, x):
            return super().forward(x).sum() * nn.functional.linear(x, self.blocks[0].up.weight).sum()

    backward(shard(Borrows(), auto_wrap=["Mlp"]))


def weights_on_meta(ctx):
    with torch.device("meta"):
        model = Stack()
    shard(model)(torch.ones(2, model.norm.weight.numel()))


def tied_weights_in_two_units(ctx):
    model = changed(lambda model: setattr(model.blocks[1].up, "weight", model.blocks[0].up.weight))
    for block in model.blocks:
        shard(block)
    backward(shard(model))


def integers_that_train(ctx):
    weight = nn.Parameter(torch.ones(3, 3).to(torch.float8_e4m3fn))
    shard(changed(lambda model: setattr(model.blocks[0].up, "weight", weight)))


def a_conversion_before_backward(ctx):
    model, _ = trained()
    loss = model(inputs(model)).sum()
    model.half()
    loss.backward()


def another_tensor_in_place_of_a_weight(ctx):
    model, _ = trained()
    values = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        torch.func.functional_call(model, values, (inputs(model),))


def gradients_that_are_not_finite(ctx):
    model, _ = trained()
    (model(inputs(model)) * float("nan")).sum().backward()
    fsdp2x.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def load_from(name: str):
    def load(ctx):
        with shared_folder(ctx) as folder:
            fsdp2x.checkpoint.load(folder / name, trained()[0])

    return load


MISTAKES = {
    **{make.__name__: make for make in (
        optimizer_before_sharding, optimizer_in_unsharded, weight_outside_of_its_forward, weights_on_meta,
        tied_weights_in_two_units, integers_that_train, a_conversion_before_backward,
        another_tensor_in_place_of_a_weight, gradients_that_are_not_finite,
    )},
    "a module list": lambda ctx: shard(Stack().blocks),
    "a scalar": lambda ctx: shard(changed(lambda model: setattr(model, "scale", nn.Parameter(torch.tensor(1.0))))),
    "a model in DDP": lambda ctx: shard(DistributedDataParallel(Stack())),
    "models of two sizes": lambda ctx: backward(shard(Stack(num=2 + dist.get_rank()))),
    "a class that the model lacks": lambda ctx: shard(Stack(), auto_wrap=["Block"]),
    "LBFGS over shards": lambda ctx: fsdp2x.local_optimizer(torch.optim.LBFGS(trained()[0].parameters())),
    "a checkpoint that is not there": load_from("missing"),
    "a folder of something else": load_from("text"),
    "a misspelled key": lambda ctx: parse_config({"optimiser": {"lr": 1e-3}}),
    "keys of two formats": lambda ctx: translate({"training_args": {"seed": 3}, "parallel": {"offload": "all"}}),
}  # fmt: skip


@distributed(world_sizes=(2,), timeout=60)
@pytest.mark.parametrize("name", MISTAKES)
def test_its_message_is_a_row_of_the_page(ctx, name):
    said = said_by(MISTAKES[name], ctx)
    assert any(re.search(row, said, flags=re.DOTALL) for row in rows()), said


# ---- at fully_shard


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_script_that_torchrun_did_not_start(given):
    launcher = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    script = "import torch, fsdp2x; fsdp2x.fully_shard(torch.nn.Linear(4, 4))"
    done = programs.run("-c", script, env=programs.environment(**dict.fromkeys(launcher[:given], "0")))
    said = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and said.startswith("RuntimeError: fully_shard: there is no process group"), done.stderr
    assert f"are not set ({', '.join(launcher[given:])})" in said and "torchrun --nproc_per_node=N" in said


OTHERS = {
    "FSDPModule": stock_fully_shard,
    "FullyShardedDataParallel": lambda module: FullyShardedDataParallel(module, device_id=torch.device("cpu")),
    "DistributedDataParallel": DistributedDataParallel,
}


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("place", ["blocks.0", "norm", ""])
def test_parts_that_others_shard(ctx, kind, place):
    """Wherever such a part is, and however the model would be split, nothing of the model is touched."""
    for options in ({}, {"auto_wrap": True}, {"auto_wrap": False}, {"auto_wrap": ["Block"]}):
        model = Stack()
        if place:
            outer, _, name = place.rpartition(".")
            setattr(model.get_submodule(outer), name, OTHERS[kind](model.get_submodule(place)))
        else:
            model = OTHERS[kind](model)
        before = {name: type(module) for name, module in model.named_modules()}
        said = said_by(shard, model, **options)
        assert (place or "itself") in said and kind in said, said
        assert {name: type(module) for name, module in model.named_modules()} == before


@distributed(world_sizes=(2,))
def test_a_mesh_without_this_rank(ctx):
    """Named on the ranks that it lacks, before anything of the model is touched; the others go on."""
    mesh, model = DeviceMesh("cpu", [0]), Stack()
    if ctx.rank == 0:
        backward(shard(model, mesh=mesh))
        return
    for options in ({}, {"auto_wrap": True}):
        assert "rank 1 is not in the mesh, whose ranks are 0" in said_by(shard, model, mesh=mesh, **options)
    assert type(model) is Stack


@distributed(world_sizes=(1,))
def test_which_modules_become_units(ctx):
    """No class is an error; a plain model that names its blocks is split when it is asked for, else there is a hint."""
    for nothing in ([], (), set(), frozenset()):
        assert "names no class" in said_by(shard, Stack(), auto_wrap=nothing)
    for kind, auto_wrap in [(list, None), (set, None), (tuple, None), (set, True), (set, False)]:
        model = Stack(num=3)
        model._no_split_modules = kind([type(model.blocks[0]).__name__])
        with Said() as said:
            shard(model, auto_wrap=auto_wrap)
        assert len(fsdp2x.describe(model).units) == (4 if auto_wrap else 1)
        assert bool(said) == (auto_wrap is None) and all("auto_wrap=True to make units" in one for one in said)


@distributed(world_sizes=(1,))
def test_the_hint_for_pinned_memory_is_the_policy_that_was_given(ctx):
    if torch.accelerator.is_available():
        pytest.skip("memory is pinned where there is an accelerator")
    policies = [fsdp2x.CPUOffloadPolicy(), *(fsdp2x.HostOffloadPolicy(mode=mode) for mode in ("gradients", "all"))]
    for policy in policies:
        said = said_by(shard, Stack(), offload_policy=policy)
        assert any(re.search(row, said) for row in rows())
        advised = eval(said.rpartition("Use ")[2].rstrip("."), vars(fsdp2x))
        assert type(advised) is type(policy) and not advised.pin_memory
        assert getattr(advised, "mode", None) == getattr(policy, "mode", None)
        shard(Stack(), offload_policy=advised)
