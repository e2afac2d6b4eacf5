"""Ranks that own several threads compute the same bits as ranks with one, and do use them."""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn

from harness import dist_run

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


def test_bits_do_not_depend_on_the_number_of_threads():
    one, three = ([outcome.value for outcome in dist_run(run, 2, threads)] for threads in (1, 3))
    assert one == three


def run(ctx, threads: int) -> list[str]:

    torch.set_num_threads(threads)
    stochastic = {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "amsgrad": True}
    cases = [
        (torch.float32, 0, {}),
        (torch.float32, 1, stochastic),
        (torch.bfloat16, 0, stochastic),
        (torch.float32, 1, {**stochastic, "moments_dtype": "int8"}),
    ]
    digests = [train(*case) for case in cases]
    check_that_threads_work(threads)
    return digests


def digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def train(dtype: torch.dtype, shard_dim: int, options: dict) -> str:
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor, Shard

    import fsdp2x
    from fsdp2x.base import torch_private

    model = Bag(dtype)

    def placement(param: nn.Parameter) -> Shard:
        return Shard(min(shard_dim, param.ndim - 1))

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    fsdp2x.fully_shard(model, auto_wrap=False, transport="shm", mp_policy=policy, shard_placement_fn=placement)
    optimizer = fsdp2x.optim.AdamW(model.parameters(), lr=1e-2, **options)
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
