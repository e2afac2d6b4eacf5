"""Muon over shards: bit for bit torch.optim.Muon on the unsharded model, and AdamW alone for its other groups."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2x
import models
from fsdp2x.optim.muon import plan
from harness import distributed
from models import STACK_UNITS, Stack, inputs
from reference import changes, full, mean_of_ranks, params, same, shard

pytestmark = pytest.mark.filterwarnings("ignore:.*param_names.*")
SHAPES = ((16, 8), (7, 33), (64, 48), (3, 5), (1, 4), (20, 20))
SETTINGS = {
    "torch's": {},
    "plain momentum": {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "moonlight": {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    "spectral": {"adjust_lr_fn": "spectral_unclamped", "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}
R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Placements of a matrix on the axes of a mesh.
ONE_AXIS = {"rows": (S0,), "columns": (S1,), "replicas": (R,)}
TWO_AXES = {"replicas of rows": (R, S0), "rows and columns": (S0, S1), "columns and columns": (S1, S1)}


def pair(shapes, mesh, placements):
    """Returns random parameters from a fixed seed: full ones, and the same as DTensors."""
    torch.manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    cut = [nn.Parameter(distribute_tensor(param.detach(), mesh, placements)) for param in whole]
    return whole, cut


def set_gradients(whole, cut, step, without=()):
    torch.manual_seed(100 + step)
    for number, (one, shards) in enumerate(zip(whole, cut, strict=True)):
        grad = torch.randn(one.shape)
        one.grad = None if number in without else grad
        shards.grad = None if number in without else distribute_tensor(grad, shards.device_mesh, shards.placements)


def check_steps(mesh, placements, rounds=(1, 2000, 1 << 20, 2000)) -> None:
    """In rounds of one matrix, of few and of all; a schedule changes the rate."""
    for settings, round_bytes in zip(SETTINGS, rounds, strict=False):
        whole, cut = pair(SHAPES, mesh, placements)
        optimizers = [
            make(params, lr=0.02, **SETTINGS[settings])
            for make, params in ((torch.optim.Muon, whole), (fsdp2x.optim.Muon, cut))
        ]
        with mock.patch.object(plan, "ROUND_BYTES", round_bytes):
            for step in range(2):
                set_gradients(whole, cut, step)
                for optimizer in optimizers:
                    optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
                    optimizer.step()
        same(full(cut), full(whole), f"{settings}, rounds of {round_bytes}")
        got, expected = (optimizer.state_dict() for optimizer in optimizers)
        same(full(got["state"]), full(expected["state"]), f"state, {settings}")


@distributed(world_sizes=(1, 2, 3, 4), only_fsdp2x=True)
@pytest.mark.parametrize("cut_as", ONE_AXIS)
def test_steps_are_torchs(ctx, cut_as):
    check_steps(init_device_mesh("cpu", (ctx.world,)), ONE_AXIS[cut_as])


@distributed(world_sizes=(4,), only_fsdp2x=True)
@pytest.mark.parametrize("cut_as", TWO_AXES)
def test_steps_over_two_axes_are_torchs(ctx, cut_as):
    check_steps(init_device_mesh("cpu", (2, 2)), TWO_AXES[cut_as], rounds=(1, 2000))


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2)], ids=str)
def test_stacks_are_matrices(ctx, placement):
    """Each expert is a separate matrix, whether a rank has some experts, or rows or columns of all."""
    mesh = init_device_mesh("cpu", (ctx.world,))
    whole, cut = pair([(5, 12, 8), (2, 3, 7)], mesh, [placement])
    matrices = [[nn.Parameter(matrix.clone()) for matrix in stack.detach()] for stack in whole]
    reference = torch.optim.Muon([one for stack in matrices for one in stack], lr=0.02)
    optimizer = fsdp2x.optim.Muon(cut, lr=0.02, ns_dtype=torch.bfloat16)
    for step in range(3):
        set_gradients(whole, cut, step)
        for stack, ones in zip(whole, matrices, strict=True):
            for one, grad in zip(ones, stack.grad, strict=True):
                one.grad = grad
        reference.step()
        optimizer.step()
    expected = [torch.stack([one.detach() for one in ones]) for ones in matrices]
    # A batch of products may round otherwise than single ones, in bfloat16.
    same(full(cut), expected, rtol=0, atol=3 * 0.02 * 0.03)


@distributed(world_sizes=(4,), only_fsdp2x=True)
def test_a_mesh_that_is_part_of_the_world(ctx):
    """Two stages of a pipeline, each a mesh of two axes over its own ranks, with other shapes."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "data", "tensor"))
    stage = mesh.get_local_rank("stage")
    whole, cut = pair(SHAPES[stage : stage + 3], mesh["data", "tensor"], (S0, S1))
    reference, optimizer = torch.optim.Muon(whole), fsdp2x.optim.Muon(cut)
    for step in range(2):
        set_gradients(whole, cut, step)
        reference.step()
        optimizer.step()
    same(full(cut), full(whole))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 24, bias=False)
        self.down = nn.Linear(24, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


@distributed(world_sizes=(4,), only_fsdp2x=True)
def test_tensor_parallel_models(ctx):
    """Rows cut by two axes, and rows by one and columns by the other, as frameworks arrange them."""
    torch.manual_seed(0)
    model = Block()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fsdp2x.fully_shard(model, mesh=mesh["data"])
    optimizers = [torch.optim.Muon(reference.parameters(), lr=0.02), fsdp2x.optim.Muon(model.parameters(), lr=0.02)]
    for step in range(3):
        torch.manual_seed(step)
        for param, whole in zip(model.parameters(), reference.parameters(), strict=True):
            whole.grad = torch.randn(whole.shape)
            param.grad = distribute_tensor(whole.grad, mesh, [R, R]).redistribute(mesh, param.placements)
        for optimizer in optimizers:
            optimizer.step()
    same(params(model), params(reference))


def groups_of(model, **adamw):
    return fsdp2x.optim.muon_param_groups(model, exclude=["head.*"], **adamw)


@distributed(world_sizes=(1, 2, 3, 4), only_fsdp2x=True)
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_training(ctx, transport):
    """Matrices by Muon and the rest by AdamW, clipped together, equal to the unsharded model's steps."""
    reference = Stack()
    model = shard(ctx, copy.deepcopy(reference), STACK_UNITS, transport=transport)
    optimizer = fsdp2x.optim.Muon(groups_of(model, lr=1e-3, betas=(0.8, 0.9)), lr=0.02, max_grad_norm=0.5)
    matrices, rest = (group["params"] for group in groups_of(reference))
    whole = [
        torch.optim.Muon([param for _, param in matrices], lr=0.02),
        fsdp2x.optim.AdamW([param for _, param in rest], lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1),
    ]
    losses = []

    def loss_of(model, rank):
        return model(inputs(rank, len(losses) % 2)).square().mean()

    for _ in range(6):
        optimizer.zero_grad()
        expected = mean_of_ranks(reference, loss_of, ctx.world)
        loss = loss_of(model, ctx.rank)
        loss.backward()
        same(loss.detach(), expected[ctx.rank], f"loss {len(losses)}", rtol=2e-3, atol=1e-5)
        optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        same(optimizer.grad_norm, norm, "norm", rtol=2e-3, atol=1e-6)
        for one in whole:
            one.step()
        losses.append(loss.item())
    assert changes(losses)


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
def test_matrices_without_gradients_stay(ctx):
    mesh = init_device_mesh("cpu", (ctx.world,))
    whole, cut = pair(SHAPES, mesh, [S0])
    reference, optimizer = torch.optim.Muon(whole), fsdp2x.optim.Muon(cut)
    mock.patch.object(plan, "ROUND_BYTES", 500).start()
    for step, without in enumerate([(1, 2), (), range(len(SHAPES)), (0,)]):
        set_gradients(whole, cut, step, without)
        reference.step()
        optimizer.step()
    same(full(cut), full(whole))
    assert optimizer.step(lambda: 3) == 3


@distributed(world_sizes=(2, 3), only_fsdp2x=True)
def test_states_are_torchs(ctx):
    """fsdp2x's Muon continues from the state of torch.optim.Muon, under any sharding, also in a copy."""
    mesh = init_device_mesh("cpu", (ctx.world,))
    whole, cut = pair(SHAPES, mesh, [S0])
    reference, optimizer = torch.optim.Muon(whole, lr=0.02), fsdp2x.optim.Muon(cut, lr=0.5)
    set_gradients(whole, cut, 0)
    reference.step()
    saved = copy.deepcopy(reference.state_dict())
    for number, state in saved["state"].items():
        state["momentum_buffer"] = distribute_tensor(state["momentum_buffer"], mesh, cut[number].placements)
    optimizer.load_state_dict(saved)
    for param, one in zip(cut, whole, strict=True):
        param.data.copy_(distribute_tensor(one.detach(), mesh, [S0]))
    again = copy.copy(fsdp2x.optim.Muon(cut, lr=0.5))
    assert again.ns_dtype is torch.bfloat16 and again.max_grad_norm is None
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    set_gradients(whole, cut, 1)
    reference.step()
    again.step()
    same(full(cut), full(whole))


@distributed(world_sizes=(2,), timeout=60, only_fsdp2x=True)
def test_ranks_with_other_parameters_are_told(ctx):
    mesh = init_device_mesh("cpu", (2,))
    cut = [nn.Parameter(DTensor.from_local(torch.ones(2 + ctx.rank, 4), mesh, [S0], run_check=False))]
    with pytest.raises(RuntimeError, match="has other matrices than rank"):
        fsdp2x.optim.Muon(cut).step()


@distributed(world_sizes=(2,), only_fsdp2x=True)
def test_gradients_that_are_cut_otherwise_are_refused(ctx):
    mesh = init_device_mesh("cpu", (2,))
    _, cut = pair(SHAPES, mesh, [S0])
    cut[0].grad = distribute_tensor(torch.zeros(SHAPES[0]), mesh, [S1])
    with pytest.raises(ValueError, match="has placements"):
        fsdp2x.optim.Muon(cut).step()


ROUNDED = {
    "int8": {"moments_dtype": "int8"},
    "bfloat16": {"moments_dtype": torch.bfloat16, "stochastic_rounding": True, "seed": 3},
}


def make_rounded(ctx, **options):
    model = shard(ctx, Stack(), STACK_UNITS)
    groups = fsdp2x.optim.muon_param_groups(model, exclude=["head.*"], lr=1e-2)
    return model, fsdp2x.optim.Muon(groups, lr=0.02, **options)


@distributed(world_sizes=(1, 3), only_fsdp2x=True)
@pytest.mark.parametrize("rounded", ROUNDED)
def test_steps_are_those_of_two_optimizers(ctx, rounded):
    model, optimizer = make_rounded(ctx, **ROUNDED[rounded])
    other = shard(ctx, Stack(), STACK_UNITS)
    matrices, rest = (group["params"] for group in fsdp2x.optim.muon_param_groups(other, exclude=["head.*"]))
    muon = fsdp2x.optim.Muon([param for _, param in matrices], lr=0.02)
    adamw = fsdp2x.optim.AdamW([param for _, param in rest], lr=1e-2, weight_decay=0.1, **ROUNDED[rounded])
    for number in range(4):
        models.step(ctx, model, optimizer, number)
        models.step(ctx, other, None, number)
        for one in (muon, adamw):
            one.step()
            one.zero_grad()
    same(params(model), params(other))
    for (_, param), (_, twin) in zip(optimizer_pairs(optimizer), rest, strict=True):
        same(full(optimizer.state[param]), full(adamw.state[twin]), "state")
    report = fsdp2x.memory_report(model, optimizer)
    fresh = fsdp2x.memory_report(model, make_rounded(ctx, **ROUNDED[rounded])[1])
    assert report.optimizer_bytes == fresh.optimizer_bytes, "what the first step makes was predicted"


def optimizer_pairs(optimizer):
    return [(name, param) for group in optimizer.param_groups if not group["use_muon"]
            for name, param in zip(group["param_names"], group["params"], strict=True)]  # fmt: skip


@distributed(world_sizes=(1,), only_fsdp2x=True)
def test_settings_are_adamws(ctx):
    with pytest.raises(ValueError, match="moments_dtype must be .*, got 'fp8'"):
        make_rounded(ctx, moments_dtype="fp8")
    with pytest.raises(ValueError, match="stochastic_rounding needs moments_dtype"):
        make_rounded(ctx, stochastic_rounding=True)
