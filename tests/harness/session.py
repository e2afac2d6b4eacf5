"""Objects that live as long as the pytest session: the idle pools, or torchrun's one process group."""

import os
from datetime import timedelta
from typing import Any

import pytest

from harness.context import GROUP_TIMEOUT, Body, Context, run_body
from harness.pool import DistributedTestError, Outcome, RankPool, check

# Idle ranks kept between tests, over all pools: worlds of 1 to 4. The least recently used pools go first.
_MAX_IDLE_RANKS = 10
_current: "Session | TorchrunSession | None" = None


def current_session(config: pytest.Config | None = None) -> "Session | TorchrunSession":
    """The session's one instance; made by the first distributed test."""
    global _current
    if _current is None:
        impl = config.getoption("--impl") if config is not None else "fsdp2x"
        _current = TorchrunSession(impl) if "TORCHELASTIC_RUN_ID" in os.environ else Session(impl)
    return _current


def close_session() -> None:
    """Ends every process of the session. conftest calls it when pytest is done."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


class Session:
    """Plain pytest: bodies run in pools of processes that are reused as long as nothing goes wrong."""

    under_torchrun = False

    def __init__(self, impl: str):
        self.impl = impl
        self.pools: list[RankPool] = []  # least recently used first

    def run_test(self, body: Body, world: int, keywords: dict[str, Any], *, fresh: bool, timeout: float) -> str | None:
        """Returns None or the reason to skip; raises DistributedTestError."""
        outcomes = self.run(body, world, (), keywords, fresh=fresh, timeout=timeout)
        return check(outcomes, f"{body.qualname} on {world} ranks")

    def run(
        self, body: Body, world: int, arguments: tuple, keywords: dict[str, Any], *, fresh: bool, timeout: float
    ) -> list[Outcome]:
        pool = RankPool(world) if fresh else self._pool(world)
        try:
            outcomes = pool.run(body, self.impl, {}, arguments, keywords, timeout)
            if any(outcome.has_diverged for outcome in outcomes) and not (fresh or pool.broken):
                pool.meet_again()
            return outcomes
        except BaseException:
            pool.broken = True
            raise
        finally:
            if fresh or pool.broken:
                self._retire(pool)

    def _pool(self, world: int) -> RankPool:
        pool = next((pool for pool in self.pools if pool.world == world), None)
        if pool is not None:
            self.pools.remove(pool)
        while self.pools and sum(other.world for other in self.pools) + world > _MAX_IDLE_RANKS:
            self._retire(self.pools[0])
        pool = pool or RankPool(world)
        self.pools.append(pool)
        return pool

    def _retire(self, pool: RankPool) -> None:
        if pool in self.pools:
            self.pools.remove(pool)
        pool.close()

    def close(self) -> None:
        while self.pools:
            self._retire(self.pools[0])


class TorchrunSession:
    """torchrun -m pytest: every rank runs pytest, and a body runs in this very process.

    Ranks agree on each test's result through the store. After a failure all of them join a new process group, so one
    rank's failure neither hangs the others nor leaves them out of step.
    """

    under_torchrun = True

    def __init__(self, impl: str):
        import torch
        import torch.distributed as dist

        self.impl = impl
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._store = dist.distributed_c10d._get_default_store()
        self._num_tests = 0

    def run_test(self, body: Body, world: int, keywords: dict[str, Any], *, fresh: bool, timeout: float) -> str | None:
        if fresh:
            return "needs fresh processes, which torchrun's world cannot give"
        if world != self.world:
            return f"needs {world} ranks, torchrun made {self.world}"
        self._num_tests += 1
        status, value = run_body(body.load(), Context(self.rank, world, self.impl), (), keywords)
        statuses = self._agree(status, timeout)
        if set(statuses) <= {"ok"}:
            return None
        if set(statuses) == {"skip"}:
            return value
        self._new_group()
        others = ", ".join(f"rank {rank}: {other}" for rank, other in enumerate(statuses))
        raise DistributedTestError(f"{body.qualname} on {world} ranks: {others}\n{value if status == 'fail' else ''}")

    def _agree(self, status: str, timeout: float) -> list[str]:
        prefix = f"harness/{self._num_tests}"
        self._store.set(f"{prefix}/{self.rank}", status)
        keys = [f"{prefix}/{rank}" for rank in range(self.world)]
        self._store.wait(keys, timedelta(seconds=timeout) + GROUP_TIMEOUT)
        return [self._store.get(key).decode() for key in keys]

    def _new_group(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
        store = dist.PrefixStore(f"harness/group{self._num_tests}", self._store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world, timeout=GROUP_TIMEOUT)

    def close(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
