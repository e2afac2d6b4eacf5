"""Servers of inference that accept a request and never answer it, in every route of a push: an error in time on every
rank, nothing generates meanwhile, and the next push heals."""

import contextlib
import http.client
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
import test_sync_sglang
import test_sync_vllm
import torch.distributed as dist
from test_sync_deaths import belongings, eventually

import fsdp2x
from engines import step, wire
from fsdp2x.sync import SyncError
from harness import distributed
from http_server import http_server

TIMEOUT_S, SLACK_S = 1.0, 5.0


class Silence:
    """In front of a server; ``route``: the one that gets no answer. ``delivers``: the server hears of it all the same.

    Routes that call methods of workers go by the method's name.
    """

    def __init__(self, address):
        self.route, self.delivers, self._held = None, False, []
        self._place = urlsplit(address).netloc

    def answer(self, request, text):
        route = urlsplit(request.path).path.strip("/")
        route = json.loads(text)["method"] if route == "collective_rpc" else route
        is_silent = route == self.route
        if not is_silent or self.delivers:
            server = http.client.HTTPConnection(self._place)
            with contextlib.closing(server):
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


def goes_silent(ctx, sync, silence, route, delivers, phase, text):
    """A push of version 1 during which a route says nothing."""
    if silence:
        silence.route, silence.delivers = route, delivers
    dist.barrier()
    sync._timeout_s = TIMEOUT_S  # of this push alone: the others may be slow on a busy machine
    began = time.monotonic()
    with pytest.raises(SyncError, match=text) as caught:
        sync.push(version=1)
    seconds = time.monotonic() - began
    sync._timeout_s = 20.0
    error = caught.value
    fields = (str(error), error.phase, error.bucket, error.rank)
    everywhere = [None] * ctx.world
    dist.all_gather_object(everywhere, fields)
    assert everywhere == [fields] * ctx.world
    assert fields[1:] == (phase, 0 if phase == "load" else None, 0)
    # The rank that talks to the server also tells it that the push has ended.
    assert TIMEOUT_S <= seconds < TIMEOUT_S * (1 + (ctx.rank == 0)) + SLACK_S
    assert sync.is_torn and sync.version is None
    dist.barrier()


SGLANG = {
    "server_info": "begin",
    "pause_generation": "begin",
    "resume_memory_occupation": "begin",
    "begin_weight_update": "begin",
    "update_weights_from_tensor": "load",
    "end_weight_update": "finish",
    "flush_cache": "commit",
    "update_weight_version": "commit",
    "continue_generation": "commit",
}
VLLM = {
    "server_info": "begin",
    "fsdp2x_listen": "begin",
    "get_world_size": "begin",
    "is_sleeping": "begin",
    "wake_up": "begin",
    "pause": "begin",
    "fsdp2x_receive": "begin",
    "reset_prefix_cache": "commit",
    "reset_encoder_cache": "commit",
    "update_weight_version": "commit",
    "resume": "commit",
}
# Where it tells most that something has happened although nobody says so.
HEARD = {"end_weight_update", "continue_generation", "fsdp2x_receive", "resume"}
# What is much like another route of its phase.
LIKE_OTHERS = {"pause_generation", "update_weight_version", "get_world_size", "is_sleeping", "wake_up"}
LIKE_OTHERS |= {"reset_encoder_cache", "resume_memory_occupation", "end_weight_update", "continue_generation", "resume"}


def cases(phases):
    """(route, whether the server hears of the request)."""
    found = [(route, False, route not in LIKE_OTHERS) for route in phases]
    # A wake that comes twice ends SGLang, and nothing tells whether one came.
    found += [(route, True, route in HEARD) for route in phases if route != "resume_memory_occupation"]
    return [pytest.param(*case, marks=() if is_quick else pytest.mark.full) for *case, is_quick in found]


@pytest.mark.parametrize(("route", "delivers"), cases(SGLANG))
@distributed(world_sizes=(2,))
def test_sglang(ctx, route, delivers):
    model, shapes = test_sync_sglang.stack_model(ctx)
    with test_sync_sglang.engines(ctx, shapes) as (target, servers), behind_silence(ctx, target) as (target, silence):
        with fsdp2x.sync.connect(model, target, bucket_bytes=300, timeout_s=20) as sync:
            sync.push(version=0)
            before = belongings()
            step(model)
            if route == "resume_memory_occupation":
                target.sleep()
            goes_silent(ctx, sync, silence, route, delivers, SGLANG[route], f"does not answer /{route}: timed out")
            for server in servers:
                is_paused = route != "server_info" and (route, delivers) != ("pause_generation", False)
                assert (server.mode is not None) == is_paused, "it generates with torn weights"
                is_labelled = route == "continue_generation" or (route, delivers) == ("update_weight_version", True)
                assert server.version == ("1" if is_labelled else "0")
                silence.end()
            dist.barrier()
            step(model)
            sync.push(version=2)
            test_sync_sglang.holds(servers, wire(model))
            assert [server.generate() for server in servers] == [("2", "2")] * len(servers)
            eventually(belongings, before)


@pytest.mark.parametrize(("route", "delivers"), cases(VLLM))
@distributed(world_sizes=(2,))
def test_vllm(ctx, route, delivers):
    model = test_sync_vllm.make_model(ctx)
    path = "collective_rpc" if route.startswith("fsdp2x") else route
    phase, text = VLLM[route], f"does not answer /{path}: timed out"
    if route == "fsdp2x_receive":  # lasts as long as a push: what tells is that nobody takes it, or that it has no end
        phase, text = (
            ("commit", "committed, and does not return in 1 s") if delivers else (phase, "cannot receive in t")
        )
    with test_sync_vllm.engine(ctx, "server") as (target, core), behind_silence(ctx, target) as (target, silence):
        with fsdp2x.sync.connect(model, target, bucket_bytes=300, timeout_s=20) as sync:
            sync.push(version=0)
            before = belongings()
            step(model)
            if route == "wake_up":
                target.sleep()
            goes_silent(ctx, sync, silence, route, delivers, phase, text)
            if core is not None:
                is_paused = (
                    route in ("fsdp2x_receive", "wake_up") or phase == "commit" or (route, delivers) == ("pause", True)
                )
                assert (core.mode is not None) == is_paused, "it generates with torn weights"
                is_labelled = route == "resume" or (route, delivers) == ("update_weight_version", True)
                assert core.version == ("1" if is_labelled else "0")
            if route == "fsdp2x_receive":
                sync._timeout_s = TIMEOUT_S
                with pytest.raises(SyncError, match="has not ended the push before; start it again"):
                    sync.push(version=1)
                sync._timeout_s = 20.0
            if silence:
                silence.end()
            dist.barrier()
            step(model)
            sync.push(version=2)
            test_sync_vllm.holds(model, core)
            assert core is None or core.generate() == ("2", "2")
            eventually(belongings, before)
