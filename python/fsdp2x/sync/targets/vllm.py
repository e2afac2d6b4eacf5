"""``Vllm``: vLLM servers, or an ``LLM`` of this process.

    wake weights, pause | begin, buckets, finish, commit | reset caches, label, wake the KV cache, resume
         control        |   sockets and memory files     |                  control

Weights go to the receiver of each worker, as with ``Peer``: in memory files on this host, by broadcasts to others. A
worker has no loop of ours: one call of all workers (``fsdp2x_receive``) lasts as long as a push. vLLM hears nothing
else meanwhile, so control comes before and after.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from fsdp2x.arguments import checked
from fsdp2x.sync.engine_tcp import SCHEME, own_host
from fsdp2x.sync.outcomes import Failure
from fsdp2x.sync.targets.base import EngineTarget, PushBucket, TargetError, WireLayout
from fsdp2x.sync.targets.peer import Peer
from fsdp2x.sync.targets.routes import ControlError, phase
from fsdp2x.sync.targets.vllm_control import EngineControl, LocalControl, ServerControl
from fsdp2x.sync.vllm_worker import place_of_process

CONTACT_S = 60.0  # from a call of all workers to the begin that they wait for; vLLM may be in the middle of a step


class Vllm(EngineTarget):
    """vLLM, whose workers have the extension ``fsdp2x.sync.vllm_worker.Fsdp2xWorker``.

        Vllm("http://127.0.0.1:8000")                     a server; VLLM_SERVER_DEV_MODE=1; also a list of them
        Vllm(llm)                                         an LLM of this rank's process; Vllm(None) on ranks without one

    If a worker of a server does not run beside the rank that talks to it, all workers get weights by broadcasts in a
    process group, and requests on a port that each opens. The secret for the port is made here and goes by the server's
    own HTTP. An ``LLM`` has its workers on its own host. Each
    worker is given whole tensors, of which it takes its part (tensor and pipeline parallel). A commit is labelled
    ``str(version)``.

    A push that fails leaves servers paused, with layers of two versions, until a full push succeeds. An ``LLM`` cannot
    be paused: ask ``Session.require_clean()`` before ``generate``. Drafters of speculative decoding keep their weights.

    Tested with vLLM 0.32.0 on CPUs, whose sleep gives no memory back; accelerators and quantised weights against
    stand-ins alone: compare the log-probabilities of a few fixed tokens, trainer and engine, after the first push.
    """

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
        """
        Args:
            engine: address or addresses of servers, the same on every rank; or what this rank has: an LLM or None.
            rank: of the session's group, that talks to servers.
            pause: what becomes of a server's requests. ``"keep"``: they go on with the new weights, what is cached of
                them is computed again. ``"wait"``: the push waits for their end. ``"abort"``: they end.
            partial: parameters that a push leaves out (``connect(params=...)``) keep what the engine holds. False: an
                error. After ``sleep(2)`` they are one in any case.
            memory: as for ``Peer``: ``"device"`` hands workers that see this rank's GPU a buffer there, by CUDA IPC.
            group: as for ``Peer``, also for workers on this host. None: memory files where all workers run beside the
                rank that talks to them, else ``"gloo"``.
        """
        addresses = [engine] if isinstance(engine, str) else engine
        self._controls: Sequence[EngineControl]
        if isinstance(addresses, Sequence):
            if not addresses or not all(isinstance(a, str) and a.startswith("http") for a in addresses):
                raise ValueError(f'fsdp2x.sync.Vllm: addresses such as "http://127.0.0.1:8000", got {engine!r}')
            self._controls, self._rank = [ServerControl(address) for address in addresses], rank
        elif engine is None or hasattr(engine, "collective_rpc"):
            self._controls, self._rank = ([] if engine is None else [LocalControl(engine)]), None
        else:
            raise TypeError(f"fsdp2x.sync.Vllm: an address, a vllm.LLM or None, got a {type(engine).__name__}")
        if group is not None and (self._rank is None or memory == "device"):
            raise ValueError('fsdp2x.sync.Vllm: a group is for servers, and takes the place of memory="device"')
        self._pause, self._partial, self._memory, self._group = pause, partial, memory, group
        self._asleep: set[str] = set()  # what `sleep` took, and nobody brought back
        self._dropped = self._stopped = self._torn = False  # weights; requests; by a push that failed
        self._acts: bool | None = None  # whether this rank talks to engines, known when a session begins
        self._layout: WireLayout | None = None
        self._peer: Peer | None = None
        self._addresses: list[str] = []
        self._secret = secrets.token_hex()  # of workers on other hosts
        self._calls: list[_Call] = []  # one per engine, while a push is under way
        self._timeout_s, self._is_committing = 0.0, False

    def receives(self, rank: int) -> bool:
        self._acts = bool(self._controls) if self._rank is None else rank == self._rank
        return self._acts

    def check(self, caller: str, deltas: bool) -> None:
        if deltas:
            raise NotImplementedError(
                f"{caller}: vLLM loads whole tensors and repacks them, it takes no deltas; connect with deltas=False"
            )

    # ---- between pushes

    @checked
    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Engines give their accelerator's memory back until the next push, which wakes them; requests are aborted.

        On a rank without an engine nothing happens. Level 1 keeps the weights in host memory; level 2 drops them, and
        what the model holds besides parameters and registered buffers is lost for good: vLLM keeps those two.

        Raises:
            ValueError: another level.
            RuntimeError: an engine refuses; it is asleep; there is no session yet.
        """
        if self._acts is None:
            raise RuntimeError("fsdp2x.sync.Vllm.sleep: connect first, which says which rank talks to engines")
        if self._asleep:
            raise RuntimeError("fsdp2x.sync.Vllm.sleep: it is asleep already; push, or wake it")
        if not self._acts:
            return
        for control in self._controls:
            control.sleep(level)
        self._asleep, self._dropped = {"weights", "kv_cache"}, level == 2

    def wake(self) -> None:
        """Engines run again with the weights that they had.

        Raises:
            RuntimeError: they have none of one version: after level 2, or a push that failed; or an engine refuses.
        """
        if self._dropped or self._torn:
            why = "level 2 dropped the weights" if self._dropped else "the last push failed"
            raise RuntimeError(f"fsdp2x.sync.Vllm.wake: {why}; push, which wakes the engine")
        if not self._acts:
            return
        self._wake("weights", "kv_cache")
        for control in self._controls:
            control.resume()

    # ---- a push

    def open(self, layout: WireLayout, timeout_s: float) -> None:
        self._layout, self._timeout_s, self._is_committing = layout, timeout_s, False
        adapter = next((spec.name for spec in layout.specs if "lora_" in spec.name), None)
        if adapter is not None:
            reason = (
                f"vLLM loads adapters by its own requests, from files, and not as weights: {adapter!r}; save_hf them"
            )
            raise TargetError(Failure("begin", reason))
        with phase("begin"):
            for control in self._controls:
                control.timeout_s = timeout_s
                control.require_ready()

    def begin(self, version: int | str, mode: str, base: int | str | None) -> None:
        covers_all = self._dropped or not self._partial
        with phase("begin"):
            self._require_idle()
            states = self._find_receivers()
            for control in self._controls:
                is_ours = self._asleep or self._stopped or states[control.name] & {"open", "torn"}
                if control.is_sleeping() and not is_ours:
                    raise ControlError(
                        f"{control.name} is paused or asleep, by somebody else: resume or wake it before a push, or "
                        "let this target's sleep() do it"
                    )
            # Waking may resume requests: the pause comes after it.
            self._wake("weights")
            self._stopped = True
            for control in self._controls:
                control.pause(self._pause)
            self._calls = [_Call(control, covers_all) for control in self._controls]
        self._peer.open(self._layout, self._timeout_s)
        self._peer.begin(version, mode, base)

    def take(self, buckets: Iterator[PushBucket]) -> None:
        self._peer.take(buckets)

    def finish(self, version: int | str) -> None:
        self._peer.finish(version)

    def commit(self, version: int | str) -> None:
        self._is_committing = True
        self._peer.commit(version)
        with phase("commit"):
            for call in self._calls:
                call.require_committed(version, self._timeout_s)
            self._calls = []
            for control in self._controls:
                control.reset_caches()
            for control in self._controls:
                control.publish(str(version))
            self._wake("kv_cache")
            for control in self._controls:
                control.resume()
        self._dropped = self._stopped = self._torn = False

    def abort(self, reason: str) -> None:
        self._torn = True
        if self._calls and not self._is_committing:
            self._peer.abort(reason)
        elif self._calls:
            self._peer.close()  # workers that have committed listen no more: those that have not see the connection end
        for call in self._calls:
            call.join(self._timeout_s)
        self._calls = [call for call in self._calls if call.is_alive()]
        if self._peer is not None and not self._calls:
            if self._is_committing:
                # Some may have gone on already: another one failed at its commit, or one did and its answer is lost.
                self._each_quietly(lambda control: control.pause(self._pause))
            # Also those that no connection told, such as workers that another trainer holds: the server is paused, and
            # only workers that are torn let another target take it over.
            self._each_quietly(lambda control: control.call("fsdp2x_tear", reason))

    def close(self) -> None:
        if self._peer is None:
            return
        self._peer.close()
        if not self._calls:
            self._each_quietly(lambda control: control.call("fsdp2x_release"))
        self._peer, self._addresses = None, []

    # ---- parts

    def _wake(self, *tags: str) -> None:
        for tag in tags:
            if tag in self._asleep:
                for control in self._controls:
                    control.wake([tag])
                self._asleep.discard(tag)

    def _find_receivers(self) -> dict[str, set[str]]:
        """What the workers of each engine hold; they are asked each time, as they may be others."""
        answers = {c.name: _values(c.name, c.call("fsdp2x_listen")) for c in self._controls}
        states = {name: {answer["state"] for answer in said} for name, said in answers.items()}
        here = place_of_process()
        everyone = [answer for said in answers.values() for answer in said]
        by_tcp = self._group is not None or any(
            answer["place"] != here or answer["address"].startswith(SCHEME) for answer in everyone
        )
        if by_tcp and self._memory == "device":
            raise ControlError('a worker runs on another host, which reaches no memory of this GPU; say memory="host"')
        if by_tcp:
            everyone = [answer for control in self._controls for answer in self._listen_tcp(control)]
        addresses = [answer["address"] for answer in everyone]
        if addresses != self._addresses:
            if self._peer is not None:
                self._peer.close()
            secret = self._secret if by_tcp else None
            self._peer = Peer(addresses, secret=secret, memory=self._memory, group=self._group)
            self._addresses = addresses
        return states

    def _listen_tcp(self, control: EngineControl) -> list[dict[str, Any]]:
        """Makes the workers of an engine listen on a port."""
        if control.host is None:
            raise ControlError(
                f"a worker of {control.name} runs on another host or in another network namespace, and reaches no "
                "memory of this one: start a server there, and give Vllm its address"
            )
        try:
            trainer = own_host(control.host)
        except OSError as error:
            raise ControlError(f"{control.name}: no way to its host: {error}") from error
        return _values(control.name, control.call("fsdp2x_listen_tcp", self._secret, trainer))

    def _require_idle(self) -> None:
        self._calls = [call for call in self._calls if call.is_alive()]
        for call in self._calls:
            raise ControlError(f"{call.control.name} has not ended the push before; start it again")

    def _each_quietly(self, act: Callable[[EngineControl], object]) -> None:
        """What cannot be told any more: the engine is gone, or takes no calls."""
        for control in self._controls:
            with contextlib.suppress(ControlError):
                act(control)


class _Call(threading.Thread):
    """The call of an engine's workers that lasts as long as a push, and gives their answers at its end."""

    def __init__(self, control: EngineControl, covers_all: bool) -> None:
        super().__init__(name=f"fsdp2x-{control.name}", daemon=True)
        self.control, self._covers_all = control, covers_all
        self._answers: list[dict[str, Any]] = []
        self._error: ControlError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answers = self.control.call("fsdp2x_receive", self._covers_all, CONTACT_S, patient=True)
        except ControlError as error:
            self._error = error

    def require_committed(self, version: int | str, timeout_s: float) -> None:
        """Every worker says that it holds ``version``.

        Raises:
            ControlError: one of them does not, or says nothing in time.
        """
        self.join(timeout_s)
        if self.is_alive():
            raise ControlError(f"{self.control.name} committed, and does not return in {timeout_s:.0f} s")
        if self._error is not None:
            raise self._error
        for answer in _values(self.control.name, self._answers):
            if (answer["state"], answer["version"]) != ("clean", version):
                raise ControlError(f"a worker of {self.control.name} is {answer['state']} ({answer['reason']})")


def _values(name: str, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of all workers.

    Raises:
        ControlError: one of them is an error.
    """
    for index, answer in enumerate(answers):
        if not answer["ok"]:
            raise ControlError(f"worker {index} of {name} says: {answer['error']}")
    return answers
