"""The engine's side of ``Peer``: a ``Receiver`` takes weights from trainers on this host.

This file needs torch 2.6 or newer and the standard library: copy it into any engine. The dialogue is requests, each
with one answer, over a Unix socket; tensors lie in memory files, whose descriptors come with the layout:

    hello   {wire, session}              who comes; the answer says what is held
    layout  {tensors, files} + files     names, dtypes, shapes once; bytes of each memory file, or a GPU's {device};
                                         {adapter} where they are a LoRA adapter: its name, rank, alpha, scales;
                                         {merged} where they have one in them
    begin   {mode, version, base}        from here on nothing is generated
    bucket  {bucket, tensors, deltas}    tensors: [index, file, offset]; deltas: [index, file, offset, count]
    finish  {}                           all weights are there: what an engine does once per push
    commit  {version}                    all engines have finished: the new version is published
    abort   {reason}                     the weights are torn

A frame is a head (magic, kind, number of descriptors, bytes) and JSON. A delta is ``count`` positions (int64, in the
flattened tensor), then as many values. Each part begins at a multiple of 8 bytes. Nothing is unpickled. An answer says
``ok`` or holds an error's text. An engine in state ``initial`` or ``clean`` (a committed version) generates. It does
not while a push is ``open``, nor while it is ``torn`` (a push ended early), until a full push. A push of an adapter
(mode "adapter") changes nothing before its commit: one that ends early leaves the state and the adapter of before.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing import reductions

WIRE = "fsdp2x-1"
_HEAD = struct.Struct("<8s8sIQ")  # magic, kind, number of descriptors, bytes of JSON
_MAX_BODY_BYTES, _MAX_FILES = 1 << 28, 64
_ANSWER = "answer"
POSITION_BYTES = _ALIGN_BYTES = 8


class WireError(RuntimeError):
    """The other side is gone, came too late, or speaks another protocol."""


class TornWeights(RuntimeError):
    """The engine holds some weights of one version and some of another: it must not generate."""


# ---- frames


def bind_address(address: str) -> str:
    """What ``socket`` takes for ``address``: a path, or "@name" for a name that needs no file."""
    return "\0" + address[1:] if address.startswith("@") else address


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has ended, between two requests."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def send_frame(connection: socket.socket, kind: str, body: Mapping[str, Any], deadline: float, files=()) -> None:
    """Sends one frame; ``deadline`` in seconds of ``time.monotonic``.

    Raises:
        WireError: the other side is gone or does not read in time.
    """
    text = json.dumps(body, separators=(",", ":")).encode()
    rest = memoryview(_HEAD.pack(WIRE.encode(), kind.encode(), len(files), len(text)) + text)
    with _told_as(f"send {kind!r}"):
        while rest:
            connection.settimeout(_left(deadline))
            rest = rest[socket.send_fds(connection, [rest], files) if files else connection.send(rest) :]
            files = ()


def receive_frame(connection: socket.socket, deadline: float) -> tuple[str, dict[str, Any], list[int]]:
    """(kind, body, descriptors that came along, which are the caller's to close).

    Raises:
        WireError: the other side is gone, sends nothing in time, or sends something else than frames.
    """
    files: list[int] = []
    try:
        with _told_as("receive"):
            head = _receive(connection, _HEAD.size, deadline, files)
            magic, kind, num_files, num_bytes = _HEAD.unpack(head)
            if magic != WIRE.encode() or num_bytes > _MAX_BODY_BYTES:
                raise WireError(f"the other side does not speak {WIRE}: a frame begins with {head!r}")
            body = json.loads(_receive(connection, num_bytes, deadline, files))
            if len(files) != num_files or not isinstance(body, dict):
                raise WireError(f"a frame with {len(files)} of {num_files} descriptors and a {type(body).__name__}")
            return kind.rstrip(b"\0").decode(), body, files
    except BaseException:
        close_files(files)
        raise


def close_files(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _receive(connection: socket.socket, num_bytes: int, deadline: float, files: list[int]) -> bytes:
    received = bytearray()
    rights = socket.CMSG_SPACE(_MAX_FILES * array.array("i").itemsize)
    while len(received) < num_bytes:
        connection.settimeout(_left(deadline))
        size = min(num_bytes - len(received), 1 << 20)
        part, ancillary, _, _ = connection.recvmsg(size, rights, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files.extend(array.array("i", data[: len(data) // 4 * 4]))
        if not part or len(files) > _MAX_FILES:
            raise WireError("the other side closed the connection" if not part else "too many descriptors")
        received += part
    return bytes(received)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


@contextlib.contextmanager
def _told_as(what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise WireError(f"cannot {what} in time: the other side hangs or is busy") from error
    except (OSError, ValueError, RecursionError) as error:  # the last one: of nested JSON
        raise WireError(f"cannot {what}: {error or type(error).__name__}") from error


# ---- memory


class ReceiveBuffer:
    """Flat bytes that buckets lie in. ``mapping``: those of a file, whose pages here are private once written to."""

    def __init__(self, memory: torch.Tensor, mapping: mmap.mmap | None = None) -> None:
        self._bytes, self._mapping = memory, mapping
        self._num_writes = memory._version  # views count for it

    def view(self, offset: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 <= offset <= offset + num_bytes <= len(self._bytes) or offset % dtype.itemsize:
            raise ValueError(f"{num_bytes} bytes at {offset} are not in a memory of {len(self._bytes)} bytes")
        return self._bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """A bucket was read: the trainers overwrite it after the answer, and what was written to it here is dropped."""
        if self._bytes.is_cuda:
            for index in {self._bytes.device.index, torch.cuda.current_device()}:
                torch.cuda.synchronize(index)
        if self._mapping is not None and self._bytes._version != self._num_writes:
            self._num_writes = self._bytes._version
            self._mapping.madvise(mmap.MADV_DONTNEED)


def mapped_file(file: int, num_bytes: int) -> ReceiveBuffer:
    """A memory file of the trainers, mapped so that what is written here stays here."""
    if os.fstat(file).st_size < num_bytes:
        raise ValueError(f"a memory file of {os.fstat(file).st_size} bytes, the layout says {num_bytes}")
    mapping = mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return ReceiveBuffer(torch.frombuffer(mapping, dtype=torch.uint8), mapping)


def delta_bytes(count: int, dtype: torch.dtype) -> tuple[int, int]:
    """(where the values of a delta of ``count`` begin, its bytes in all)."""
    values = count * POSITION_BYTES
    return values, -(-(values + count * dtype.itemsize) // _ALIGN_BYTES) * _ALIGN_BYTES


class Parameters:
    """What a ``Receiver`` hands weights to: tensors by name, each overwritten in place.

    For engines that are plain torch modules: ``Parameters(dict(model.named_parameters()))``, with trainers that
    ``connect(..., names="model")``. Tensors may be on any device and of another dtype than what comes.
    """

    keeps_tensors = False

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def check(self, layout: list[tuple[str, torch.dtype, list[int]]]) -> None:
        """Raises ValueError before any byte moves, unless every name is known with the same shape."""
        for name, _, shape in layout:
            held = self._tensors.get(name)
            if held is None or list(held.shape) != shape:
                has = "no tensor of this name" if held is None else f"one of shape {list(held.shape)}"
                raise ValueError(f"the trainers send {name!r} of shape {shape}, this engine has {has}")

    def load(self, items: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in items:
            self._tensors[name].copy_(tensor)

    def apply_delta(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        held = self._tensors[name].view(-1)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(held.itemsize, held.dtype)
        values = values.to(held.device, held.dtype).view(bits)
        held.view(bits).scatter_(0, positions.to(held.device), values)  # faster than by index; NaNs stay


# ---- the receiver


class Receiver:
    """Listens for trainers of the same user on this host, and hands what they push to ``sink``.

    ``poll`` does all the work, between two batches of the engine or in a thread; ``with receiver.reading() as version``
    is where the engine generates. Several workers of one engine have a receiver each, all of which a trainer is given.

    ``sink``: a function like a vLLM model's ``load_weights``, called with a list of (name, tensor) for each bucket; or
    an object with ``load`` that does so and, where it has them,

        check(layout)        list of (name, dtype, shape) when a trainer connects; raises what does not fit
        start(mode)          before the first bucket of a push
        apply_delta(name, positions, values)    int64 positions in the flattened tensor; without it deltas are refused
        abort(reason)        a push failed: what the sink keeps of it must go, so that the next one begins afresh
        finish()             after the last bucket, before the version is published: what is done once per push
        prepare_adapter(adapter, tensors)       checks an adapter, a dict and its tensors by name, and returns the
                             function that puts it in place, which the commit calls; without it adapters are refused
        drop_adapter()       other weights were committed: the base runs alone
        keeps_tensors        False: ``load`` copies what it needs. Default True: it is given copies of its own
    """

    def __init__(self, address: str, sink: Any, *, timeout_s: float = 300.0) -> None:
        """
        Args:
            address: "@name", which leaves no file behind, or the path of a socket, which must not exist.
            timeout_s: how long a trainer may be silent in the middle of a push.

        Raises:
            OSError: the address is taken.
        """
        self.address, self._timeout_s = address, timeout_s
        self._load = sink.load if hasattr(sink, "load") else sink
        self._sink = sink
        self._copies = getattr(sink, "keeps_tensors", True)
        self._state, self._version, self._reason = "initial", None, ""
        self._weights = threading.RLock()  # held by who generates, and from begin to commit or abort
        self._layout: list[tuple[str, torch.dtype, list[int]]] = []
        self._buffers: list[ReceiveBuffer] = []
        self._next, self._is_finished = None, False
        self._adapter: dict[str, Any] | None = None  # what the trainer pushes in place of weights
        self._is_merged = self._will_be_merged = False  # whether the weights have an adapter in them
        self._staged: dict[str, torch.Tensor] = {}  # of the adapter that comes
        self._install: Any = None  # puts it in place
        self._before: tuple[str, Any, str] = ("initial", None, "")  # state, version and session before this push
        self._session, self._version_of = "", ""  # of the trainers that are connected, and of those that committed
        self._num_ends = 0  # of pushes, and of trainers' visits
        self._heard_at = 0.0  # when the last request was answered
        self._connection: socket.socket | None = None
        self._listener = self._listen()

    @property
    def status(self) -> dict[str, Any]:
        """``state``, the last committed ``version``, and why the weights are torn."""
        return {"state": self._state, "version": self._version, "reason": self._reason, "pid": os.getpid()}

    @contextlib.contextmanager
    def reading(self) -> Iterator[int | str | None]:
        """The block uses the weights; no push begins meanwhile. Gives their version, None for those of the start.

        Raises:
            TornWeights: there are none of one version.
        """
        with self._weights:
            if self._state not in ("initial", "clean"):
                raise TornWeights(
                    f"the weights are {self._state} ({self._reason}): nothing may be generated until a full push is "
                    "committed"
                )
            yield self._version

    @property
    def sockets(self) -> list[socket.socket]:
        """``poll`` has something to do when one can be read: for engines that wait for others besides."""
        return [self._listener] + ([self._connection] if self._connection is not None else [])

    def poll(self, timeout_s: float = 0.0) -> int | str | None:
        """Answers what has come, waiting up to ``timeout_s`` for it; once a push begins, stays to its end.

        Returns:
            The version that was committed, if any.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select(self.sockets, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            connection = self._connection
            if connection is not None and connection in ready:
                if (version := self._answer_one(connection)) is not None:
                    return version
            elif self._listener in ready:
                self._accept()

    def receive(self, contact_s: float) -> dict[str, Any]:
        """One push from its beginning to its end, for engines that are told when one comes.

        Returns:
            ``status``: "clean" with the version that was committed, or "torn". What failed here has ended when the
            trainer has said so, or has left.

        Raises:
            WireError: no push begins in ``contact_s`` seconds.
        """
        if self._connection is not None and is_closed(self._connection):
            self.release("the trainer has left")
        deadline, num_ends, self._heard_at = time.monotonic() + contact_s, self._num_ends, 0.0
        while self._num_ends == num_ends:
            if time.monotonic() > max(deadline, self._heard_at + self._timeout_s):
                raise WireError(f"no trainer has begun a push at {self.address!r} in {contact_s:.0f} s")
            self.poll(0.02)
        return self.status

    def close(self) -> None:
        """Lets go of the socket and the trainers' memory."""
        self.release("the engine was closed")
        self._listener.close()
        if not self.address.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)

    # what `engine_tcp.py` does otherwise

    def _listen(self) -> socket.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(bind_address(self.address))
            listener.listen()
            return listener.dup()

    def _admit(self) -> socket.socket | None:
        """The trainer who has come, None for somebody else."""
        connection, _ = self._listener.accept()
        if peer_uid(connection) == os.getuid():
            return connection
        return connection.close()

    def _map(self, sizes: list[int], files: list[int]) -> list[ReceiveBuffer]:
        if len(files) != len(sizes):
            raise WireError(f"{len(files)} memory files, the layout names {len(sizes)}")
        return [mapped_file(file, size) for file, size in zip(files, sizes, strict=True)]

    def _accept(self) -> None:
        connection = self._admit()
        if connection is not None and self._connection is not None:
            deadline = time.monotonic() + self._timeout_s
            with connection, contextlib.suppress(WireError):
                send_frame(connection, _ANSWER, {"ok": False, "error": "another trainer is connected"}, deadline)
        elif connection is not None:
            self._connection = connection

    def _answer_one(self, connection: socket.socket) -> int | str | None:
        """Answers a request; from begin on, all to the end of the push."""
        with contextlib.ExitStack() as held:
            while True:
                try:
                    kind, body, files = receive_frame(connection, time.monotonic() + self._timeout_s)
                except WireError as error:
                    self.release(str(error))
                    return None
                if kind in ("begin", "abort"):
                    held.enter_context(self._weights)
                answer = self._handle(kind, body, files)
                try:
                    deadline = time.monotonic() + self._timeout_s
                    send_frame(connection, _ANSWER, {**self.status, **answer}, deadline)
                except WireError as error:
                    self.release(str(error))
                if self._state != "open" or self._connection is None:
                    return self._version if kind == "commit" and answer["ok"] else None

    def _handle(self, kind: str, body: dict[str, Any], files: list[int]) -> dict[str, Any]:
        try:
            handle = getattr(self, f"_on_{kind}", None)
            if handle is None:
                raise WireError(f"an unknown request {kind!r}")
            return {"ok": True, **(handle(body, files) or {})}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self._state == "open":
                # After a bad bucket the trainers finish their gathers, and then abort: until then nobody generates.
                self._reason = self._reason or text
                if kind != "bucket":
                    self.tear(text)
            return {"ok": False, "error": text}
        finally:
            self._heard_at = time.monotonic()
            close_files(files)

    @property
    def _trainer(self) -> socket.socket:
        """The connection that a request came by."""
        assert self._connection is not None, "requests come by a connection"
        return self._connection

    def _on_hello(self, body: dict[str, Any], files: list[int]) -> None:
        if body["wire"] != WIRE:
            raise WireError(f"the trainer speaks {body['wire']}, this engine {WIRE}")
        self._session = body["session"]

    def _on_layout(self, body: dict[str, Any], files: list[int]) -> None:
        layout = [(name, _dtype(dtype), list(shape)) for name, dtype, shape in body["tensors"]]
        self._adapter, self._will_be_merged = body.get("adapter"), body.get("merged", False)
        if self._adapter is None:
            getattr(self._sink, "check", lambda layout: None)(layout)
        elif not hasattr(self._sink, "prepare_adapter"):
            raise NotImplementedError("this engine takes no adapters: its sink has no prepare_adapter")
        self._buffers = self._map(body["files"], files)
        if "device" in body:
            self._buffers = [ReceiveBuffer(opened_memory(body["device"]))]
        self._layout = layout

    def _on_begin(self, body: dict[str, Any], files: list[int]) -> None:
        mode, version = body["mode"], body["version"]
        modes = ("full", "delta") if self._adapter is None else ("adapter",)
        if not self._layout or mode not in modes or not isinstance(version, int | str):
            raise WireError("a push before a layout, or of an unknown mode or version")
        if mode == "delta":
            if not hasattr(self._sink, "apply_delta"):
                raise NotImplementedError('this engine takes no deltas (its sink has no apply_delta); push mode="full"')
            if self._state != "clean" or (self._version, self._version_of) != (body["base"], self._session):
                held = f"{self._version!r}{'' if self._version_of == self._session else ' of another session'}"
                raise ValueError(
                    f"a delta to version {body['base']!r}, but this engine holds {held} and is {self._state}; push "
                    'mode="full"'
                )
        if mode == "adapter":
            if self._state == "torn":
                raise TornWeights(f"the base is torn ({self._reason}): push all weights before an adapter")
            if self._is_merged:
                raise ValueError(
                    "the weights that were pushed last have an adapter merged in: push the base alone before an "
                    'adapter (connect(params=lambda name, param: "lora_" not in name))'
                )
            if hasattr(self._sink, "start"):
                self._sink.start(mode)
        self._before, self._staged, self._install = (self._state, self._version, self._version_of), {}, None
        self._reason, self._is_finished = "", False
        self._state, self._next = "open", body["version"]
        if mode != "adapter" and hasattr(self._sink, "start"):
            self._sink.start(mode)

    def _on_bucket(self, body: dict[str, Any], files: list[int]) -> None:
        if self._state != "open":
            raise WireError(f"a bucket while the weights are {self._state}")
        if self._reason:
            return  # an earlier bucket failed: the trainers know, and this push will be aborted
        items = []
        for index, file, offset in body["tensors"]:
            name, dtype, shape = self._layout[index]
            tensor = self._buffers[file].view(offset, dtype, shape)
            items.append((name, tensor.clone() if self._copies or self._adapter is not None else tensor))
        if self._adapter is not None:
            self._staged.update(items)
        elif items:
            self._load(items)
        for index, file, offset, count in body["deltas"]:
            name, dtype, _ = self._layout[index]
            positions = self._buffers[file].view(offset, torch.int64, [count])
            values = self._buffers[file].view(offset + delta_bytes(count, dtype)[0], dtype, [count])
            self._sink.apply_delta(name, positions, values)
        for buffer in self._buffers:
            buffer.release()

    def _on_finish(self, body: dict[str, Any], files: list[int]) -> None:
        if self._state != "open" or self._reason:
            raise WireError(f"an end of a push while the weights are {self._state} ({self._reason})")
        if self._adapter is not None:
            missing = next((name for name, _, _ in self._layout if name not in self._staged), None)
            if missing is not None:
                raise WireError(f"the adapter's {missing!r} did not come")
            self._install = self._sink.prepare_adapter({**self._adapter, "version": self._next}, self._staged)
        elif hasattr(self._sink, "finish"):
            self._sink.finish()
        self._is_finished = True

    def _on_commit(self, body: dict[str, Any], files: list[int]) -> None:
        if self._state != "open" or not self._is_finished or body["version"] != self._next:
            raise WireError(f"a commit of {body['version']!r} while the weights are {self._state} ({self._reason})")
        if self._install is not None:
            self._install()
        else:
            self._is_merged = self._will_be_merged
            getattr(self._sink, "drop_adapter", lambda: None)()
        self._staged, self._install = {}, None
        self._state, self._version, self._version_of = "clean", body["version"], self._session
        self._num_ends += 1

    def _on_abort(self, body: dict[str, Any], files: list[int]) -> None:
        self.tear(str(body["reason"]))
        self._num_ends += 1

    def tear(self, reason: str) -> None:
        """The push that is under way, or has been committed, has failed: the weights are not those of one version.

        A failed push of an adapter changed nothing.
        """
        if self._adapter is not None:
            if self._state == "open":
                self._state, self._version, self._version_of = self._before
                self._staged, self._install, self._reason = {}, None, ""
            return
        if self._state != "torn" and hasattr(self._sink, "abort"):
            try:
                self._sink.abort(reason)
            except Exception as error:
                reason = f"{reason}; and then abort raised {type(error).__name__}: {error}"
        self._state, self._reason = "torn", self._reason or reason

    def release(self, reason: str) -> None:
        """Lets go of the trainer, and of its memory; a push that is under way is torn."""
        if self._state == "open":
            self.tear(f"the trainer is gone in the middle of a push: {reason}")
        self._layout, self._buffers, self._adapter = [], [], None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._num_ends += 1


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} of this engine knows no dtype {name!r}")
    return dtype


# ---- memory of a GPU that trainers hand out

# Positions among the arguments of `rebuild_cuda_tensor`.
_DEVICE = 6
_SIZE, _STORAGE, _BYTES, _COUNTER, _COUNTER_OFFSET, _EVENT, _EVENT_SYNC = 1, 7, 8, 11, 12, 13, 14


def describe_handle(arguments: tuple) -> dict[str, Any]:
    """JSON of the arguments that torch rebuilds a flat CUDA tensor of bytes from, with the GPU's UUID for its number.

    The number may be another one in another process.
    """
    return {
        "uuid": arguments[_DEVICE],
        "bytes": arguments[_SIZE][0],
        "offset": arguments[3],
        "storage": arguments[_STORAGE].hex(),
        "storage_bytes": [arguments[_BYTES], arguments[_BYTES + 1]],
        "counter": [arguments[_COUNTER].hex(), arguments[_COUNTER_OFFSET]],
        "event": [arguments[_EVENT].hex(), bool(arguments[_EVENT_SYNC])],
    }


def device_of(uuid: str) -> int:
    """The number of a GPU here.

    Raises:
        ValueError: this process does not see it.
    """
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(
            f"the trainers hand out memory of GPU {uuid}, and this engine sees {seen}: start it where it sees that, "
            'or leave memory at "host"'
        )
    return seen.index(uuid)


def opened_memory(handle: Mapping[str, Any]) -> torch.Tensor:
    """The flat bytes that a handle names, whose readers and writers see the same memory."""
    head = (torch.Tensor, torch.Size([handle["bytes"]]), (1,), handle["offset"], torch.UntypedStorage, torch.uint8)
    tail = (bytes.fromhex(handle["storage"]), *handle["storage_bytes"], False)
    counter, event = handle["counter"], handle["event"]
    tail += (bytes.fromhex(counter[0]), counter[1], bytes.fromhex(event[0]), event[1])
    return reductions.rebuild_cuda_tensor(*head, device_of(handle["uuid"]), *tail)
