"""``CheckpointEngine``: engines whose workers have checkpoint-engine's ``update_weights_from_ipc``.

Each rank is the parameter server of the worker that shares its GPU, and speaks that worker's dialogue, in pickles over
a ZeroMQ socket. It binds, the engine is asked to call its workers, and then requests and answers are in turn:

    (rebuild, arguments) of one buffer  -> b""                     begin
    [{name, shape, dtype, offset}, ..]  -> b"" or an error's text  load, a bucket in each half of the buffer
    None                                -> b"", memory let go of   finish
    None                                -> b"", weights processed  finish
    an exception                        -> the worker raises it    abort

A worker that raises answers nothing: what the engine's call says then ends the wait.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.memory_file import collect_handed
from fsdp2x.io.names import TensorSpec
from fsdp2x.rl.sync.targets.base import BackgroundCall, EngineTarget, PushBucket, TargetError, WireLayout
from fsdp2x.rl.sync.targets.transports import HandedMemory, accelerator_or_cpu, device_uuid

_ALIGN_BYTES = 256
_GLANCE_MS = 20  # between two looks at how the engine's call fares
_END_S = 1.0  # for the call of a worker that was silent


class CheckpointEngine(EngineTarget):
    """Engines that take weights from MoonshotAI's checkpoint-engine, colocated: one worker beside each rank.

        def request(socket_paths):                             as for checkpoint-engine's ``ParameterServer.update``
            if rank == 0:
                llm.collective_rpc("update_weights_from_ipc", args=(dict(socket_paths),))

        CheckpointEngine(request)                              CheckpointEngine(None) on ranks without a worker

    Needs pyzmq. Weights are gathered on every rank that has a worker, and copied into a buffer of two buckets, which
    is freed at the end of a push. Who calls the engine pauses it before a push, and resumes it after: neither a
    version nor a pause is part of the dialogue. After a push that fails ask ``Session.require_clean()``.

    vLLM's extension (``checkpoint_engine.worker.VllmColocateWorkerExtension``) loads by ``model.load_weights`` alone,
    which some of its kernels do not survive (experts on FlashInfer, see ``Vllm``). Tested with release 0.4.2 of its
    function, on memory of the CPU: compare log-probabilities of a few fixed tokens after the first push of a run.
    """

    whole_only = "checkpoint-engine loads whole tensors"

    @checked
    def __init__(self, request: Callable | None, *, device: torch.device | None = None) -> None:
        """
        Args:
            request: ``request(socket_paths)``, called on every rank that has one, in a thread, with (UUID of the GPU,
                address of the socket) of all ranks that have one; on one of them at least it makes each worker call
                ``update_weights_from_ipc(dict(socket_paths))``, and raises where that raises.
            device: of the buffer, which the worker shares. Default the current accelerator. Memory of the CPU goes to
                workers whose call has no device index.
        """
        self._request, self._device = request, device
        self._address: tuple[str, str] | None = None  # UUID and name of this rank's socket, without the push's number
        self._addresses: list[tuple[str, str]] = []
        self._context: Any = None
        self._socket: Any = None
        self._memory: HandedMemory | None = None
        self._call: BackgroundCall | None = None
        self._num_pushes, self._slot_bytes, self._slot, self._timeout_s = 0, 0, 0, 0.0
        self._sent: PushBucket | None = None  # a bucket that was not answered for yet
        self._owes_answer = self._is_silent = False

    def receives(self, rank: int) -> bool:
        return self._request is not None

    def check(self, caller: str, deltas: bool) -> None:
        if self._request is None:
            return
        super().check(caller, deltas)
        device = self._device or accelerator_or_cpu()
        if device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"{caller}: CheckpointEngine hands out memory of CUDA or the CPU, not of {device}"
            )
        _zmq(caller)
        self._device = device
        key = f"GPU-{device_uuid(device)}" if device.type == "cuda" else f"CPU-{secrets.token_hex(8)}"
        self._address = key, f"ipc://@checkpoint-engine-{key}-{secrets.token_hex(8)}"

    def introduction(self) -> tuple[str, str] | None:
        return self._address

    def meet(self, introductions: list[Any]) -> None:
        self._addresses = [address for address in introductions if address is not None]
        keys = [key for key, _ in self._addresses]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ValueError(
                f"fsdp2x.sync.connect: {keys.count(twice)} ranks have a worker on {twice}: each rank serves the worker "
                "on its own GPU; CheckpointEngine(None) on the others"
            )

    # ---- a push

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        self._num_pushes += 1
        self._timeout_s, self._sent = timeout_s, None
        if self._call is not None and self._call.is_alive():
            raise TargetError.at("begin", "the engine has not ended the call of the push before; start it again")
        self._slot_bytes = max(_places(specs)[1] for specs in layout.buckets)

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        zmq = _zmq("fsdp2x.sync.push")
        if self._context is None:
            self._context = zmq.Context()
        self._memory, self._slot = HandedMemory(self._device, 2 * self._slot_bytes), 0
        self._socket = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._path(self._address[1]))
        paths = [(key, self._path(path)) for key, path in self._addresses]
        self._call = BackgroundCall(lambda: self._request(paths))
        self._send("begin", self._memory.handle())
        self._hear("begin")

    def _path(self, address: str) -> str:
        """Of one push: the name of the one before may still be taken."""
        return f"{address}-{self._num_pushes}.sock"

    def take(self, buckets: Iterator[PushBucket]) -> None:
        for bucket in buckets:
            # The bucket before is being loaded from the other half; the one before that was answered for.
            if bucket.tensors:
                places = self._fill(bucket)
                self._answered()
                self._sent = bucket
                self._send("load", places, bucket)
        self._answered()

    def _fill(self, bucket: PushBucket) -> list[dict[str, Any]]:
        begin = self._slot * self._slot_bytes
        self._slot = 1 - self._slot
        told = []
        for spec, offset, tensor in zip(bucket.specs, _places(bucket.specs)[0], bucket.tensors, strict=True):
            part = self._memory.bytes[begin + offset : begin + offset + spec.num_bytes]
            part.view(spec.dtype).view(spec.shape).copy_(tensor)
            told.append({"name": spec.name, "shape": spec.shape, "dtype": spec.dtype, "offset": begin + offset})
        self._memory.synchronize()
        return told

    def _answered(self) -> None:
        bucket, self._sent = self._sent, None
        if bucket is not None:
            self._hear("load", bucket)

    def finish(self, version: int | str) -> None:
        self._send("finish", None)
        self._hear("finish")
        self._drop_memory()
        self._send("finish", None)
        self._hear("finish")
        self._hang_up()

    def commit(self, version: int | str) -> None:
        self._call.join(self._timeout_s)
        if self._call.is_alive():
            reason = f"the worker is done, and the engine's call does not return in {self._timeout_s:.0f} s"
            raise TargetError.at("commit", reason)
        error = self._call.error
        if error is not None:
            raise TargetError.at("commit", _said(error)) from error

    def abort(self, reason: str) -> None:
        """The worker raises, as it expects of a parameter server, unless it has ended."""
        if self._owes_answer and not self._is_silent:
            with contextlib.suppress(TargetError):
                self._hear("abort")  # an error's text is an answer, too
        if self._socket is not None and not self._owes_answer and not self._is_silent:
            with contextlib.suppress(TargetError):
                self._send("abort", RuntimeError(reason))
        if self._call is not None:
            self._call.join(_END_S if self._is_silent else self._timeout_s)
        self._hang_up()
        self._drop_memory()

    def close(self) -> None:
        self._hang_up()
        self._drop_memory()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _drop_memory(self) -> None:
        self._memory = None
        collect_handed()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._sent, self._owes_answer, self._is_silent = None, None, False, False

    # ---- requests and answers

    def _send(self, phase: str, message: object, bucket: PushBucket | None = None) -> None:
        self._wait(phase, _zmq("").POLLOUT, "no worker has come to its socket", bucket)
        self._socket.send_pyobj(message)
        self._owes_answer = True

    def _hear(self, phase: str, bucket: PushBucket | None = None) -> None:
        self._wait(phase, _zmq("").POLLIN, "the worker does not answer", bucket)
        answer = self._socket.recv()
        self._owes_answer = False
        if answer != b"":
            raise TargetError.at(phase, f"the worker says: {answer.decode(errors='replace').strip()}", bucket)

    def _wait(self, phase: str, events: int, silence: str, bucket: PushBucket | None) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._is_silent = True
        while not self._socket.poll(_GLANCE_MS, events):
            error = self._call.error
            if error is not None:
                raise TargetError.at(phase, f"{silence}, and the engine's call has failed: {_said(error)}", bucket)
            if time.monotonic() > deadline:
                raise TargetError.at(phase, f"{silence} in {self._timeout_s:.0f} s", bucket)
        self._is_silent = False


def _places(specs: tuple[TensorSpec, ...]) -> tuple[list[int], int]:
    """Where the tensors of a bucket begin in its half, and where the last one ends."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
    return starts, end


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _zmq(caller: str) -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ValueError(f"{caller}: checkpoint-engine's workers speak ZeroMQ; pip install pyzmq") from error
    return zmq
