"""An engine that samples for trainers: requests it refuses, engines that end or hang, and cleanup."""

import contextlib
import os
import select
import socket
import threading
import time
from pathlib import Path

import pytest

from engines import new_address
from fsdp2x.rl.rollout.server import weights_address
from fsdp2x.rl.sync.receiver.engine import bind_address, receive_frame, send_frame
from fsdp2x.rollout import ColocatedRollout, RolloutClient, RolloutError, RolloutServer, Sampling, sample
from models import build
from rollouts import DEADLINE_S, asked, connected, serving
from training import make_words


def test_answers_are_those_of_sample():
    model = build("qwen3").eval()
    sampling = Sampling(5, 3, 0.8, (4, 5), seed=7)
    with serving(model) as (address, _), RolloutClient(address) as client:
        status = client.status()
        assert (status["state"], status["version"], status["pid"]) == ("initial", None, os.getpid())
        for prompts in ([[3, 4], [5], [6, 7]], []):
            client.ask(prompts, sampling)
            assert client.collect() == sample(model, prompts, sampling)


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("sing", {}, "unknown request 'sing'"),
        ("sample", {}, r"missing \['max_tokens', 'prompts'\]"),
        ("sample", {"prompts": [[3]], "max_tokens": 2, "best_of": 1}, r"unknown \['best_of'\]"),
        ("sample", {"prompts": [3], "max_tokens": 2}, "prompts must be lists of token ids, texts or lists of messages"),
        ("sample", {"prompts": [["a"]], "max_tokens": 2}, "token ids must be ints"),
        ("sample", {"prompts": [[3], "a"], "max_tokens": 2}, "prompt 1 is text, but the engine has no tokenizer. Save"),
        ("sample", {"prompts": [[{}]], "max_tokens": 2}, "prompt 0 is a conversation, but the engine has no tokenizer"),
        ("sample", {"prompts": [[True]], "max_tokens": 2}, "token ids must be ints"),
        ("sample", {"prompts": [[3]], "max_tokens": "2"}, "max_tokens must be int"),
        ("sample", {"prompts": [[3]], "max_tokens": 2, "stop_ids": 4}, "stop_ids must be a list"),
        ("sample", {"prompts": [[3]], "max_tokens": 2, "temperature": None}, "temperature must be float"),
        ("sample", {"prompts": [[3]], "max_tokens": 2, "top_p": 0.0}, "top_p must be above 0"),
        ("sample", {"prompts": [[10**6]], "max_tokens": 2}, "prompt 0 has the token 1000000"),
    ],
)
def test_a_bad_request_is_an_answer_and_the_next_one_is_served(kind, body, said):
    with serving() as (address, _), connected(address) as connection:
        answer = asked(connection, kind, body)
        assert answer["ok"] is False
        with pytest.raises(ValueError, match=said):
            raise ValueError(answer["error"])
        assert asked(connection, "sample", {"prompts": [[3]], "max_tokens": 2})["ok"] is True


def test_requests_of_several_trainers_run_together():
    """The short one is answered while the long one, which came first, is drawn; one that leaves is forgotten."""
    model = build("qwen3").eval()
    with serving(model, stop_ids=(4,)) as (address, server), contextlib.ExitStack() as held:
        first, second, third = (held.enter_context(connected(address)) for _ in range(3))
        deadline = time.monotonic() + DEADLINE_S
        is_started, forwards = threading.Event(), threading.Semaphore(0)

        def wait(*_):
            is_started.set()
            assert forwards.acquire(timeout=DEADLINE_S)

        model.register_forward_hook(wait)
        send_frame(first, "sample", {"id": 7, "prompts": [[3, 4, 5]], "max_tokens": 20, "stop_ids": []}, deadline)
        assert is_started.wait(DEADLINE_S)
        send_frame(second, "sample", {"id": "b", "prompts": [[6]], "max_tokens": 2, "stop_ids": None}, deadline)
        send_frame(third, "sample", {"prompts": [[9]] * 3, "max_tokens": 20}, deadline)
        third.close()
        while not select.select([second], [], [], 0.02)[0]:
            forwards.release()
        _, early, _ = receive_frame(second, deadline)
        assert server._requests, "the first one is not complete"
        for _ in range(200):
            forwards.release()
        _, late, _ = receive_frame(first, deadline)
        assert (early["id"], late["id"]) == ("b", 7) and not server._requests and server._batch.is_idle
        for answer, prompt, asked in ((early, [6], Sampling(2, stop_ids=(4,))), (late, [3, 4, 5], Sampling(20))):
            (expected,) = sample(model, [prompt], asked)
            assert answer["completions"][0][1] == expected.tokens


TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"


def make_tokenizer(template=TEMPLATE):
    made = make_words(["<unk>", "<s>", "<|end|>", "user", *(f"w{i}" for i in range(4, 37))])
    made.chat_template = template
    return made


def test_text_and_conversations():
    model, tokenizer, sampling = build("qwen3").eval(), make_tokenizer(), Sampling(5, 2, stop_ids=(2,), seed=1)
    asked = ["w7 w8", [{"role": "user", "content": "w5 w6"}], (4, 5)]
    ids = [[7, 8], [3, 5, 6, 9], [4, 5]]
    expected = sample(model, ids, sampling)
    colocated = ColocatedRollout(model, tokenizer=tokenizer)
    colocated._finish(0)
    with serving(model, tokenizer=tokenizer) as (address, _), RolloutClient(address) as client:
        assert client.status()["has_tokenizer"] is True
        for engine in (client, colocated):
            engine.ask(asked, sampling)
            found = engine.collect()
            assert [c.tokens for c in found] == [c.tokens for c in expected]
            assert [c.prompt_tokens for c in found] == [ids[c.prompt] for c in found]
            assert [c.text for c in found] == [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in found]
        with pytest.raises(TypeError, match="must be token ids, text or a list of messages, got a list with 'w7'"):
            client.ask([["w7"]], sampling)
    assert all(c.text is None for c in expected)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (None, "the tokenizer has no chat template. Set data.chat_template .*or save a tokenizer with one"),
        ("{{ raise_exception('roles must alternate') }}", "prompt 0: the chat template failed: .*roles must alternate"),
    ],
)
def test_conversations_that_are_refused(template, said):
    with pytest.raises(ValueError, match=said):
        sample(build("qwen3"), [[{"role": "user", "content": "w5"}]], Sampling(2), tokenizer=make_tokenizer(template))


def test_nothing_is_sampled_without_weights():
    with serving(has_weights=False) as (address, server), RolloutClient(address) as client:
        assert client.status()["has_weights"] is False
        client.ask([[3]], Sampling(2))
        with pytest.raises(RolloutError, match="rank 0: the engine rejected .*started without weights. Push before"):
            client.collect()


def test_nothing_is_sampled_from_torn_weights():
    with serving() as (address, _), RolloutClient(address) as client, connected(weights_address(address)) as trainer:
        assert asked(trainer, "hello", {"wire": "fsdp2x-1", "session": "a"})["ok"]
        assert asked(trainer, "abort", {"reason": "a trainer failed"})["state"] == "torn"
        client.ask([[3]], Sampling(2))
        with pytest.raises(RolloutError, match="the weights are torn .a trainer failed.. Do not generate"):
            client.collect()


def test_an_engine_that_does_not_come():
    with pytest.raises(RolloutError, match="failed in connect: rank 0: no engine answers at .* is `fsdp2x rollout`"):
        RolloutClient(new_address(), contact_s=0.1)
    for wrong in ({"contact_s": 0.0}, {"timeout_s": -1.0}):
        with pytest.raises(ValueError, match="must be positive"):
            RolloutClient(new_address(), **wrong)


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_an_engine_that_ends_or_hangs(ends):
    address = new_address()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(bind_address(address))
        listener.listen()
        client = RolloutClient(address, timeout_s=DEADLINE_S if ends else 0.2)
        engine, _ = listener.accept()
        client.ask([[3]], Sampling(2))
        receive_frame(engine, time.monotonic() + DEADLINE_S)
        if ends:
            engine.close()
        with pytest.raises(RolloutError, match="failed in sample: rank 0: the engine is gone or hangs"):
            client.collect()
        # A late message of such an engine is not taken as the answer to another request.
        client.ask([[3]], Sampling(2))
        with pytest.raises(RolloutError, match="the engine is gone or hangs"):
            client.collect()
        client.close()
        engine.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.ask([[3]], Sampling(2))


def test_one_request_at_a_time():
    with serving() as (address, _), RolloutClient(address) as client:
        with pytest.raises(RuntimeError, match=r"ask\(...\) first"):
            client.collect()
        client.ask([[3]], Sampling(2))
        with pytest.raises(RuntimeError, match=r"collect\(\) the answer to the last request first"):
            client.ask([[3]], Sampling(2))
        client.collect()


def test_sockets_with_paths_are_removed(tmp_path):
    address = str(tmp_path / "engine")
    with serving(address=address), RolloutClient(address):
        assert sorted(os.listdir(tmp_path)) == ["engine", "engine.weights"]
        with pytest.raises(OSError, match="in use"):
            RolloutServer(build("qwen3"), address)
        assert sorted(os.listdir(tmp_path)) == ["engine", "engine.weights"], "those are the other engine's"
    assert os.listdir(tmp_path) == []


def test_a_server_that_cannot_listen_leaves_nothing(tmp_path):
    Path(tmp_path / "engine").touch()
    with pytest.raises(OSError, match="in use"):
        RolloutServer(build("qwen3"), str(tmp_path / "engine"))
    assert os.listdir(tmp_path) == ["engine"]
