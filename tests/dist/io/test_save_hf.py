"""fsdp2x.save_hf: loading and saving gives the same bytes, and a failed save leaves no files."""

import logging
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3ForCausalLM

import fsdp2x
from checkpoints import shared_folder, tensors
from fsdp2x.base.failures import CheckpointError
from harness import distributed
from models import Stack, build, tiny_lora, tiny_vlm
from reference import same

# The others are among those of `test_load_hf.py` and `test_convert.py`.
NAMES = ["qwen3", "mixtral", "gpt2", "vlm", "hrm_text"]
NAMES += [pytest.param(name, marks=pytest.mark.full) for name in ("llama", "qwen3_moe", "t5", "bert")]
HALF = ("qwen3", "llama", "qwen3_moe", "vlm")  # tied, untied, experts, vision and language: also in bfloat16


def write_source(ctx, folder, name, **options):
    if ctx.rank == 0:
        model = tiny_vlm().to(options["dtype"]) if name == "vlm" else build(name, **options)
        model.save_pretrained(folder, max_shard_size="6KB")
    dist.barrier()


@contextmanager
def only_rank_0_sees_files(ctx):
    """A folder that the ranks do not share: the others can write nothing."""
    is_file, pwrite = Path.is_file, os.pwrite if ctx.rank == 0 else None
    with mock.patch.object(Path, "is_file", lambda path: ctx.rank == 0 and is_file(path)):
        with mock.patch.object(os, "pwrite", pwrite):
            yield


@pytest.mark.parametrize("name", NAMES)
@distributed(world_sizes=(2,))
def test_round_trip(ctx, name):
    with shared_folder() as folder:
        for dtype in (torch.float32, torch.bfloat16) if name in HALF else (torch.float32,):
            source, out = folder / f"source-{dtype}", folder / f"out-{dtype}"
            write_source(ctx, source, name, dtype=dtype)
            model = fsdp2x.from_pretrained(source, progress=False)
            for shared, size in ((True, "6KB"), (False, "5GB")):
                with nullcontext() if shared else only_rank_0_sees_files(ctx):
                    assert fsdp2x.save_hf(model, out, max_shard_size=size, force=True) == out
                same(tensors(out), tensors(source))
                assert (out / "model.safetensors.index.json").exists() == (size == "6KB")
                config = transformers.AutoConfig.from_pretrained(out)
                cls = getattr(transformers, config.architectures[0])
                again, info = cls.from_pretrained(out, output_loading_info=True)
                assert not info["missing_keys"] and not info["unexpected_keys"] and again.dtype == dtype
            names = {"config.json", "model.safetensors"} | (
                {"generation_config.json"} if again.can_generate() else set()
            )
            assert {file.name for file in out.iterdir()} == names
        if name in HALF:  # masters in float32 of files in bfloat16
            masters = fsdp2x.from_pretrained(source, dtype=torch.float32, progress=False)
            same(tensors(fsdp2x.save_hf(masters, folder / "same")), tensors(source))
            full = fsdp2x.save_hf(masters, folder / "full", dtype=torch.float32)
            same(tensors(full), {key: tensor.float() for key, tensor in tensors(source).items()})
            assert '"float32"' in (full / "config.json").read_text()


@distributed(world_sizes=(1, 3))
def test_models_that_were_never_in_files(ctx):
    """Uneven and empty shards; names as transformers would write them; not sharded at all."""
    with shared_folder() as folder:
        write_source(ctx, folder / "source", "mixtral")
        expected = tensors(folder / "source")
        model = build("mixtral")
        fsdp2x.save_hf(model, folder / "plain")
        same(tensors(folder / "plain"), expected)
        fsdp2x.fully_shard(model)
        fsdp2x.save_hf(model, folder / "shared")
        same(tensors(folder / "shared"), expected)
        with only_rank_0_sees_files(ctx):
            fsdp2x.save_hf(model, folder / "one")
        same(tensors(folder / "one"), expected)
        fsdp2x.save_hf(fsdp2x.fully_shard(Stack()), folder / "stack")
        same(tensors(folder / "stack"), dict(sorted((name, p.detach()) for name, p in Stack().named_parameters())))
        fsdp2x.save_hf(model, folder / "half", dtype=torch.bfloat16)
        same(tensors(folder / "half"), {name: tensor.bfloat16() for name, tensor in expected.items()})


@distributed(world_sizes=(2,))
def test_experts_that_were_fused_in_the_source_stay_fused(ctx):
    with shared_folder() as folder:
        if ctx.rank == 0:
            build("qwen3_moe").save_pretrained(folder / "source", save_original_format=False)
        dist.barrier()
        expected = tensors(folder / "source")
        assert "model.layers.0.mlp.experts.gate_up_proj" in expected
        model = fsdp2x.from_pretrained(folder / "source", progress=False)
        same(dict(sorted(fsdp2x.full_tensors(model))), expected)
        same(tensors(fsdp2x.save_hf(model, folder / "out")), expected)


@distributed(world_sizes=(4,))
def test_two_axes(ctx):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with shared_folder() as folder:
        write_source(ctx, folder / "source", "qwen3")
        model = fsdp2x.fully_shard(build("qwen3"), mesh=mesh)
        with mock.patch.object(os, "pwrite", side_effect=os.pwrite) as pwrite:
            fsdp2x.save_hf(model, folder / "out")
        assert pwrite.called == (ctx.rank < 2), "replicas write nothing"
        same(tensors(folder / "out"), tensors(folder / "source"))


def with_adapter(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


@distributed(world_sizes=(2, 3))
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_adapters(ctx, name):
    """Files of PEFT's own -> shards -> files: adapters in float32 over a base in bfloat16, each written alone."""
    with shared_folder() as folder:
        write_source(ctx, folder / "base", name, dtype=torch.bfloat16)
        if ctx.rank == 0:
            source = with_adapter(build(name, dtype=torch.bfloat16))
            for key, param in source.named_parameters():
                if "lora_" in key:
                    param.data = torch.randn(param.shape)
            source.save_pretrained(folder / "adapter")
        dist.barrier()
        model = fsdp2x.from_pretrained(folder / "base", prepare=with_adapter, progress=False)
        report = fsdp2x.load_hf(model, folder / "adapter", strict=True, progress=False)
        assert not report.missing_keys and not report.unexpected_keys
        fsdp2x.save_hf(model, folder / "out", dtype=torch.float32)
        same(tensors(folder / "out"), tensors(folder / "adapter"))
        files = {file.name for file in (folder / "out").iterdir()}
        assert files == {"adapter_model.safetensors", "adapter_config.json"}
        plain = PeftModel.from_pretrained(build(name, dtype=torch.bfloat16), folder / "out")
        same(dict(fsdp2x.full_tensors(model)), {key: param.detach() for key, param in plain.named_parameters()})
        fsdp2x.save_hf(model, folder / "whole", weights="base")
        same(tensors(folder / "whole"), tensors(folder / "base"))


@distributed(world_sizes=(2,))
def test_of_a_quantized_model_only_adapters_have_names_in_files(ctx):
    """A quantized model's files hold more than its weights. Nothing could read the weights alone."""
    calls = {
        "save": lambda model, folder: fsdp2x.save_hf(model, folder / "base", weights="base"),
        "stream": lambda model, folder: list(fsdp2x.export.stream(model)),
        "connect": lambda model, folder: fsdp2x.sync.connect(
            model, fsdp2x.sync.InProcess(nn.Linear(1, 1)), merge_adapters=True
        ),
    }
    with shared_folder() as folder:
        write_source(ctx, folder / "source", "llama")
        model = tiny_lora()
        fsdp2x.fully_shard(model)
        model.get_base_model().config.quantization_config = {"quant_method": "bitsandbytes"}
        for what, call in calls.items():
            with pytest.raises(NotImplementedError, match=r"LlamaForCausalLM is quantized.*save_adapter"):
                call(model, folder)
            assert not (folder / "base").exists(), what
        with pytest.raises(NotImplementedError, match="quantized weights"):
            fsdp2x.load_hf(model, folder / "source", progress=False)
        before = dict(fsdp2x.full_tensors(model))
        fsdp2x.save_adapter(model, folder / "adapter")
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.zero_()
        fsdp2x.load_adapter(model, folder / "adapter")
        same(dict(fsdp2x.full_tensors(model)), before)
        pushed = fsdp2x.export.stream(model, names="model")
        same({name: tensor for bucket in pushed for name, tensor in bucket.items()}, before)


@distributed(world_sizes=(2,))
def test_a_failed_save_leaves_nothing_behind(ctx):
    def refuses(pattern):
        return pytest.raises(CheckpointError, match=pattern)

    with shared_folder() as folder:
        model = fsdp2x.fully_shard(build("qwen3_moe"))
        out = fsdp2x.save_hf(model, folder / "out")
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        dist.barrier()
        with refuses("out: exists already; choose another folder"):
            fsdp2x.save_hf(model, out)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        full = OSError(28, "No space left on device")
        for broken in (1, 0):
            writes = [0]

            def pwrite(fd, data, offset, real=os.pwrite, writes=writes, broken=broken):
                writes[0] += 1
                if ctx.rank == broken and writes[0] > 3:
                    raise full
                return real(fd, data, offset)

            with mock.patch.object(os, "pwrite", pwrite), refuses("saving to .*out: rank . *.*No space left|No space"):
                fsdp2x.save_hf(model, out, force=True)
            assert [file.name for file in folder.iterdir()] == ["out"]
            assert {file.name: file.read_bytes() for file in out.iterdir()} == before
            dist.barrier()
        if ctx.rank == 0:
            (folder / ".tmp-save-out").mkdir()
            (folder / ".tmp-save-out" / "leftover").write_text("of a killed run")
        fsdp2x.save_hf(model, out, force=True)
        same({"head": tensors(out)["lm_head.weight"]}, {"head": 2 * build("qwen3_moe").lm_head.weight.detach()})
        assert [file.name for file in folder.iterdir()] == ["out"] and not (out / "leftover").exists()
        dist.barrier()
        for options, message in (
            ({"weights": "x"}, "weights must be 'auto', 'base' or 'adapter', got 'x'"),
            ({"weights": "adapter"}, "is not a PEFT model"),
            ({"max_shard_size": "big"}, "max_shard_size must be bytes or a size"),
        ):
            with pytest.raises(ValueError, match=message):
                fsdp2x.save_hf(model, out, **options)
        with torch.device("meta"):
            model = build("qwen3")
        with pytest.raises(RuntimeError, match="have no values yet"):
            fsdp2x.save_hf(fsdp2x.fully_shard(model), folder / "meta")


@distributed(world_sizes=(2,))
def test_configs_that_transformers_refuses_cost_no_weights(ctx):
    """A warning on rank 0 names the file, which keeps the settings."""
    for change, file in (
        (lambda model: setattr(model.generation_config, "temperature", 0.5), "generation_config.json"),
        (lambda model: setattr(model.config, "num_beams", 3), "config.json"),
    ):
        model = build("qwen3")
        change(model)
        expected = dict(model.state_dict())
        with shared_folder() as folder, mock.patch.object(logging.getLogger("fsdp2x"), "warning") as warning:
            fsdp2x.fully_shard(model).save_pretrained(folder / "out")
            assert [call.args[1] for call in warning.call_args_list] == ([file] if ctx.rank == 0 else [])
            again = type(build("qwen3")).from_pretrained(folder / "out")
            same(dict(again.state_dict()), expected)
            setting = "temperature" if file.startswith("generation") else "num_beams"
            assert f'"{setting}": {0.5 if setting == "temperature" else 3}' in (folder / "out" / file).read_text()
            dist.barrier()


@pytest.mark.parametrize("kind", ["plain", "peft"])
@distributed(world_sizes=(2,))
def test_save_pretrained_of_a_sharded_model_writes_what_the_whole_one_does(ctx, kind):
    """In a folder that holds other things, over a former save; arguments that change the files are refused."""
    with shared_folder() as folder:
        make, stem = (lambda: build("qwen3"), "model") if kind == "plain" else (tiny_lora, "adapter_model")
        if ctx.rank == 0:
            make().save_pretrained(folder / "expected")
            (folder / "out").mkdir()
            (folder / f"out/{stem}-00009-of-00009.safetensors").write_text("of a former save")
            (folder / "out/tokenizer.json").write_text("mine")
        dist.barrier()
        model = fsdp2x.fully_shard(make())
        for _ in range(2):
            model.save_pretrained(folder / "out", is_main_process=ctx.rank == 0)
        same(tensors(folder / "out"), tensors(folder / "expected"))
        names = {file.name for file in (folder / "expected").iterdir()} - {"README.md"}
        assert names | {"tokenizer.json"} == {file.name for file in (folder / "out").iterdir()}
        assert (folder / "out/tokenizer.json").read_text() == "mine"
        # save_pretrained also takes a state dict that the caller gathered, as accelerate does.
        if ctx.rank == 0:
            model.save_pretrained(folder / "state", state_dict=make().state_dict())
            same(tensors(folder / "state"), tensors(folder / "expected"))
        refused = {"push_to_hub": True} if kind == "plain" else {"safe_serialization": False}
        with pytest.raises(NotImplementedError, match="not supported .*fsdp2x.save_hf"):
            model.save_pretrained(folder / "no", **refused)
        with pytest.raises(NotImplementedError, match="`hf upload"):
            model.push_to_hub("me/model")


@distributed(world_sizes=(2,))
def test_save_pretrained_of_a_class_runs_if_it_gets_an_argument_of_that_class(ctx):
    """As with NeMo Automodel, whose models pass themselves to a checkpointer that knows shards."""
    given = []

    class Mine(Qwen3ForCausalLM):
        def save_pretrained(self, save_directory, checkpointer=None, **kwargs):
            given.append((self, save_directory, checkpointer, kwargs))

    with shared_folder() as folder:
        model = fsdp2x.fully_shard(Mine(build("qwen3").config))
        model.save_pretrained(folder / "mine", checkpointer="mine", is_final=True)
        assert given == [(model, folder / "mine", "mine", {"is_final": True})]
        model.save_pretrained(folder / "ours")
        assert len(given) == 1 and "model.embed_tokens.weight" in tensors(folder / "ours")
        with pytest.raises(NotImplementedError, match="push_to_hub=True is not supported"):
            model.save_pretrained(folder / "no", push_to_hub=True)
