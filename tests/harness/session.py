"""Objects that live as long as the pytest session: the idle pools."""

from typing import Any

import pytest

from harness.context import Body
from harness.pool import Outcome, RankPool, check

# Idle ranks kept between tests, over all pools: worlds of 1 to 4. The least recently used pools go first.
_MAX_IDLE_RANKS = 10
_current: "Session | None" = None


def current_session(config: pytest.Config | None = None) -> "Session":
    """The session's one instance; made by the first distributed test."""
    global _current
    if _current is None:
        impl = config.getoption("--impl") if config is not None else "fsdp2x"
        _current = Session(impl)
    return _current


def close_session() -> None:
    """Ends every process of the session. conftest calls it when pytest is done."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


class Session:
    """Bodies run in pools of processes that are reused as long as nothing goes wrong."""

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
            if fresh or pool.is_spent:
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
