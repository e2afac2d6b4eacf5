"""Muon by blocks over shards: the bits of the model that does not fuse them, and of the unsharded parameters."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2x
from fsdp2x.base import torch_private
from harness import distributed
from models import VOCAB
from reference import full, only_fsdp2x, same

pytestmark = pytest.mark.filterwarnings("ignore:.*param_names.*")
CONFIG = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "pad_token_id": 0,
          "tie_word_embeddings": False}  # fmt: skip
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
FUSED = {"qkv_proj": (QKV, (16, 4, 4)), "gate_up_proj": (GATE_UP, (20, 20))}


def phi3():
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**CONFIG, attn_implementation="eager"))


def unfused(named):
    """Tensors of Phi-3 under Llama's names."""
    parts = {}
    for name, tensor in named.items():
        kind = name.split(".")[-2]
        leaves, sizes = FUSED.get(kind, ((kind,), tensor.shape[:1]))
        parts |= {name.replace(kind, leaf): part for leaf, part in zip(leaves, tensor.split(sizes), strict=True)}
    return parts


@distributed(world_sizes=(1, 2, 3, 4))
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_a_fused_model_is_the_unfused_one(ctx, adjust):
    """Phi-3's sharded weights, in bits, are Llama's under torch.optim.Muon, and so are its losses nearly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    only_fsdp2x(ctx)
    model, llama = phi3(), LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager"))
    llama.load_state_dict(unfused(model.state_dict()))
    reference = {name: param for name, param in llama.named_parameters() if ".layers." in name and param.ndim == 2}
    fsdp2x.fully_shard(model)
    groups = fsdp2x.optim.muon_param_groups(model)
    fused = {name: param for group in groups[:-1] for name, param in group["params"]}
    optimizer = fsdp2x.optim.Muon(groups[:-1], lr=0.02, adjust_lr_fn=adjust)
    plain = torch.optim.Muon(reference.values(), lr=0.02, adjust_lr_fn=adjust)
    for step in range(3):
        torch.manual_seed(step)
        whole = {name: torch.randn(param.shape) for name, param in fused.items()}
        for name, param in fused.items():
            param.grad = distribute_tensor(whole[name], param.device_mesh, param.placements)
        for name, grad in unfused(whole).items():
            reference[name].grad = grad.clone()
        optimizer.step()
        plain.step()
    got = unfused(full(fused))
    assert got.keys() == reference.keys()
    same(got, {name: reference[name].detach() for name in got})
    ids = torch.arange(12).view(1, 12)
    losses = [one(input_ids=ids, labels=ids).loss.item() for one in (model, llama)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    if adjust == "original":
        text = str(fsdp2x.describe(model, optimizer))
        assert "qkv_proj.weight (2) in blocks, rows 16 + 4 + 4" in text


MOONLIGHT = {"adjust_lr_fn": "match_rms_adamw"}
R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Shape -> the blocks of its group.
SPLITS = (
    ((7, 9), {"split_sizes": (4, 1, 2)}),
    ((12, 5), {"num_heads": 3}),
    ((24, 10), {"split_sizes": (2, 4, 6), "split_repeats": 2, "num_heads": (2, 1, 4), **MOONLIGHT}),
    ((6, 14), {"split_sizes": (8, 6), "split_dim": -1, "ns_method": "gram"}),
    ((200, 64), {"split_sizes": (136, 64), "ns_method": "gram", "adjust_lr_fn": "spectral_unclamped"}),
    ((3, 4, 12), {"split_sizes": (1, 1), "split_dim": -1, "split_repeats": 6}),
)


def check(cuts):
    """``cuts``: (mesh, placements) of parameters of two and of three dims. Against plain tensors on one rank."""
    torch.manual_seed(0)
    pairs = []
    for shape, settings in SPLITS:
        whole = nn.Parameter(torch.randn(shape))
        mesh, placements = cuts(len(shape))
        pairs.append((whole, nn.Parameter(distribute_tensor(whole.detach(), mesh, placements)), settings))
    optimizers = [
        fsdp2x.optim.Muon([{"params": [pair[side]], **pair[2]} for pair in pairs], lr=0.02) for side in range(2)
    ]
    for _ in range(2):
        for whole, cut, _ in pairs:
            whole.grad = torch.randn(whole.shape)
            cut.grad = distribute_tensor(whole.grad, cut.device_mesh, cut.placements)
        for optimizer in optimizers:
            optimizer.step()
    for whole, cut, settings in pairs:
        # Ranks cut a stack of matrices into other batches, which round otherwise.
        atol = 0 if whole.ndim == 2 else 2e-3
        same(full(cut), whole.detach(), f"{tuple(whole.shape)}, {settings}", rtol=0, atol=atol)


@distributed(world_sizes=(1, 2, 3, 4), only_fsdp2x=True)
@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_shards_are_the_unsharded_reference(ctx, placement):
    mesh = init_device_mesh("cpu", (ctx.world,))
    check(lambda ndim: (mesh, [placement]))


@distributed(world_sizes=(4,), only_fsdp2x=True)
def test_two_axes_are_the_unsharded_reference(ctx):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ((S0, S1), (R, S0), (S1, S1)):
        check(lambda ndim, placements=placements: (mesh, placements))


@distributed(world_sizes=(2, 4), only_fsdp2x=True)
@pytest.mark.parametrize("rows", [20, 12])
@pytest.mark.parametrize("shard_dim", [0, 1])
def test_tensor_parallel_blocks(ctx, rows, shard_dim):
    """gate_up with each block cut over two ranks, below FSDP of rows or columns on four."""
    mesh = init_device_mesh("cpu", (ctx.world // 2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_coordinate()
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(rows, 6))
    packed = torch_private.StridedShard(0, split_factor=2)

    def local(full):
        lines = full.view(2, 2, -1, 6)[:, tensor].flatten(0, 1)
        size = -(-lines.size(shard_dim) // mesh.size(0))
        start = min(size * data, lines.size(shard_dim))
        return lines.narrow(shard_dim, start, min(size, lines.size(shard_dim) - start)).contiguous()

    model = nn.Linear(6, rows, bias=False)
    model.weight = nn.Parameter(distribute_tensor(whole.detach(), mesh["tensor"], [packed]))
    if ctx.world == 4:
        fsdp2x.fully_shard(model, mesh=mesh["data"], shard_placement_fn=lambda param: Shard(shard_dim))
    param = model.weight
    if ctx.world == 2:
        assert torch.equal(param.to_local(), whole.view(2, 2, -1, 6)[:, tensor].flatten(0, 1))
    else:
        assert torch.equal(param.to_local(), local(whole.detach()))
    groups = [[{"params": [one], "split_sizes": (rows // 2, rows // 2)}] for one in (whole, param)]
    optimizers = [fsdp2x.optim.Muon(group, lr=0.02) for group in groups]
    for _ in range(2):
        whole.grad = torch.randn(whole.shape)
        grad = local(whole.grad)
        param.grad = DTensor.from_local(
            grad, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(param.to_local(), local(whole.detach()))


@distributed(world_sizes=(2,), timeout=60, only_fsdp2x=True)
def test_ranks_with_other_blocks_are_told(ctx):
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [S0]))
    weight.grad = distribute_tensor(torch.ones(8, 4), mesh, [S0])
    with pytest.raises(RuntimeError, match="other matrices than rank "):
        fsdp2x.optim.Muon([{"params": [weight], "num_heads": 1 + ctx.rank}]).step()
    odd = nn.Parameter(
        DTensor.from_local(
            torch.ones(5, 4),
            mesh,
            [torch_private.StridedShard(0, split_factor=2)],
            run_check=False,
            shape=torch.Size((10, 4)),
            stride=(4, 1),
        )  # fmt: skip
    )
    odd.grad = odd.detach().clone()
    with pytest.raises(ValueError, match="do not cut 10 lines evenly"):
        fsdp2x.optim.Muon([{"params": [("up", odd)], "split_sizes": (5, 5)}]).step()
