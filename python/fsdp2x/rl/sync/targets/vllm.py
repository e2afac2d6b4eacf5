"""``Vllm``: vLLM servers, or an ``LLM`` of this process.

    wake weights, pause | begin, buckets, finish, commit | reset caches, label, wake the KV cache, resume
         control        |   dialogue with workers        |                  control

Weights go to the receiver of each worker: in memory files on this host (``Peer``), by broadcasts to others
(``GroupPeer``). A worker has no receive loop: one call of all workers (``fsdp2x_receive``) lasts as long as a push.
vLLM accepts no other calls meanwhile, so control comes before and after.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from fsdp2x.base.arguments import checked
from fsdp2x.rl.sync.receiver.engine import WireError
from fsdp2x.rl.sync.receiver.engine_group import SCHEME, join_address, own_host
from fsdp2x.rl.sync.receiver.vllm_worker import adapter_path, place_of_process
from fsdp2x.rl.sync.targets.base import BackgroundCall, EngineTarget, PushBucket, WireLayout, refuse_adapters
from fsdp2x.rl.sync.targets.dialogue import Dialogue
from fsdp2x.rl.sync.targets.group_peer import GroupPeer
from fsdp2x.rl.sync.targets.peer import Peer
from fsdp2x.rl.sync.targets.routes import ControlError, Routes, phase, server_addresses

CONTACT_S = 60.0  # from a call of all workers to the begin that they wait for; vLLM may be in the middle of a step


class Vllm(EngineTarget):
    """vLLM, whose workers have the extension ``fsdp2x.sync.vllm_worker.Fsdp2xWorker``.

        Vllm("http://127.0.0.1:8000")                     a server; VLLM_SERVER_DEV_MODE=1; also a list of them
        Vllm(llm)                                         an LLM of this rank's process; Vllm(None) on ranks without one

    Each worker gets full tensors and takes its part (tensor and pipeline parallel). If a server's worker runs on
    another host, all workers join a group with this rank (``GroupPeer``) at an address that they get by HTTP. A commit
    is labeled ``str(version)``.

    With ``connect(weights="adapter")`` requests name the adapter. A server takes ``"model": NAME`` and must run with
    ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. An ``LLM`` with ``enable_lora=True`` takes
    ``generate(..., lora_request=target.lora_request())``. A failed push of an adapter keeps the old one. A push of all
    weights drops it, and its name then stands for these weights.

    A failed push of all weights leaves servers paused, with layers of two versions, until a full push succeeds. An
    ``LLM`` cannot be paused, so call ``Session.require_clean()`` before ``generate``. Drafters of speculative decoding
    keep their weights.

    Tested with vLLM 0.32.0 on CPUs; accelerators and quantized weights only against stand-ins. After the first push,
    compare the log-probabilities of a few fixed tokens in trainer and engine.
    """

    whole_only = "vLLM loads full tensors and repacks them"
    takes_adapters = True

    @checked
    def __init__(
        self,
        engine: Any,
        *,
        rank: int = 0,
        pause: Literal["keep", "wait", "abort"] = "keep",
        partial: bool = False,
        memory: Literal["host", "device"] = "host",
        group: Literal["gloo", "nccl"] | None = None,
    ) -> None:
        """Describes the engines. The first push connects to them.

        Args:
            engine: address or addresses of servers, the same on every rank, or this rank's LLM or None.
            rank: rank of the session's group that talks to servers.
            pause: treatment of a server's requests. ``"keep"``: they continue with the new weights, and their cache is
                computed again. ``"wait"``: the push waits for their end. ``"abort"``: they end.
            partial: whether parameters that a push omits (``connect(params=...)``) keep the engine's values. Otherwise,
                and always after ``sleep(2)``, a missing parameter is an error.
            memory: see ``Peer``. ``"device"`` shares a buffer on this rank's GPU, which workers must see, by CUDA IPC.
            group: backend of ``GroupPeer``, also for workers on this host. None: memory files if all workers run on
                the host of the rank that talks to them, else ``"gloo"``.

        Raises:
            TypeError: ``engine`` is of another type.
            ValueError: ``group`` does not fit the other arguments.
        """
        self._controls: Sequence[ServerControl | LocalControl]
        if isinstance(engine, Sequence):
            addresses = server_addresses("fsdp2x.sync.Vllm", engine, 8000)
            self._controls, self._rank = [ServerControl(address) for address in addresses], rank
        elif engine is None or hasattr(engine, "collective_rpc"):
            self._controls, self._rank = ([] if engine is None else [LocalControl(engine)]), None
        else:
            raise TypeError(f"fsdp2x.sync.Vllm: expected an address, a vllm.LLM or None, got a {type(engine).__name__}")
        if group is not None and (self._rank is None or memory == "device"):
            raise ValueError('fsdp2x.sync.Vllm: a group is for servers and replaces memory="device". Pass one of them.')
        self._pause, self._partial, self._memory, self._group = pause, partial, memory, group
        self._asleep: set[str] = set()  # what `sleep` freed and is still free
        self._dropped = self._stopped = self._torn = False  # weights; requests; by a push that failed
        self._acts: bool | None = None  # whether this rank talks to engines, known when a session begins
        self._layout: WireLayout | None = None
        self._adapter: dict[str, Any] | None = None
        self._committed: int | str | None = None  # version of the adapter
        self._peer: Dialogue | None = None
        self._known: Any = None  # the workers of ``_peer``
        self._calls: dict[str, BackgroundCall] = {}  # of each engine's workers, during a push
        self._timeout_s, self._is_committing = 0.0, False

    def receives(self, rank: int) -> bool:
        self._acts = bool(self._controls) if self._rank is None else rank == self._rank
        return self._acts

    # ---- between pushes

    @checked
    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the engines' accelerator memory until the next push, which wakes them, and aborts requests.

        On a rank without an engine nothing happens.

        Args:
            level: 1 keeps the weights in CPU memory. 2 drops them; vLLM then restores only parameters and registered
                buffers.

        Raises:
            ValueError: ``level`` is unknown.
            RuntimeError: an engine rejects it or is asleep, or there is no session yet.
        """
        if self._acts is None:
            raise RuntimeError("fsdp2x.sync.Vllm.sleep: there is no session, which selects the rank. Connect first.")
        if self._asleep:
            raise RuntimeError("fsdp2x.sync.Vllm.sleep: it is already asleep. Push, or wake it.")
        if not self._acts:
            return
        for control in self._controls:
            control.sleep(level)
        self._asleep, self._dropped = {"weights", "kv_cache"}, level == 2

    def wake(self) -> None:
        """Wakes engines with the weights that they had.

        Raises:
            RuntimeError: they have no consistent weights, after level 2 or a failed push, or an engine rejects it.
        """
        if self._dropped or self._torn:
            why = "level 2 dropped the weights" if self._dropped else "the last push failed"
            raise RuntimeError(f"fsdp2x.sync.Vllm.wake: {why}. Push, which wakes the engine.")
        if not self._acts:
            return
        self._wake("weights", "kv_cache")
        for control in self._controls:
            control.resume()

    # ---- a push

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        self._layout, self._timeout_s, self._is_committing = layout, timeout_s, False
        self._adapter = layout.adapter
        refuse_adapters(layout, "vLLM loads adapters by its own requests, from files")
        with phase("begin"):
            for control in self._controls:
                control.timeout_s = timeout_s
                control.require_ready()
                if self._adapter is not None:
                    control.require_adapters()

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        covers_all = self._dropped or not self._partial
        with phase("begin"):
            self._require_idle()
            if self._adapter is not None and (self._dropped or self._torn):
                raise ControlError("the engine's base is gone or torn. Push all weights before an adapter.")
            states = self._find_receivers()
            for control in self._controls:
                is_ours = self._asleep or self._stopped or states[control.name] & {"open", "torn"}
                if control.is_sleeping() and not is_ours:
                    raise ControlError(
                        f"{control.name} was paused or put to sleep by another client. Resume or wake it before a "
                        "push, or use this target's sleep()."
                    )
            # Waking may resume requests, so the pause comes after it.
            self._wake("weights")
            self._stopped = True
            for control in self._controls:
                control.pause(self._pause)
            self._calls = {control.name: _call_workers(control, covers_all) for control in self._controls}
        assert self._layout is not None, "open runs before this"
        self._workers.open(self._layout, self._timeout_s)
        self._workers.begin(version, mode, base)

    def take(self, buckets: Iterator[PushBucket]) -> None:
        self._workers.take(buckets)

    def finish(self, version: int | str) -> None:
        self._workers.finish(version)

    def commit(self, version: int | str) -> None:
        self._is_committing = True
        self._workers.commit(version)
        with phase("commit"):
            for name, call in self._calls.items():
                self._require_committed(name, call, version)
            self._calls = {}
            if self._adapter is not None:
                for control in self._controls:
                    control.load_adapter(self._adapter["name"], version)
            for control in self._controls:
                control.reset_caches()
            for control in self._controls:
                control.publish(str(version))
            self._wake("kv_cache")
            for control in self._controls:
                control.resume()
        self._committed = None if self._adapter is None else version
        self._dropped = self._stopped = self._torn = False

    def lora_request(self) -> Any:
        """Returns the argument with which ``LLM.generate`` uses the last pushed adapter.

        Raises:
            RuntimeError: no adapter was committed.
        """
        if self._adapter is None or self._committed is None:
            raise RuntimeError(
                'fsdp2x.sync.Vllm.lora_request: no adapter was pushed. Connect with weights="adapter" and push.'
            )
        return _lora_request(self._adapter["name"], self._committed)

    def _restore_adapter(self, name: str) -> None:
        """Lets engines continue with the previous adapter."""
        if self._is_committing:
            self._each_quietly(lambda control: control.call("fsdp2x_revert"))
            if (version := self._committed) is not None:
                self._each_quietly(lambda control: control.load_adapter(name, version))
            else:
                self._each_quietly(lambda control: control.unload_adapter(name))
            self._each_quietly(lambda control: control.reset_caches())
        if self._stopped and not self._calls:
            with contextlib.suppress(ControlError):
                self._wake("kv_cache")
            self._each_quietly(lambda control: control.resume())
            self._stopped = False

    def abort(self, reason: str) -> None:
        self._torn = self._torn or self._adapter is None
        if self._calls and not self._is_committing:
            self._workers.abort(reason)
        elif self._calls:
            self._workers.close()  # those that committed no longer listen, and others see the connection end
        for call in self._calls.values():
            call.join(self._timeout_s)
        self._calls = {name: call for name, call in self._calls.items() if call.is_alive()}
        if self._adapter is not None:
            return self._restore_adapter(self._adapter["name"])
        if self._peer is not None and not self._calls:
            if self._is_committing:
                # Some may already run again: another one failed at its commit, or its answer was lost.
                self._each_quietly(lambda control: control.pause(self._pause))
            # Also workers without a connection, such as those that another trainer holds: the server is paused, and
            # only torn workers let another target take over.
            self._each_quietly(lambda control: control.call("fsdp2x_tear", reason))

    def close(self) -> None:
        if self._peer is None:
            return
        self._peer.close()
        if not self._calls:
            self._each_quietly(lambda control: control.call("fsdp2x_release"))
        self._peer = self._known = None

    # ---- parts

    @property
    def _workers(self) -> Dialogue:
        assert self._peer is not None, "begin finds the workers"
        return self._peer

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self._asleep:
                for control in self._controls:
                    control.wake([tag])
                self._asleep.discard(tag)

    def _find_receivers(self) -> dict[str, set[str]]:
        """Returns what the workers of each engine hold. Asks each time, because they may change."""
        answers = {c.name: _values(c.name, c.call("fsdp2x_listen")) for c in self._controls}
        states = {name: {answer["state"] for answer in said} for name, said in answers.items()}
        everyone = [answer for said in answers.values() for answer in said]
        here, group = place_of_process(), self._group
        if any(answer["place"] != here or answer["address"].startswith(SCHEME) for answer in everyone):
            group = group or "gloo"
        known = group, [answer["worker"] for answer in everyone]
        if known != self._known:
            if self._peer is not None:
                self._peer.close()
            self._peer = self._make_peer(group, [answer["address"] for answer in everyone])
            self._known = known
        if isinstance(self._peer, GroupPeer):
            for control in self._controls:
                _values(control.name, control.call("fsdp2x_listen", self._peer.listen()))
        return states

    def _make_peer(self, group: Any, addresses: list[str]) -> Dialogue:
        if group is None:
            return Peer(addresses, memory=self._memory)
        if self._memory == "device":
            raise ControlError(
                'a worker runs on another host, which does not see this GPU\'s memory. Use memory="host".'
            )
        if (far := next((control for control in self._controls if control.host is None), None)) is not None:
            raise ControlError(
                f"a worker of {far.name} runs on another host or in another network namespace, and reaches no memory "
                "of this one. Start a server there, and give Vllm its address."
            )
        try:
            host = own_host([control.host or "" for control in self._controls])
            peer = GroupPeer(join_address(host, 0), len(addresses), backend=group)
            peer.listen()
        except (OSError, WireError) as error:
            raise ControlError(f"{self._controls[0].name}: cannot reach its host: {error}") from error
        return peer

    def _require_idle(self) -> None:
        self._calls = {name: call for name, call in self._calls.items() if call.is_alive()}
        for name in self._calls:
            raise ControlError(f"{name} still runs the previous push. Restart it.")

    def _require_committed(self, name: str, call: BackgroundCall, version: int | str) -> None:
        """Raises ControlError unless every worker reports in time that it holds ``version``."""
        call.join(self._timeout_s)
        if call.is_alive():
            raise ControlError(f"{name} committed, but did not return within {self._timeout_s:.0f} s")
        if call.error is not None:
            raise call.error
        for answer in _values(name, call.result):
            if (answer["state"], answer["version"]) != ("clean", version):
                raise ControlError(f"a worker of {name} is {answer['state']} ({answer['reason']})")

    def _each_quietly(self, act: Callable[[ServerControl | LocalControl], object]) -> None:
        """Acts on each engine and ignores failures: the engine is gone, or takes no calls."""
        for control in self._controls:
            with contextlib.suppress(ControlError):
                act(control)


def _call_workers(control: ServerControl | LocalControl, covers_all: bool) -> BackgroundCall:
    """Calls an engine's workers to take a push, and returns the call, which ends with the push."""
    return BackgroundCall(lambda: control.call("fsdp2x_receive", covers_all, CONTACT_S, patient=True))


def _values(name: str, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answers of all workers.

    Raises:
        ControlError: one of them is an error.
    """
    for index, answer in enumerate(answers):
        if not answer["ok"]:
            raise ControlError(f"worker {index} of {name} says: {answer['error']}")
    return answers


# ---- control of engines

EXTENSION = "fsdp2x.sync.vllm_worker.Fsdp2xWorker"


class ServerControl(Routes):
    """A vLLM server that runs with ``VLLM_SERVER_DEV_MODE=1``. Every method raises ``ControlError``.

    ``host`` is its host in the address, or None in this process.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url, "start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1")
        self.host: str | None = urlsplit(url).hostname

    def require_ready(self) -> None:
        """Raises unless the engine answers and its workers have the extension."""
        config = self.ask("GET", "/server_info", {"config_format": "json"})["vllm_config"]
        _require_extension(self.name, config["parallel_config"]["worker_extension_cls"])

    def require_adapters(self) -> None:
        """Raises unless the server registers adapters at run time."""
        try:
            self.ask("POST", "/v1/unload_lora_adapter", body={"lora_name": ""})
        except ControlError as error:
            if error.status == 404:
                raise ControlError(
                    f"{self.name} registers no adapters. Start it with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."
                ) from error
            if error.status != 400:  # the route exists, but needs a name
                raise

    def load_adapter(self, name: str, version: int | str) -> None:
        """Replaces the last adapter of this name by the one that the workers hold."""
        body = {"lora_name": name, "lora_path": adapter_path(name, version), "load_inplace": True}
        self.send("POST", "/v1/load_lora_adapter", body=body)

    def unload_adapter(self, name: str) -> None:
        """Removes the name."""
        self.send("POST", "/v1/unload_lora_adapter", body={"lora_name": name})

    def call(self, method: str, *args: Any, patient: bool = False) -> list[dict[str, Any]]:
        """Returns the result of each worker's ``method``. ``patient`` waits without a limit."""
        body = {"method": method, "args": list(args)}
        results = self.ask("POST", "/collective_rpc", body=body, patient=patient)["results"]
        num_workers = self.ask("GET", "/get_world_size")["world_size"]
        if num_workers != len(results):
            raise ControlError(
                f"{self.name} has {num_workers} workers, of which {len(results)} answer, because a data-parallel "
                "server passes calls to one replica. Start a server for each, and give Vllm all their addresses."
            )
        return results

    def is_sleeping(self) -> bool:
        """Returns whether it is paused or asleep. vLLM does not distinguish them."""
        return self.ask("GET", "/is_sleeping")["is_sleeping"]

    def sleep(self, level: int) -> None:
        self.ask("POST", "/sleep", {"level": level})

    def wake(self, tags: list[str]) -> None:
        self.ask("POST", "/wake_up", {"tags": tags})

    def pause(self, mode: str) -> None:
        self.ask("POST", "/pause", {"mode": mode})

    def resume(self) -> None:
        self.ask("POST", "/resume")

    def reset_caches(self) -> None:
        # While requests hold blocks, vLLM keeps the cache; older servers do not even report it. So preempt them first.
        answer = self.ask("POST", "/reset_prefix_cache", {"reset_running_requests": "true"})
        _require_reset(self.name, answer.get("success", True))
        self.ask("POST", "/reset_encoder_cache")

    def publish(self, version: str) -> None:
        self.ask("POST", "/update_weight_version", body={"new_version": version})


class LocalControl:
    """A ``vllm.LLM`` of this process, with the methods of ``ServerControl``.

    It does nothing between two calls of ``generate``, so it needs no pause.
    """

    name, host, timeout_s = "the LLM of this process", None, 300.0

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def require_ready(self) -> None:
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        _require_extension(self.name, parallel.worker_extension_cls)

    def require_adapters(self) -> None:
        if self._llm.llm_engine.vllm_config.lora_config is None:
            raise ControlError(f"{self.name} serves no adapters. Make it with LLM(..., enable_lora=True).")

    def load_adapter(self, name: str, version: int | str) -> None:
        request = _lora_request(name, version)
        request.load_inplace = True
        self._told(self._llm.llm_engine.add_lora, request)

    def unload_adapter(self, name: str) -> None:
        """Does nothing, because an ``LLM`` keeps no names."""

    def call(self, method: str, *args: Any, patient: bool = False) -> list[dict[str, Any]]:
        return self._told(self._llm.collective_rpc, method, None if patient else self.timeout_s, args)

    def is_sleeping(self) -> bool:
        return self._told(self._llm.llm_engine.is_sleeping)

    def sleep(self, level: int) -> None:
        self._told(self._llm.sleep, level)

    def wake(self, tags: list[str]) -> None:
        self._told(self._llm.wake_up, tags)

    def pause(self, mode: str) -> None:
        """Does nothing, because an ``LLM`` does not generate between calls."""

    def resume(self) -> None:
        """Does nothing, because nothing was paused."""

    def reset_caches(self) -> None:
        _require_reset(self.name, self._told(self._llm.reset_prefix_cache))
        self._told(self._llm.llm_engine.reset_encoder_cache)

    def publish(self, version: str) -> None:
        self._told(self._llm.update_weight_version, version)

    def _told(self, method: Any, *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:
            raise ControlError(f"{self.name}: {type(error).__name__}: {error}") from error


def _lora_request(name: str, version: int | str) -> Any:
    """Returns vLLM's request object, with a number that an ``LLM`` uses for nothing else."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, 1 + zlib.crc32(name.encode()) % (1 << 30), adapter_path(name, version))


def _require_extension(name: str, extension: str | None) -> None:
    # A call of a missing method on one worker would leave the other workers' answers in vLLM's queues.
    if not extension:
        raise ControlError(
            f"{name} has no worker extension. Start it with --worker-extension-cls {EXTENSION} (LLM(..., "
            f'worker_extension_cls="{EXTENSION}")), or with the copy on its PYTHONPATH.'
        )


def _require_reset(name: str, success: bool) -> None:
    if not success:
        raise ControlError(f"{name} did not reset its prefix cache, so it would use results of old weights")
