"""Counts memory peaks of a training step on a device, of fsdp2x and FSDP2, on the CPU. A script that writes JSON.

fsdp2x runs on the recorder of device transports. The script counts the bytes of tensors in the order in which the host
allocates and frees them, as a device's caching allocator sees them. Eight ranks are rank 0 of a fake world, whose
collectives do nothing.
"""

import itertools
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

import fsdp2x
import memory
import streams

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
WIDTH, NUM_BLOCKS = 128, 5
PIECES = 3 << 20, 1 << 20  # a block's reduction is whole, the embedding's and head's are cut


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Text(nn.Module):
    """Embedding and head of ``vocab`` rows around blocks; ``is_tied``: one weight serves both."""

    def __init__(self, vocab: int, hidden: int, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, vocab, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().logsumexp(-1).mean()


MODELS = {
    "untied": lambda: Text(8192, 2048, is_tied=False),
    "tied": lambda: Text(8192, 2048, is_tied=True),
    "like units": lambda: Text(16, 4096, is_tied=False),
}


def peak(side: str, name: str, world: int, policy: str) -> dict[str, int]:
    """Bytes of the third step's forward and backward on top of the shards."""
    backend = "fake" if world > 1 else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        model = MODELS[name]()
        is_tied = model.head.weight is model.embedding.weight
        options = {"mesh": mesh, "mp_policy": POLICIES[policy]}
        shard = stock_fully_shard
        if side == "fsdp2x":
            options["transport"] = "process_group"
            shard = fsdp2x.fully_shard
        tail = [[model.embedding, model.head]] if is_tied else [model.embedding, model.head]
        for unit in [*model.blocks, *tail]:
            shard(unit, **options)
        shard(model, **options)
        tokens = torch.arange(8)[None]

        def step() -> None:
            model(tokens).backward()

        def warm_up() -> None:
            for owner in (model, torch.optim.SGD(model.parameters())):
                step()
                owner.zero_grad()

        held = memory.held(warm_up)
        highest = held + memory.peak_of(memory.allocations(step, without="aten::_chunk_cat"))
        if side == "stock":
            return {"stock": highest}
        report = fsdp2x.memory_report(model)
        return {
            "fsdp2x": highest,
            "resting": held,
            "planned": report.peak_bytes - report.shard_bytes,
            "largest": max(unit.slot_bytes for unit in report.units),
        }
    finally:
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    axes = (list(MODELS), [1, 8], list(POLICIES))
    half = int(sys.argv[1])
    cases = [case for case in itertools.product(*axes) if sum(map(list.index, axes, case)) % 2 == half]
    found = {case: peak("stock", *case) for case in cases}
    streams.install(pack_below_bytes=1 << 14, pieces=PIECES)
    for case in cases:
        found[case] |= peak("fsdp2x", *case)
    json.dump([{"case": case, **found[case]} for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
