"""The engine's side of ``Peer``: a ``Receiver`` takes weights from trainers on this host.

This file needs torch 2.6 or newer and the standard library, so you can copy it into any engine. Trainers send requests,
each with one answer, over a Unix socket. Tensors are in memory files, whose descriptors come with the layout:

    hello   {wire, session}              identifies the trainer; the answer says what the engine holds
    layout  {tensors, files} + files     names, dtypes, shapes once; bytes of each memory file, or a GPU's {device};
                                         {adapter} for a LoRA adapter: its name, rank, alpha, scales;
                                         {merged} if an adapter is merged into the tensors
    begin   {mode, version, base}        the engine stops generating
    bucket  {bucket, tensors, deltas}    tensors: [index, file, offset]; deltas: [index, file, offset, count]
    finish  {}                           all weights are there: work that an engine does once per push
    commit  {version}                    all engines have finished: the new version is published
    abort   {reason}                     the weights are torn

A frame is a head (magic, kind, number of descriptors, bytes) and JSON. A delta is ``count`` positions (int64, in the
flattened tensor), then as many values. Each part begins at a multiple of 8 bytes. Nothing is unpickled. An answer has
``ok`` or an error's text. ``WeightsState`` says when an engine generates. A push of an adapter (mode "adapter")
changes nothing before its commit. If it ends early, state and adapter do not change.
"""

from __future__ import annotations

import array
import contextlib
import enum
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
_MAX_GAP_BYTES = 256  # between two tensors of a bucket


class WireError(RuntimeError):
    """The other side is gone, is too late, or uses another protocol."""


# Engines reject an adapter with this message if their weights already include one.
MERGED_BASE = (
    "the weights that were pushed last have an adapter merged in. Push the base alone before an adapter "
    '(connect(params=lambda name, param: "lora_" not in name)).'
)


class TornWeights(RuntimeError):
    """The engine holds some weights of one version and some of another, so it must not generate."""


class WeightsState(enum.Enum):
    """State of an engine's weights."""

    INITIAL = "initial"  # the engine's own, so it generates
    CLEAN = "clean"  # a committed version, so it generates
    OPEN = "open"  # a push is running
    TORN = "torn"  # a push ended early: nothing is generated until a full push


_MOVES: dict[WeightsState, tuple[WeightsState, ...]]
_MOVES = dict.fromkeys(WeightsState, (WeightsState.OPEN, WeightsState.TORN))
# A push of an adapter that ends early restores the state before it.
_MOVES[WeightsState.OPEN] = (WeightsState.CLEAN, WeightsState.TORN, WeightsState.INITIAL)


# ---- frames


def bind_address(address: str) -> str:
    """Returns what ``socket`` takes for ``address``: a path, or "@name" for a name without a file."""
    return "\0" + address[1:] if address.startswith("@") else address


def peer_uid(connection: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    return struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[1]


def is_closed(connection: socket.socket) -> bool:
    """Returns whether the other side has ended, between two requests."""
    connection.settimeout(0)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def send_frame(connection: socket.socket, kind: str, body: Mapping[str, Any], deadline: float, files=()) -> None:
    """Sends one frame. ``deadline`` is in seconds of ``time.monotonic``.

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
    """Returns (kind, body, received descriptors, which the caller closes).

    Raises:
        WireError: the other side is gone, sends nothing in time, or does not send frames.
    """
    files: list[int] = []
    try:
        with _told_as("receive"):
            head = _receive(connection, _HEAD.size, deadline, files)
            magic, kind, num_files, num_bytes = _HEAD.unpack(head)
            if magic != WIRE.encode() or num_bytes > _MAX_BODY_BYTES:
                raise WireError(f"the other side does not use {WIRE}: a frame begins with {head!r}")
            body = json.loads(_receive(connection, num_bytes, deadline, files))
            if len(files) != num_files or not isinstance(body, dict):
                raise WireError(
                    f"a bad frame: expected {num_files} descriptors and an object, got {len(files)} and a "
                    f"{type(body).__name__}"
                )
            return kind.rstrip(b"\0").decode(), body, files
    except BaseException:
        close_files(files)
        raise


class SocketLine:
    """A trainer's connection. ``EngineGroup`` of ``engine_group.py`` has the same methods."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection

    def is_closed(self) -> bool:
        return is_closed(self.socket)

    def receive(self, deadline: float) -> tuple[str, dict[str, Any], list[int]]:
        return receive_frame(self.socket, deadline)

    def answer(self, body: Mapping[str, Any], deadline: float) -> None:
        send_frame(self.socket, _ANSWER, body, deadline)

    def close(self) -> None:
        self.socket.close()


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
    except (OSError, ValueError, RecursionError) as error:  # RecursionError comes from nested JSON
        raise WireError(f"cannot {what}: {error or type(error).__name__}") from error


# ---- memory


class ReceiveBuffer:
    """Flat bytes that hold buckets. ``mapping`` is that of a file, whose written pages are private here."""

    def __init__(self, memory: torch.Tensor, mapping: mmap.mmap | None = None) -> None:
        self._bytes, self._mapping = memory, mapping
        self._num_writes = memory._version  # writes to views count too

    def view(self, offset: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 <= offset <= offset + num_bytes <= len(self._bytes) or offset % dtype.itemsize:
            raise ValueError(
                f"expected an aligned tensor inside of {len(self._bytes)} shared bytes, got {num_bytes} bytes at "
                f"{offset}"
            )
        return self._bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def release(self) -> None:
        """Drops local writes after a bucket was read. The trainers overwrite it after the answer."""
        if self._bytes.is_cuda:
            for index in {self._bytes.device.index, torch.cuda.current_device()}:
                torch.cuda.synchronize(index)
        if self._mapping is not None and self._bytes._version != self._num_writes:
            self._num_writes = self._bytes._version
            self._mapping.madvise(mmap.MADV_DONTNEED)


def mapped_file(file: int, num_bytes: int) -> ReceiveBuffer:
    """Maps a memory file of the trainers. Writes stay private to this process."""
    if os.fstat(file).st_size < num_bytes:
        raise ValueError(f"the layout says {num_bytes} bytes, got a memory file of {os.fstat(file).st_size}")
    mapping = mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    return ReceiveBuffer(torch.frombuffer(mapping, dtype=torch.uint8), mapping)


def delta_bytes(count: int, dtype: torch.dtype) -> tuple[int, int]:
    """Returns (where the values of a delta of ``count`` begin, its total bytes)."""
    values = count * POSITION_BYTES
    return values, -(-(values + count * dtype.itemsize) // _ALIGN_BYTES) * _ALIGN_BYTES


class Parameters:
    """Sink of a ``Receiver`` that overwrites tensors by name, in place.

    Use it for engines that are plain torch modules: ``Parameters(model.state_dict())``, with trainers that
    ``connect(..., names="model")``. Tensors may be on any device and have another dtype than the received ones.
    """

    keeps_tensors = False

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def check(self, layout: list[tuple[str, torch.dtype, list[int]]]) -> None:
        """Raises ValueError before any byte moves, unless every name is known with the same shape."""
        for name, _, shape in layout:
            held = self._tensors.get(name)
            if held is None or list(held.shape) != shape:
                has = "no tensor of this name (give Parameters the engine's state_dict())"
                has = has if held is None else f"one of shape {list(held.shape)}"
                raise ValueError(f"the trainers send {name!r} of shape {shape}, but this engine has {has}")

    def load(self, items: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in items:
            self._tensors[name].copy_(tensor)

    def apply_delta(self, name: str, positions: torch.Tensor, values: torch.Tensor) -> None:
        held = self._tensors[name].view(-1)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(held.itemsize, held.dtype)
        values = values.to(held.device, held.dtype).view(bits)
        held.view(bits).scatter_(0, positions.to(held.device), values)  # faster than by index; keeps NaNs


# ---- the receiver


class Receiver:
    """Listens for trainers of the same user on this host, and passes pushed weights to ``sink``.

    ``poll`` does all the work, between two batches of the engine or in a thread. The engine generates inside
    ``with receiver.reading() as version``. Several workers of one engine have a receiver each, and a trainer gets all
    of their addresses.

    ``sink`` is a function like a vLLM model's ``load_weights``, called with a list of (name, tensor) for each bucket.
    Or it is an object with such a ``load`` and any of

        check(layout)        gets a list of (name, dtype, shape) when a trainer connects; raises for what does not fit
        start(mode)          before the first bucket of a push
        apply_delta(name, positions, values)    int64 positions in the flattened tensor; without it deltas are rejected
        abort(reason)        a push failed: the sink must drop what it keeps of it
        finish()             after the last bucket, before the version is published: work that is done once per push
        prepare_adapter(adapter, tensors)       checks an adapter, a dict and its tensors by name, and returns the
                             function that installs it at the commit; without it adapters are rejected
        drop_adapter()       other weights were committed: the base runs alone
        keeps_tensors        False: ``load`` copies what it needs. Default True: it gets copies
    """

    def __init__(
        self, address: str, sink: Any, *, timeout_s: float = 300.0, held: Mapping[str, Any] | None = None
    ) -> None:
        """Listens at ``address``.

        Args:
            address: "@name", which leaves no file, or the path of a socket, which must not exist.
            sink: function or object that takes the weights.
            timeout_s: seconds that a trainer may be silent in the middle of a push.
            held: ``status`` of a receiver of the same sink, which this one replaces.

        Raises:
            OSError: the address is taken.
        """
        self.address, self._timeout_s = address, timeout_s
        self._load = sink.load if hasattr(sink, "load") else sink
        self._sink = sink
        self._copies = getattr(sink, "keeps_tensors", True)
        self._state, self._version, self._reason = WeightsState.INITIAL, None, ""
        self._is_merged = self._will_be_merged = False  # whether the weights include an adapter
        if held is not None:
            self._state, self._version, self._reason = WeightsState(held["state"]), held["version"], held["reason"]
            self._is_merged = held["is_merged"]
        self._weights = threading.RLock()  # held while generating, and from begin to commit or abort
        self._layout: list[tuple[str, torch.dtype, list[int]]] = []
        self._buffers: list[ReceiveBuffer] = []
        self._next: int | str = ""  # version of this push
        self._is_finished = False
        self._adapter: dict[str, Any] | None = None  # what the trainer pushes in place of weights
        self._staged: dict[str, torch.Tensor] = {}  # tensors of the incoming adapter
        self._install: Any = None  # installs it
        self._before: tuple[WeightsState, Any, str] = (self._state, None, "")  # and session, before this push
        self._session, self._version_of = "", ""  # of the connected trainers, and of those that committed
        self._num_ends = 0  # of pushes, and of trainers' visits
        self._heard_at = 0.0  # time of the last answer
        self._line: Any = None  # to the trainers
        self._listener = self._listen()

    @property
    def status(self) -> dict[str, Any]:
        """``state``, the last committed ``version``, why the weights are torn, and whether they hold an adapter."""
        about = {"is_merged": self._is_merged, "pid": os.getpid()}
        return {"state": self._state.value, "version": self._version, "reason": self._reason, **about}

    @contextlib.contextmanager
    def reading(self) -> Iterator[int | str | None]:
        """Protects a block that uses the weights: no push begins meanwhile. Yields their version, None at the start.

        Raises:
            TornWeights: the weights are not of one version.
        """
        with self._weights:
            if self._state not in (WeightsState.INITIAL, WeightsState.CLEAN):
                raise TornWeights(
                    f"the weights are {self._state.value} ({self._reason}). Do not generate until a full push is "
                    "committed."
                )
            yield self._version

    @property
    def sockets(self) -> list[socket.socket]:
        """Sockets that are readable when ``poll`` has work, for engines that also wait for others."""
        return [self._listener] + ([self._line.socket] if self._line is not None else [])

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer is connected."""
        return self._line is not None and not self._line.is_closed()

    def poll(self, timeout_s: float = 0.0) -> int | str | None:
        """Answers requests, waiting up to ``timeout_s`` for the first. Once a push begins, stays to its end.

        Returns:
            The version that was committed, if any.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _, _ = select.select(self.sockets, [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            if self._line is not None and self._line.socket in ready:
                if (version := self._answer()) is not None:
                    return version
            elif self._listener in ready:
                self._accept()

    def receive(self, contact_s: float) -> dict[str, Any]:
        """Takes one push from beginning to end, for engines that are notified of it.

        Returns:
            ``status``: "clean" with the committed version, or "torn". A failed push ends when the trainer reports it or
            leaves.

        Raises:
            WireError: no push begins in ``contact_s`` seconds.
        """
        if not self.has_trainer:
            self.release("the trainer has left")
        deadline, num_ends, self._heard_at = time.monotonic() + contact_s, self._num_ends, 0.0
        while self._num_ends == num_ends:
            if time.monotonic() > max(deadline, self._heard_at + self._timeout_s):
                raise WireError(f"no trainer has begun a push at {self.address!r} in {contact_s:.0f} s")
            self.poll(0.02)
        return self.status

    def close(self) -> None:
        """Closes the socket and releases the trainers' memory."""
        self.release("the engine was closed")
        self._listener.close()
        if not self.address.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)

    # ---- methods that `engine_group.py` overrides

    def _listen(self) -> socket.socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(bind_address(self.address))
            listener.listen()
            return listener.dup()

    def _is_last(self, kind: str) -> bool:
        """Returns whether the engine goes on after this request. From begin on, it stays to the end of the push."""
        return self._state is not WeightsState.OPEN

    def _map(self, sizes: list[int], files: list[int], most_bytes: int) -> list[ReceiveBuffer]:
        if len(files) != len(sizes):
            raise WireError(f"{len(files)} memory files, the layout names {len(sizes)}")
        return [mapped_file(file, size) for file, size in zip(files, sizes, strict=True)]

    # ---- requests

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        line = SocketLine(connection)
        if peer_uid(connection) != os.getuid():
            line.close()
        elif self._line is None:
            self._line = line
        else:
            with connection, contextlib.suppress(WireError):
                answer = {"ok": False, "error": "another trainer is connected"}
                line.answer(answer, time.monotonic() + self._timeout_s)

    def _answer(self) -> int | str | None:
        """Answers requests to the last one for now. Returns the version that was committed, if any."""
        line = self._line
        with contextlib.ExitStack() as held:
            while True:
                kind, is_committed = "", False
                try:
                    kind, body, files = line.receive(time.monotonic() + self._timeout_s)
                    if kind in ("begin", "abort"):
                        held.enter_context(self._weights)
                    answer = self._handle(kind, body, files)
                    is_committed = kind == "commit" and answer["ok"]
                    line.answer({**self.status, **answer}, time.monotonic() + self._timeout_s)
                except WireError as error:
                    self.release(str(error))
                if self._line is None or self._is_last(kind):
                    return self._version if is_committed else None

    def _handle(self, kind: str, body: dict[str, Any], files: list[int]) -> dict[str, Any]:
        try:
            handle = getattr(self, f"_on_{kind}", None)
            if handle is None:
                raise WireError(f"an unknown request {kind!r}")
            return {"ok": True, **(handle(body, files) or {})}
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self._state is WeightsState.OPEN:
                # After a bad bucket the trainers finish their gathers and then abort. Until then, do not generate.
                self._reason = self._reason or text
                if kind != "bucket":
                    self.tear(text)
            return {"ok": False, "error": text}
        finally:
            self._heard_at = time.monotonic()
            close_files(files)

    def _move(self, state: WeightsState) -> None:
        if state not in _MOVES[self._state]:
            raise WireError(f"weights that are {self._state.value} cannot become {state.value}")
        self._state = state

    def _tell_sink(self, method: str, *args: Any) -> None:
        """Calls an optional method of the sink."""
        getattr(self._sink, method, lambda *_: None)(*args)

    def _on_hello(self, body: dict[str, Any], files: list[int]) -> None:
        if body["wire"] != WIRE:
            raise WireError(f"the trainer uses {body['wire']}, but this engine {WIRE}")
        self._session = body["session"]

    def _on_layout(self, body: dict[str, Any], files: list[int]) -> None:
        if self._state is WeightsState.OPEN:
            raise WireError("a layout in the middle of a push")
        layout = [(name, _dtype(dtype), list(shape)) for name, dtype, shape in body["tensors"]]
        self._adapter, self._will_be_merged = body.get("adapter"), body.get("merged", False)
        if self._adapter is None:
            self._tell_sink("check", layout)
        elif not hasattr(self._sink, "prepare_adapter"):
            raise NotImplementedError("this engine takes no adapters, because its sink has no prepare_adapter")
        most_bytes = sum(math.prod(shape) * dtype.itemsize + _MAX_GAP_BYTES for _, dtype, shape in layout)
        self._buffers = self._map(body["files"], files, most_bytes + _MAX_GAP_BYTES)
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
                raise NotImplementedError(
                    'this engine takes no deltas, because its sink has no apply_delta. Push mode="full".'
                )
            is_own = self._version_of == self._session
            if self._state is not WeightsState.CLEAN or self._version != body["base"] or not is_own:
                held = f"{self._version!r}{'' if is_own else ' of another session'} and is {self._state.value}"
                raise ValueError(
                    f'a delta to version {body["base"]!r}, but this engine holds {held}. Push mode="full".'
                )
        if mode == "adapter":
            if self._state is WeightsState.TORN:
                raise TornWeights(f"the base is torn ({self._reason}). Push all weights before an adapter.")
            if self._is_merged:
                raise ValueError(MERGED_BASE)
            self._tell_sink("start", mode)
        before = (self._state, self._version, self._version_of)
        self._move(WeightsState.OPEN)
        self._before, self._staged, self._install = before, {}, None
        self._reason, self._is_finished, self._next = "", False, version
        if mode != "adapter":
            self._tell_sink("start", mode)

    def _on_bucket(self, body: dict[str, Any], files: list[int]) -> None:
        if self._state is not WeightsState.OPEN:
            raise WireError(f"a bucket while the weights are {self._state.value}")
        if self._reason:
            return  # an earlier bucket failed; the trainers know it and will abort
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
        if self._state is not WeightsState.OPEN or self._reason:
            raise WireError(f"an end of a push while the weights are {self._state.value} ({self._reason})")
        if self._adapter is not None:
            missing = next((name for name, _, _ in self._layout if name not in self._staged), None)
            if missing is not None:
                raise WireError(f"the adapter's {missing!r} did not come")
            self._install = self._sink.prepare_adapter({**self._adapter, "version": self._next}, self._staged)
        else:
            self._tell_sink("finish")
        self._is_finished = True

    def _on_commit(self, body: dict[str, Any], files: list[int]) -> None:
        if self._state is not WeightsState.OPEN or not self._is_finished or body["version"] != self._next:
            state = f"{self._state.value} ({self._reason})"
            raise WireError(f"a commit of {body['version']!r} while the weights are {state}")
        if self._install is not None:
            self._install()
        else:
            self._is_merged = self._will_be_merged
            self._tell_sink("drop_adapter")
        self._staged, self._install = {}, None
        self._move(WeightsState.CLEAN)
        self._version, self._version_of = body["version"], self._session
        self._num_ends += 1

    def _on_abort(self, body: dict[str, Any], files: list[int]) -> None:
        self.tear(str(body["reason"]))
        self._num_ends += 1

    def tear(self, reason: str) -> None:
        """Records that the current or committed push failed, so the weights are not of one version.

        A failed push of an adapter changed nothing.
        """
        if self._adapter is not None:
            if self._state is WeightsState.OPEN:
                before, self._version, self._version_of = self._before
                self._move(before)
                self._staged, self._install, self._reason = {}, None, ""
            return
        if self._state is not WeightsState.TORN:
            try:
                self._tell_sink("abort", reason)
            except Exception as error:
                reason = f"{reason}; and then abort raised {type(error).__name__}: {error}"
            self._move(WeightsState.TORN)
        self._reason = self._reason or reason

    def release(self, reason: str) -> None:
        """Releases the trainer and its memory. A running push is torn."""
        if self._state is WeightsState.OPEN:
            self.tear(f"the trainer is gone in the middle of a push: {reason}")
        self._layout, self._buffers, self._adapter = [], [], None
        if self._line is not None:
            self._line.close()
            self._line = None
            self._num_ends += 1


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} of this engine has no dtype {name!r}")
    return dtype


# ---- GPU memory that trainers share

_SIZE, _OFFSET, _DEVICE, _STORAGE = 1, 3, 6, 7  # positions among the arguments of `rebuild_cuda_tensor`


def describe_handle(arguments: tuple) -> dict[str, Any]:
    """Returns the arguments from which torch rebuilds a flat CUDA byte tensor, as JSON with the GPU's UUID.

    The GPU's number may differ in another process.
    """
    storage = [one.hex() if isinstance(one, bytes) else one for one in arguments[_STORAGE:]]
    (num_bytes,) = arguments[_SIZE]
    return {"uuid": arguments[_DEVICE], "bytes": num_bytes, "offset": arguments[_OFFSET], "storage": storage}


def device_of(uuid: str) -> int:
    """Returns the number of a GPU in this process.

    Raises:
        ValueError: this process does not see it.
    """
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise ValueError(
            f"the trainers share memory of GPU {uuid}, but this engine sees {seen}. Start it where it sees that GPU, "
            'or leave memory at "host".'
        )
    return seen.index(uuid)


def opened_memory(handle: Mapping[str, Any]) -> torch.Tensor:
    """Returns the flat bytes of a handle. All its readers and writers see the same memory."""
    head = (torch.Tensor, torch.Size([handle["bytes"]]), (1,), handle["offset"], torch.UntypedStorage, torch.uint8)
    storage = [bytes.fromhex(one) if isinstance(one, str) else one for one in handle["storage"]]
    return reductions.rebuild_cuda_tensor(*head, device_of(handle["uuid"]), *storage)
