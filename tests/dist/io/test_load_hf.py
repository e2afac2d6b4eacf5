"""fsdp2x.load_hf and from_pretrained: the bits, logits, buffers and reports of plain transformers, on every rank."""

import contextlib
import gc
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Qwen3MoeForCausalLM

import checkpoints
import fsdp2x
from fsdp2x.base.failures import CheckpointError
from fsdp2x.io.formats.tensors import FileTensor
from fsdp2x.io.hf.files import Checkpoint
from harness import distributed
from models import STACK_UNITS, Stack, batch, build, tiny_lora, tiny_vlm
from reference import params, same, shard

QUIET = {"progress": False}


@contextlib.contextmanager
def shared_folder(ctx, write):
    """A folder that rank 0 filled by `write(folder)`, gone afterwards."""
    with checkpoints.shared_folder() as folder:
        checkpoints.on_first(lambda: write(folder))
        yield folder


def model_of(name, **options):
    return tiny_vlm() if name == "vlm" else build(name, **options)


def writer(name, max_shard_size="5GB", **options):
    return lambda folder: model_of(name, **options).save_pretrained(folder, max_shard_size=max_shard_size)


def whole(model):
    return dict(fsdp2x.full_tensors(model))


def logits(model, name):
    ids = batch("llama", 0)["input_ids"]
    more = {"decoder_input_ids": ids} if name == "t5" else {}
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


def meta(name, **options):
    with torch.device("meta"):
        return build(name, **options)


def refuses(pattern):
    return pytest.raises(CheckpointError, match=pattern)


@pytest.mark.parametrize(
    "name", ["qwen3", "llama", "qwen3_moe", "hrm_text", "gpt2", "t5", "bert", "vlm"]
)  # mixtral: test_save_hf.py
@distributed(world_sizes=(2,))
def test_equals_transformers(ctx, name):
    for max_shard_size, mode in (("6KB", "each"), ("5GB", "broadcast")):
        with shared_folder(ctx, writer(name, max_shard_size)) as folder:
            assert (folder / "model.safetensors.index.json").exists() == (max_shard_size == "6KB")
            config = transformers.AutoConfig.from_pretrained(folder)
            plain = getattr(transformers, config.architectures[0]).from_pretrained(folder)
            model = fsdp2x.from_pretrained(folder, mode=mode, **QUIET)
        assert not model.training
        same(whole(model), params(plain))
        same(dict(model.named_buffers()), dict(plain.named_buffers()))
        same({"logits": logits(model, name)}, {"logits": logits(plain, name)})
    tied = {"qwen3", "gpt2", "t5", "bert", "vlm"}
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (name in tied)


@distributed(world_sizes=(1, 3))
def test_any_number_of_ranks(ctx):
    """37 rows of vocabulary, 4 experts, and matrices that are split from one: short and empty shards."""
    for name in ("qwen3", "qwen3_moe", "hrm_text"):
        with shared_folder(ctx, writer(name)) as folder:
            for mode in ("each", "broadcast"):
                model = fsdp2x.from_pretrained(folder, mode=mode, **QUIET)
                same(whole(model), params(build(name)))


@distributed(world_sizes=(2,))
def test_dtypes(ctx):
    half = build("qwen3_moe", dtype=torch.bfloat16)
    with shared_folder(ctx, writer("qwen3_moe", dtype=torch.bfloat16)) as folder:
        same(whole(fsdp2x.from_pretrained(folder, **QUIET)), params(half))
        for mode in ("each", "broadcast"):
            policy = fsdp2x.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            options = {"dtype": torch.float32, "mode": mode, "mp_policy": policy, **QUIET}
            masters = fsdp2x.from_pretrained(Qwen3MoeForCausalLM, folder, **options)
            same(whole(masters), {name: value.float() for name, value in params(half).items()})
            assert not any(param.to_local().numel() and param.dtype != torch.float32 for param in masters.parameters())
    with shared_folder(ctx, writer("llama")) as folder:
        cast = fsdp2x.from_pretrained(folder, dtype=torch.bfloat16, **QUIET)
        same(whole(cast), params(build("llama", dtype=torch.bfloat16)))


@distributed(world_sizes=(2,))
def test_pickles(ctx):
    """.bin: read by rank 0 alone, also torch's old format, and two keys of one tied weight."""
    state = build("qwen3").state_dict()
    half = len(state) // 2

    def single(folder, **options):
        build("qwen3").config.save_pretrained(folder)
        torch.save(state, folder / "pytorch_model.bin", **options)

    def indexed(folder):
        build("qwen3").config.save_pretrained(folder)
        files = {"a.bin": dict(list(state.items())[:half]), "b.bin": dict(list(state.items())[half:])}
        index = {"weight_map": {key: file for file, part in files.items() for key in part}}
        (folder / "pytorch_model.bin.index.json").write_text(str(index).replace("'", '"'))
        for file, part in files.items():
            torch.save(part, folder / file)

    for write in (single, indexed, lambda folder: single(folder, _use_new_zipfile_serialization=False)):
        with shared_folder(ctx, write) as folder:
            opened, real = [], Checkpoint.__init__

            def init(self, paths, opened=opened, real=real):
                opened.append(paths)
                real(self, paths)

            with (
                mock.patch.object(Checkpoint, "__init__", init),
                mock.patch("torch.load", side_effect=torch.load) as load,
            ):
                model = fsdp2x.from_pretrained(folder, **QUIET)
            assert bool(opened) == (ctx.rank == 0)
            assert all(call.kwargs["weights_only"] for call in load.call_args_list)
        same(whole(model), params(build("qwen3")))


@pytest.mark.parametrize("mode", ["each", "broadcast"])
@distributed(world_sizes=(4,))
def test_layouts(ctx, mode):
    """Plain modules on HSDP and tensor parallel meshes, other shard dims, ignored and frozen parameters."""
    expected = params(Stack())
    torch.manual_seed(0)
    linears = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))

    def write(folder):
        save_file(expected, folder / "stack.safetensors")
        save_file(params(linears), folder / "linears.safetensors")

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with shared_folder(ctx, write) as folder:

        def load(model, file):
            report = fsdp2x.load_hf(model, folder / file, mode=mode, strict=True, **QUIET)
            assert not report.missing_keys and not report.unexpected_keys

        for options in ({"mesh": mesh}, {}):
            with torch.device("meta"):
                model = Stack()
            model.head.requires_grad_(False)
            shard(ctx, model, STACK_UNITS, ignored_params={model.norm.weight}, **options)
            before = {name: id(param) for name, param in model.named_parameters() if isinstance(param, DTensor)}
            optimizer = torch.optim.AdamW([param for param in model.parameters() if isinstance(param, DTensor)])
            load(model, "stack.safetensors")
            same(whole(model), expected)
            assert before == {name: id(model.get_parameter(name)) for name in before}, "parameters were replaced"
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            assert not torch.equal(whole(model)["blocks.0.up.weight"], expected["blocks.0.up.weight"])
            load(model, "stack.safetensors")
            same(whole(model), expected)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        shard(ctx, model, shard_placement_fn=lambda param: Shard(param.dim() - 1))
        load(model, "linears.safetensors")
        same(whole(model), params(linears))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard(ctx, model, mesh=mesh["dp"])
        load(model, "linears.safetensors")
        same(whole(model), params(linears))


@distributed(world_sizes=(2,))
def test_missing_and_unexpected_are_reported_as_transformers_does(ctx):
    def write(folder):
        build("llama").save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        del state["model.layers.1.mlp.up_proj.weight"], state["model.norm.weight"]
        state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        state["extra"] = torch.zeros(2)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    with shared_folder(ctx, write) as folder:
        for cls in (LlamaForCausalLM, LlamaForSequenceClassification):
            plain, info = cls.from_pretrained(folder, output_loading_info=True)
            with torch.device("meta"):
                model = cls._from_config(plain.config)
            fsdp2x.fully_shard(model)
            # The files are of this very class, so a missing weight is an error and not a new head.
            options = {"strict": False} if cls is LlamaForCausalLM else {}
            report = fsdp2x.load_hf(model, folder, **options, **QUIET)
            assert (report.missing_keys, report.unexpected_keys) == (info["missing_keys"], info["unexpected_keys"])
            got, expected = whole(model), params(plain)
            same(
                {name: value for name, value in got.items() if name not in report.missing_keys},
                {name: value for name, value in expected.items() if name not in report.missing_keys},
            )
            same({"norm": got["model.norm.weight"]}, {"norm": torch.ones(16)})
            drawn = got["model.layers.1.mlp.up_proj.weight"]
            assert 0.01 < drawn.std() < 0.03, "not drawn as the class initialises it"
        with refuses("missing: .*model.norm.weight.*unexpected: .*extra.*strict=True"):
            fsdp2x.load_hf(model, folder, strict=True, **QUIET)
        causal = fsdp2x.fully_shard(build("llama"))
        before = whole(causal)
        lost = (
            "the files lack 2 weights of the model: model.layers.1.mlp.up_proj.weight, model.norm.weight; unexpected: "
        )
        for path in (folder, folder / "model.safetensors"):
            with refuses(f"{lost}.*extra.*. Pass strict=False to initialize them"):
                fsdp2x.load_hf(causal, path, **QUIET)
        with refuses(lost):
            fsdp2x.from_pretrained(folder, **QUIET)
        same(whole(causal), before)
        wider = fsdp2x.fully_shard(meta("llama", intermediate_size=32, tie_word_embeddings=False))
        with refuses(r"shapes differ: .*up_proj.weight has \(24, 16\) in the files and \(32, 16\) here"):
            fsdp2x.load_hf(wider, folder, **QUIET)


@pytest.mark.parametrize("mode", ["each", "broadcast"])
@distributed(world_sizes=(2,))
def test_what_does_not_fit_changes_nothing(ctx, mode):
    """A plain module: a weight that is lost, renamed, of integers, or tied and stored twice with other values."""
    torch.manual_seed(0)
    expected = params(Stack())
    name = "blocks.0.up.weight"

    def write(folder):
        lost = {key: value for key, value in expected.items() if key != name}
        save_file(lost, folder / "lost.safetensors")
        save_file({**lost, f"{name}x": expected[name]}, folder / "renamed.safetensors")
        save_file({**expected, name: expected[name].int()}, folder / "integers.safetensors")
        save_file(expected, folder / "whole.safetensors")

    with shared_folder(ctx, write) as folder:
        model = shard(ctx, Stack(), STACK_UNITS)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        before = whole(model)
        for file, reason in (
            ("lost", f"the files lack 1 weights of the model: {name}. Pass strict=False"),
            ("renamed", f"the files lack 1 weights of the model: {name}; unexpected: {name}x. Pass strict=False"),
            ("integers", f"{name} has dtype torch.int32 in the files, but torch.float32 in the model"),
        ):
            with refuses(reason):
                fsdp2x.load_hf(model, folder / f"{file}.safetensors", mode=mode, **QUIET)
            same(whole(model), before)
        fsdp2x.load_hf(model, folder / "whole.safetensors", mode=mode, **QUIET)
        same(whole(model), expected)


@pytest.mark.parametrize("mode", ["each", "broadcast"])
@distributed(world_sizes=(2,))
def test_experts_that_do_not_fit_together_are_named(ctx, mode):
    """One of the tensors that become one weight has integers, is transposed, is too short, or is missing."""
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    odd = {"integers": lambda w: (9 * w).int(), "turned": lambda w: w.T.contiguous(), "short": lambda w: w[:-1].clone()}

    def write(folder):
        build("qwen3_moe").save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        for kind, change in odd.items():
            save_file({**state, name: change(state[name])}, folder / f"{kind}.safetensors")
        save_file({key: one for key, one in state.items() if key != name}, folder / "lost.safetensors")

    with shared_folder(ctx, write) as folder:
        model = fsdp2x.fully_shard(build("qwen3_moe"))
        before = whole(model)
        for kind in (*odd, "lost"):
            with refuses(r"experts.gate_up_proj is made of \d tensors that do not fit together in the files"):
                fsdp2x.load_hf(model, folder / f"{kind}.safetensors", mode=mode, **QUIET)
            same(whole(model), before)


@distributed(world_sizes=(2,))
def test_adapters(ctx):
    def write(folder):
        build("llama").save_pretrained(folder)
        model = tiny_lora()
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param)
        model.save_pretrained(folder)

    with shared_folder(ctx, write) as folder:
        plain = PeftModel.from_pretrained(build("llama"), folder)
        model = fsdp2x.fully_shard(
            get_peft_model(
                meta("llama", tie_word_embeddings=False),
                LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
            )
        )
        report = fsdp2x.load_hf(model, folder / "model.safetensors", **QUIET)
        assert len(report.missing_keys) == 8 and all("lora_" in name for name in report.missing_keys)
        fresh = {name: value for name, value in whole(model).items() if "lora_" in name}
        assert all(value.any() == ("lora_A" in name) for name, value in fresh.items()), "not PEFT's initialisation"
        report = fsdp2x.load_hf(model, folder / "adapter_model.safetensors", **QUIET)
        assert not report.missing_keys
        same(whole(model), params(plain))
        both = fsdp2x.from_pretrained(
            folder,
            prepare=lambda base: get_peft_model(base, LoraConfig(r=3, target_modules=["q_proj", "v_proj"])),
            attn_implementation="eager",
            **QUIET,
        )
        fsdp2x.load_hf(both, [folder / "model.safetensors", folder / "adapter_model.safetensors"], strict=True, **QUIET)
        same({"logits": logits(both, "llama")}, {"logits": logits(plain.eval(), "llama")})


@pytest.mark.parametrize("mode", ["each", "broadcast"])
@distributed(world_sizes=(2,))
def test_errors_reach_all_ranks(ctx, mode):
    with shared_folder(ctx, writer("qwen3")) as folder:
        model = fsdp2x.fully_shard(meta("qwen3"))
        real, reader = FileTensor.read, 1 if mode == "each" else 0

        def read(self, start, out):
            if ctx.rank == reader and self.shape == (24, 16):
                raise OSError(5, "Input/output error", "the disk")
            real(self, start, out)

        with mock.patch.object(FileTensor, "read", read), refuses("the disk: Input/output error"):
            fsdp2x.load_hf(model, folder, mode=mode, **QUIET)
        mine = folder if ctx.rank == 0 else folder / "elsewhere"
        if mode == "each":
            with refuses("rank 1: .*elsewhere: no such folder"):
                fsdp2x.load_hf(model, mine, mode=mode, **QUIET)
        fsdp2x.load_hf(model, mine if mode == "broadcast" else folder, mode=mode, **QUIET)
        same(whole(model), params(build("qwen3")))
        with pytest.raises(ValueError, match="mode must be .*got 'x'"):
            fsdp2x.load_hf(model, folder, mode="x")
    with refuses("config.json"):
        fsdp2x.from_pretrained(folder)


@distributed(world_sizes=(2,))
def test_tied_weights_that_differ_and_buffers_that_differ(ctx):
    def write(folder):
        build("llama").save_pretrained(folder)

    with shared_folder(ctx, write) as folder:
        for mode in ("each", "broadcast"):
            model = fsdp2x.fully_shard(meta("llama", tie_word_embeddings=True))
            with refuses("lm_head.weight are tied in the model, but differ in the files"):
                fsdp2x.load_hf(model, folder, mode=mode, **QUIET)
        model = build("llama")
        model.model.rotary_emb.inv_freq[1] += ctx.rank
        fsdp2x.fully_shard(model)
        with refuses("buffers differ from rank 0's: model.rotary_emb.inv_freq on rank 1"):
            fsdp2x.load_hf(model, folder, **QUIET)


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)


@distributed(world_sizes=(2,))
def test_what_nobody_initialises(ctx):
    with shared_folder(
        ctx, lambda folder: save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    ) as folder:
        with torch.device("meta"):
            model = shard(ctx, Counted())
        with refuses("no file holds scale, and .*Counted does not initialize them"):
            fsdp2x.load_hf(model, folder, **QUIET)


@distributed(world_sizes=(2,), fresh=True)  # memory that earlier tests freed would count
def test_reads_half_and_keeps_half(ctx):
    """Bytes that left the file, and private memory: the shard and less than the largest tensor."""
    rows, columns, num = 2048, 1024, 6
    names = {f"{i}.weight": str(i) for i in range(num)}
    whole_bytes = num * rows * columns * 4

    def io_bytes():
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    def private_kib(field):
        text = Path("/proc/self/status").read_text()
        return int(text.split(f"{field}:")[1].split()[0])

    def write(folder: Path) -> None:
        save_file({str(i): torch.full((rows, columns), float(i)) for i in range(num)}, folder / "model.safetensors")

    with shared_folder(ctx, write) as folder:
        for dtype in (torch.float32, torch.bfloat16):
            with torch.device("meta"):
                model = nn.Sequential(*(nn.Linear(columns, rows, bias=False, dtype=dtype) for _ in range(num)))
            for linear in model:
                shard(ctx, linear)
            shard(ctx, model)
            dist.barrier()
            with mock.patch("fsdp2x.io.hf.targets.hf_base", lambda model: (model, names.__getitem__)):
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")  # forget the peak
                before, mapped, read = private_kib("RssAnon"), private_kib("RssFile"), io_bytes()
                report = fsdp2x.load_hf(model, folder, **QUIET)
            read = io_bytes() - read
            mapped = max(mapped, private_kib("RssFile"))  # the system may take pages of libraries back meanwhile
            peak = private_kib("VmHWM") - mapped - private_kib("RssShmem") - before
            assert report.read_bytes == whole_bytes // 2
            assert whole_bytes // 2 <= read < whole_bytes * 0.55
            shard_kib = whole_bytes // 2 // 1024 * dtype.itemsize // 4
            assert peak < shard_kib + rows * columns * 4 // 1024, f"{peak} KiB above the start, shard {shard_kib} KiB"
            same(
                dict(zip("012345", whole(model).values(), strict=True)),
                {str(i): torch.full((rows, columns), float(i), dtype=dtype) for i in range(num)},
            )
            del model
            gc.collect()  # modules and their units know each other
