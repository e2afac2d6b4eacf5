"""Methods of FSDPModule: gathering, resharding, prefetching, and how gradients are reduced."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp2x.conformance.behavior import (
    UNITS,
    Context,
    Net,
    behavior,
    close,
    data,
    is_sharded,
    mean_square,
    raises,
    same_gradients,
)


def _units(model: Any) -> list[Any]:
    return [*model.blocks, model]


def _mean(t: Context, factor: float = 1.0) -> Net:
    plain = Net()
    t.backward(plain, scale=factor)
    return plain


# reshard_after_forward -> whether a block, and the root's own parameters, are sharded after forward.
AFTER_FORWARD = {None: (True, False), True: (True, True), False: (False, False)}


@behavior(ranks=2, rows=[(key, *value) for key, value in AFTER_FORWARD.items()])
def reshards_after_forward(t: Context, reshard: bool | None, block: bool, root: bool) -> None:
    """Parameters are freed after forward unless it is False; None keeps the root's. After backward all are sharded."""
    model = t.shard(Net(), UNITS, reshard_after_forward=reshard)
    loss = mean_square(model, t.rank)
    assert is_sharded(model.blocks[0]) == block
    # The default of the root is False since torch 2.8; an explicit True also holds for it.
    assert is_sharded(model.head) == root
    loss.backward()
    assert is_sharded(model)


@behavior(ranks=2)
def reshards_to_fewer_ranks(t: Context) -> None:
    """An integer reshards to shards over so many ranks, which the backward gathers from."""
    model = t.shard(Net(), UNITS, reshard_after_forward=2)
    loss = mean_square(model, t.rank)
    assert isinstance(model.blocks[0].up.weight, DTensor)
    loss.backward()
    same_gradients(model, _mean(t))


@behavior(rows=(True, False))
def changes_resharding(t: Context, value: bool) -> None:
    """set_reshard_after_forward acts in the next forward, and recurses unless recurse=False."""
    model = t.shard(Net(), UNITS, reshard_after_forward=not value)
    model.set_reshard_after_forward(value)
    mean_square(model, t.rank)
    assert is_sharded(model.blocks[0]) == value
    model.reshard()
    for block in model.blocks:
        block.reshard()
    model.set_reshard_after_forward(not value, recurse=False)
    loss = mean_square(model, t.rank)
    assert is_sharded(model.blocks[0]) == value
    loss.backward()
    same_gradients(model, _mean(t))


@behavior()
def keeps_parameters_after_backward(t: Context) -> None:
    """set_reshard_after_backward(False) keeps parameters gathered until reshard()."""
    model = t.shard(Net(), UNITS)
    model.set_reshard_after_backward(False)
    mean_square(model, t.rank).backward()
    assert not is_sharded(model.blocks[1])
    for unit in _units(model):
        unit.reshard()
    assert is_sharded(model)
    same_gradients(model, _mean(t))


@behavior(rows=(False, True))
def unshards_and_reshards(t: Context, is_async: bool) -> None:
    """unshard() registers plain full parameters of this unit only, after handle.wait() if async; reshard() ends it."""
    model, plain = t.shard(Net(), UNITS), Net()
    handle = model.blocks[0].unshard(async_op=is_async)
    assert (handle is not None) == is_async
    if handle is not None:
        handle.wait()
        handle.wait()
    weight = model.blocks[0].up.weight
    assert not isinstance(weight, DTensor) and torch.equal(weight, plain.blocks[0].up.weight)
    assert isinstance(weight, nn.Parameter) and is_sharded(model.blocks[1])
    model.blocks[0].reshard()
    assert is_sharded(model)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda param: param.mul_(2),
    "data": lambda param: param.data.mul_(2),
    "detached": lambda param: param.detach().fill_(7),
    "last element": lambda param: param.data.view(-1)[-1:].add_(1),
    "memory": lambda param: ctypes.memset(param.data_ptr(), 0x3F, param.nbytes),
}


@behavior(ranks=2, rows=WRITES)
def writes_end_with_the_reshard(t: Context, write: Callable[[torch.Tensor], Any]) -> None:
    """reshard() drops what any of the ranks has written to gathered parameters."""
    model = t.shard(Net(), UNITS)
    before = model(data(t.rank)).detach()
    for writers in (range(t.world), (t.world - 1,)):
        for unit in _units(model):
            unit.unshard()
        if t.rank in writers:
            with torch.no_grad():
                for param in model.parameters():
                    write(param)
        for unit in _units(model):
            unit.reshard()
        assert torch.equal(model(data(t.rank)), before)


# Units that are unsharded before the first forward. "": the root; "*": waits after the forward; "+": waits at once;
# "!": resharded at once.
EARLY = {
    "root": ("",),
    "root, waits later": ("*",),
    "root, resharded": ("!",),
    "a block": ("blocks.0",),
    "two ways": ("*blocks.1", "+blocks.2"),
    "three ways": ("blocks.2", "!blocks.0", ""),
    "all": ("", *UNITS),
    "all, wait later": ("*", *(f"*{name}" for name in UNITS)),
}


@behavior(rows={name: (units,) for name, units in EARLY.items()})
def unshards_before_the_first_forward(t: Context, units: tuple[str, ...]) -> None:
    """unshard() may come before the first forward, which uses values that were written to gathered parameters."""
    model, plain, waiting = t.shard(Net(), UNITS), Net(), []
    for unit in units:
        module = model.get_submodule(unit.strip("*+!"))
        handle = module.unshard(async_op=unit.startswith(("*", "+")))
        if unit.startswith("!"):
            module.reshard()
        elif unit.startswith("+"):
            handle.wait()
        elif handle is not None:
            waiting.append(handle)
    if units[-1] == UNITS[-1] and not waiting:
        with torch.no_grad():
            for one in (model, plain):
                one.head.weight.mul_(2)
    loss = mean_square(model, t.rank)
    for handle in waiting:
        handle.wait()
    loss.backward()
    t.backward(plain)
    assert is_sharded(model)
    same_gradients(model, plain)


def _prefetch(kind: str, depth: int) -> Callable[[Any], None]:
    def call(model: Any) -> None:
        blocks = list(model.blocks)
        blocks = blocks if kind == "forward" else blocks[::-1]
        for index, block in enumerate(blocks):
            getattr(block, f"set_modules_to_{kind}_prefetch")(blocks[index + 1 : index + 1 + depth])

    return call


SETTERS: dict[str, Callable[[Any], Any]] = {
    "set_is_last_backward": lambda m: m.set_is_last_backward(True),
    "set_requires_gradient_sync": lambda m: m.set_requires_gradient_sync(True, recurse=True),
    "set_requires_all_reduce": lambda m: m.set_requires_all_reduce(True, recurse=False),
    "set_reshard_after_forward": lambda m: m.set_reshard_after_forward(True, recurse=False),
    "set_reshard_after_backward": lambda m: m.set_reshard_after_backward(True),
    "set_modules_to_forward_prefetch": _prefetch("forward", 1),
    "set_modules_to_forward_prefetch, two": _prefetch("forward", 2),
    "set_modules_to_backward_prefetch": _prefetch("backward", 1),
    "set_modules_to_backward_prefetch, two": _prefetch("backward", 2),
    "set_unshard_in_backward": lambda m: m.set_unshard_in_backward(True),
    "set_force_sum_reduction_for_comms": lambda m: [u.set_force_sum_reduction_for_comms(True) for u in _units(m)],
}
LATER_SETTERS: dict[str, Callable[[Any], Any]] = {
    "set_reduce_scatter_unused_params": lambda m: m.set_reduce_scatter_unused_params(True),
    "set_reduce_scatter_max_input_buffers": lambda m: m.set_reduce_scatter_max_input_buffers(2),
    "set_separate_reduce_scatter_group": lambda m: m.set_separate_reduce_scatter_group(True),
    "set_keep_unsharded_storage": lambda m: m.set_keep_unsharded_storage(True),
}


@behavior(rows=SETTERS)
def setters_keep_the_numbers(t: Context, call: Callable[[Any], Any]) -> None:
    """Setters of FSDPModule can be called before and between steps, and do not change what is computed."""
    t.compare(Net(), UNITS, set_up=call, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    model = t.shard(Net(), UNITS)
    mean_square(model, t.rank).backward()
    call(model)
    model.zero_grad()
    mean_square(model, t.rank).backward()
    same_gradients(model, _mean(t))


@behavior(torch=(2, 14), rows=LATER_SETTERS)
def later_setters_keep_the_numbers(t: Context, call: Callable[[Any], Any]) -> None:
    """The same of the setters that came with torch 2.13 and 2.14."""
    setters_keep_the_numbers(t, call)


WRONG: dict[str, Callable[[Any], Any]] = {
    "forward prefetch of a plain module": lambda m: m.blocks[0].set_modules_to_forward_prefetch([m.head]),
    "backward prefetch of a plain module": lambda m: m.blocks[0].set_modules_to_backward_prefetch([m.head]),
    "reshard_after_forward of an integer": lambda m: m.set_reshard_after_forward(2),
}


@behavior(rows=WRONG)
def setters_refuse(t: Context, call: Callable[[Any], Any]) -> None:
    """Setters raise an error for modules that are not sharded and for wrong types."""
    model = t.shard(Net(), UNITS)
    raises((ValueError, TypeError), lambda: call(model))


def _divide(t: Context, factor: float, force_sum: bool) -> None:
    model = t.shard(Net(), UNITS)
    for unit in _units(model):
        unit.set_force_sum_reduction_for_comms(force_sum)
        unit.set_gradient_divide_factor(factor)
    mean_square(model, t.rank).backward()
    same_gradients(model, _mean(t, t.world / factor))


@behavior(rows=(1.0, 3.0), ranks=2, lacks={"torch": "gloo has no ReduceOp.PREMUL_SUM"})
def divides_gradients(t: Context, factor: float) -> None:
    """set_gradient_divide_factor(f) divides the sum over ranks by f instead of their number."""
    _divide(t, factor, False)


@behavior(rows=(1.0, 3.0), torch=(2, 9), ranks=2)
def divides_sums(t: Context, factor: float) -> None:
    """The same with set_force_sum_reduction_for_comms(True)."""
    _divide(t, factor, True)


@behavior(torch=(2, 9), lacks={"torch": "drops the factor of sums on one rank"})
def divides_sums_on_one_rank(t: Context) -> None:
    """The same on a mesh of one rank."""
    model = t.shard(Net(), mesh=t.mesh(-1, 1, names=("other", "one"))["one"])
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(3.0)
    plain = Net()
    mean_square(model, t.rank).backward()
    (mean_square(plain, t.rank) / 3).backward()
    same_gradients(model, plain)


@behavior(ranks=2)
def runs_all_reduce_hooks(t: Context) -> None:
    """set_all_reduce_hook gets the reduced shard of the unit, and may change it."""
    model, seen = t.shard(Net(), UNITS), []

    def hook(rows: torch.Tensor) -> None:
        seen.append(rows.numel())
        rows.mul_(2)

    for unit in _units(model):
        unit.set_all_reduce_hook(hook)
    mean_square(model, t.rank).backward()
    assert len(seen) == len(_units(model))
    same_gradients(model, _mean(t, 2.0))


class _Counting:
    """A collective as set_custom_all_gather and set_custom_reduce_scatter take it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run, self.num_calls = run, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return self.run(*args, **kwargs)


def _gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def _scatter(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


@behavior(torch=(2, 9), ranks=2, rows={"all_gather": _gather, "reduce_scatter": _scatter})
def runs_custom_collectives(t: Context, run: Callable[..., Any]) -> None:
    """set_custom_all_gather and set_custom_reduce_scatter replace the collective of a unit."""
    model, counting = t.shard(Net(), UNITS), _Counting(run)
    name = "all_gather" if run is _gather else "reduce_scatter"
    for unit in _units(model):
        getattr(unit, f"set_custom_{name}")(counting)
    mean_square(model, t.rank).backward()
    assert counting.num_calls >= len(_units(model))
    same_gradients(model, _mean(t))


class _Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


@behavior()
def registers_forward_methods(t: Context) -> None:
    """register_fsdp_forward_method makes another method gather and reshard like forward."""
    register, plain = t.find("register_fsdp_forward_method"), _Methods()
    model = t.shard(_Methods())
    register(model, "encode")
    register(plain, "encode")  # no-op on modules that are not sharded
    for rank in range(t.world):
        (plain.encode(data(rank)).square().mean() / t.world).backward()
    model.encode(data(t.rank)).square().mean().backward()
    assert is_sharded(model)
    same_gradients(model, plain)


@behavior(torch=(2, 9))
def shares_communication(t: Context) -> None:
    """share_comm_ctx accepts several roots before their first forward."""
    models = [t.shard(Net(), UNITS), t.shard(Net(), UNITS)]
    t.find("share_comm_ctx")(models)
    for model in models:
        mean_square(model, t.rank).backward()
        same_gradients(model, _mean(t))


@behavior()
def skips_the_backward_gather(t: Context) -> None:
    """set_unshard_in_backward(False) suits units whose backward needs no weights, such as embeddings."""

    class Embedded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.embed(x.abs().long().clamp(max=6)[:, 0]))

    t.compare(Embedded(), ("embed", *UNITS), set_up=lambda model: model.embed.set_unshard_in_backward(False))


@behavior(rows={"fp32": (), "bf16": (torch.bfloat16,)})
def offloads_to_cpu(t: Context, *dtype: torch.dtype) -> None:
    """CPUOffloadPolicy keeps parameters, gradients, and optimizer state on the CPU."""
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype[0])} if dtype else {}
    model = t.shard(Net(), UNITS, offload_policy=CPUOffloadPolicy(pin_memory=False), **options)
    mean_square(model, t.rank).backward()
    for param in model.parameters():
        assert param.device.type == "cpu" and param.grad.device.type == "cpu"
    same_gradients(model, _mean(t), **({"rtol": 5e-2, "atol": 1e-2} if dtype else {}))


@behavior(torch=(2, 15))
def finalizes_backward_by_hand(t: Context) -> None:
    """With set_manual_backward_finalization(True), gradients are complete after finalize_backward(), and not before."""
    model = t.shard(Net(), UNITS)
    model.set_manual_backward_finalization(True)
    for step in range(2):
        model.zero_grad()
        mean_square(model, t.rank).backward()
        raises(RuntimeError, lambda: model.set_manual_backward_finalization(False))
        handle = model.finalize_backward(async_op=step == 1)
        if handle is not None:
            handle.wait()
        same_gradients(model, _mean(t))


@behavior()
def mixes_inference_and_training(t: Context) -> None:
    """Outputs under torch.no_grad and in training are the same, and no_grad outputs need no gradient."""
    model = t.shard(Net(), UNITS)
    with torch.no_grad():
        silent = model(data(t.rank))
    assert not silent.requires_grad
    close(model(data(t.rank)), silent, "output", rtol=0, atol=0)


@behavior()
def runs_under_autocast(t: Context) -> None:
    """torch.autocast acts inside sharded modules."""
    model = t.shard(Net(), UNITS)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(data(t.rank))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert model.head.weight.grad is not None
