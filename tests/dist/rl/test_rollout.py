"""An engine process for trainer ranks: versions of tokens, a push in the middle of a request, ends of either side."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationConfig

import fsdp2x
from engines import new_address
from fsdp2x.rollout import ColocatedRollout, RolloutClient, RolloutError, RolloutServer, Sampling
from harness import dist_run, distributed, programs
from models import build
from rollouts import change, compare, sharded
from training import make_words

LIMIT_S = 60.0


@pytest.mark.parametrize("where", ["process", "colocated"])
@distributed(world_sizes=(1, 2, 3))
def test_tokens_are_those_of_the_version_that_was_pushed(ctx, where):
    model = sharded()
    addresses = [new_address()]
    dist.broadcast_object_list(addresses)
    thread, server = None, None
    if where == "colocated":
        engine = ColocatedRollout(build("qwen3", seed=5))
    else:
        if ctx.rank == 0:
            server = RolloutServer(build("qwen3", seed=5), addresses[0], has_weights=False)
            thread = threading.Thread(target=server.serve, kwargs={"contact_s": LIMIT_S}, daemon=True)
            thread.start()
        engine = RolloutClient(addresses[0], timeout_s=LIMIT_S)
    prompts = [[3, 4, 5, 6], [7, 8], [9]][: 3 - ctx.rank]  # another number on each rank, none on the fourth
    with fsdp2x.sync.connect(model, engine.target, names="model") as sync:
        engine.ask(prompts, Sampling(4))
        with pytest.raises(RuntimeError, match="Push before sampling|Push first"):
            engine.collect()  # nothing was pushed yet
        for version in range(3):
            sync.push(version=version)
            engine.ask(prompts, Sampling(6, 2, stop_ids=(4, 5), seed=ctx.rank))
            completions = engine.collect()
            assert [c.prompt for c in completions] == [index for index in range(len(prompts)) for _ in range(2)]
            compare(model, prompts, completions, version)
            change(model)
    engine.close()
    dist.barrier()
    if thread is not None:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        server.close()


@distributed(world_sizes=(2,))
def test_a_push_between_two_tokens(ctx):
    """The engine waits in the middle of a request until the trainers push: the rest is of the new weights."""
    model, twins = sharded(), []
    addresses = [new_address()]
    dist.broadcast_object_list(addresses)
    if ctx.rank == 0:
        held = build("qwen3", seed=5)
        server = RolloutServer(held, addresses[0])
        num_forwards, is_there = 0, threading.Event()

        def wait(*_):
            nonlocal num_forwards
            num_forwards += 1
            if num_forwards == 4:
                is_there.set()
                while server._receiver.status["version"] != 2:
                    server._receiver.poll(LIMIT_S)

        thread = threading.Thread(target=server.serve, kwargs={"contact_s": LIMIT_S}, daemon=True)
        thread.start()
    engine = RolloutClient(addresses[0], timeout_s=LIMIT_S)
    with fsdp2x.sync.connect(model, engine.target, names="model") as sync:
        sync.push(version=1)
        twins.append(dict(fsdp2x.full_tensors(model)))
        prompt = [3, 4, 5]
        if ctx.rank == 0:
            held.register_forward_hook(wait)
        engine.ask([prompt] if ctx.rank == 0 else [], Sampling(8))
        if ctx.rank == 0:
            assert is_there.wait(LIMIT_S)
        change(model)
        sync.push(version=2)
        twins.append(dict(fsdp2x.full_tensors(model)))
        completions = engine.collect()
    engine.close()
    dist.barrier()
    if ctx.rank:
        assert completions == []
        return
    thread.join(LIMIT_S)
    server.close()
    (completion,) = completions
    assert completion.admitted == 1 and completion.spans == [(1, 4), (2, 4)]
    inputs = torch.tensor([prompt + completion.tokens])
    by_version = []
    for tensors in twins:
        twin = build("qwen3")
        twin.load_state_dict(tensors, strict=False)
        with torch.no_grad():
            logs = twin(input_ids=inputs).logits[0, 2:-1].log_softmax(-1)
        by_version.append(logs.gather(-1, inputs[0, 3:, None])[:, 0])
    expected = torch.cat((by_version[0][:4], by_version[1][4:]))
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


# ---- ends


@pytest.fixture
def engine_process(tmp_path):
    """`fsdp2x rollout` with a model, and its address."""
    build("qwen3").save_pretrained(tmp_path / "model")
    address = new_address()
    words = ("-m", "fsdp2x", "rollout", tmp_path / "model", "--address", address, "--once", LIMIT_S)
    program = programs.Program(*words, log=tmp_path / "log")
    yield program, address, Path(tmp_path / "log")
    program.end()


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < deadline, f"process {pid} does not end"
            time.sleep(0.01)


def body_kill_engine(ctx, address):
    model = sharded()
    engine = RolloutClient(address, timeout_s=LIMIT_S)
    with fsdp2x.sync.connect(model, engine.target, names="model", timeout_s=LIMIT_S) as sync:
        sync.push(version=0)
        engine.ask([[3, 4]], Sampling(4))
        compare(model, [[3, 4]], engine.collect(), 0)
        pid = engine.status()["pid"]
        dist.barrier()
        if ctx.rank == 0:
            os.kill(pid, signal.SIGSTOP)  # it does not answer before it ends
        dist.barrier()
        engine.ask([[3]], Sampling(4))
        if ctx.rank == 0:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match="failed in sample: .*rank [01]: the engine is gone or hangs"):
            engine.collect()
        if ctx.rank == 0:
            wait_for_end(pid)  # the last of its sockets may be open for a while
        dist.barrier()
        with pytest.raises(
            fsdp2x.sync.SyncError, match="version 1 failed on rank 0 in phase 'begin': .*is the engine running"
        ):
            sync.push(version=1)
    engine.close()
    with pytest.raises(RolloutError, match="failed in connect: rank 0: .*rank 1: no engine answers"):
        RolloutClient(address, contact_s=0.2)


def test_an_engine_that_is_killed(engine_process):
    _, address, _ = engine_process
    dist_run(body_kill_engine, 2, address, timeout=2 * LIMIT_S)


def body_kill_trainer(ctx, address):
    model = sharded()
    engine = RolloutClient(address, timeout_s=LIMIT_S)
    with fsdp2x.sync.connect(model, engine.target, names="model", timeout_s=LIMIT_S) as sync:
        sync.push(version=0)
        engine.ask([[3, 4]], Sampling(4))
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"rollout \(sample\)"):
            engine.collect()
    engine.close()


def body_after(ctx, address):
    engine = RolloutClient(address, timeout_s=LIMIT_S)
    status = engine.status()
    engine.ask([[3, 4]], Sampling(4))
    versions = engine.collect()[0].versions
    engine.close()
    return status["state"], versions


def test_a_trainer_that_is_killed(engine_process):
    """The other trainer raises. The engine drops both connections and ends once no client is left."""
    program, address, log = engine_process
    watcher = RolloutClient(address, timeout_s=LIMIT_S)  # so that the engine stays
    dist_run(body_kill_trainer, 2, address, expect_exit={1: -signal.SIGKILL}, timeout=2 * LIMIT_S)
    outcomes = dist_run(body_after, 1, address, timeout=2 * LIMIT_S)
    assert outcomes[0].value == ("clean", [0] * 4)
    watcher.close()
    assert program.wait(LIMIT_S) == 0, log.read_text()


def test_the_command_ends_by_a_signal_and_leaves_nothing(tmp_path):
    build("qwen3").save_pretrained(tmp_path / "model")
    address = tmp_path / "engine"
    words = ("-m", "fsdp2x", "rollout", tmp_path / "model" / "config.json", "--address", address)
    program = programs.Program(*words, log=tmp_path / "log")
    with RolloutClient(str(address), timeout_s=LIMIT_S) as client:
        assert client.status()["has_weights"] is False
        os.kill(program.pid, signal.SIGTERM)
        assert program.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert sorted(os.listdir(tmp_path)) == ["log", "model"]


@pytest.mark.parametrize("kind", ["weights", "config"])
def test_the_command_takes_tokenizer_and_stop_ids_from_the_folder(tmp_path, kind):
    build("qwen3").save_pretrained(tmp_path)
    make_words(["<unk>", "<s>", "<|end|>", *(f"w{i}" for i in range(3, 37))]).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(tmp_path)
    if kind == "config":
        (tmp_path / "model.safetensors").unlink()
    address = new_address()
    words = ("-m", "fsdp2x", "rollout", tmp_path, "--address", address, "--once", LIMIT_S, "--max-batch-rows", 2)
    program = programs.Program(*words, log=tmp_path / "log")
    try:
        with RolloutClient(address, timeout_s=LIMIT_S) as client:
            status = client.status()
            assert status["stop_ids"] == [2, 7] and status["has_tokenizer"] is True
            if kind == "weights":
                client.ask(["w5 w6"], Sampling(20, 8))
                found = client.collect()
                assert all(c.tokens[-1] in (2, 7) or len(c.tokens) == 20 for c in found)
                assert any(len(c.tokens) < 20 for c in found) and found[0].prompt_tokens == [5, 6] and found[0].text
        assert program.wait(LIMIT_S) == 0
    finally:
        program.end()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model", "--address", "@x", "--stop-ids", "a"], "expected token ids such as 2,5, or none, got 'a'"),
        (["nowhere", "--address", "@x"], "no model at 'nowhere'"),
        (["model", "--address", "@x", "--once", "0"], "--once must be positive"),
        (["model", "--address", "/nowhere/engine"], "No such file"),
    ],
)
def test_what_the_command_refuses(tmp_path, words, said):
    build("qwen3").save_pretrained(tmp_path / "model")
    done = programs.run("-m", "fsdp2x", "rollout", *words, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
