"""accelerate's FSDP2 path through install(): what it computes, clips, saves and loads is what it does with stock."""

import contextlib
import importlib
import json
import logging
import os
import sys
from unittest import mock

import pytest
import torch

import fsdp2x
from frameworks import assert_sharded_by_us, fsdp_accelerator_class, launched
from harness import distributed, programs
from models import batch, build
from reference import full, params, same
from training import shared_folder

MODELS = ("qwen3", "qwen3_moe")  # tied embeddings; experts
each_model = pytest.mark.parametrize("name", MODELS)


def whole_model(name, seed=0):
    # Checkpointing refuses a cache; grouped products in bf16 need widths that are multiples of 8.
    return build(name, seed=seed, use_cache=False, **({"moe_intermediate_size": 16} if "moe" in name else {}))


def prepared(name, *, seed=0, state_dict_type="SHARDED_STATE_DICT", accumulation=1, mixed_precision="no", **plugin):
    from accelerate.utils import FullyShardedDataParallelPlugin

    options = {"reshard_after_forward": True, "auto_wrap_policy": "transformer_based_wrap", **plugin}
    options = {"fsdp_version": 2, "state_dict_type": state_dict_type, "cpu_ram_efficient_loading": False, **options}
    accelerator = fsdp_accelerator_class()(
        fsdp_plugin=FullyShardedDataParallelPlugin(**options),
        gradient_accumulation_steps=accumulation,
        mixed_precision=mixed_precision,
    )
    model = whole_model(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


def train(ctx, accelerator, model, optimizer, name, steps=range(3), max_norm=0.5):
    """Losses and norms of every step."""
    seen = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = model(**batch(name, ctx.rank + 10 * step)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(full(accelerator.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
        seen.append(full(loss))
    return seen


@contextlib.contextmanager
def both(ctx, **tolerance):
    """Yields run(function): under stock, then under ours, and compares the results, bit for bit without a tolerance."""

    def run(function):
        results = []
        for impl in ("torch", "fsdp2x"):
            torch.manual_seed(7)
            with launched(ctx, impl=impl):
                results.append(function(impl))
        same(results[1], results[0], **tolerance)
        return results[1]

    yield run


OPTIONS = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "checkpointed": {"activation_checkpointing": True},
    "ram_efficient": {"cpu_ram_efficient_loading": True},
    "accumulated": {"accumulation": 2},
    "unwrapped": {"auto_wrap_policy": "no_wrap"},
    "bf16": {"mixed_precision": "bf16"},
}


@each_model
@pytest.mark.parametrize("option", list(OPTIONS))
@distributed(world_sizes=(2,), timeout=120)
def test_trains_as_with_stock(ctx, name, option):
    ram_efficient = option == "ram_efficient"

    def run(impl):
        # Only rank 0 has read the weights when loading is RAM-efficient; the others must get rank 0's.
        seed = ctx.rank if ram_efficient else 0
        accelerator, model, optimizer = prepared(name, seed=seed, **OPTIONS[option])
        if impl == "fsdp2x":
            assert_sharded_by_us(model)
        loaded = params(model)
        if ram_efficient:
            plain = {key: value.detach() for key, value in whole_model(name).named_parameters()}
            same(loaded, {key: plain[key] for key in loaded})
        seen = train(ctx, accelerator, model, optimizer, name, range(2))
        return seen, params(model)

    # Reducing in bf16, shared memory rounds once and gloo at every addition.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if option == "bf16" else {}
    with both(ctx, **tolerance) as compare:
        seen, after = compare(run)
    assert len(set(map(float, seen))) > len(seen) // 2, "losses that do not move would show nothing"
    assert all(torch.isfinite(value).all() for value in after.values())


@distributed(world_sizes=(2,), timeout=120)
def test_checkpoints_of_stock_load_and_the_other_way_round(ctx):
    with shared_folder(ctx) as folder:
        losses = {}
        for writer in ("torch", "fsdp2x"):
            with launched(ctx, impl=writer):
                accelerator, model, optimizer = prepared("qwen3")
                train(ctx, accelerator, model, optimizer, "qwen3", range(2))
                accelerator.save_state(str(folder / writer))
            reader = "fsdp2x" if writer == "torch" else "torch"
            with launched(ctx, impl=reader):
                accelerator, model, optimizer = prepared("qwen3", seed=5)
                accelerator.load_state(str(folder / writer))
                losses[writer] = train(ctx, accelerator, model, optimizer, "qwen3", range(2, 4))
        same(losses["torch"], losses["fsdp2x"])


@distributed(world_sizes=(2,), timeout=120)
def test_a_model_that_is_sharded_already_passes_through(ctx):
    import fsdp2x

    with launched(ctx):
        from accelerate.utils import FullyShardedDataParallelPlugin

        accelerator = fsdp_accelerator_class()(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        model = fsdp2x.fully_shard(build("qwen3"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        units = len(fsdp2x.describe(model).units)
        prepared_model, optimizer = accelerator.prepare(model, optimizer)
        assert prepared_model is model and len(fsdp2x.describe(model).units) == units
        train(ctx, accelerator, model, optimizer, "qwen3")


@distributed(world_sizes=(2,), timeout=180)
def test_a_plain_accelerator_shards_on_a_cpu(ctx):
    """accelerate's own class and switches; by itself it takes DDP there, without a word."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import FullyShardedDataParallelPlugin

    with launched(ctx):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap"
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = whole_model("qwen3")
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert_sharded_by_us(model)
        seen = train(ctx, accelerator, model, optimizer, "qwen3")
    assert not hasattr(AcceleratorState.__init__, "__wrapped__"), "uninstalled"
    with launched(ctx, impl="torch"):
        accelerator, model, optimizer = prepared("qwen3")
        same(seen, train(ctx, accelerator, model, optimizer, "qwen3"))


def test_an_accelerate_that_comes_later_is_followed():
    import accelerate.state as loaded

    try:
        del sys.modules["accelerate.state"]
        with fsdp2x.install():
            fresh = importlib.import_module("accelerate.state")
            assert hasattr(fresh.AcceleratorState.__init__, "__wrapped__")
        assert not hasattr(fresh.AcceleratorState.__init__, "__wrapped__")
        del sys.modules["accelerate.state"]
        assert not hasattr(importlib.import_module("accelerate.state").AcceleratorState.__init__, "__wrapped__")
    finally:
        sys.modules["accelerate.state"] = sys.modules["accelerate"].state = loaded


LAUNCHED = """
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

accelerator = Accelerator()
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16))
model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
print(f"<{accelerator.num_processes} {type(model).__name__} {accelerator.device.type}>")
"""


@pytest.mark.skipif(torch.accelerator.is_available(), reason="accelerate takes the accelerator")
@pytest.mark.parametrize("use_cpu", [pytest.param(True, marks=pytest.mark.full), False])
def test_the_file_of_accelerate_config_shards_on_cpus(tmp_path, use_cpu):
    """As `accelerate config` writes it, where accelerate itself lets every rank train alone."""
    config = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "use_cpu": use_cpu,
              "num_machines": 1, "machine_rank": 0, "num_processes": 2, "mixed_precision": "no",
              "main_training_function": "main", "rdzv_backend": "static", "same_network": True,
              "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP",
                              "fsdp_reshard_after_forward": True}}  # fmt: skip
    (tmp_path / "fsdp.yaml").write_text(json.dumps(config))
    (tmp_path / "train.py").write_text(LAUNCHED)
    launch = ("-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml", "--main_process_port", "0")
    done = programs.run(*launch, "-m", "fsdp2x.run", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.count("<2 FSDPGPT2LMHeadModel cpu>") == 2, done.stderr


@distributed(world_sizes=(2,))
def test_what_shards_nothing_is_told(ctx):
    from accelerate import Accelerator, PartialState
    from accelerate.state import DistributedType
    from accelerate.utils import FullyShardedDataParallelPlugin

    logger = logging.getLogger("fsdp2x")
    with launched(ctx), mock.patch.object(logger, "warning") as warning:
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
        assert "nothing is sharded" in warning.call_args.args
    for kind, users in ((kind, kind != DistributedType.NO) for kind in DistributedType):
        state = mock.Mock(distributed_type=kind, use_distributed=users)
        with mock.patch.object(logger, "warning") as warning, mock.patch.dict(os.environ, WORLD_SIZE="1"):
            sys.modules["fsdp2x.installer"]._take_fsdp(
                sys.modules["accelerate.state"], state, mock.Mock(fsdp_version=1)
            )
            assert warning.call_count == 1
    if not torch.accelerator.is_available():
        with launched(ctx), pytest.raises(RuntimeError, match="every rank would train alone"):
            PartialState()
            Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
