"""Parameters with fewer rows than ranks are cut along another dim in a model that is split."""

import copy

import pytest
import torch
import torch.distributed as dist

import fsdp2x
import models
from fsdp2x.memory import plan_memory
from fsdp2x.sharding import shapes
from harness import distributed
from reference import full, only_fsdp2x, same
from training import shared_folder

ONE_EXPERT = {"num_experts": 1, "num_experts_per_tok": 1}


def whole(model):
    return dict(fsdp2x.full_tensors(model))


def steps(model, rank):
    """Gradients of a step whose batch is the same on all ranks."""
    model(**models.batch("qwen3_moe", seed=1)).loss.backward()
    return full({name: param.grad for name, param in model.named_parameters() if param.grad is not None})


@distributed(world_sizes=(2,))
@pytest.mark.parametrize("transport", ["shm", "process_group"])
def test_split_models_are_cut_where_rows_would_pad(ctx, transport):
    """Values, gradients, checkpoints and files do not know of it; what the user places is left alone."""
    only_fsdp2x(ctx)
    plain = models.build("qwen3_moe", **ONE_EXPERT)
    with pytest.MonkeyPatch.context() as patch, shared_folder(ctx) as folder:
        patch.setattr(shapes, "_WASTED_BYTES", 0)
        model = fsdp2x.fully_shard(copy.deepcopy(plain), transport=transport)
        experts = [name for name, _ in model.named_parameters() if "experts." in name]
        cut = {name: param.placements[0].dim for name, param in model.named_parameters()}
        assert experts and all(cut[name] == 1 for name in experts)
        assert plan_memory(plain, 2, transport=transport).shard_bytes == fsdp2x.memory_report(model).shard_bytes
        same(whole(model), {name: param.detach() for name, param in plain.named_parameters()})
        same(steps(model, ctx.rank), steps(plain, ctx.rank), rtol=1e-5, atol=1e-6)
        optimizer = fsdp2x.optim.AdamW(model.parameters())
        optimizer.step()
        fsdp2x.checkpoint.save(folder / "checkpoints", model, optimizer, step=1)
        fsdp2x.save_hf(model, folder / "hf")
        dist.barrier()
        other = fsdp2x.fully_shard(models.build("qwen3_moe", seed=5, **ONE_EXPERT), transport=transport)
        fsdp2x.checkpoint.load(folder / "checkpoints", other)
        same(whole(other), whole(model))
        read = fsdp2x.from_pretrained(folder / "hf", dtype=torch.float32, transport=transport)
        same(whole(read), whole(model))
        placed = fsdp2x.fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda param: None, transport=transport)
        assert all(param.placements[0].dim == 0 for param in placed.parameters())
