"""Bodies of distributed tests on cases that hypothesis draws."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.context import Body
from harness.pool import DistributedTestError
from harness.session import current_session


def drawn_settings(num: int, *, shrink: bool = False) -> settings:
    """Derandomized: the same examples in each run, and in each rank of torchrun."""
    phases = (Phase.explicit, Phase.generate, *((Phase.shrink,) if shrink else ()))
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(
        max_examples=num, derandomize=True, database=None, deadline=None, phases=phases, suppress_health_check=checks
    )


def _on_all_ranks(request: pytest.FixtureRequest, world: int, body: Callable, **keywords) -> None:
    """One example: like a distributed test, but called once per drawn case."""
    session = current_session(request.config)
    failure = None
    try:
        reason = session.run_test(Body.of(body), world, keywords, fresh=False, timeout=60.0)
    except DistributedTestError as error:
        failure = str(error)
    if failure is not None:
        raise AssertionError(f"{keywords}\n{failure}")
    if reason is not None:
        pytest.skip(reason)


def explore(
    request: pytest.FixtureRequest, world: int, body: Callable, num: int, *, shrink: bool, cases: st.SearchStrategy
) -> None:
    """Calls `body(ctx, case=...)` on all ranks with `num` cases, the same ones in each run."""

    @drawn_settings(num, shrink=shrink)
    @given(case=cases)
    def one_after_the_other(case) -> None:
        _on_all_ranks(request, world, body, case=case)

    one_after_the_other()
