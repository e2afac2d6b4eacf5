"""``Sglang``: SGLang servers, over HTTP.

    pause, wake weights, begin session | buckets | end session | wake the KV cache, flush, label, continue
                 begin                 |   load  |   finish    |                 commit

Every bucket is a request of its own, which the server answers when its workers have loaded it; the next bucket is
gathered meanwhile. None of these requests flushes or labels: a flush that is refused would fail a bucket that was
loaded, and a label would be out before the session ends, and before other servers have ended theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

from fsdp2x.arguments import checked
from fsdp2x.runtime.memory_file import collect_handed
from fsdp2x.sync.outcomes import Failure, span
from fsdp2x.sync.targets.base import EngineTarget, PushBucket, TargetError, WireLayout
from fsdp2x.sync.targets.handed_memory import HandedMemory
from fsdp2x.sync.targets.routes import ControlError, Routes, phase, require_success
from fsdp2x.sync.targets.sglang_group import UpdateGroup
from fsdp2x.sync.targets.sglang_payload import flattened_bucket, handed_bucket

_MISSING = "start SGLang 0.5.10 or newer"
_IDLE_S = 60  # until what was aborted has left the scheduler


class Sglang(EngineTarget):
    """SGLang servers on any host, by their addresses.

        Sglang("http://127.0.0.1:30000")                   also a list of them

    Weights are in the requests, once per tensor-parallel worker, in base64; in memory of the GPU; or broadcast to all
    workers. Each worker is given whole tensors, of which it takes its part. A commit is labelled ``str(version)``. A
    push that fails leaves servers paused until a full push succeeds. SGLang ignores tensors whose names it does not
    know, with a line in its log and an answer of success.

    Tested against a stand-in with the routes, orders and traps of SGLang 0.5.23, not against SGLang itself: compare the
    log-probabilities of a few fixed tokens, trainer and engine, after the first push of a run.
    """

    @checked(own=("pause",))  # which says why there is no third way
    def __init__(
        self,
        address: str | Sequence[str],
        *,
        rank: int = 0,
        pause: Literal["retract", "abort"] = "retract",
        memory: Literal["host", "device"] = "host",
        group: Literal["gloo", "nccl"] | None = None,
    ) -> None:
        """
        Args:
            address: of servers, the same on every rank.
            rank: of the session's group, that talks to them.
            pause: what becomes of their requests. ``"retract"``: they go on with the new weights, what is cached of
                them is computed again. ``"abort"``: they end.
            memory: how buckets get there. ``"host"``: in the requests. ``"device"``: servers run on this host, and see
                the GPU of the rank that talks to them; they are sent handles of its memory, which holds all buckets
                until the push ends, because SGLang answers before its copies ran: the bytes of all weights on the wire.
            group: buckets are broadcast to all workers of all servers at once, in SGLang's weights-update group of this
                backend, which lasts as long as a push. ``"nccl"``: no worker shares a GPU with the rank that talks to
                them, whose current GPU a bucket is copied to; SGLang's side of a broadcast that failed has no limit of
                ours, start such servers again. SGLang answers for the first tensor-parallel worker: another one that
                could not load is a line in its log. None: they go as ``memory`` says; such an error ends the server.
        """
        addresses = [address] if isinstance(address, str) else list(address)
        if not addresses or not all(isinstance(a, str) and a.startswith("http") for a in addresses):
            raise ValueError(f'fsdp2x.sync.Sglang: addresses such as "http://127.0.0.1:30000", got {address!r}')
        if pause not in ("retract", "abort"):
            raise ValueError(
                f'fsdp2x.sync.Sglang: pause must be "retract" or "abort", got {pause!r}: what is paused in place keeps '
                "the cache of the old weights"
            )
        if group is not None and memory == "device":
            raise ValueError('fsdp2x.sync.Sglang: a group takes the place of memory="device"; leave one of them out')
        self._servers = [Routes(one, _MISSING) for one in addresses]
        self._rank, self._pause, self._acts = rank, pause, False
        self._num_workers: dict[str, int] = {}
        self._on_device, self._backend = memory == "device", group
        self._group: UpdateGroup | None = None  # of the push that is under way
        self._handed: list[HandedMemory] = []  # what workers may still read
        self._open: set[str] = set()  # servers with a session of ours
        self._has_begun = False
        self._asleep: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None
        self._sent: tuple[PushBucket, list[Future]] | None = None
        self._failure: Failure | None = None

    def receives(self, rank: int) -> bool:
        self._acts = rank == self._rank
        return self._acts

    def check(self, caller: str, deltas: bool) -> None:
        if deltas:
            raise NotImplementedError(
                f"{caller}: SGLang loads whole tensors, it takes no deltas; connect with deltas=False"
            )

    def sleep(self) -> None:
        """Servers give the memory of weights and KV cache back until the next push, which wakes them.

        Requests are aborted. On a rank that talks to no server nothing happens. SGLang keeps no weights meanwhile.

        Raises:
            RuntimeError: a server refuses; it sleeps already.
        """
        if self._asleep:
            raise RuntimeError("fsdp2x.sync.Sglang.sleep: it is asleep already; push")
        if not self._acts:
            return
        for server in self._servers:
            server.ask("POST", "/pause_generation", body={"mode": "abort"})
            self._flush(server)  # memory is released by idle servers alone: others end
            server.ask("POST", "/release_memory_occupation", body={"tags": ["kv_cache", "weights"]})
        self._asleep = {"weights", "kv_cache"}

    # ---- a push

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        adapter = next((spec.name for spec in layout.specs if "lora_" in spec.name), None)
        if adapter is not None:
            reason = f"SGLang loads adapters by requests of their own, and not as weights: {adapter!r}; save_hf them"
            raise TargetError(Failure("begin", reason))
        self._failure, self._sent, self._has_begun = None, None, False
        if self._pool is None:
            self._pool = ThreadPoolExecutor(len(self._servers), "fsdp2x-sglang")
        with phase("begin"):
            for server in self._servers:
                server.timeout_s = timeout_s
                about = server.ask("GET", "/server_info")
                if about.get("dp_size", 1) > 1:
                    raise ControlError(
                        f"{server.name} has {about['dp_size']} data-parallel replicas, and passes weights on to none "
                        "of them; start a server for each, and give Sglang all their addresses"
                    )
                if self._backend is not None and about.get("pp_size", 1) > 1:
                    raise ControlError(
                        f"{server.name} has {about['pp_size']} pipeline stages, and numbers the workers of a group by "
                        "their tensor-parallel rank alone; leave group out"
                    )
                self._num_workers[server.name] = about.get("tp_size", 1)

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        self._has_begun = True
        with phase("begin"):
            for server in self._servers:
                server.ask("POST", "/pause_generation", body={"mode": self._pause})
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
            if error.status == 404:  # of a release before sessions, which takes buckets without
                return
            if error.status != 400 or "already open" not in str(error):
                raise
            # Of a push that did not come to its end, perhaps of a trainer that is gone.
            server.ask("POST", "/end_weight_update", body={})
            server.ask("POST", "/begin_weight_update", body={})
        self._open.add(server.name)

    def take(self, buckets: Iterator[PushBucket]) -> None:
        for bucket in buckets:
            self._answered()
            if self._failure is None and bucket.tensors:
                self._sent = bucket, self._group.send(bucket) if self._group is not None else self._send(bucket)
                bucket.wait = self._answered
        self._answered()
        if self._failure is not None:
            raise TargetError(self._failure)

    def _send(self, bucket: PushBucket) -> list[Future]:
        payloads = self._payloads(bucket)
        return [self._pool.submit(self._load, server, payloads.pop()) for server in self._servers]

    def _payloads(self, bucket: PushBucket) -> list[list[str]]:
        """Of each server, one for each of its workers; the last server comes first."""
        counts = [self._num_workers[server.name] for server in reversed(self._servers)]
        if not self._on_device:
            payload = flattened_bucket(bucket.specs, bucket.tensors)
            return [[payload] * count for count in counts]
        memory, payloads = handed_bucket(bucket.specs, bucket.tensors, sum(counts))
        self._handed.append(memory)
        return [[payloads.pop() for _ in range(count)] for count in counts]

    def _load(self, server: Routes, payloads: list[str]) -> None:
        body = {"serialized_named_tensors": payloads}
        flags = {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}
        require_success(server, server.ask("POST", "/update_weights_from_tensor", body={**body, **flags}))

    def _answered(self) -> None:
        """All servers have loaded the bucket that was sent last, or it is known why not."""
        if self._sent is None:
            return
        (bucket, answers), self._sent = self._sent, None
        reasons = [str(error) for error in (answer.exception() for answer in answers) if error is not None]
        if reasons:
            self._failure = Failure("load", "; ".join(reasons), bucket.index, span(bucket.names))

    def finish(self, version: int | str) -> None:
        with phase("finish"):
            if self._group is not None:
                group, self._group = self._group, None
                group.leave()
            for server in self._servers:
                if server.name in self._open:
                    require_success(server, server.ask("POST", "/end_weight_update", body={}))
                    self._open.discard(server.name)

    def commit(self, version: int | str) -> None:
        with phase("commit"):
            self._wake("kv_cache")
            for server in self._servers:
                self._flush(server)
            for server in self._servers:
                body = {"new_version": str(version), "abort_all_requests": False}
                require_success(server, server.ask("POST", "/update_weight_version", body=body))
            for server in self._servers:
                server.ask("POST", "/continue_generation", body={})
        self._drop_handed()

    def abort(self, reason: str) -> None:
        self._abandon_group()
        self._answered()
        for server in self._servers if self._has_begun else ():
            # Some may have gone on already, when another one failed at its commit.
            self._quietly(server, "/pause_generation", {"mode": self._pause})
            if server.name in self._open:
                self._open.discard(server.name)
                self._quietly(server, "/end_weight_update", {})
        self._drop_handed()

    def close(self) -> None:
        self._abandon_group()
        self._drop_handed()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    # ---- parts

    def _drop_handed(self) -> None:
        self._handed.clear()
        collect_handed()

    def _abandon_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abandon()

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            for server in self._servers:
                server.ask("POST", "/resume_memory_occupation", body={"tags": [tag]})
            self._asleep.discard(tag)

    def _quietly(self, server: Routes, path: str, body: dict[str, Any]) -> None:
        """What cannot be told any more: the server is gone, or takes no requests."""
        with contextlib.suppress(ControlError):
            server.ask("POST", path, body=body)

    def _flush(self, server: Routes) -> None:
        """Refused while requests run, with a status of failure; aborted ones may take a moment to leave."""
        server.send("POST", "/flush_cache", {"timeout": min(_IDLE_S, server.timeout_s / 2)})
