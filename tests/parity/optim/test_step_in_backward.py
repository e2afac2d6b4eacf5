"""``AdamW(step_in_backward=True)`` against an optimizer that steps afterward, bit for bit, and what it refuses."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp2x
from fsdp2x.optim import in_backward
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from offloading import OFFLOAD
from reference import full, only_fsdp2x, params, same, shard

OPTIONS = {
    "plain": {},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1, "maximize": True},
    "bf16": {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
    "int8": {"moments_dtype": "int8"},
    "left to torch": {},  # parameters of 16 bits
}
PLACES = {"shm": {}, "process_group": {}, "streams": {"offload_policy": OFFLOAD}}


def twins_of(ctx, transport="auto", name="plain", **places):
    """Two equal models, each with its optimizer; the first one steps in backward, in batches of few parameters."""
    only_fsdp2x(ctx)
    dtype = torch.bfloat16 if name == "left to torch" else torch.float32
    models = [shard(ctx, Stack().to(dtype), STACK_UNITS, transport=transport, **places) for _ in range(2)]
    optimizers = [
        fsdp2x.optim.AdamW(groups_of(model), lr=1e-2, step_in_backward=early, **OPTIONS[name])
        for model, early in zip(models, (True, False), strict=True)
    ]
    optimizers[0]._in_backward._batch_numel = 1  # many batches of few elements
    return list(zip(models, optimizers, strict=True))


def groups_of(model: nn.Module) -> list[dict]:
    own = list(model.parameters())
    return [{"params": own[::2]}, {"params": own[1::2], "lr": 3e-2, "betas": (0.8, 0.9)}]


def states_of(optimizer: torch.optim.Optimizer) -> dict:
    states = full(optimizer.state_dict())["state"]
    return {key: states[key] for key in sorted(states)}  # made in the order of their first gradients


def loss_of(ctx, model: nn.Module, number: int) -> torch.Tensor:
    x = inputs(ctx.rank, number).to(next(model.parameters()).dtype)
    return model(x).square().sum()


def backward(ctx, model: nn.Module, number: int = 0) -> None:
    loss_of(ctx, model, number).backward()


@distributed(world_sizes=(1, 2, 3))
@pytest.mark.parametrize("transport", list(PLACES))
@pytest.mark.parametrize("name", list(OPTIONS))
def test_bits_are_those_of_a_later_step(ctx, transport, name):
    """Over uneven shards, with accumulation, frozen parameters in step 2, and changes of lr between steps."""
    pairs = twins_of(ctx, transport, name, **PLACES[transport])
    before = params(pairs[0][0])
    for number in range(4):
        for model, optimizer in pairs:
            model.head.requires_grad_(number != 2)
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
            if number == 1:
                model.set_requires_gradient_sync(False)
                backward(ctx, model, 7)
                model.set_requires_gradient_sync(True)
            backward(ctx, model, number)
        now = params(pairs[0][0])
        moved = [not torch.equal(now[key], before[key]) for key in now]
        assert any(moved) == (name != "left to torch"), "steps in backward"
        for _, optimizer in pairs:
            optimizer.step()
        found, expected = ((params(model), states_of(optimizer)) for model, optimizer in pairs)
        same(found, expected, f"step {number}")
        before = found[0]
        for _, optimizer in pairs:
            optimizer.zero_grad()


def clip_by_torch(ctx, model, optimizer):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_by_fsdp2x(ctx, model, optimizer):
    fsdp2x.clip_grad_norm_(model.parameters(), 1e9)


def scale(ctx, model, optimizer):
    for param in model.parameters():
        grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
        grad.mul_(0.5)


def change_lr(ctx, model, optimizer):
    optimizer.param_groups[1]["lr"] = 1.0


def clip_values(ctx, model, optimizer):
    """Changes few elements."""
    largest = max(param.grad.to_local().abs().max().item() for param in model.parameters())
    nn.utils.clip_grad_value_(model.parameters(), 0.9 * largest)


def multiply_one(ctx, model, optimizer):
    smallest = min(model.parameters(), key=lambda param: param.grad.to_local().abs().sum() or torch.inf)
    torch._foreach_mul_([smallest.grad], 0.5)


def clear_data(ctx, model, optimizer):
    list(model.parameters())[-1].grad.data.zero_()


def unscale(ctx, model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def clear(ctx, model, optimizer):
    optimizer.zero_grad()


def load_a_state(ctx, model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def backward_again(ctx, model, optimizer):
    backward(ctx, model)


def fail_in_a_thread(ctx, model, optimizer):
    optimizer.step()
    optimizer.zero_grad()

    class Failing:  # what threads raise, finish() raises: tests/cpp/test_step_threads.cpp
        def finish(self) -> None:
            optimizer._threads.finish()
            raise RuntimeError("a range failed")

    optimizer._in_backward.threads = Failing()
    begin = optimizer._begin_step
    optimizer._begin_step = lambda params, threads: begin(params, optimizer._threads)
    with pytest.raises(RuntimeError, match="a range failed"):
        backward(ctx, model)


MISUSES = [
    (clip_by_torch, "gradients changed between both, as by clipping"),
    (clip_by_fsdp2x, "before the norm of all gradients is known"),
    (scale, "gradients changed between both"),
    (clip_values, "gradients changed between both"),
    (multiply_one, "gradients changed between both"),
    (clear_data, "gradients changed between both"),
    (unscale, "gradients changed between both"),
    (load_a_state, "Call step.. before you load a state"),
    (change_lr, "settings of a parameter group, such as lr, changed"),
    (clear, "gradients changed between both"),
    (backward_again, "another gradient before step"),
    (fail_in_a_thread, "some parameters have stepped and others have not"),
]


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize(("misuse", "text"), MISUSES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_would_change_the_step_is_refused(ctx, misuse, text):
    """The next step works as usual."""
    (model, optimizer), _ = twins_of(ctx)
    backward(ctx, model)
    with pytest.raises(RuntimeError, match=text):
        misuse(ctx, model, optimizer)
        optimizer.step()
    with contextlib.suppress(RuntimeError):
        optimizer.step()
    if misuse is fail_in_a_thread:
        return
    optimizer.zero_grad()
    backward(ctx, model)
    optimizer.step()


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("misuse", [clip_by_torch, clip_values, multiply_one, clear_data, unscale])
def test_edits_show_although_most_gradients_are_zeros(ctx, misuse):
    """The largest gradient, of an embedding, has few rows that are not zero."""
    only_fsdp2x(ctx)
    torch.manual_seed(0)
    model = shard(ctx, nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 64)), ("0",))
    optimizer = fsdp2x.optim.AdamW(model.parameters(), step_in_backward=True)
    model(torch.tensor([[1, 2, 4998, 4999]])).square().sum().backward()
    misuse(ctx, model, optimizer)
    with pytest.raises(RuntimeError, match="gradients changed between both"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 31, 64])
def test_checksums_read_every_element(dtype, numel):
    """From any offset into memory, in columns too, and with NaN, which differs from itself as a number."""
    for offset in range(4):
        grad = torch.full((offset + 2 * numel,), torch.nan, dtype=dtype)[offset:]
        for view in (grad[:numel], grad[::2], grad.view(numel, 2).t()):
            expected = in_backward._checksum(view)
            assert in_backward._checksum(view) == expected
            for index in range(view.numel()):
                place = (index // view.size(-1), index % view.size(-1)) if view.ndim == 2 else index
                view[place] = 1.0
                assert in_backward._checksum(view) != expected
                view[place] = torch.nan
    assert in_backward._checksum(view) == expected


def test_clipping_works_after_the_optimizer_is_gone():
    weight = nn.Parameter(torch.ones(4))
    optimizer = fsdp2x.optim.AdamW([weight], step_in_backward=True)
    with pytest.raises(RuntimeError, match="before the norm of all gradients is known"):
        fsdp2x.clip_grad_norm_([weight], 1.0)
    del optimizer
    gc.collect()
    weight.square().sum().backward()
    fsdp2x.clip_grad_norm_([weight], 1.0)
    assert weight.grad.norm().item() == pytest.approx(1.0)


def test_clipping_in_the_step_is_refused():
    with pytest.raises(ValueError, match="Leave out max_grad_norm or step_in_backward"):
        fsdp2x.optim.AdamW([nn.Parameter(torch.ones(2))], max_grad_norm=1.0, step_in_backward=True)


def test_a_backward_that_raises_ends_its_steps():
    """One process without shards: what has stepped is known, and nothing runs any more."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = fsdp2x.optim.AdamW(model.parameters(), step_in_backward=True)
    optimizer._in_backward._batch_numel = 1
    x = model[0](torch.ones(2, 64))
    x.register_hook(lambda grad: 1 / 0)
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        model[1:](x).sum().backward()
    moved = [not torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]
    assert any(moved) and not all(moved)
    with pytest.raises(RuntimeError, match="Load a checkpoint"):
        optimizer.step()
