"""The process group of ``Sglang(group=...)``: SGLang's own weights-update group, whose rank 0 is the trainer's.

A bucket is one broadcast of bytes, ``load_format="flattened_bucket"``: tensors without gaps, which both sides lay out
by their dtypes and shapes in the order of the request. That order is by itemsize, largest first: each tensor begins
where views of its dtype may.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import torch

from fsdp2x.sync.engine import WireError
from fsdp2x.sync.engine_group import BroadcastGroup, common_host
from fsdp2x.sync.engine_tcp import own_host
from fsdp2x.sync.targets.base import PushBucket
from fsdp2x.sync.targets.routes import ControlError, Routes, require_success


class UpdateGroup:
    """Lives as long as a push: a server that was started anew knows none, and would end at a bucket of one."""

    def __init__(
        self, servers: Sequence[Routes], counts: Sequence[int], backend: str, pool: ThreadPoolExecutor
    ) -> None:
        """All workers join. ``counts``: of each server's workers; ``pool``: a thread for each server.

        Raises:
            ControlError: a server refuses, or they did not meet in time.
        """
        self._servers, self._pool = servers, pool
        timeout_s = min(server.timeout_s for server in servers)
        deadline = time.monotonic() + timeout_s
        try:
            hosts = [own_host(urlsplit(server.name).hostname or "").strip("[]") for server in servers]
            self._group, invitation = BroadcastGroup.opened(backend, sum(counts), common_host(hosts), timeout_s)
        except (OSError, WireError) as error:
            raise ControlError(f"no group with {servers[0].name}: {error}") from error
        self._name = invitation["name"]
        about = {"master_port": invitation["port"], "world_size": invitation["size"]}
        about |= {"group_name": self._name, "backend": backend}
        answers, rank = [], 1
        for server, host, count in zip(servers, hosts, counts, strict=True):
            body = {**about, "master_address": host, "rank_offset": rank}
            answers.append(self._ask(server, "/init_weights_update_group", body))
            rank += count
        try:
            self._group.join(True, deadline, lambda: any(map(_has_failed, answers)))
            reasons = [str(error) for error in (answer.exception() for answer in answers) if error is not None]
        except WireError as error:
            reasons = [str(answer.exception()) for answer in answers if _has_failed(answer)] + [str(error)]
        if reasons:
            self.abandon()
            raise ControlError("; ".join(reasons))

    def send(self, bucket: PushBucket) -> list[Future]:
        """Broadcasts the tensors; the answers of all servers, whose workers load them, and what failed besides."""
        deadline = time.monotonic() + min(server.timeout_s for server in self._servers)
        tensors = sorted(zip(bucket.specs, bucket.tensors, strict=True), key=lambda pair: -pair[0].dtype.itemsize)
        body: dict[str, Any] = {
            "names": [spec.name for spec, _ in tensors],
            "dtypes": [str(spec.dtype).removeprefix("torch.") for spec, _ in tensors],
            "shapes": [list(spec.shape) for spec, _ in tensors],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
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
        """Ends the group everywhere at the same time, when what was sent has arrived.

        Raises:
            ControlError: a server does not.
        """
        ends = self._end()
        self._group.end(time.monotonic() + min(server.timeout_s for server in self._servers))
        for end in ends:
            end.result()

    def abandon(self) -> None:
        """Ends the group here, which ends what servers wait for over gloo, and there, where they still can."""
        self._group.close()
        for end in self._end():
            with contextlib.suppress(ControlError):
                end.result()

    def _end(self) -> list[Future]:
        body = {"group_name": self._name}
        return [self._ask(server, "/destroy_weights_update_group", body) for server in self._servers]

    def _ask(self, server: Routes, path: str, body: dict[str, Any]) -> Future:
        return self._pool.submit(_asked, server, path, body)


def _asked(server: Routes, path: str, body: dict[str, Any]) -> None:
    require_success(server, server.ask("POST", path, body=body))


def _has_failed(answer: Future) -> bool:
    return answer.done() and answer.exception() is not None
