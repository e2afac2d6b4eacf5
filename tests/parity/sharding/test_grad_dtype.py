"""`param.grad_dtype` next to fsdp2x's own parts: plans, AdamW, offloading, and settings that come too late.

The differential fuzzer draws it for random programs, and `fsdp2x.conformance` has FSDP2's own contract.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp2x
from fsdp2x.memory import plan_memory
from harness import distributed
from reference import TORCH_MINOR, TRANSPORTS, install_streams, same, train_alike

pytestmark = pytest.mark.skipif(TORCH_MINOR < 15, reason="FSDP2 ignores grad_dtype before torch 2.15")
F64, BF16 = torch.float64, torch.bfloat16
SETTINGS = {"lr": 1e-2, "eps": 1e-2}  # a small eps would round signs of tiny gradients


def build() -> nn.Sequential:
    """Seven rows and three; gradients in float64, bfloat16, and that of the weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3))
    model[0].weight.grad_dtype, model[2].weight.grad_dtype = F64, BF16
    return model


def loss_of(model, rank, step):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    return model(x).square().mean()


def gradient_bytes(model, world: int) -> int:
    """Each gradient takes the rows of the rank with most of them, in cache lines."""
    sizes = [-(-p.shape[0] // world) * p[:1].numel() * p.grad_dtype.itemsize for p in model.parameters()]
    return sum(-(-size // 64) * 64 for size in sizes)


class InDouble:
    """torch's AdamW over copies in float64, since it takes gradients of the parameter's dtype only."""

    def __init__(self, params) -> None:
        self.params = list(params)
        self.twins = [nn.Parameter(param.detach().double()) for param in self.params]
        self.adamw = torch.optim.AdamW(self.twins, **SETTINGS)

    @torch.no_grad()
    def step(self) -> None:
        for twin, param in zip(self.twins, self.params, strict=True):
            twin.grad = param.grad.double()
        self.adamw.step()
        for twin, param in zip(self.twins, self.params, strict=True):
            param.copy_(twin)

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None


@distributed(world_sizes=(1, 2, 3), only_fsdp2x=True)
@pytest.mark.parametrize("offload", [None, "optimizer", "gradients", "all"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, "streams"])
def test_steps_and_plans(ctx, transport, offload):
    plain = build()
    planned = plan_memory(plain, ctx.world, device="cpu", auto_wrap=False).gradient_bytes
    assert planned == gradient_bytes(plain, ctx.world)
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32), "auto_wrap": False}
    if offload and transport == "streams":
        options["offload_policy"] = fsdp2x.HostOffloadPolicy(offload, pin_memory=False)
    if transport == "streams":
        install_streams()
    model = fsdp2x.fully_shard(build(), transport=transport, **options)
    optimizers = InDouble(plain.parameters()), fsdp2x.optim.AdamW(model.parameters(), **SETTINGS)
    train_alike(ctx, plain, model, loss_of, optimizers, rtol=2e-2, atol=1e-3)
    loss_of(model, ctx.rank, 9).backward()
    found = {name: param.grad.dtype for name, param in model.named_parameters()}
    assert found == {name: param.grad_dtype for name, param in plain.named_parameters()}
    measured = fsdp2x.memory_report(model).gradient_bytes
    assert measured == planned or (transport == "streams" and measured > planned)


LATE = {
    "forward": lambda model, state: loss_of(model, 0, 0),
    "convert": lambda model, state: model.to(F64),
    "assign": lambda model, state: model.load_state_dict(state, assign=True),
}


@distributed(world_sizes=(2,), only_fsdp2x=True)
@pytest.mark.parametrize("where", LATE)
def test_a_dtype_that_is_set_after_the_first_forward_is_refused(ctx, where):
    model = fsdp2x.fully_shard(build(), auto_wrap=False)
    model[0].bias.grad_dtype = BF16  # before it, it counts
    loss_of(model, ctx.rank, 0).backward()
    assert model[0].bias.grad.dtype == BF16
    state = dict(model.state_dict())
    model.zero_grad()
    model[0].weight.grad_dtype = BF16
    with pytest.raises(RuntimeError, match="grad_dtype.*fully_shard"):
        LATE[where](model, state)
    same(model[0].weight.dtype, torch.float32)
