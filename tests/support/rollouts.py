"""Rollout engines for tests: one in a thread, and the sharded policy that its responses are compared with."""

import contextlib
import socket
import threading
import time

import torch

import fsdp2x
from engines import new_address
from fsdp2x import rl
from fsdp2x.rl.sync.receiver.engine import bind_address, receive_frame, send_frame
from fsdp2x.rollout import RolloutClient, RolloutError, RolloutServer
from models import build

DEADLINE_S = 60.0


@contextlib.contextmanager
def serving(model=None, address=None, **options):
    """The address of an engine in a thread, which has ended when all clients have left."""
    address = address or new_address()
    server = RolloutServer(model or build("qwen3"), address, **options)
    thread = threading.Thread(target=server.serve, kwargs={"contact_s": DEADLINE_S}, daemon=True)
    thread.start()
    try:
        yield address, server
    finally:
        with contextlib.suppress(RolloutError):
            RolloutClient(address, contact_s=0.1).close()  # the engine ends after a client has connected and left
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        server.close()


def connected(address):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(bind_address(address))
    return connection


def asked(connection, kind, body):
    deadline = time.monotonic() + DEADLINE_S
    send_frame(connection, kind, body, deadline)
    said, answer, files = receive_frame(connection, deadline)
    assert said == "answer" and not files
    return answer


def sharded(seed=0):
    model = build("qwen3", seed=seed)
    fsdp2x.sequence.use_varlen_attention(model)
    return fsdp2x.fully_shard(model)


def compare(model, prompts, completions, version):
    """Every token is of this version, with the log-probability that the sharded model gives it now."""
    samples = [
        {"input_ids": [*prompts[c.prompt], *c.tokens], "labels": [-100] * len(prompts[c.prompt]) + c.tokens}
        for c in completions
    ]
    assert all(c.admitted == version and c.spans == [(version, len(c.tokens))] for c in completions)
    for row in fsdp2x.sequence.micro_batches(samples, 256):
        with torch.no_grad():
            found = rl.score(model, row.inputs, row.next_labels).log_probs
        tokens = rl.RowTokens(row)
        expected = tokens.align([c.log_probs for c in completions])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def change(model):
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().mul_(1.05)
