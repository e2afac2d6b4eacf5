"""Several engines for one client: who is given how much, engines that hang or have old weights, weights by value."""

import contextlib
import threading
import time

import pytest
import torch

from fsdp2x.rl.rollout.server import weights_address
from fsdp2x.rollout import RolloutClient, RolloutError, Sampling, sample
from fsdp2x.sync import Peer
from models import build
from rollouts import DEADLINE_S, asked, connected, serving

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10], [11, 12]] * 6
SAMPLING = Sampling(6, 2, 0.9, (4,), seed=5)


@contextlib.contextmanager
def serving_several(models, **options):
    with contextlib.ExitStack() as held:
        addresses = [held.enter_context(serving(model))[0] for model in models]
        yield held.enter_context(RolloutClient(addresses, timeout_s=DEADLINE_S, **options))


def commit(address, version, mode="full"):
    """A push of nothing by the receiver's dialogue: a version, without other values."""
    with connected(weights_address(address)) as trainer:
        assert asked(trainer, "hello", {"wire": "fsdp2x-1", "session": "a"})["ok"]
        name, param = next(iter(build("qwen3").named_parameters()))
        layout = {"tensors": [[name, "float32", list(param.shape)]], "files": []}
        assert asked(trainer, "layout", layout)["ok"]
        for kind, body in (("begin", {"version": version, "mode": mode, "base": None}), ("finish", {})):
            assert asked(trainer, kind, body)["ok"]
        assert asked(trainer, "commit", {"version": version})["state"] == "clean"


def asked_for(client, prompts=PROMPTS, sampling=SAMPLING):
    client.ask(prompts, sampling)
    return client.collect()


def test_responses_do_not_depend_on_the_engine_and_a_slow_one_gets_less():
    fast, slow = build("qwen3").eval(), build("qwen3").eval()
    expected = sample(fast, PROMPTS, SAMPLING)
    slow.register_forward_hook(lambda *_: time.sleep(0.05))
    with serving_several([slow, fast]) as client:
        found = asked_for(client)
        assert [(c.prompt, c.tokens) for c in found] == [(c.prompt, c.tokens) for c in expected]
        of_slow, of_fast = client.engines
        assert (of_slow.reason, of_fast.reason, of_slow.num_failures) == ("", "", 0)
        assert of_slow.num_tokens + of_fast.num_tokens == sum(len(c.tokens) for c in found)
        assert 0 < 2 * of_slow.num_tokens < of_fast.num_tokens
        assert asked_for(client, []) == []


def test_an_engine_that_hangs_is_left_out_and_comes_back():
    models = [build("qwen3").eval() for _ in range(2)]
    expected = sample(models[0], PROMPTS, SAMPLING)
    may_go_on = threading.Event()
    hook = models[1].register_forward_hook(lambda *_: may_go_on.wait(DEADLINE_S) and None)
    with contextlib.ExitStack() as held:
        addresses = [held.enter_context(serving(model))[0] for model in models]
        client = held.enter_context(RolloutClient(addresses, timeout_s=8.0))
        with pytest.warns(UserWarning, match=f"the engine at '{addresses[1]}' is lost .it was silent for 4 s"):
            found = asked_for(client)
        assert [c.tokens for c in found] == [c.tokens for c in expected]
        assert client.engines[1].num_failures == 1 and "was silent" in client.engines[1].reason
        began = time.monotonic()  # an engine that is lost is not waited for
        assert [c.tokens for c in asked_for(client)] == [c.tokens for c in expected]
        assert time.monotonic() - began < 4
        hook.remove()
        may_go_on.set()
        deadline = time.monotonic() + DEADLINE_S
        while client.engines[1].num_tokens == 0:
            assert time.monotonic() < deadline
            asked_for(client)
        assert client.engines[1].reason == ""


def test_only_engines_with_the_last_version_sample():
    with serving_several([build("qwen3").eval() for _ in range(2)]) as client:
        addresses = [engine.address for engine in client.engines]
        commit(addresses[0], 1)
        asked_for(client)
        assert client.engines[1].num_tokens == 0
        assert client.engines[1].reason == "it has its own weights, not the version that was pushed last (1)"
        commit(addresses[1], 2)
        assert {c.admitted for c in asked_for(client)} == {2}
        assert "it has version 1, not the version that was pushed last (2)" in client.engines[0].reason
        commit(addresses[0], 2)
        before = client.engines[0].num_tokens
        asked_for(client)
        assert client.engines[0].num_tokens > before and client.engines[0].reason == ""


def test_engines_that_all_have_failed():
    with serving_several([build("qwen3").eval() for _ in range(2)]) as client:
        for engine in client._engines:
            engine.close()
            engine.address = "@nowhere-" + engine.address[1:]
        with pytest.raises(RolloutError, match="no engine can sample .'@nowhere.*refused.*'@nowhere.*Push to engines"):
            asked_for(client)
    with serving_several([build("qwen3").eval() for _ in range(2)]) as client:
        with pytest.raises(RolloutError, match="the engine rejected the request: ValueError: prompt 0"):
            asked_for(client, [[3], [999], [4]])
        assert len(asked_for(client)) == 2 * len(PROMPTS), "a refusal costs no engine"
        assert [engine.num_failures for engine in client.engines] == [0, 0]


def test_weights_by_value():
    models = [build("qwen3", dtype=dtype).eval() for dtype in (torch.float32, torch.bfloat16)]
    tensors = dict(build("qwen3").named_parameters())
    with serving_several(models) as client:
        client.check_weights(tensors.items())
        with torch.no_grad():
            models[1].model.norm.weight[3] += 0.01
        with pytest.raises(RolloutError, match=r"has other values of 1 parameters, such as 'model.norm.weight'"):
            client.check_weights(tensors.items())
        with pytest.raises(RolloutError, match="has other values of 1 parameters, such as 'extra'"):
            client.check_weights([("extra", torch.zeros(2))])
        name = "model.embed_tokens.weight"
        with pytest.raises(RolloutError, match=f"'{client.engines[0].address}' has other .* such as '{name}'"):
            client.check_weights([(name, tensors[name])], dtype=torch.bfloat16)


@pytest.mark.parametrize("addresses", [[], ["@a", "@a"]])
def test_addresses_that_are_refused(addresses):
    with pytest.raises(ValueError, match="each engine needs its own address"):
        RolloutClient(addresses)
    with pytest.raises(ValueError, match="min_engines must be from 1 to 1"):
        Peer("@a", min_engines=2)
    with pytest.raises(ValueError, match="unset over TCP, got 1"):
        Peer("tcp://127.0.0.1:7000", secret="x" * 16, min_engines=1)
