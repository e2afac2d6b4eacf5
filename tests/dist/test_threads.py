"""Ranks that own several threads compute the same bits as ranks with one, and do use them.

Run by torchrun, this file is the script of a rank.
"""

import hashlib
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import programs
from harness.pool import PATH

# Larger than what is worth a second thread; rows that neither ranks nor threads divide, columns that two ranks do.
SHAPES = ((331, 258), (100_003,), (3, 6), (129, 4, 211))


class Bag(nn.Module):
    """Parameters whose gradients are made without arithmetic that depends on the number of threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([_Give.apply(weight, x) for weight in self.weights]).sum()


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (weight,) = ctx.saved_tensors
        return (weight * (dist.get_rank() + 1.5)).to(weight.dtype), grad


def run(threads: int) -> list[str]:
    """What each rank prints with so many threads."""
    env = programs.environment(OMP_NUM_THREADS=str(threads), PYTHONPATH=PATH)
    done = programs.run(*programs.TORCHRUN, "--standalone", "--nproc_per_node=2", __file__, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.skipif("TORCHELASTIC_RUN_ID" in os.environ, reason="starts torchrun itself")
def test_bits_do_not_depend_on_the_number_of_threads():
    outputs = {threads: run(threads) for threads in (1, 3)}
    assert len(outputs[1]) == 2 * 5
    assert outputs[1] == outputs[3]


def digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def train(dtype: torch.dtype, shard_dim: int, optimizer_class, options: dict) -> str:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor, Shard

    import fsdp2x
    from fsdp2x.runtime import torch_private

    model = Bag(dtype)

    def placement(param: nn.Parameter) -> Shard:
        return Shard(min(shard_dim, param.ndim - 1))

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fsdp2x.fully_shard(model, auto_wrap=False, transport="shm", mp_policy=policy, shard_placement_fn=placement)
    optimizer = optimizer_class(model.parameters(), lr=1e-2, **options)
    x = torch.ones(1, requires_grad=True)
    seen = []
    for _ in range(3):
        for _ in range(2):  # accumulates
            model(x).sum().backward()
        seen.append(fsdp2x.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        model.unshard()
        seen += [param.detach().clone() for param in model.parameters()]
        model.reshard()
        optimizer.zero_grad()
    for param in model.parameters():
        for value in optimizer.state[param].values():
            if value.ndim:
                seen.append(torch_private.local_tensor(value) if isinstance(value, DTensor) else value)
    return digest(seen)


def main() -> None:
    import fsdp2x

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)  # torch takes no more than there are cores by itself
    stochastic = {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "amsgrad": True}
    cases = [
        (torch.float32, 0, fsdp2x.optim.AdamW, {}),
        (torch.float32, 1, fsdp2x.optim.SGD, {"momentum": 0.9}),
        (torch.float32, 1, fsdp2x.optim.AdamW, stochastic),
        (torch.bfloat16, 0, fsdp2x.optim.AdamW, stochastic),
        (torch.float32, 1, fsdp2x.optim.AdamW, {**stochastic, "moments_dtype": "int8"}),
    ]
    for number, case in enumerate(cases):
        # With its newline in one write: torchrun's ranks are unbuffered, and share the pipe.
        print(f"rank {dist.get_rank()} case {number}: {train(*case)}\n", end="", flush=True)
    dist.barrier()
    check_that_threads_work(threads)
    dist.destroy_process_group()


def check_that_threads_work(threads: int) -> None:
    """A large step on a thread of its own, whose team of workers is made by that step."""
    import threading

    import fsdp2x

    param = nn.Parameter(torch.zeros(1 << 20))
    param.grad = torch.ones_like(param)
    optimizer = fsdp2x.optim.AdamW([param])
    counts = []

    def step() -> None:
        torch.set_num_threads(threads)  # OpenMP counts for each thread that starts work
        before = len(os.listdir("/proc/self/task"))
        optimizer.step()
        counts.append(len(os.listdir("/proc/self/task")) - before)

    optimizer.step()  # makes the state
    worker = threading.Thread(target=step)
    worker.start()
    worker.join()
    assert counts == [threads - 1], counts


if __name__ == "__main__":
    main()
