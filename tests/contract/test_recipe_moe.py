"""torchtitan's mixture of experts: expert parallel weights on a mesh of their own, inside the block's one unit."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp2x
from harness import distributed
from models import inputs
from reference import TORCH_MINOR, grads, params, same

WIDTH, NUM_EXPERTS = 6, 4


class Experts(nn.Module):
    """Grouped weights, as torchtitan keeps them; each rank of the expert mesh owns some and sees everybody's tokens."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(NUM_EXPERTS, 8, WIDTH) / 3)
        self.w2 = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 8) / 3)
        self.mesh = None

    def parallelize(self, mesh):
        self.mesh = mesh
        for name in ("w1", "w2"):
            setattr(self, name, nn.Parameter(distribute_tensor(getattr(self, name), mesh, [Shard(0)])))

    def forward(self, x, gates):
        group = self.mesh.get_group()
        x, gates = (all_gather_tensor_autograd(one.contiguous(), 0, group) for one in (x, gates))
        w1, w2 = self.w1.to_local(), self.w2.to_local()
        first = self.mesh.get_local_rank() * w1.shape[0]
        hidden = torch.einsum("td,ehd->teh", x, w1).relu()
        out = torch.einsum("teh,edh,te->td", hidden, w2, gates[:, first : first + w1.shape[0]])
        return reduce_scatter_tensor_autograd(out, "sum", 0, group)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x):
        h = self.norm(x)
        return x + self.experts(h, self.router(h).softmax(-1))


def make():
    torch.manual_seed(3)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def titan(fully_shard, model, expert_dim, policy):
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    dp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    infos = {"dp": FSDPMeshInfo(dp, shard_mesh_dim=0), "efsdp": FSDPMeshInfo(sparse["efsdp"], shard_mesh_dim=0)}
    for block in (model[0], model[1]):
        block.experts.parallelize(sparse["ep"])
        experts = set(block.experts.parameters())

        def place(param, experts=experts):
            if param in experts:
                return ShardPlacementResult(placement=Shard(expert_dim), mesh_info=infos["efsdp"])
            return ShardPlacementResult(placement=Shard(0), mesh_info=infos["dp"])

        fully_shard(block, mesh=dp, mp_policy=policy, shard_placement_fn=place, reshard_after_forward=True)
    fully_shard(model, mesh=dp, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[1].set_modules_to_backward_prefetch([model[0]])


def train(rank, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for step in range(3):
        loss = model(inputs(rank, step)).float().square().mean() / dist.get_world_size()
        loss.backward()
        results += [loss.detach(), grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return results, params(model)


def train_whole(world):
    """The weights after the same steps without any mesh, on the tokens of all ranks."""

    def forward(experts, x, gates):
        hidden = torch.einsum("td,ehd->teh", x, experts.w1).relu()
        return torch.einsum("teh,edh,te->td", hidden, experts.w2, gates)

    model = make()
    for block in (model[0], model[1]):
        block.experts.forward = functools.partial(forward, block.experts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        for rank in range(world):
            (model(inputs(rank, step)).square().mean() / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.skipif(TORCH_MINOR < 15, reason="no ShardPlacementResult before torch 2.15")
@distributed(world_sizes=(4,), timeout=120)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("expert_dim", [0, 1])
def test_experts_on_their_own_mesh(ctx, expert_dim, precision):
    """Against stock, and against one process that has every token."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if precision == "bf16" else {}
    policy = MixedPrecisionPolicy(**dtypes)

    def run(fully_shard):
        model = make()
        titan(fully_shard, model, expert_dim, policy)
        return model, train(ctx.rank, model)

    import torch.distributed.fsdp as torch_fsdp

    stock, expected = run(torch_fsdp.fully_shard)
    with fsdp2x.install():
        ours, got = run(torch_fsdp.fully_shard)
    assert isinstance(ours[0], fsdp2x.FSDPModule) and not isinstance(stock[0], fsdp2x.FSDPModule)
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        assert one.placements == other.placements and one.device_mesh == other.device_mesh
    loose = {"rtol": 2e-2, "atol": 2e-3} if precision == "bf16" else {"rtol": 1e-5, "atol": 1e-7}
    same(got, expected, **loose)
    if precision == "fp32":
        (losses, weights), whole = got, train_whole(ctx.world)
        same(weights, whole, rtol=1e-4, atol=1e-6)
        assert len({float(loss) for loss in losses[::2]}) == 3
