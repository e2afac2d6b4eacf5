"""Two engine processes for two trainers: one is killed while it samples, and another one starts at its address."""

import os
import signal
import threading
import time
import warnings

import pytest
import torch.distributed as dist

import fsdp2x
from engines import new_address
from fsdp2x.rollout import RolloutClient, RolloutError, Sampling
from harness import dist_run, programs
from models import build
from rollouts import change, compare, sharded

LIMIT_S = 60.0
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12], [5, 5], [9]]


def start(folder, address, name):
    words = ("-m", "fsdp2x", "rollout", folder / "model", "--address", address, "--once", LIMIT_S, "--stop-ids", "none")
    return programs.Program(*words, log=folder / name)


def body(ctx, addresses, pid, flag):
    model, sampling = sharded(), Sampling(20, 2, seed=ctx.rank)
    client = RolloutClient(addresses, timeout_s=LIMIT_S)

    def sampled(version, act=lambda: None):
        client.ask(PROMPTS, sampling)
        act()
        completions = client.collect()
        assert [c.prompt for c in completions] == [index for index in range(len(PROMPTS)) for _ in range(2)]
        compare(model, PROMPTS, completions, version)
        return [engine.num_tokens for engine in client.engines]

    def kill():
        dist.barrier()
        if ctx.rank == 0:
            os.kill(pid, signal.SIGKILL)

    with fsdp2x.sync.connect(model, client.target, names="model", timeout_s=LIMIT_S) as sync:
        sync.push(version=0)
        client.check_weights(fsdp2x.full_tensors(model))
        assert min(sampled(0)) > 0
        dist.barrier()
        if ctx.rank == 0:
            os.kill(pid, signal.SIGSTOP)  # so that it owes answers when it ends
        dist.barrier()
        with pytest.warns(UserWarning, match=f"the engine at '{addresses[1]}' is lost"):
            before = sampled(0, kill)
        assert client.engines[1].num_failures == 1

        change(model)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sync.push(version=1)
        texts = [str(one.message) for one in said if "fsdp2x.sync" in str(one.message)]
        assert len(texts) == (ctx.rank == 0) and all("1 of 2 engines took version 1" in text for text in texts)
        with pytest.raises(RolloutError, match="such as 'model.embed_tokens.weight'"):
            client.check_weights((name, tensor + 1) for name, tensor in fsdp2x.full_tensors(model))
        assert sampled(1)[1] == before[1]

        # Another one starts, with weights of its own.
        flag.touch()
        deadline = time.monotonic() + LIMIT_S
        while "own" not in client.engines[1].reason:
            assert time.monotonic() < deadline, client.engines[1]
            client.ask([[3]], Sampling(1))
            client.collect()
            time.sleep(0.05)
            reasons = [None, None]
            dist.all_gather_object(reasons, client.engines[1].reason)
            if not all("own" in reason for reason in reasons):
                client._engines[1].lose("ask again", is_failure=False)
        assert sampled(1)[1] == before[1]

        change(model)
        sync.push(version=2)
        if ctx.rank == 0:
            assert client.target.missing == {}
        client.check_weights(fsdp2x.full_tensors(model))
        assert sampled(2)[1] > before[1]

        pids = [None]
        if ctx.rank == 0:
            pids = [engine.answer_to("status", time.monotonic() + LIMIT_S)["pid"] for engine in client._engines]
            for one in pids:
                os.kill(one, signal.SIGKILL)
        dist.barrier()
        client.ask(PROMPTS, sampling)
        with pytest.raises(RolloutError, match="failed in sample: .*0: no engine can sample .*1: no engine can"):
            client.collect()
        with pytest.raises(fsdp2x.sync.SyncError, match="no receiver answers at .*no receiver answers at "):
            sync.push(version=3)
    client.close()


def test_an_engine_that_dies_and_returns(tmp_path):
    build("qwen3").save_pretrained(tmp_path / "model")
    addresses = [new_address(), new_address()]
    engines = [start(tmp_path, address, f"log-{place}") for place, address in enumerate(addresses)]
    flag = tmp_path / "start again"

    def restart():
        engines[1].wait(2 * LIMIT_S)
        deadline = time.monotonic() + 2 * LIMIT_S
        while not flag.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        engines.append(start(tmp_path, addresses[1], "log-again"))

    watcher = threading.Thread(target=restart)
    watcher.start()
    try:
        dist_run(body, 2, addresses, engines[1].pid, flag, timeout=2 * LIMIT_S)
    finally:
        flag.touch()
        engines[1].end()
        watcher.join(2 * LIMIT_S)
        for engine in engines:
            engine.end()
