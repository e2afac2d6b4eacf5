"""fsdp2x.convert: checkpoints that really were written by ranks come out as the folder transformers would write."""

import json

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import damage
import fsdp2x
from checkpoints import shared_folder, tensors
from fsdp2x import checkpoint
from fsdp2x.base.failures import CheckpointError
from fsdp2x.convert import dcp_to_hf, hf_to_dcp, ranks_to_hf
from harness import distributed
from models import batch, build, tiny_vlm
from reference import same

NAMES = ["qwen3", "llama", "mixtral", "qwen3_moe", "gpt2", "t5", "vlm", "hrm_text"]
SHORT = NAMES[3:6] + NAMES[:1]


def trained(name, dtype=torch.float32, **options):
    """The model after a step, that is with other weights than the origin's, which `build` makes."""
    model = tiny_vlm() if name == "vlm" else build(name, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.25)
    return model.to(dtype)


def write_origin(folder, name, max_shard_size="6KB", dtype=torch.float32, **options):
    """Origin, and what transformers would write of the trained model."""
    origin = tiny_vlm() if name == "vlm" else build(name, **options)
    origin.to(dtype).save_pretrained(folder / "origin", max_shard_size=max_shard_size)
    (folder / "origin" / "tokenizer.json").write_text("{}")
    (folder / "origin" / "training_args.bin").write_text("no weights")
    trained(name, dtype, **options).save_pretrained(folder / "expected", max_shard_size=max_shard_size)


def check_same_folder(folder, out, *, index=True):
    same(tensors(out), tensors(folder / "expected"))
    files = {file.name for file in (folder / "origin").iterdir()} - {"training_args.bin"}
    assert {file.name for file in out.iterdir()} == files
    if index:
        maps = [json.loads((one / "model.safetensors.index.json").read_text()) for one in (out, folder / "origin")]
        assert maps[0]["weight_map"] == maps[1]["weight_map"]
        assert maps[0]["metadata"]["total_size"] == maps[1]["metadata"]["total_size"]
    assert (out / "config.json").read_bytes() == (folder / "origin" / "config.json").read_bytes()


def logits(model):
    ids = batch("llama", 0)["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids).logits


def units(model, shard, **options):
    """Every block a unit, whatever the architecture."""
    blocks = next((m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2), ())
    for block in blocks:
        shard(block, **options)
    return shard(model, **options)


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in NAMES]
)
@distributed(world_sizes=(2,))
def test_dcp_directories_of_stock_and_ours(ctx, name):
    import transformers

    with shared_folder() as folder:
        if ctx.rank == 0:
            write_origin(folder, name)
        dist.barrier()
        prefix_of_stock = ("model.", "model_state.model.")[NAMES.index(name) % 2]
        for writer, prefix in (("stock", prefix_of_stock), ("ours", "")):
            model = trained(name)
            units(model, stock_fully_shard) if writer == "stock" else fsdp2x.fully_shard(model)
            state = {f"{prefix}{key}": value for key, value in model.state_dict().items()}
            state["optimizer.state.lm_head.weight.exp_avg"] = torch.zeros(3)
            checkpoint = folder / f"{writer}-{prefix}"
            dcp.save(state, checkpoint_id=checkpoint)
            if ctx.rank == 0:
                out = dcp_to_hf(checkpoint, folder / f"out-{writer}-{prefix}", folder / "origin")
                check_same_folder(folder, out)
            dist.barrier()
        if name not in ("t5", "vlm"):
            again = fsdp2x.from_pretrained(folder / "out-ours-", progress=False)
            config = transformers.AutoConfig.from_pretrained(out := folder / "out-ours-")
            plain = getattr(transformers, config.architectures[0]).from_pretrained(out)
            same({"logits": logits(again)}, {"logits": logits(plain)})
            torch.testing.assert_close(logits(plain), logits(trained(name).eval()), atol=1e-5, rtol=1e-5)


@distributed(world_sizes=(2,))
def test_checkpoints_of_training(ctx):
    """fsdp2x's own directories keep ties once and verify checksums; the newest of a folder is taken."""
    for name in ("qwen3", "qwen3_moe"):
        with shared_folder() as folder:
            if ctx.rank == 0:
                write_origin(folder, name, dtype=torch.bfloat16)
            dist.barrier()
            model = fsdp2x.fully_shard(trained(name))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in (1, 2):
                checkpoint.save(folder / "run" / "checkpoints", model, optimizer, step=step)
            if ctx.rank == 0:
                check_same_folder(folder, dcp_to_hf(folder / "run", folder / "out", folder / "origin"))
                (damaged,) = (folder / "run" / "checkpoints" / "step-000002").glob("__1_0.distcp")
                damage.flip(damaged)
                with pytest.raises(CheckpointError, match="__1_0.distcp: .* damaged"):
                    dcp_to_hf(folder / "run", folder / "out", folder / "origin", force=True)
                assert sorted(file.name for file in folder.iterdir()) == ["expected", "origin", "out", "run"]
            dist.barrier()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gpt2"])
@distributed(world_sizes=(3,))
def test_files_of_ranks(ctx, name):
    """Single-file origin, ties, uneven and empty shards."""
    with shared_folder() as folder:
        checkpoint = folder / "ckpt" / "7"
        if ctx.rank == 0:
            write_origin(folder, name, max_shard_size="5GB", dtype=torch.bfloat16)
            checkpoint.mkdir(parents=True)
        dist.barrier()
        model = units(trained(name), stock_fully_shard)
        torch.save(model.state_dict(), checkpoint / f"model_world_size_3_rank_{ctx.rank}.pt")
        torch.save({}, checkpoint / f"optim_world_size_3_rank_{ctx.rank}.pt")
        dist.barrier()
        if ctx.rank == 0:
            check_same_folder(folder, ranks_to_hf(folder / "origin", folder / "ckpt", folder / "out", 7), index=False)
            (checkpoint / "model_world_size_3_rank_1.pt").unlink()
            with pytest.raises(CheckpointError, match=r"ranks \[1\] of 3 are missing"):
                ranks_to_hf(folder / "origin", folder / "ckpt", folder / "elsewhere", 7)


@distributed(world_sizes=(4,))
def test_files_of_ranks_on_two_axes(ctx):
    """HSDP, and FSDP over tensor parallelism, whose shards of one dim are strided."""
    with shared_folder() as folder:
        if ctx.rank == 0:
            write_origin(folder, "llama")
            for iteration in (1, 2):
                (folder / "ckpt" / str(iteration)).mkdir(parents=True)
        dist.barrier()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        for iteration in (1, 2):
            model = trained("llama")
            if iteration == 1:
                units(model, stock_fully_shard, mesh=mesh)
            else:
                for block in model.model.layers:
                    plan = {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
                    parallelize_module(block, mesh["inner"], plan)
                units(model, stock_fully_shard, mesh=mesh["outer"])
                placements = model.model.layers[0].mlp.up_proj.weight.placements
                assert type(placements[0]).__name__ == "_StridedShard"
            path = folder / "ckpt" / str(iteration) / f"model_world_size_4_rank_{ctx.rank}.pt"
            torch.save(model.state_dict(), path)
            dist.barrier()
            if ctx.rank == 0:
                out = ranks_to_hf(folder / "origin", folder / "ckpt", folder / f"out{iteration}", iteration)
                check_same_folder(folder, out)


@distributed(world_sizes=(2,))
def test_grouped_experts(ctx):
    """Weights (experts x rows, columns) named group_mlp, as grouped GEMM kernels want them."""
    with shared_folder() as folder:
        checkpoint = folder / "ckpt" / "3"
        if ctx.rank == 0:
            write_origin(folder, "qwen3_moe")
            checkpoint.mkdir(parents=True)
        dist.barrier()
        expected = tensors(folder / "expected")
        grouped = torch.nn.ParameterDict()
        for name, tensor in expected.items():
            if ".experts." in name:
                layer, _, rest = name.partition(".experts.")
                key = f"{layer}.group_mlp.{rest.partition('.')[2]}"
                parts = [expected[f"{layer}.experts.{i}.{rest.partition('.')[2]}"] for i in range(4)]
                tensor, name = torch.cat(parts), key
            grouped[name.replace(".", "/")] = torch.nn.Parameter(tensor)
        stock_fully_shard(grouped)
        state = {name.replace("/", "."): value for name, value in grouped.state_dict().items()}
        torch.save(state, checkpoint / f"model_world_size_2_rank_{ctx.rank}.pt")
        dist.barrier()
        if ctx.rank == 0:
            out = ranks_to_hf(folder / "origin", folder / "ckpt", folder / "out", 3, groupgemm=True)
            check_same_folder(folder, out)
            with pytest.raises(CheckpointError, match="lacks 24 tensors of .*experts"):
                ranks_to_hf(folder / "origin", folder / "ckpt", folder / "plain", 3)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@distributed(world_sizes=(2,))
def test_from_huggingface_to_dcp(ctx, name):
    with shared_folder() as folder:
        if ctx.rank == 0:
            write_origin(folder, name)
            hf_to_dcp(folder / "origin", folder / "dcp")
            dcp_to_hf(folder / "dcp", folder / "back", folder / "origin")
            same(tensors(folder / "back"), tensors(folder / "origin"))
            assert (folder / "dcp" / "hf" / "config.json").is_file()
        dist.barrier()
        for shard in (stock_fully_shard, fsdp2x.fully_shard):
            model = trained(name)
            units(model, shard)
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=folder / "dcp")
            model.load_state_dict(state["model"])
            got = {key: param.full_tensor() for key, param in model.named_parameters()}
            same(got, {key: param.detach() for key, param in build(name).named_parameters()})
