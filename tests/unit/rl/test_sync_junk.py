"""Frames that no trainer sends, at every door of an engine: the peer is let go, and the next push arrives."""

import contextlib
import json
import os
import socket
import struct
import time

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from engines import SECRET, Served, new_address, push_by_hand
from fsdp2x.rl.sync.receiver.engine import WIRE, Parameters, bind_address, receive_frame, send_frame
from fsdp2x.rl.sync.receiver.engine_tcp import greet_engine, split_address
from fsdp2x.sync import Peer

KINDS = b"hello layout begin bucket finish commit abort invite join".split()
FIELDS = "wire session tensors files mode version base bucket bytes deltas reason device".split()
VALUES = torch.tensor([1.5, -2.0])
LAYOUT = {"tensors": [["w", "float32", [2]]], "files": [64]}
DEEP = b"[" * 200_000
NEST = b"[" * 900 + b"]" * 900
NESTED = b'{"version":' + NEST + b',"mode":"full","base":null,"reason":' + NEST + b"}"

leaves = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=5), st.sampled_from(["float32", "full", WIRE, "w"]),
    st.sampled_from([-1, 0, 1, 2, 64, 2**31, 2**63, -(2**63), 2**64, 10**400]),
)  # fmt: skip
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6).map(lambda body: json.dumps(body).encode())
odd = st.sampled_from([DEEP, b'{"a":' + DEEP, NESTED, b'"\\ud800"', b'{"reason":"\\ud800"}'])
texts = st.one_of(bodies, st.binary(max_size=40), odd)
# (magic, kind, what the head says of descriptors, and of bytes beyond those that come, the body)
junk = st.tuples(
    st.sampled_from([WIRE.encode()] * 7 + [b"fsdp2x-0"]),
    st.sampled_from(KINDS * 2 + [b"\xff\xfe", b"__init__", b"answer"]),
    st.sampled_from([0] * 9 + [1, 2**32 - 1]),
    st.sampled_from([0] * 9 + [1, 2**40, 2**64 - 1]),
    texts,
)


def frame(magic, kind, num_files, more, text):
    return struct.pack("<8s8sIQ", magic, kind, num_files, min(len(text) + more, 2**64 - 1)) + text


class Door(Served):
    """An engine that a thread serves, and how trainers come to it."""

    def __init__(self, kind):
        self.kind, self.weight = kind, torch.zeros(2)
        super().__init__(new_address("group" if kind == "tcp" else "memory"), Parameters({"w": self.weight}), 5.0)
        self.address = self.receiver.address

    def dial(self):
        if self.kind == "tcp":
            connection = socket.create_connection(split_address(self.address), 20)
            greet_engine(connection, SECRET, 20)
            return connection
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(bind_address(self.address))
        return connection

    def visit(self, introduced, begun, frames, num_bytes=None):
        """Says what belongs there, then so many bytes of ``frames``, and waits until it is let go."""
        with self.dial() as connection, contextlib.suppress(OSError):
            if introduced:
                self.ask(connection, "layout", LAYOUT)
            if introduced and begun:
                self.ask(connection, "begin", {"mode": "full", "version": 2, "base": None})
            connection.settimeout(20)
            try:
                connection.sendall(b"".join(frame(*one) for one in frames)[:num_bytes])
                connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                return
            while connection.recv(1 << 16):
                pass
        assert self._thread.is_alive(), "the engine is gone"

    def ask(self, connection, kind, body):
        with open(os.memfd_create("fsdp2x-junk"), "r+b") as file:
            os.pwrite(file.fileno(), VALUES.numpy().tobytes().ljust(64), 0)
            deadline = time.monotonic() + 20
            files = [file.fileno()] if kind == "layout" and self.kind == "unix" else []
            send_frame(connection, kind, body, deadline, files)
            return receive_frame(connection, deadline)[1]

    def require_service(self):
        """Checks that a client that follows the protocol gets correct answers."""
        push_by_hand(Peer(self.address, secret=SECRET if self.kind == "tcp" else None), {"w": VALUES})
        assert torch.equal(self.weight, VALUES)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_junk_ends_no_engine(kind):
    with Door(kind) as door:

        @settings(
            max_examples=60,
            derandomize=True,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate),
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.booleans(),
            st.booleans(),
            st.lists(junk, min_size=1, max_size=4),
            st.one_of(st.none(), st.none(), st.integers(1, 40)),
        )
        @example(False, False, [(WIRE.encode(), b"hello", 0, 0, b'{"a":' + DEEP)], None)
        @example(True, False, [(WIRE.encode(), b"begin", 0, 0, NESTED)], None)
        @example(True, True, [(WIRE.encode(), b"abort", 0, 0, NESTED)], None)
        def check(introduced, begun, frames, num_bytes):
            door.visit(introduced, begun, frames, num_bytes)

        check()
        door.require_service()
