"""``Sglang``: SGLang servers, controlled by HTTP.

    pause, wake weights, begin session | buckets | end session | wake the KV cache, flush, label, continue
                 begin                 |   load  |   finish    |                 commit

A request for each bucket says where its bytes are: in memory of a GPU that the server's workers share with this rank,
or in a broadcast. Servers answer when their workers have loaded it, and the next bucket is gathered meanwhile. No such
request flushes or labels: a rejected flush would fail a loaded bucket, and a label would be visible before all servers
have ended their sessions.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from torch.multiprocessing import reductions

from fsdp2x.api import aligned_starts, collect_handed
from fsdp2x.base.arguments import checked
from fsdp2x.rl.sync.receiver.engine import MERGED_BASE, WireError
from fsdp2x.rl.sync.receiver.engine_group import BroadcastGroup, open_store, own_host
from fsdp2x.rl.sync.targets.base import PipelinedTarget, PushBucket, WireLayout, refuse_adapters
from fsdp2x.rl.sync.targets.routes import ControlError, Routes, phase, server_addresses
from fsdp2x.rl.sync.targets.transports import HandedMemory

_MISSING = "start SGLang 0.5.10 or newer"
_IDLE_S = 60  # until aborted requests have left the scheduler


class Sglang(PipelinedTarget):
    """SGLang servers, by their addresses.

        Sglang("http://127.0.0.1:30000")                   whose workers see the GPU of this rank; also a list of them
        Sglang("http://10.0.0.7:30000", group="nccl")      on any host

    Each worker gets full tensors and takes its part. A commit is labeled ``str(version)``. A failed push leaves servers
    paused until a full push succeeds. SGLang ignores tensors with unknown names: it logs a line and reports success.

    With ``connect(weights="adapter")`` requests name the adapter (``lora_path``, or ``model`` as ``BASE:NAME``).
    Servers must run with ``--enable-lora``, ``--max-lora-rank`` and ``--lora-target-modules``. SGLang replaces the
    adapter at the commit, after requests with the old one end. If a server rejects the new adapter, all servers keep
    the old one.

    Tested against a stand-in for SGLang 0.5.23, not against SGLang itself. After the first push of a run, compare the
    log-probabilities of a few fixed tokens in trainer and engine.
    """

    whole_only = "SGLang loads full tensors"
    takes_adapters = True

    @checked
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        rank: int = 0,
        pause: Literal["retract", "abort"] = "retract",
        group: Literal["gloo", "nccl"] | None = None,
    ) -> None:
        """Describes the servers. The first push connects to them.

        Args:
            address: one server or several, the same on every rank.
            rank: rank of the session's group that talks to them.
            pause: treatment of running requests. ``"retract"``: they continue with the new weights, and their cache is
                computed again. ``"abort"``: they end. SGLang's pause in place would keep the cache of old weights.
            group: None sends handles of this rank's GPU memory by CUDA IPC. The GPU then holds all weights on the wire
                until the push ends, because SGLang answers before it has copied. A backend broadcasts buckets to all
                workers instead. With ``"nccl"`` no worker may share the current GPU of this rank. If a broadcast fails,
                restart the servers, because SGLang's side has no timeout. SGLang answers for its first tensor-parallel
                worker only: failures of others appear in its log.
        """
        self._servers = [Routes(one, _MISSING) for one in server_addresses("fsdp2x.sync.Sglang", address, 30000)]
        self._rank, self._pause, self._acts = rank, pause, False
        self._num_workers: dict[str, int] = {}
        self._backend = group
        self._group: UpdateGroup | None = None  # of the current push
        self._handed: list[HandedMemory] = []  # memory that workers may still read
        self._open: set[str] = set()  # servers with an open session of this target
        self._has_begun = False
        self._asleep: set[str] = set()
        self._pool = self._make_pool()
        self._adapter: dict[str, Any] | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._is_merged = self._will_be_merged = False  # whether the servers' weights include an adapter
        self._held: dict[str, dict[str, Any]] = {}  # by server: the request that loads its current adapter
        self._swapped: list[Routes] = []  # servers whose adapter this push has changed

    def receives(self, rank: int) -> bool:
        self._acts = rank == self._rank
        return self._acts

    def sleep(self) -> None:
        """Frees the servers' memory of weights and KV cache until the next push, which wakes them.

        It aborts requests. SGLang keeps no weights meanwhile. On a rank that talks to no server nothing happens.

        Raises:
            RuntimeError: a server rejects it, or sleeps already.
        """
        if self._asleep:
            raise RuntimeError("fsdp2x.sync.Sglang.sleep: it is already asleep. Push to wake it.")
        if not self._acts:
            return
        for server in self._servers:
            server.ask("POST", "/pause_generation", body={"mode": "abort"})
            self._flush(server)  # a busy server that frees memory would end
            server.ask("POST", "/release_memory_occupation", body={"tags": ["kv_cache", "weights"]})
        self._asleep = {"weights", "kv_cache"}

    # ---- a push

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        refuse_adapters(layout, "SGLang loads adapters by separate requests")
        self._adapter, self._staged, self._swapped = layout.adapter, {}, []
        self._will_be_merged = layout.is_merged
        self._has_begun = False
        with phase("begin"):
            for server in self._servers:
                server.timeout_s = timeout_s
                about = server.ask("GET", "/server_info")
                if about.get("dp_size", 1) > 1:
                    raise ControlError(
                        f"{server.name} has {about['dp_size']} data-parallel replicas, and passes weights to none "
                        "of them. Start a server for each, and give Sglang all their addresses."
                    )
                if self._backend is not None and about.get("pp_size", 1) > 1:
                    raise ControlError(
                        f"{server.name} has {about['pp_size']} pipeline stages, but numbers the workers of a group by "
                        "their tensor-parallel rank only. Omit group."
                    )
                if layout.adapter is not None:
                    _require_adapters(server.name, about, layout.adapter)
                self._num_workers[server.name] = about.get("tp_size", 1)

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        self._has_begun = True
        with phase("begin"):
            if self._adapter is not None:
                if self._is_merged:
                    raise ControlError(MERGED_BASE)
                if self._asleep:
                    raise ControlError("servers sleep and keep no weights. Push all weights before an adapter.")
                if self._pause == "abort":
                    self._post("/pause_generation", {"mode": "abort"})
                return
            self._post("/pause_generation", {"mode": self._pause})
            self._wake("weights")
            for server in self._servers:
                self._begin_session(server)
            if self._backend is not None:
                counts = [self._num_workers[server.name] for server in self._servers]
                self._group = UpdateGroup(self._servers, counts, self._backend, self._pool)

    def _begin_session(self, server: Routes) -> None:
        try:
            server.ask("POST", "/begin_weight_update", body={})
        except ControlError as error:
            if error.status == 404:  # of a release before sessions, which takes buckets without one
                return
            if error.status != 400 or "already open" not in str(error):
                raise
            # Ends the session of an unfinished push, perhaps of another trainer that is gone.
            server.ask("POST", "/end_weight_update", body={})
            server.ask("POST", "/begin_weight_update", body={})
        self._open.add(server.name)

    def take(self, buckets: Iterator[PushBucket]) -> None:
        if self._adapter is not None:
            for bucket in buckets:
                for spec, tensor in zip(bucket.specs, bucket.tensors, strict=True):
                    self._staged[spec.name] = tensor.detach().to("cpu", copy=True)
            return
        super().take(buckets)

    def _deliver(self, bucket: PushBucket) -> Callable[[], None]:
        send = self._send if self._group is None else self._group.send
        answers = send(bucket) if bucket.tensors else []

        def wait() -> None:
            reasons = [str(error) for error in (answer.exception() for answer in answers) if error is not None]
            if reasons:
                raise ControlError("; ".join(reasons))

        return wait

    def _send(self, bucket: PushBucket) -> list[Future]:
        counts = [self._num_workers[server.name] for server in self._servers]
        memory, payloads = handed_bucket(bucket, sum(counts))
        self._handed.append(memory)
        return [
            self._pool.submit(self._load, server, [payloads.pop() for _ in range(count)])
            for server, count in zip(self._servers, counts, strict=True)
        ]

    def _load(self, server: Routes, payloads: list[str]) -> None:
        _ask(server, "/update_weights_from_tensor", {"serialized_named_tensors": payloads, **_BUCKET})

    def finish(self, version: int | str) -> None:
        if self._adapter is not None:
            return
        with phase("finish"):
            if self._group is not None:
                group, self._group = self._group, None
                group.leave()
            for server in self._servers:
                if server.name in self._open:
                    _ask(server, "/end_weight_update", {})
                    self._open.discard(server.name)

    def _swap(self, adapter: dict[str, Any], version: int | str) -> None:
        """Replaces the old adapter by the new one, which SGLang does not do at once."""
        data = base64.b64encode(pickle.dumps(self._staged, protocol=4)).decode()
        scale = next(iter(adapter["layers"].values()))  # SGLang multiplies by alpha / r, whatever the settings are
        config = {name: adapter[name] for name in ("peft_type", "r", "target_modules")}
        config["lora_alpha"] = scale * adapter["r"]
        for server in self._servers:
            body = {"lora_name": adapter["name"], "config_dict": config}
            body["serialized_named_tensors"] = [data] * self._num_workers[server.name]
            self._swapped.append(server)
            # It may have none, such as after a restart. The load reports any other problem.
            self._quietly(server, "/unload_lora_adapter", {"lora_name": adapter["name"]})
            _ask(server, "/load_lora_adapter_from_tensors", body)
        self._held = {server.name: body for server in self._servers}
        self._swapped, self._staged = [], {}
        self._label(version)
        if self._pause == "abort":
            self._post("/continue_generation", {})

    def _restore(self, adapter: dict[str, Any]) -> None:
        """Gives servers the previous adapter and lets them continue."""
        for server in self._swapped:
            self._quietly(server, "/unload_lora_adapter", {"lora_name": adapter["name"]})
            if server.name in self._held:
                self._quietly(server, "/load_lora_adapter_from_tensors", self._held[server.name])
        self._swapped, self._staged = [], {}
        for server in self._servers if self._has_begun and self._pause == "abort" else ():
            self._quietly(server, "/continue_generation", {})

    def commit(self, version: int | str) -> None:
        if self._adapter is not None:
            with phase("commit"):
                return self._swap(self._adapter, version)
        self._is_merged = self._will_be_merged
        with phase("commit"):
            self._wake("kv_cache")
            for server in self._servers:
                self._flush(server)
            self._label(version)
            self._post("/continue_generation", {})
        self._drop_handed()

    def abort(self, reason: str) -> None:
        if self._adapter is not None:
            return self._restore(self._adapter)
        self._abandon_group()
        self._await_answers()
        for server in self._servers if self._has_begun else ():
            # Some may already run again if another one failed at its commit.
            self._quietly(server, "/pause_generation", {"mode": self._pause})
            if server.name in self._open:
                self._open.discard(server.name)
                self._quietly(server, "/end_weight_update", {})
        self._drop_handed()

    def close(self) -> None:
        self._abandon_group()
        self._drop_handed()
        self._pool.shutdown()
        self._pool = self._make_pool()  # threads start with the first request

    # ---- parts

    def _make_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(len(self._servers), "fsdp2x-sglang")

    def _drop_handed(self) -> None:
        self._handed.clear()
        collect_handed()

    def _abandon_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abandon()

    def _post(self, path: str, body: dict[str, Any]) -> None:
        for server in self._servers:
            server.ask("POST", path, body=body)

    def _label(self, version: int | str) -> None:
        for server in self._servers:
            _ask(server, "/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self._post("/resume_memory_occupation", {"tags": [tag]})
            self._asleep.discard(tag)

    def _quietly(self, server: Routes, path: str, body: dict[str, Any]) -> None:
        """Sends a request and ignores failures: the server is gone, or takes no requests."""
        with contextlib.suppress(ControlError):
            server.ask("POST", path, body=body)

    def _flush(self, server: Routes) -> None:
        """Flushes the cache. The server rejects it while requests run, and aborted ones take a moment to leave."""
        server.send("POST", "/flush_cache", {"timeout": min(_IDLE_S, server.timeout_s / 2)})


def _require_adapters(name: str, about: dict[str, Any], adapter: dict[str, Any]) -> None:
    """Checks that the server supports the adapter.

    Raises:
        ControlError: it serves no adapters, or none like this one.
    """
    if not about.get("enable_lora"):
        raise ControlError(
            f"{name} serves no adapters. Start it with --enable-lora --max-lora-rank {adapter['r']} "
            f"--lora-target-modules {' '.join(adapter['target_modules'])}."
        )
    if adapter["rank_pattern"] or len(set(adapter["layers"].values())) > 1:
        raise ControlError(
            "SGLang supports one rank and one scale per adapter, and this one has several. Omit rank_pattern and "
            'alpha_pattern, or push weights="all" with merge_adapters=True.'
        )


# ---- buckets in memory of a GPU

# Layout of a bucket; loading it has no other effects.
_BUCKET = {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}


def handed_bucket(bucket: PushBucket, num_workers: int) -> tuple[HandedMemory, list[str]]:
    """Returns the bucket in GPU memory, and a base64 payload for each worker. The memory must outlive their reads.

        | t0 |gap| t1 |gap| t2 ...       a tensor begins at a multiple of 64 bytes, as views of its dtype must

    SGLang unpickles a payload with an exact list of globals, and this one needs nothing of SGLang. The GPU's number in
    the handle is its UUID, as SGLang writes and reads it in place of torch's.

    Raises:
        ValueError: the tensors are not on a GPU.
    """
    starts, num_bytes = aligned_starts(spec.num_bytes for spec in bucket.specs)
    memory = HandedMemory(bucket.tensors[0].device, num_bytes)
    places = []
    for spec, begin, tensor in zip(bucket.specs, starts, bucket.tensors, strict=True):
        place = {"name": spec.name, "shape": spec.shape, "dtype": spec.dtype, "numel": spec.num_bytes}
        places.append(SimpleNamespace(**place, start_idx=begin, end_idx=begin + spec.num_bytes))
        memory.bytes[begin : begin + spec.num_bytes].view(spec.dtype).view(spec.shape).copy_(tensor)
    memory.synchronize()
    handles = [_Handle(memory.device_handle()) for _ in range(num_workers)]
    pickles = [pickle.dumps({"flattened_tensor": handle, "metadata": places}, protocol=4) for handle in handles]
    return memory, [base64.b64encode(data).decode() for data in pickles]


class _Handle:
    """Unpickles as the tensor."""

    def __init__(self, arguments: tuple) -> None:
        self._arguments = arguments

    def __reduce__(self) -> tuple:
        return reductions.rebuild_cuda_tensor, self._arguments


# ---- buckets in a broadcast


class UpdateGroup:
    """SGLang's weights-update group, with this rank as its rank 0.

    It lives as long as a push, because a restarted server knows no group and would end at a bucket of one. A bucket is
    one broadcast of tensors without gaps, which both sides lay out in the order of the request: by itemsize, largest
    first, so that each tensor is aligned for its dtype.
    """

    def __init__(
        self, servers: Sequence[Routes], counts: Sequence[int], backend: str, pool: ThreadPoolExecutor
    ) -> None:
        """Makes all workers join. ``counts`` has each server's workers, ``pool`` a thread for each server.

        Raises:
            ControlError: a server rejects it, or they did not connect in time.
        """
        self._servers, self._pool = servers, pool
        timeout_s = min(server.timeout_s for server in servers)
        deadline = time.monotonic() + timeout_s
        try:
            host = own_host([urlsplit(server.name).hostname or "" for server in servers])
            store = open_store(host, 0)
            self._name, size = f"fsdp2x-{secrets.token_hex(8)}", 1 + sum(counts)
            self._group = BroadcastGroup({"backend": backend, "size": size, "name": self._name}, store, host)
        except (OSError, WireError) as error:
            raise ControlError(f"no group with {servers[0].name}: {error}") from error
        about = {"master_address": host, "master_port": store.port, "world_size": size}
        del store  # errors keep this frame, and the store must end with the group, because servers wait in it
        about |= {"group_name": self._name, "backend": backend}
        answers, rank = [], 1
        for server, count in zip(servers, counts, strict=True):
            body = {**about, "rank_offset": rank}
            answers.append(self._ask(server, "/init_weights_update_group", body))
            rank += count
        try:
            self._group.join(0, deadline, lambda: any(map(_has_failed, answers)))
            reasons = [str(error) for error in (answer.exception() for answer in answers) if error is not None]
        except WireError as error:
            reasons = [str(answer.exception()) for answer in answers if _has_failed(answer)] + [str(error)]
        if reasons:
            self.abandon()
            raise ControlError("; ".join(reasons))

    def send(self, bucket: PushBucket) -> list[Future]:
        """Broadcasts the tensors. Returns the answers of all servers, whose workers load them, and other failures."""
        deadline = time.monotonic() + min(server.timeout_s for server in self._servers)
        tensors = sorted(zip(bucket.specs, bucket.tensors, strict=True), key=lambda pair: -pair[0].dtype.itemsize)
        body: dict[str, Any] = {
            "names": [spec.name for spec, _ in tensors],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec, _ in tensors],
            "shapes": [list(spec.shape) for spec, _ in tensors],
            "group_name": self._name,
            **_BUCKET,
        }
        data = torch.cat([one.detach().reshape(-1).view(torch.uint8).to(self._group.device) for _, one in tensors])
        answers = [self._ask(server, "/update_weights_from_distributed", body) for server in self._servers]
        try:
            self._group.broadcast(data, deadline, lambda: any(map(_has_failed, answers)))
        except WireError as error:
            answers.append(Future())
            answers[-1].set_exception(error)
        return answers

    def leave(self) -> None:
        """Ends the group everywhere at the same time, after everything sent has arrived.

        Raises:
            ControlError: a server does not.
        """
        ends = self._end()
        self._group.end(time.monotonic() + min(server.timeout_s for server in self._servers))
        for end in ends:
            end.result()

    def abandon(self) -> None:
        """Ends the group here, which ends the servers' waits over gloo, and on servers that still can."""
        self._group.close()
        for end in self._end():
            with contextlib.suppress(ControlError):
                end.result()

    def _end(self) -> list[Future]:
        body = {"group_name": self._name}
        return [self._ask(server, "/destroy_weights_update_group", body) for server in self._servers]

    def _ask(self, server: Routes, path: str, body: dict[str, Any]) -> Future:
        return self._pool.submit(_ask, server, path, body)


def _ask(server: Routes, path: str, body: dict[str, Any]) -> None:
    """Sends a request. Some releases report a failure in a value, with a status of success.

    Raises:
        ControlError: the server rejects it, or does not answer.
    """
    answer = server.ask("POST", path, body=body)
    if answer and not answer.get("success", True):
        raise ControlError(f"{server.name}: {answer.get('message')}")


def _has_failed(answer: Future) -> bool:
    return answer.done() and answer.exception() is not None
