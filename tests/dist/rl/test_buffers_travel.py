"""Persistent buffers travel with the weights: pushes, deltas, streams and files have what a state dict has."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fsdp2x
from checkpoints import shared_folder
from engines import OVER, Layerwise, Store, peer
from fsdp2x.sync import InProcess, WeightSource
from harness import distributed
from reference import same, shard
from sequences import build

TRANSPORTS = ("shm", "process_group")
KINDS = ("bfloat16", "float64", "int64", "bool", "uint8", "complex64")


class Buffered(nn.Module):
    """Buffers of all kinds in a unit, of the root, under two names, and two that do not travel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        for kind in KINDS:
            self.layers[1].register_buffer(f"of_{kind}", torch.arange(3).to(getattr(torch, kind)))
        self.layers[1].register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scale", torch.ones(3))
        self.layers[0].register_buffer("tied", self.scale)
        self.register_buffer("here", torch.ones(3), persistent=False)
        self.register_buffer("later", None)


def load(file):
    return dict(sorted(load_file(file).items()))


def change(model, value):
    """Other values in place; a module may also replace its buffer."""
    for buffer in model.buffers():
        buffer.copy_(buffer + value)
    model.layers[1].of_int64 = model.layers[1].of_int64 + value


def expected_of(model, plain, dtype=None):
    """What a state dict has: parameters of `plain`, cast, and the buffers that `model` has now."""
    weights = {name: p.detach().to(dtype) for name, p in plain.named_parameters()}
    return {**weights, **{n: b.clone() for n, b in model.state_dict().items() if n not in weights}}


@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2, 3))
def test_streams_and_files(ctx, transport):
    plain = Buffered()
    model = shard(ctx, copy.deepcopy(plain), ("layers.0", "layers.1"))
    change(model, ctx.rank + 1)
    expected = expected_of(model, plain, torch.float16)
    assert set(expected) == set(plain.state_dict())
    same(dict(fsdp2x.full_tensors(model, dtype=torch.float16)), expected)
    some = fsdp2x.full_tensors(model, params=lambda name, weight: name.endswith(("scale", "0.0.bias")))
    assert [name for name, _ in some] == ["layers.0.0.bias", "scale"]
    for bucket_bytes in (50, 1 << 20):
        got = {}
        options = {"dtype": torch.float16, "transport": transport, "bucket_bytes": bucket_bytes}
        for bucket in fsdp2x.export.stream(model, **options):
            got.update((name, tensor.clone()) for name, tensor in bucket.items())
            change(model, 1)  # as a forward between two buckets does
        same(got, expected)
        expected = expected_of(model, plain, torch.float16)
    del model.layers[1].of_complex64, expected["layers.1.of_complex64"]  # no type of safetensors
    with shared_folder() as folder:
        fsdp2x.save_hf(model, folder / "saved", dtype=torch.float16)
        saved = load(folder / "saved" / "model.safetensors")
    if ctx.rank == 0:
        same(saved, dict(sorted(expected.items())))


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("transport", TRANSPORTS)
@distributed(world_sizes=(1, 2))
def test_pushes_and_deltas(ctx, transport, over):
    plain = Buffered()
    model = shard(ctx, copy.deepcopy(plain), ("layers.0", "layers.1"))
    store, options = Store(), {"names": "model", "dtype": torch.bfloat16, "deltas": True, "transport": transport}
    with peer(ctx, store, rank=ctx.world - 1, over=over) as (target, served):
        with fsdp2x.sync.connect(model, target, **options) as sync:
            for version, (mode, value) in enumerate([("full", 1), ("delta", 2), ("full", 0), ("delta", 0)]):
                if value:
                    change(model, value + ctx.rank)
                report = sync.push(version=version, mode=mode)
                assert (report.num_tensors > 0) == (mode == "full" or value > 0)
                assert mode == "full" or report.num_tensors < len(list(model.buffers())) + 2
                if served:
                    same(store.weights, expected_of(model, plain, torch.bfloat16))
            model.layers[1].of_bfloat16 = (kept := model.layers[1].of_bfloat16).float()
            with pytest.raises(RuntimeError, match=r"'layers.1.of_bfloat16' was replaced since connecting"):
                sync.push(version="other dtype")
            model.layers[1].of_bfloat16 = kept
            model.later = torch.ones(2)
            with pytest.raises(RuntimeError, match=r"'later' was added to the model since connecting"):
                sync.push(version="another buffer")


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "minimax_m2"])
@distributed(world_sizes=(2,))
def test_a_push_has_what_the_files_have(ctx, name):
    """The bias of these routers decides which experts run, and is no parameter. MiniMax's files have another name."""
    plain = build(name)
    bias = next(b for n, b in plain.named_buffers() if n.endswith("e_score_correction_bias"))
    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)) * 5)
    model = fsdp2x.fully_shard(copy.deepcopy(plain))
    engine = Layerwise()
    with fsdp2x.sync.connect(model, InProcess(engine.load, finish=engine.finish)) as sync:
        sync.push(version=1)
    with shared_folder() as folder:
        plain.save_pretrained(folder / "stock")  # on rank 0
        fsdp2x.save_hf(model, folder / "saved")
        expected = load(folder / "stock" / "model.safetensors")
        same(load(folder / "saved" / "model.safetensors"), expected)
    same(dict(sorted(engine.weights.items())), expected)
    same(dict(sorted(WeightSource(model))), expected)


@distributed(world_sizes=(2,))
def test_buffers_of_modules_that_adapters_train(ctx):
    """PEFT trains a copy of such a module: its buffers are the adapter's, and those of merged weights."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    twin = get_peft_model(Buffered(), LoraConfig(r=2, target_modules=["0.0"], modules_to_save=["1.1"]))
    for name, buffer in twin.named_buffers():
        buffer.copy_(buffer + 2 + ("modules_to_save" in name))
    model = fsdp2x.fully_shard(copy.deepcopy(twin))
    engine = Layerwise()
    with fsdp2x.sync.connect(model, InProcess(engine.load, finish=engine.finish), merge_adapters=True) as sync:
        sync.push(version=1)
    with shared_folder() as folder:
        fsdp2x.save_hf(model, folder / "saved")
        saved = load(folder / "saved" / "adapter_model.safetensors")
    same(saved, dict(sorted(get_peft_model_state_dict(twin).items())))
    same(dict(sorted(engine.weights.items())), dict(sorted(twin.merge_and_unload().state_dict().items())))
