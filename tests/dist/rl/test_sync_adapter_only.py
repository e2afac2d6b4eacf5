"""Adapters pushed without their base: results of engines, the cost, failed pushes, and engines that refuse them."""

import copy
import os
import signal

import pytest
import test_sync_sglang as sglang_tests
import test_sync_vllm as vllm_tests
import torch
from torch import nn

import fsdp2x
from engines import Served, Store, new_address, peer
from fsdp2x.rl.sync.receiver.engine_adapter import LoraParameters
from fsdp2x.sync import InProcess, Peer, SyncError
from harness import dist_run, distributed
from models import build
from reference import same

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SETTINGS = {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LIMIT_S = 60.0


def change(model, seed=0):
    """Other adapter weights, by names alone, of an unsharded model or a sharded one."""
    with torch.no_grad():
        for name, param in sorted(model.named_parameters()):
            if "lora_" in name:
                param.add_(0.02 * (seed + 1) * (1 + len(name) % 7))


def adapted(**settings):
    """(an unsharded PEFT model, the same sharded)."""
    torch.manual_seed(1)
    twin = fsdp2x.add_lora(build("llama"), {**SETTINGS, **settings})
    change(twin)
    model = fsdp2x.fully_shard(copy.deepcopy(twin))
    return twin, model


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("over", ["memory", "group"])
@distributed(world_sizes=(1, 2, 3))
def test_an_engine_computes_what_the_trainer_does(ctx, over):
    """Results agree bit for bit after each push. A merged push replaces the adapter and refuses another on top."""
    twin, model = adapted(use_rslora=True, alpha_pattern={"v_proj": 3})
    engine = build("llama")
    with peer(ctx, LoraParameters(engine), over=over) as (target, served):
        with fsdp2x.sync.connect(model, target, weights="adapter", bucket_bytes=300) as sync:
            for version in range(3):
                report = sync.push(version=version)
                if served:
                    same(logits(engine), logits(twin))
                    assert served.receiver.status["version"] == version
                change(twin, version), change(model, version)
        num_bytes = sum(param.nbytes for name, param in twin.named_parameters() if "lora_" in name)
        assert report.bytes_sent == num_bytes and report.mode == "adapter" and report.num_buckets > 1
        with fsdp2x.sync.connect(model, target, merge_adapters=True) as sync:
            full = sync.push(version=7)
        assert full.bytes_sent == sum(param.nbytes for param in engine.parameters()) > 10 * num_bytes
        if served:
            same(logits(engine), logits(copy.deepcopy(twin).merge_and_unload()))
        with fsdp2x.sync.connect(model, target, weights="adapter") as sync:
            with pytest.raises(SyncError, match="have an adapter merged in. Push the base alone"):
                sync.push(version=8)
        base = {"params": lambda name, param: "lora_" not in name}
        with fsdp2x.sync.connect(model, target, **base) as sync:
            sync.push(version=9)
        if served:
            same(logits(engine), logits(build("llama")))
        with fsdp2x.sync.connect(model, target, weights="adapter") as sync:
            sync.push(version=10)
        if served:
            same(logits(engine), logits(twin))


class Faulty(LoraParameters):
    """Raises once in the phase `fails_in`."""

    fails_in = None

    def _fail(self, phase):
        if self.fails_in == phase:
            self.fails_in = None
            raise RuntimeError(f"failure in {phase}")

    def start(self, mode):
        self._fail("begin")

    def prepare_adapter(self, adapter, tensors):
        self._fail("finish")
        install = super().prepare_adapter(adapter, tensors)
        return lambda: (self._fail("commit"), install())


@pytest.mark.parametrize("over", ["memory", "group"])
@distributed(world_sizes=(2,))
def test_a_failed_push_leaves_the_adapter_of_before(ctx, over):
    """Wherever it fails, all ranks know, and the next push heals. Only a commit leaves two engines at two versions."""
    twin, model = adapted()
    engines = [build("llama"), build("llama")]
    sinks = [LoraParameters(engines[0]), Faulty(engines[1])]
    with peer(ctx, *sinks, over=over) as (target, served):
        with fsdp2x.sync.connect(model, target, weights="adapter", timeout_s=20) as sync:
            sync.push(version=0)
            before = logits(twin)
            for version, phase in enumerate(("begin", "finish", "commit"), 1):
                change(twin), change(model)
                sinks[1].fails_in = phase
                with pytest.raises(SyncError, match=f"failure in {phase}") as caught:
                    sync.push(version=version)
                assert caught.value.phase == phase and sync.is_torn == (phase == "commit")
                if phase != "commit":
                    assert "continues with the adapter of version 0" in str(caught.value) and sync.version == 0
                for engine, one in zip(engines, served or (), strict=False):
                    has_new = phase == "commit" and engine is engines[0]
                    same(logits(engine), logits(twin) if has_new else before)
                    with one.receiver.reading() as held:
                        assert held == (version if has_new else 0)
            sync.push(version=9)
            for engine in engines if served else ():
                same(logits(engine), logits(twin))


def _push_and_die(ctx, address):
    _, model = adapted()
    target = Peer(address)

    def take(buckets):
        target.__class__.take(target, [next(iter(buckets))])
        os.kill(os.getpid(), signal.SIGKILL)

    with fsdp2x.sync.connect(model, target, weights="adapter", bucket_bytes=100, timeout_s=5) as sync:
        sync.push(version=0)
        change(model)
        target.take = take
        with pytest.raises(RuntimeError, match="rank 0 .* ended meanwhile"):
            sync.push(version=1)
        assert sync.version == 0


def test_a_trainer_that_is_killed_in_the_middle():
    """The engine sees the connection end and keeps its weights."""
    engine, address = build("llama"), new_address()
    with Served(address, LoraParameters(engine)) as served:
        dist_run(_push_and_die, 2, address, expect_exit={0: -9}, timeout=60)
        with served.receiver.reading() as version:
            assert version == 0 and served.versions == [0]
        torch.manual_seed(1)
        twin = fsdp2x.add_lora(build("llama"), dict(SETTINGS))
        change(twin)
        same(logits(engine), logits(twin))


# ---- vLLM and SGLang


def wanted(twin):
    """The adapter under the names of PEFT's files."""
    return {n.replace(".default", ""): p.detach().clone() for n, p in sorted(twin.named_parameters()) if "lora_" in n}


@pytest.mark.parametrize(("way", "num_workers"), [("server", 2), ("llm", 1)])
@distributed(world_sizes=(2,))
def test_vllm_serves_the_adapter_by_its_name(ctx, way, num_workers):
    """vLLM's own requests load it from memory. If a push fails before or after the commit, the old adapter stays."""
    twin, model = adapted()
    with vllm_tests.engine(ctx, way, num_workers) as (target, core):
        request = None

        def runs(expected):
            if core is not None:
                same(*[[dict(sorted(one.items())) for one in core.adapted(request)], [expected] * num_workers])

        with fsdp2x.sync.connect(model, target, weights="adapter", adapter_name="policy") as sync:
            for version in range(2):
                sync.push(version=version)
                if core is not None:
                    request = core.adapters["policy"] if way == "server" else target.lora_request()
                    assert request.lora_path == f"fsdp2x://policy/{version}" and core.version == str(version)
                runs(wanted(twin))
                change(twin), change(model)
            held = wanted(twin)
            sync.push(version=2)
            change(twin), change(model)
            for version, fails in enumerate(("finish", "commit"), 3):
                if core is not None:
                    manager = core.workers[-1].lora_manager
                    manager.bad = fails == "commit"
                    rank, manager.lora_config.max_lora_rank = manager.lora_config.max_lora_rank, 4 if manager.bad else 1
                with pytest.raises(SyncError) as caught:
                    sync.push(version=version)
                assert caught.value.phase == fails
                if core is not None:
                    manager.lora_config.max_lora_rank = rank
                runs(held)
            sync.push(version=9)
            runs(wanted(twin))
        if core is not None:
            for worker in core.workers:
                worker.fsdp2x_reload.drop_adapter(), worker.reset_lora_state()  # as a push of all weights does
            for one in core.adapted(request):  # an error would end the engine
                assert one and not any(tensor.any() for tensor in one.values())
            core.lora_config = None
        with fsdp2x.sync.connect(model, target, weights="adapter") as sync:
            with pytest.raises(SyncError, match="enable.lora"):
                sync.push(version=0)


@pytest.mark.parametrize("pause", ["retract", "abort"])
@distributed(world_sizes=(2,))
def test_sglang_serves_the_adapter_by_its_name(ctx, pause):
    """The scale is that of alpha / r, whatever PEFT's settings; a server that refuses leaves all with the old one."""
    twin, model = adapted(use_rslora=True)
    with sglang_tests.engines(ctx, {}, 2, num_workers=2, pause=pause) as (target, servers):

        def runs(version, expected):
            for server in servers:
                ((scale, found),) = server.adapters.values()
                assert scale == pytest.approx(6 / 2**0.5) and server.version == version and server.mode is None
                same([dict(sorted(one.items())) for one in found], [expected] * 2)

        with fsdp2x.sync.connect(model, target, weights="adapter", adapter_name="policy") as sync:
            for version in range(2):
                sync.push(version=version)
                runs(str(version), wanted(twin))
                held = wanted(twin)
                change(twin), change(model)
            if servers:
                servers[1].broken["load_lora_adapter_from_tensors"] = "out of memory"
            with pytest.raises(SyncError, match="out of memory"):
                sync.push(version=2)
            runs("1", held)
            if servers:
                servers[0].adapters.clear()  # it was started again
            sync.push(version=3)
            runs("3", wanted(twin))
            if servers:
                servers[0].enable_lora = False
            with pytest.raises(SyncError, match="--max-lora-rank 2 --lora-target-modules down_proj q_proj"):
                sync.push(version=4)


# ---- refusals

PLAIN = {"weights": "adapter"}
CASES = {
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save=.*merge_adapters=True"),
    "dora": ({"use_dora": True}, "use_dora=True"),
    "bias": ({"bias": "lora_only"}, "bias='lora_only'"),
    "embedding": ({"target_modules": ["embed_tokens"]}, "embed_tokens' adapts something else than a linear layer"),
    "changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' has changed the base"),
}


@pytest.mark.parametrize("case", CASES)
@distributed(world_sizes=(2,))
def test_adapters_that_are_not_pushed_alone(ctx, case):
    settings, said = CASES[case]
    _, model = adapted(**settings)
    with pytest.raises(NotImplementedError, match=said):
        fsdp2x.sync.connect(model, InProcess(None), **PLAIN)


@distributed(world_sizes=(2,))
def test_what_cannot_be_connected(ctx):
    from peft import LoraConfig

    with pytest.raises(ValueError, match="Linear has no adapter. Call fsdp2x.add_lora before fully_shard"):
        fsdp2x.sync.connect(fsdp2x.fully_shard(nn.Linear(2, 2)), InProcess(list), **PLAIN)
    twin, model = adapted()
    with pytest.raises(NotImplementedError, match="this InProcess takes no adapters. Give InProcess a load_adapter"):
        fsdp2x.sync.connect(model, InProcess(list if ctx.rank else None), **PLAIN)
    for wrong in ({"names": "model"}, {"deltas": True}, {"merge_adapters": True}, {"params": lambda name, param: True}):
        with pytest.raises(ValueError, match="Omit merge_adapters, deltas, names, and params"):
            fsdp2x.sync.connect(model, InProcess(None), **PLAIN, **wrong)
    with pytest.raises(ValueError, match="adapter_name='policy' needs weights=\"adapter\""):
        fsdp2x.sync.connect(model, InProcess(list), adapter_name="policy")
    with pytest.raises(ValueError, match="other names, shapes or dtypes"):
        fsdp2x.sync.connect(model, InProcess(None), **PLAIN, adapter_name=f"name{ctx.rank}")
    with peer(ctx, Store()) as (target, _), fsdp2x.sync.connect(model, target, **PLAIN) as sync:
        with pytest.raises(SyncError, match="this engine takes no adapters"):
            sync.push(version=0)
    with peer(ctx, LoraParameters(build("llama", num_hidden_layers=1))) as (target, served):
        with fsdp2x.sync.connect(model, target, **PLAIN) as sync, pytest.raises(SyncError, match="no such module"):
            sync.push(version=0)
    twin.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(NotImplementedError, match="the model has default, second"):
        fsdp2x.sync.connect(fsdp2x.fully_shard(twin), InProcess(None), **PLAIN)
