"""``GroupPeer``: engines on any host, in a process group with one rank that broadcasts buckets to them."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from typing import Any, Literal

import torch

from fsdp2x.base.arguments import checked
from fsdp2x.base.failures import reworded
from fsdp2x.rl.sync.receiver import engine_group
from fsdp2x.rl.sync.receiver.engine import WireError
from fsdp2x.rl.sync.targets.base import TargetError, WireLayout
from fsdp2x.rl.sync.targets.dialogue import Dialogue
from fsdp2x.rl.sync.targets.transports import BucketMemory, room_for


class GroupPeer(Dialogue):
    """Engine processes on any host, which join a process group by a ``GroupReceiver`` each.

        GroupPeer("tcp://10.0.0.7:7000", num_engines=2)      engines: GroupReceiver("tcp://10.0.0.7:7000", sink)

    The rank that talks to them listens at the address, and broadcasts each bucket to all engines at once. Make it with
    the same arguments on every rank. Engines may start before or after it. If a push fails or an engine is lost, the
    group ends for all, and the next push waits for ``num_engines`` again. Any process that reaches the port can join,
    as in every group of torch, so use it inside the network of a cluster.
    """

    @checked
    def __init__(
        self, address: str, num_engines: int, *, rank: int = 0, backend: Literal["gloo", "nccl"] = "gloo"
    ) -> None:
        """Describes the group. The first push makes it.

        Args:
            address: "tcp://host:port" of the rank's host, as the engines reach it.
            num_engines: number of receivers. Each push needs all of them.
            rank: rank of the session's group that talks to them. It runs on that host.
            backend: ``"nccl"`` broadcasts from the rank's current GPU, which no other member may share. Both need
                memory for one bucket on the rank and on each engine.

        Raises:
            ValueError: it is not such an address, or ``num_engines`` is not positive.
        """
        super().__init__(rank)
        with reworded(ValueError, "fsdp2x.sync.GroupPeer", ValueError):
            self._host, self._port = engine_group.split_address(address)
        if num_engines < 1:
            raise ValueError(f"fsdp2x.sync.GroupPeer: num_engines must be positive, got {num_engines}")
        self._num_engines = num_engines
        self._backend, self._num_pushes = backend, 0
        self._invitation: dict[str, Any] = {}  # to the group
        self._store: Any = None  # while this rank listens
        self._group: engine_group.EngineGroup | None = None

    def listen(self) -> str:
        """Listens for engines, as the first push does. Returns the address, with the port that replaces port 0.

        Raises:
            WireError: the port is taken, or the address is not one of this host.
        """
        if self._store is None:
            self._store = engine_group.open_store(self._host, self._port)
            self._store.set(engine_group.CURRENT, engine_group.NO_GROUP)
        return engine_group.join_address(self._host, self._store.port)

    def _reach(self, layout: WireLayout) -> None:
        deadline = time.monotonic() + self._timeout_s
        if self._group is not None:
            try:
                self._announce_push()
                self._ask("begin", "hello", self._hello())
            except TargetError:
                if self._group is not None or time.monotonic() > deadline:
                    raise
        if self._group is None:
            self._gather(layout, deadline)
            self._ask("begin", "hello", self._hello())
            assert self._memory is not None
            self._ask("begin", "layout", self._described(layout, self._memory.describe()[0]))
        if (num_came := self._store.add(f"{self._invitation['name']}/engines", 0)) > self._num_engines:
            problem = f"{num_came} engines came to {self.listen()}, but num_engines is {self._num_engines}"
            raise TargetError.at("begin", problem)

    def _gather(self, layout: WireLayout, deadline: float) -> None:
        """Makes a group when all engines have come."""
        name = f"fsdp2x-{secrets.token_hex(8)}"
        invitation = {"name": name, "size": self._num_engines + 1, "backend": self._backend}
        self._invitation = {**invitation, "timeout_s": self._timeout_s}
        reason = ""
        try:
            address = self.listen()
            self._group = engine_group.EngineGroup(invitation, (self._host, self._store.port))
            self._memory = BucketMemory(torch.empty(room_for(layout), dtype=torch.uint8, device=self._group.device))
            self._announce_push()
            reason = f"not all of {self._num_engines} engines came to {address}, with a GroupReceiver that polls: "
            self._group.join(0, deadline, lambda: self._store.check([f"{name}/refused"]))
        except (OSError, WireError) as error:
            if reason and self._store.check([f"{name}/refused"]):
                reason = self._store.get(f"{name}/refused").decode(errors="replace") + "; "
            self._leave()
            raise TargetError.at("begin", f"{reason}{error}") from error

    def _announce_push(self) -> None:
        """Makes engines listen to requests."""
        self._num_pushes += 1
        text = json.dumps({**self._invitation, "num_pushes": self._num_pushes})
        self._store.set(engine_group.CURRENT, text)

    def _tell(self, phase: str, kind: str, body: dict[str, Any]) -> None:
        assert self._group is not None, "made when opening"
        deadline = time.monotonic() + self._timeout_s
        try:
            self._group.ask(kind, body, deadline)
            if kind == "bucket":
                assert self._memory is not None, "made when opening"
                self._group.broadcast_bucket(self._memory.bytes[: body["bytes"]], deadline)
        except WireError as error:
            self._leave()
            raise TargetError.at(phase, str(error)) from error

    def _hear(self, phase: str) -> None:
        assert self._group is not None, "made when opening"
        deadline, reasons = time.monotonic() + self._timeout_s, []
        for rank in range(1, self._num_engines + 1):
            try:
                answer = self._group.hear(rank, deadline)
                if not answer["ok"]:
                    reasons.append(f"engine {rank} (pid {answer['pid']}) says: {answer['error']}")
            except (WireError, KeyError) as error:
                reasons.append(f"engine {rank}: {error}")
                self._leave()
                break
        if reasons:
            raise TargetError.at(phase, "; ".join(reasons))

    def abort(self, reason: str) -> None:
        self._delivered = None
        if self._group is not None and self._has_begun:
            with contextlib.suppress(TargetError):
                self._announce_push()  # those that have committed no longer listen
                self._ask("abort", "abort", {"reason": reason})
        self._leave()
        if self._has_begun and self._told is not None and self._told.adapter is None:
            torn = {"torn": self._invitation["name"], "reason": reason}  # for those that no longer hear the group
            self._store.set(engine_group.CURRENT, json.dumps(torn))

    def _leave(self) -> None:
        if self._group is not None:
            self._store.set(engine_group.CURRENT, engine_group.NO_GROUP)
            self._group.close()
            self._group = None
        super()._leave()

    def close(self) -> None:
        super().close()
        if self._store is not None:
            self._store.set(engine_group.CURRENT, engine_group.NO_MORE)
            time.sleep(3 * engine_group.LOOK_S)  # torch logs errors of engines that find the store gone
            self._store = None
