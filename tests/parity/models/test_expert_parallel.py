"""Expert parallelism on (efsdp, ep): gradients, steps, norms and files of the unsharded model."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2x
import models
from fsdp2x import moe
from harness import distributed
from moe_models import fused, loss_of, steered
from reference import both_transports, grads, only_fsdp2x, params, same, train_alike
from training import shared_folder

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def mesh_of(*shape):
    names = ("replicate", "efsdp", "ep")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard(model, mesh, **options):
    assert moe.expert_parallel(model, mesh, **options) == 2
    return fsdp2x.fully_shard(model, auto_wrap=True, **options)


def three_steps(ctx, reference, ours, loss_of=loss_of):
    """With global clipping over both meshes by our functions, and our optimizer."""

    def clip():
        norms = [clip_(model.parameters(), 0.01) for clip_, model in zip(clips, (reference, ours), strict=True)]
        same(norms[1], norms[0], "norm", rtol=1e-5, atol=0)
        assert norms[1] > 0.01, "nothing was clipped"

    clips = torch.nn.utils.clip_grad_norm_, fsdp2x.clip_grad_norm_
    optimizers = [
        torch.optim.AdamW(reference.parameters(), lr=5e-3), fsdp2x.optim.AdamW(ours.parameters(), lr=5e-3)
    ]  # fmt: skip
    train_alike(ctx, reference, ours, loss_of, optimizers, before_step=clip, **TOLERANCE)


@distributed(world_sizes=(4,), timeout=120, only_fsdp2x=True)
@pytest.mark.parametrize(
    "implementation, transport",
    [
        ("eager", "shm"),
        ("grouped_mm", "process_group"),
        pytest.param("eager", "process_group", marks=pytest.mark.full),
        pytest.param("grouped_mm", "shm", marks=pytest.mark.full),
    ],
)
def test_ep_2_fsdp_2(ctx, transport, implementation):
    reference = fused()
    moe.use_grouped_gemm(reference, implementation == "grouped_mm")
    ours = shard(copy.deepcopy(reference), mesh_of(2, 2), transport=transport)
    weight = ours.model.layers[0].mlp.experts.gate_up_proj
    assert isinstance(weight, DTensor) and weight.shape == (4, 24, 16) and weight.to_local().shape == (1, 24, 16)
    assert weight.device_mesh.mesh_dim_names == ("efsdp", "ep")
    three_steps(ctx, reference, ours)


@distributed(world_sizes=(3,), only_fsdp2x=True)
@pytest.mark.parametrize("first_is_ep", [True, False])
def test_one_axis_of_one_rank(ctx, first_is_ep):
    """All ranks share the experts, or each has them all; 6 experts over 3 ranks too."""
    reference = fused(num_experts=6)
    mesh = mesh_of(1, ctx.world) if first_is_ep else mesh_of(ctx.world, 1)
    three_steps(ctx, reference, shard(copy.deepcopy(reference), mesh))


@distributed(world_sizes=(4,), timeout=120, only_fsdp2x=True)
@pytest.mark.full
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 4), (4, 1), (2, 2, 1)])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
@both_transports
def test_other_meshes_and_models(ctx, transport, name, shape):
    """Also a replicated axis (over all-reduce), and 4 ranks that share one expert each."""
    reference = fused(name)
    ours = shard(copy.deepcopy(reference), mesh_of(*shape), transport=transport)
    three_steps(ctx, reference, ours)


@distributed(world_sizes=(4,), timeout=120, only_fsdp2x=True)
def test_columns_where_experts_are_too_few(ctx):
    """2 experts over ep 2: one each, whose columns are shared by efsdp 2."""
    reference = fused(num_experts=2)
    ours = shard(copy.deepcopy(reference), mesh_of(2, 2))
    assert ours.model.layers[0].mlp.experts.gate_up_proj.to_local().shape == (1, 12, 16)
    three_steps(ctx, reference, ours)


@distributed(world_sizes=(4,), timeout=120, only_fsdp2x=True)
@both_transports
def test_owners_without_tokens_one_token_and_no_tokens(ctx, transport):
    """All tokens of all ranks go to experts 0 and 1: ep rank 1 computes nothing. A micro-batch of one token."""

    def loss_of_steered(model, rank, step):
        with steered(model, ((0, 1), (2, 3), (0, 3))[step]):
            return loss_of(model, rank, step, length=1 if rank == step else 7)

    reference = fused()
    ours = shard(copy.deepcopy(reference), mesh_of(2, 2), transport=transport)
    three_steps(ctx, reference, ours, loss_of_steered)
    block = ours.model.layers[0].mlp
    x = torch.randn(1, 0 if ctx.rank == 1 else 5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with fsdp2x.unsharded(ours):
        out = block(x)
        assert out.shape == x.shape
        out.sum().backward()
    assert x.grad.shape == x.shape


@distributed(world_sizes=(4,), timeout=120, only_fsdp2x=True)
def test_mixed_precision_checkpointing_and_frozen_experts(ctx):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = fused(moe_intermediate_size=16)
    for layer in reference.model.layers[:1]:
        layer.mlp.experts.requires_grad_(False)
    ours = copy.deepcopy(reference)
    ours.gradient_checkpointing_enable({"use_reentrant": False})
    ours = shard(ours.train(), mesh_of(2, 2), mp_policy=policy)
    plain = fsdp2x.fully_shard(copy.deepcopy(reference), mp_policy=policy)
    for model in (plain, ours):
        loss_of(model, ctx.rank, 0).float().backward()
    found, expected = grads(ours), grads(plain)
    assert found["model.layers.0.mlp.experts.gate_up_proj"] is None
    same(found, expected, "gradients", rtol=5e-2, atol=1e-3)


@distributed(world_sizes=(4,), timeout=120)
def test_files(ctx):
    """Saved under the names of plain files, loaded by plain transformers and into another mesh."""
    from transformers import Qwen3MoeForCausalLM

    only_fsdp2x(ctx)
    with shared_folder(ctx) as folder:
        reference = fused()
        ours = shard(copy.deepcopy(reference), mesh_of(2, 2))
        fsdp2x.save_hf(ours, folder / "out")
        plain = Qwen3MoeForCausalLM.from_pretrained(folder / "out")
        same(params(plain), params(reference))
        other = fused(seed=1)
        other = shard(other, mesh_of(1, 4))
        fsdp2x.load_hf(other, folder / "out", progress=False)
        same(params(other), params(reference))
        onto_meta = fsdp2x.from_pretrained(
            folder / "out",
            prepare=lambda model: (moe.expert_parallel(model, mesh_of(2, 2)), model)[1],
            dtype=torch.float32,
            auto_wrap=True,
            progress=False,
        )
        same(params(onto_meta), params(reference))


@distributed(world_sizes=(2,))
def test_refusals(ctx):
    with pytest.raises(ValueError, match="named axes, .*'ep'.*got DeviceMesh"):
        moe.expert_parallel(fused(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)))
    with pytest.raises(ValueError, match="LlamaForCausalLM has no fused experts"):
        moe.expert_parallel(models.build("llama"), mesh_of(1, 2))
    with pytest.raises(ValueError, match="3 experts, which 2 ranks cannot share"):
        moe.expert_parallel(fused(num_experts=3), mesh_of(1, 2))
    model = fsdp2x.fully_shard(fused())
    with pytest.raises(RuntimeError, match="experts is sharded already"):
        moe.expert_parallel(model, mesh_of(1, 2))
