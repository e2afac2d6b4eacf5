"""A small training that checkpoints are taken from: the same rows over all ranks at any world size."""

import contextlib
import copy
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from models import Stack

ROWS = 12
FORMS = ("sharded", "full", "per_rank")


class Mixed(nn.Module):
    """A tied head, a frozen weight, a buffer, bfloat16 next to float32, and rows that leave shards uneven and empty."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.stack = Stack()
        self.adapter = nn.Linear(6, 6, bias=False, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(5, 6), requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.zeros(3))

    def forward(self, tokens):
        self.count += 1
        x = self.embed(tokens) + self.frozen.mean()
        for block in self.stack.blocks:
            x = block(x)
        x = x + self.adapter(x.bfloat16()).float()
        return self.head(self.stack.norm(x)).logsumexp(-1).mean() + self.stack.head(x).square().mean()


class LocalMomentum(torch.optim.Optimizer):
    """Keeps plain tensors next to DTensors: one of the shard's shape, one of the parameter's, and a number."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for param in [param for param in group["params"] if param.grad is not None]:
            state, local = self.state[param], param.to_local()
            state["step"] = state.get("step", torch.zeros(1)) + 1
            state["whole"] = state.get("whole", torch.linspace(1, 2, param.numel()).view(param.shape)) * 0.9
            state["moment"] = state.get("moment", torch.zeros_like(local)) * group["momentum"] + param.grad.to_local()
            assert state["moment"].shape == local.shape and {type(one) for one in state.values()} == {torch.Tensor}
            local.sub_(group["lr"] * state["whole"].mean() / state["step"].sqrt() * state["moment"])


OPTIMIZERS = ("torch_adamw", "adamw", "sgd", "local_momentum", "local_nadam")


def make_optimizer(name, model):
    import fsdp2x

    params = [p for p in model.parameters() if p.requires_grad]
    if name == "torch_adamw":
        groups = [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim < 2]}]
        groups[1]["weight_decay"] = 0.0
        return torch.optim.AdamW(groups, lr=0.02)
    if name == "adamw":
        return fsdp2x.optim.AdamW(params, lr=0.02, amsgrad=True)
    if name == "sgd":
        return fsdp2x.local_optimizer(torch.optim.SGD(params, lr=0.05, momentum=0.9))
    if name == "local_momentum":
        return LocalMomentum(params, lr=0.05)
    return fsdp2x.local_optimizer(torch.optim.NAdam(params, lr=0.02))


class Training:
    """Model, optimizer and schedule; `step()` returns the loss over all ranks."""

    def __init__(self, optimizer="torch_adamw", impl="fsdp2x", model=None, mesh=None):
        import fsdp2x

        self.model = model or Mixed()
        if impl == "torch":
            from torch.distributed.fsdp import fully_shard

            for block in self.model.stack.blocks:
                fully_shard(block)
            fully_shard(self.model.adapter)
            fully_shard(self.model)
        elif impl == "fsdp2x":
            for block in self.model.stack.blocks:
                fsdp2x.fully_shard(block, mesh=mesh)
            fsdp2x.fully_shard(self.model, auto_wrap=False, mesh=mesh)
        self.optimizer = make_optimizer(optimizer, self.model)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=50)
        self.number = 0

    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(self.number)
        tokens = torch.randint(0, 11, (ROWS, 4), generator=generator)
        each = ROWS // world
        loss = self.model(tokens[rank * each : (rank + 1) * each])
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.number += 1
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / world

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def save(self, path, **keywords):
        import fsdp2x

        keywords = {"step": self.number, "scheduler": self.schedule, "data": {"next": self.number}, **keywords}
        return fsdp2x.checkpoint.save(path, self.model, self.optimizer, **keywords)

    def load(self, path, **keywords):
        import fsdp2x

        loaded = fsdp2x.checkpoint.load(path, self.model, self.optimizer, scheduler=self.schedule, **keywords)
        self.number = loaded.data["next"]
        return loaded


HANDED_OVER_BY = ("sharded", "full", "dcp", "pickle", "whole")


def hand_over(first, second, folder: Path, form: str, warm_up: Callable[[], None]) -> None:
    """Copies the state of `first`, a model and its optimizer, to `second`. `warm_up` steps `second`, as DCP requires.

    "whole": torch's utilities gather the state on the first rank and distribute it.
    """
    import fsdp2x

    if form == "pickle":
        second[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
        second[0].load_state_dict(first[0].state_dict())
    elif form == "whole":
        options = StateDictOptions(full_state_dict=True)
        state = copy.deepcopy(get_optimizer_state_dict(*first, options=options))
        if dist.get_rank() == 0:
            held = [value for values in state["state"].values() for value in values.values()]
            assert held and not any(isinstance(value, DTensor) for value in held)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(*second, state, options=options)
        second[0].load_state_dict(first[0].state_dict())
    elif form == "dcp":
        saved = {"model": first[0].state_dict(), "optim": get_optimizer_state_dict(*first)}
        dcp.save(saved, checkpoint_id=folder)
        warm_up()
        found = {"model": second[0].state_dict(), "optim": get_optimizer_state_dict(*second)}
        dcp.load(found, checkpoint_id=folder)
        second[0].load_state_dict(found["model"])
        set_optimizer_state_dict(*second, found["optim"])
    else:
        fsdp2x.checkpoint.save(folder / "run", *first, step=3, form=form)
        fsdp2x.checkpoint.load(folder / "run", *second)


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all ranks see; gone when all have left."""
    names = [tempfile.mkdtemp(prefix="fsdp2x-checkpoint-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    folder = Path(names[0])
    try:
        yield folder
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Loads the tensors of all safetensors files in a folder, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return dict(sorted(item for file in files for item in load_file(file).items()))


def on_first(work) -> None:
    """Runs `work` on rank 0 while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        work()
    dist.barrier()


@contextlib.contextmanager
def full_disk(rank: int, num_bytes: int = 300) -> Iterator[None]:
    """No file of that rank may grow over so many bytes; unlike permissions, that stops root too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
