"""`fsdp2x selftest`: checks a sharded model against an unsharded one in five ways, on any machine.

Every rank runs each check, because forward, backward and `full_tensor` are collective.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fsdp2x.api import describe, fully_shard, local_tensor, readable
from fsdp2x.base.arguments import checked, with_memory
from fsdp2x.base.failures import exchange
from fsdp2x.memory import memory_report

__all__ = ["run_suite", "shard_layers"]

# 1003 and 250 are not multiples of 2, 3 or 4 ranks, so shards differ in size.
VOCAB, HIDDEN, LAYERS, HEADS, FEED_FORWARD = 1003, 64, 4, 8, 250
BATCH, LENGTH = 2, 16


class SimpleTransformer(nn.Module):
    """Embedding, encoder layers, head. Logits are [batch, length, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, FEED_FORWARD, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def build(device: torch.device) -> SimpleTransformer:
    """Returns a model with the same weights on every rank and at every call. Keeps the global generator's state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        return SimpleTransformer().to(device)


def batch(rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns inputs and labels of one rank in one step, int64 [batch, length]. Any rank can make any rank's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCAB, (2, BATCH, LENGTH), generator=generator, device="cpu").to(device)
    return tokens[0], tokens[1]


def loss_of(model: nn.Module, rank: int, step: int, device: torch.device) -> Tensor:
    """Returns the mean cross-entropy of that rank's batch, in fp32."""
    inputs, labels = batch(rank, step, device)
    return nn.functional.cross_entropy(model(inputs).float().view(-1, VOCAB), labels.view(-1))


STEPS = 4
LEARNING_RATE = 1e-3
# Larger than the rounding error of a zero gradient (of the keys' bias), from which AdamW would make a step.
EPSILON = 1e-6
# A step over gloo on a machine with fewer cores than ranks stays below this. One that waits for a timeout does not.
SLOWEST_RATIO = 100.0


class CheckFailed(AssertionError):
    """A failed check. The message says what was found, where, and what was expected."""


@dataclass(frozen=True)
class Setting:
    """The objects of the checks. ``shard(model, mp_policy=None)`` shards in place and returns the model."""

    shard: Callable[..., nn.Module]
    device: torch.device
    rank: int
    world: int
    num_steps: int

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        return loss_of(model, self.rank, step, self.device)

    def mean_loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Returns the mean loss of all ranks' batches, computed by this rank alone on an unsharded model."""
        losses = [loss_of(model, rank, step, self.device) for rank in range(self.world)]
        return torch.stack(losses).mean()

    def mean_over_ranks(self, loss: torch.Tensor) -> float:
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / self.world

    def pair(self) -> tuple[nn.Module, nn.Module]:
        """Returns a sharded model and the same model unsharded."""
        return self.shard(build(self.device)), build(self.device)


def check_parameter_sharding(setting: Setting) -> str:
    """Checks that each parameter is a ``Shard(0)`` DTensor whose local rows are this rank's chunk of the original."""
    model, twin = setting.pair()
    originals = dict(twin.named_parameters())
    for name, param in model.named_parameters():
        original = originals[name].detach()
        if not isinstance(param, DTensor):
            raise CheckFailed(f"{name} is a {type(param).__name__}, expected a DTensor")
        _require(tuple(param.placements) == (Shard(0),), f"{name} has placements {param.placements}")
        rows = -(-original.shape[0] // setting.world)
        expected = original[setting.rank * rows : (setting.rank + 1) * rows]
        local = param.to_local()
        _require(
            local.shape == expected.shape,
            f"{name}: local shape {tuple(local.shape)}, expected {tuple(expected.shape)} of {tuple(original.shape)}",
        )
        _require(torch.equal(local, expected), f"{name}: the local rows are not those of the original")
        _require(torch.equal(param.full_tensor(), original), f"{name}: the gathered tensor is not the original")
    return "All parameters are correctly sharded!"


def check_gradient_synchronization(setting: Setting) -> str:
    """Checks that gathered gradients are the mean over the ranks' batches, as one process computes it."""
    model, twin = setting.pair()
    for step in range(2):  # the second accumulates into the first
        setting.loss(model, step).backward()
        setting.mean_loss(twin, step).backward()
        expected = {name: _whole(param.grad) for name, param in twin.named_parameters()}
        for name, param in model.named_parameters():
            if param.grad is None:
                raise CheckFailed(f"{name} has no gradient")
            error = (_whole(param.grad) - expected[name]).abs().max().item()
            scale = expected[name].abs().max().item()
            _require(
                error <= 1e-5 * max(scale, 1.0) and error <= 1e-3 * scale + 1e-8,
                f"{name}: a gradient is off by {error:.3g} where the largest is {scale:.3g} (step {step})",
            )
    return "Gradients are correctly synchronized!"


def check_loss_consistency(setting: Setting) -> str:
    """Checks losses and final weights of several AdamW steps against one process, and bf16 compute roughly."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, twin = setting.pair()
    half: Any = setting.shard(build(setting.device), mp_policy=policy)
    seen: list[torch.dtype] = []
    handle = half.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=LEARNING_RATE, eps=EPSILON) for each in (model, half, twin)]
    expected = 0.0
    for step in range(STEPS):
        losses = [setting.loss(model, step), setting.loss(half, step), setting.mean_loss(twin, step)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        got, near = (setting.mean_over_ranks(loss) for loss in losses[:2])
        expected = losses[2].item()
        _require(abs(got - expected) <= 1e-5 * abs(expected), f"loss {got:.7f} in step {step}, expected {expected:.7f}")
        _require(abs(near - expected) <= 2e-2 * abs(expected), f"bf16 loss {near:.5f}, fp32 {expected:.5f}")
    handle.remove()
    _require(set(seen) == {torch.bfloat16}, f"the head computed in {set(seen)}, expected bfloat16")
    _require(
        {param.dtype for param in half.parameters()} == {torch.float32}, "shards under mixed precision are not fp32"
    )
    originals = dict(twin.named_parameters())
    for name, param in model.named_parameters():
        error = (_whole(param) - originals[name]).abs().max().item()
        _require(error <= 0.05 * LEARNING_RATE, f"{name}: off by {error:.3g} after {STEPS} steps")
    return f"Loss is consistent across all ranks: {expected:.6f}"


def check_memory_usage(setting: Setting) -> str:
    """Checks that a rank keeps its share of the unsharded model's bytes, and nothing gathered after a step."""
    model, twin = setting.pair()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=LEARNING_RATE) for each in (model, twin)]
    plan = memory_report(model, optimizers[0])
    held = []
    for each, optimizer in zip((model, twin), optimizers, strict=True):
        setting.loss(each, 0).backward()
        tensors = [*each.parameters(), *(param.grad for param in each.parameters() if param.grad is not None)]
        optimizer.step()
        tensors += [value for state in optimizer.state.values() for value in state.values() if value.dim() > 0]
        held.append(sum(local_tensor(tensor).nbytes for tensor in tensors))
    mine, whole = held
    rows = [-(-param.shape[0] // setting.world) * param[0].numel() for param in twin.parameters()]
    most = 4 * sum(rows) * 4  # weight, gradient and two moments in fp32, of the rank with the most rows
    _require(mine <= most, f"{readable(mine)} on this rank, expected at most {readable(most)} of {readable(whole)}")
    total = torch.tensor(mine, dtype=torch.float64, device=setting.device)
    dist.all_reduce(total)
    _require(total.item() == whole, f"all ranks hold {readable(int(total))}, expected {readable(whole)}")
    if (report := describe(model)).stats:
        _require(report.stats["gather_slots_owned"] == 0, f"still gathered after a step: {report.stats['owners']}")
        after = memory_report(model, optimizers[0])
        _require(after.peak_bytes == plan.peak_bytes, "the memory plan changed when the model ran")
        _require(mine <= plan.peak_bytes, f"a peak of {readable(plan.peak_bytes)} is planned, {readable(mine)} stay")
    lines = [
        f"Unsharded: {readable(whole)} of weights, gradients and optimizer states",
        f"This rank: {readable(mine)} ({mine / whole:.2f} of it)",
    ]
    print_on_first("\n".join(lines))
    return f"Memory usage validated (Peak without activations: {readable(plan.peak_bytes)})"


def check_training_speed(setting: Setting) -> str:
    """Compares steps of the sharded model with those of an unsharded one at equal batch size. The loss must fall."""
    model, twin = setting.pair()
    seconds = {}
    losses: list[float] = []
    for name, each in (("sharded", model), ("unsharded", twin)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=LEARNING_RATE)
        times = []
        for step in range(setting.num_steps + 2):
            dist.barrier()
            begun = time.perf_counter()
            loss = setting.loss(each, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if setting.device.type == "cuda":
                torch.cuda.synchronize(setting.device)
            if step >= 2:  # the first ones allocate
                times.append(time.perf_counter() - begun)
            if name == "sharded":
                losses.append(setting.mean_over_ranks(loss))
        seconds[name] = statistics.median(times)
    ratio = seconds["sharded"] / seconds["unsharded"]
    throughput = 1 / seconds["sharded"]
    print_on_first(
        f"Trained {setting.num_steps} steps in {setting.num_steps * seconds['sharded']:.2f}s\n"
        f"Throughput: {throughput:.2f} steps/s, a step takes {ratio:.2f} times as long as unsharded"
    )
    _require(losses[-1] < losses[0], f"the loss of one batch went from {losses[0]:.4f} to {losses[-1]:.4f}")
    _require(ratio < SLOWEST_RATIO, f"a sharded step takes {ratio:.0f} times as long as an unsharded one")
    return f"Training speed validated ({throughput:.2f} steps/s)"


CHECKS: dict[str, Callable[[Setting], str]] = {
    "Parameter Sharding": check_parameter_sharding,
    "Gradient Synchronization": check_gradient_synchronization,
    "Loss Consistency": check_loss_consistency,
    "Memory Usage": check_memory_usage,
    "Training Speed": check_training_speed,
}


def print_on_first(text: str) -> None:
    """Prints on rank 0 only, while every rank runs the checks."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise CheckFailed(message)


def _whole(tensor: torch.Tensor | None) -> torch.Tensor:
    """Returns the full tensor. Collective if it is sharded."""
    assert tensor is not None, "every parameter has a gradient"
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_LINE = "=" * 60


@checked
def shard_layers(model: nn.Module, mp_policy=None, transport: str = "auto") -> nn.Module:
    """Makes one unit per layer and one for the rest, as the checks shard."""
    options = {"mp_policy": mp_policy} if mp_policy is not None else {}
    layers: Any = model.layers
    for layer in layers:
        fully_shard(layer, transport=transport, **options)
    return fully_shard(model, auto_wrap=False, transport=transport, **options)


@checked
@with_memory()
def run_suite(
    device: torch.device, *, shard: Callable[..., nn.Module] = shard_layers, num_steps: int = 20
) -> list[tuple[str, str]]:
    """Runs all checks and prints on rank 0. Collective over the default process group.

    Returns the failures as (name of the check, sentences of the ranks that failed), the same on every rank. After a
    failure the remaining checks still run, unless a rank could not finish. Then its error is raised everywhere.
    """
    setting = Setting(shard, device, dist.get_rank(), dist.get_world_size(), num_steps)
    print_on_first(f"{_LINE}\nFSDP2 Integration Test Suite\n{_LINE}")
    failures = []
    for name, check in CHECKS.items():
        print_on_first(f"\n=== Testing {name} ===")
        verdict, wrong = "", None
        try:
            verdict = check(setting)
        except CheckFailed as error:
            wrong = f"rank {setting.rank}: {error}"
        sentences = list(dict.fromkeys(sentence for sentence in exchange(wrong) if sentence is not None))
        if sentences:
            failures.append((name, "; ".join(sentences)))
            print_on_first("\n".join(f"❌ Test failed on {sentence}" for sentence in sentences))
        else:
            print_on_first(f"✅ {verdict}")
    verdict = "✅ All tests passed!" if not failures else f"❌ {len(failures)} of {len(CHECKS)} tests failed"
    print_on_first(f"\n{_LINE}\n{verdict}\n{_LINE}")
    return failures
