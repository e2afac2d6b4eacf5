"""Meshes by name and size, and what contradicts itself."""

import datetime
from unittest import mock

import pytest
import torch

from fsdp2x.train import ConfigError, parse_config
from fsdp2x.train.config import ModelConfig, ParallelConfig, ScalerConfig, TrainSection
from fsdp2x.train.distributed import choose_device, explain_emulation, idle_gpus
from fsdp2x.train.feeds import resolve_tiled_loss
from fsdp2x.train.model import sharding, with_defaults
from fsdp2x.train.strategy import (
    plan_mesh,
    resolve_batching,
    resolve_param_dtype,
    resolve_scaling,
    resolve_steps,
)
from models import build


@pytest.mark.parametrize(
    ("settings", "shape", "reshard"),
    [
        ({"strategy": "FULL_SHARD"}, (16,), None),
        ({"strategy": "SHARD_GRAD_OP"}, (16,), False),
        ({"strategy": "NO_SHARD"}, (16, 1), False),
        ({"strategy": "HYBRID_SHARD"}, (2, 8), None),  # inside the node, copies across nodes
        ({"strategy": "HYBRID_SHARD", "fsdp_size": 4}, (4, 4), None),
        ({"strategy": "HYBRID_SHARD_ZERO2"}, (2, 8), False),
        ({}, (16,), None),
        ({"fsdp_size": 16}, (16,), None),
        ({"fsdp_size": 1}, (16,), None),
        ({"fsdp_size": 0}, (16,), None),
        ({"fsdp_size": 8, "reshard_after_forward": True}, (2, 8), True),
        ({"fsdp_size": 4, "reshard_after_forward": False}, (4, 4), False),
        ({"fsdp_size": 4, "sequence_parallel": 2}, (4, 4), None),
        ({"sequence_parallel": {"context": 4, "ulysses": 2}}, (16,), None),
    ],
)
def test_meshes(settings, shape, reshard):
    plan = plan_mesh(ParallelConfig(**settings), 16, 8)
    assert (plan.shape, plan.reshard_after_forward) == (shape, reshard)
    assert plan.axes == (("fsdp",) if len(shape) == 1 else ("ddp", "fsdp"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"fsdp_size": 5}, "parallel.fsdp_size: got 5, expected a divisor of the 16 ranks"),
        ({"fsdp_size": 64}, "parallel.fsdp_size: got 64, expected a divisor of the 16 ranks"),
        ({"strategy": "FULL_SHARD", "fsdp_size": 17}, "parallel.fsdp_size: got 17, expected a divisor"),
        ({"strategy": "FULL_SHARD", "fsdp_size": 4}, "For groups of 4 ranks use HYBRID_SHARD"),
        ({"strategy": "SHARD_GRAD_OP", "fsdp_size": 4}, "For groups of 4 ranks use HYBRID_SHARD_ZERO2"),
        ({"strategy": "NO_SHARD", "fsdp_size": 2}, "got 2 with NO_SHARD, which shards nothing"),
        ({"strategy": "HYBRID_SHARD", "fsdp_size": 1}, "expected the ranks of one shard group"),
        ({"strategy": "FULL_SHARD", "reshard_after_forward": False}, "got False with parallel.strategy=FULL_SHARD"),
        ({"sequence_parallel": 3}, "parallel.sequence_parallel: got 3, expected a divisor of the 16 ranks"),
        ({"sequence_parallel": {"context": 3}}, "got 3 ranks (Ulysses 1 x context 3), expected a divisor of the 16"),
    ],
)
def test_contradictions(settings, sentence):
    with pytest.raises(ConfigError) as error:
        plan_mesh(ParallelConfig(**settings), 16, 8)
    assert sentence in str(error.value)


def test_nodes_of_unequal_size():
    with pytest.raises(ConfigError, match="got 3, expected .* 8 ranks"):
        plan_mesh(ParallelConfig(strategy="HYBRID_SHARD"), 8, 3)


def test_batches():
    def batching(readers, **train):
        found = resolve_batching(TrainSection(**train), readers)
        return found.batch_size, found.accumulation, found.eval_batch_size

    assert batching(4) == (8, 1, 8)
    assert batching(4, batch_size=2, accumulation=3) == (2, 3, 2)
    assert batching(4, global_batch_size=48) == (12, 1, 12)
    assert batching(4, global_batch_size=48, accumulation=2) == (6, 2, 6)
    assert batching(4, global_batch_size=48, batch_size=3, global_eval_batch_size=16) == (3, 4, 4)
    for wrong, sentence in (
        ({"global_batch_size": 46}, "got 46, expected a multiple of 4 ranks"),
        ({"global_batch_size": 48, "batch_size": 5}, "expected a multiple of 4 ranks x 5 blocks a micro-batch"),
        ({"global_batch_size": 48, "batch_size": 3, "accumulation": 3}, "accumulation 3 are 36. Omit one of them"),
        ({"eval_batch_size": 4, "global_eval_batch_size": 4}, "got both eval_batch_size and global_eval_batch_size"),
    ):
        with pytest.raises(ConfigError) as error:
            batching(4, **wrong)
        assert sentence in str(error.value)


def test_steps():
    assert resolve_steps(TrainSection(), 100, 8) == 12
    assert resolve_steps(TrainSection(steps=7), 100, 8) == 7
    assert resolve_steps(TrainSection(epochs=2), 100, 8) == 25
    assert resolve_steps(TrainSection(epochs=2, steps=7), 100, 8) == 7
    assert resolve_steps(TrainSection(epochs=1), 3, 8) == 1


def test_defaults_that_depend_on_other_settings(tmp_path, monkeypatch):
    def of(device, dtype="bfloat16", **sections):
        (tmp_path / "config.json").write_text(f'{{"dtype": "{dtype}"}}')
        model = {"path": str(tmp_path)} | sections.pop("model", {})
        config = with_defaults(parse_config({"model": model, "data": {"files": ["text"]}, **sections}), device)
        return config.model.dtype, config.model.load, config.data.held_out

    lora = {"lora": {"rank": 2}}
    assert of("cuda") == of("cpu", **lora) == ("float32", "rows", 0.0)
    assert of("cuda", **lora)[0] == "bfloat16" and of("cuda", "float16", **lora)[0] == "float32"
    assert of("cuda", model={"dtype": "float32", "load": "whole"}, **lora)[:2] == ("float32", "whole")
    assert of("cpu", parallel={"expert_parallel": 2})[1] == "whole"
    assert of("cpu", train={"eval_every": 5})[2] == of("cpu", train={"mode": "evaluate"})[2] == 0.05
    assert of("cpu", data={"files": ["text"], "held_out": 0.25})[2] == 0.25

    def computes_in(dtype="float32", wanted=None, *, has_bfloat16=True, device="cuda"):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: has_bfloat16)
        model, parallel = ModelConfig(path="x", dtype=dtype), ParallelConfig(param_dtype=wanted)
        return resolve_param_dtype(model, parallel, torch.device(device))

    assert computes_in() == torch.bfloat16 and computes_in("float16") is None and computes_in(device="cpu") is None
    assert computes_in(has_bfloat16=False) is None
    assert computes_in(wanted="auto", has_bfloat16=False) == torch.float16


def test_gpus_in_no_rank_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def said(local_size, device="cuda"):
        return idle_gpus(mock.Mock(local_size=local_size, device=torch.device(device)))

    assert "1 of this host's 8 GPUs" in said(1) and said(1).endswith("run fsdp2x train with --nproc auto")
    assert said(8) == said(16) == said(2, "cpu") == ""


def test_when_the_loss_is_scaled():
    model = ModelConfig(path="x")
    assert resolve_scaling(ScalerConfig(), model, torch.float16)
    assert not resolve_scaling(ScalerConfig(), model, torch.bfloat16)
    assert not resolve_scaling(ScalerConfig(enabled=False), model, torch.float16)
    with pytest.raises(ConfigError, match="model.dtype: got 'float16'"):
        resolve_scaling(ScalerConfig(), ModelConfig(path="x", dtype="float16"), None)


def test_devices_follow_the_local_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert choose_device("auto", 3, 4)[0] == torch.device("cuda", 3)  # whatever the global rank is
    assert choose_device("cpu", 3, 4) == (torch.device("cpu"), "gloo")
    assert choose_device("auto", 5, 8) == (torch.device("cuda", 1), "gloo")  # two ranks a GPU: no NCCL


def test_a_device_leaves_timeouts_to_its_process_group():
    """`fully_shard` refuses a timeout there; the process group is made with the same one."""
    plan = mock.Mock(reshard_after_forward=True)
    config = ParallelConfig(timeout_s=120)
    of = {device: sharding(config, plan, torch.device(device), None)["timeout"] for device in ("cpu", "cuda")}
    assert of == {"cpu": datetime.timedelta(seconds=120), "cuda": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fast", [True, False])
def test_half_precision_that_a_cpu_emulates_is_reported(dtype, fast, monkeypatch):
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: fast, raising=False)
    warning = explain_emulation(dtype, torch.device("cpu"))
    if fast or dtype == torch.float32:
        assert warning is None
    else:
        assert str(dtype).removeprefix("torch.") in warning and "parallel.param_dtype=float32" in warning
    assert explain_emulation(dtype, torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("wanted", "device", "tiled"), [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True)]
)
def test_the_loss_has_no_logits_where_the_head_is_known(wanted, device, tiled):
    model, device = build("llama"), torch.device(device)
    assert resolve_tiled_loss(wanted, model, device) == tiled
    model.loss_function = lambda **_: None
    if wanted:
        with pytest.raises(ConfigError, match="train.tiled_loss: .* has another loss"):
            resolve_tiled_loss(wanted, model, device)
    else:
        assert not resolve_tiled_loss(wanted, model, device)
