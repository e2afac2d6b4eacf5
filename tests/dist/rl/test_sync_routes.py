"""Inference servers that refuse a request or never answer it, in every route of a push."""

import contextlib
import http.client
import json
import socket
from urllib.parse import urlsplit

import pytest
import test_sync_sglang
import test_sync_vllm
import torch.distributed as dist
from test_sync_faults import SLACK_S, TIMEOUT_S, belongings, eventually, fails

import fsdp2x
from engines import step, wire
from harness import distributed
from http_server import http_server


class Silence:
    """In front of a server; ``route``: the one that goes wrong, and ``how``.

    "silent": it gets no answer. "heard": nor then, but the server hears of it. "refused": once. Routes that call
    methods of workers go by the method's name.
    """

    def __init__(self, address):
        self.route, self.how, self._held = None, "", []
        self._place = urlsplit(address).netloc

    def answer(self, request, text):
        route = urlsplit(request.path).path.strip("/")
        is_silent = (json.loads(text)["method"] if route == "collective_rpc" else route) == self.route
        if is_silent and self.how == "refused":
            self.route = None
            return 400, b'{"message": "out of order"}'
        if not is_silent or self.how == "heard":
            with contextlib.closing(http.client.HTTPConnection(self._place)) as server:
                server.request(request.command, request.path, text, {"Content-Type": "application/json"})
                answer = server.getresponse()
                data = answer.read()
        if not is_silent:
            return answer.status, data
        self._held.append(request.connection)
        with contextlib.suppress(OSError):
            request.connection.recv(1)  # until it is given up
        return None

    def end(self):
        """As a server that is started again ends its connections."""
        self.route = None
        while self._held:
            with contextlib.suppress(OSError):
                self._held.pop().shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def behind_silence(ctx, target):
    """(target of the same class, the silence in front of what ``target`` speaks to on rank 0)."""
    servers = getattr(target, "_servers", None) or target._controls
    with contextlib.ExitStack() as stack:
        silence, address = None, [None]
        if ctx.rank == 0:
            silence = Silence(servers[0].name)
            address = [stack.enter_context(http_server(silence.answer))]
            stack.callback(silence.end)
        dist.broadcast_object_list(address)
        yield type(target)(address[0]), silence


# Phases of the routes. "*": it behaves like another route of its phase, so it is tested with --full.
SGLANG = {
    "server_info": "begin", "pause_generation": "begin*", "resume_memory_occupation": "begin*",
    "begin_weight_update": "begin", "update_weights_from_tensor": "load", "end_weight_update": "finish*",
    "flush_cache": "commit", "update_weight_version": "commit*", "continue_generation": "commit*",
}  # fmt: skip
VLLM = {
    "server_info": "begin", "fsdp2x_listen": "begin", "get_world_size": "begin*", "is_sleeping": "begin*",
    "wake_up": "begin*", "pause": "begin", "fsdp2x_receive": "begin", "reset_prefix_cache": "commit",
    "reset_encoder_cache": "commit*", "update_weight_version": "commit*", "resume": "commit*",
}  # fmt: skip
# Routes for which a request that was done but not answered matters most.
HEARD = {"end_weight_update", "continue_generation", "fsdp2x_receive", "resume"}


def cases():
    """(server, route, how)."""
    found = []
    for server, phases in (("sglang", SGLANG), ("vllm", VLLM)):
        found += [(server, route, "silent", "*" not in phase) for route, phase in phases.items()]
        # A wake that comes twice ends SGLang, and nothing tells whether one came.
        found += [(server, route, "heard", route in HEARD) for route in phases if route != "resume_memory_occupation"]
        refused = [route for route in phases if not route.startswith("fsdp2x")]
        found += [(server, route, "refused", "*" not in phases[route]) for route in refused]
    return [pytest.param(*case, marks=() if is_quick else pytest.mark.full) for *case, is_quick in found]


@contextlib.contextmanager
def running(ctx, server):
    """(model, target, the servers that run here, a check that they hold the model's weights)."""
    if server == "sglang":
        model, shapes = test_sync_sglang.stack_model(ctx)
        with test_sync_sglang.engines(ctx, shapes) as (target, servers):
            yield model, target, servers, lambda: test_sync_sglang.holds(servers, wire(model))
    else:
        model = test_sync_vllm.make_model(ctx)
        with test_sync_vllm.engine(ctx, "server") as (target, core):
            yield model, target, [core] if core is not None else [], lambda: test_sync_vllm.holds(model, core)


def told(server, route, how):
    """(phase, what the error says, whether the server is paused, whether it has the label of the push)."""
    path = "collective_rpc" if route.startswith("fsdp2x") else route
    phase = (SGLANG if server == "sglang" else VLLM)[route].strip("*")
    text = f"answers /{path} with 400: .*out of order" if how == "refused" else f"does not answer /{path}: timed out"
    is_labelled = route in ("continue_generation", "resume") or (route, how) == ("update_weight_version", "heard")
    if server == "sglang":
        return phase, text, route != "server_info" and (route != "pause_generation" or how != "silent"), is_labelled
    is_paused = route in ("fsdp2x_receive", "wake_up") or phase == "commit" or (route, how) == ("pause", "heard")
    # This request lasts as long as a push. The error comes if no server takes it, or if it does not end.
    if route == "fsdp2x_receive" and how == "heard":
        phase, text = "commit", "committed, but did not return within 1 s"
    elif route == "fsdp2x_receive":
        text = "cannot receive in t"
    return phase, text, is_paused, is_labelled


@pytest.mark.parametrize(("server", "route", "how"), cases())
@distributed(world_sizes=(2,))
def test_a_route_of_a_server(ctx, server, route, how):
    """No server generates with torn weights meanwhile."""
    phase, text, is_paused, is_labelled = told(server, route, how)
    with contextlib.ExitStack() as stack:
        model, target, servers, check = stack.enter_context(running(ctx, server))
        target, silence = stack.enter_context(behind_silence(ctx, target))
        sync = stack.enter_context(fsdp2x.sync.connect(model, target, bucket_bytes=300, timeout_s=20))
        sync.push(version=0)
        before = belongings()
        step(model)
        if route in ("resume_memory_occupation", "wake_up"):
            target.sleep()
        if silence:
            silence.route, silence.how = route, how
        dist.barrier()
        sync._timeout_s = TIMEOUT_S  # of this push alone: the others may be slow on a busy machine
        seconds = fails(ctx, sync, phase, 0 if phase == "load" else None, 0, text, version=1)
        # The rank that talks to the server also tells it that the push has ended.
        assert TIMEOUT_S * (how != "refused") <= seconds < TIMEOUT_S * (1 + (ctx.rank == 0)) + SLACK_S
        dist.barrier()
        for one in servers:
            assert (one.mode is not None) == is_paused, "it generates with torn weights"
            assert one.version == ("1" if is_labelled else "0")
        if route == "fsdp2x_receive":
            fails(ctx, sync, "begin", None, 0, "still runs the previous push. Restart it", version=1)
        sync._timeout_s = 20.0
        if silence:
            silence.end()
        dist.barrier()
        step(model)
        sync.push(version=2)
        check()
        assert [one.generate() for one in servers] == [("2", "2")] * len(servers)
        eventually(belongings, before)
