"""The pytest side: `distributed` turns a body into a test, `dist_run` starts fresh ranks inside an ordinary test."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest

from harness.context import Body
from harness.pool import START_TIMEOUT_S, DistributedTestError, Outcome, RankPool, check, report
from harness.session import current_session

DEFAULT_TIMEOUT_S = 60.0


def distributed(
    function: Callable | None = None,
    *,
    world_sizes: Sequence[int] = (2,),
    fresh: bool = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    only_fsdp2x: bool = False,
) -> Callable:
    """Runs the function on every rank of each world size. It takes a Context, then pytest's parametrized arguments.

    fresh: new processes for this test alone, if it breaks the process group. timeout: seconds for all ranks.
    only_fsdp2x: skipped under --impl torch, because only fsdp2x has this behavior.
    """

    def decorate(body: Callable) -> Callable:
        parameters = list(inspect.signature(body).parameters.values())
        if not parameters or parameters[0].name != "ctx":
            raise TypeError(f"{body.__qualname__}: the first argument of a distributed test must be named ctx")
        if any(parameter.name == "monkeypatch" for parameter in parameters):
            raise TypeError(
                f"{body.__qualname__}: the fixture monkeypatch does not undo its patches in the ranks, whose processes "
                "later tests reuse: use `with pytest.MonkeyPatch.context()`"
            )

        @pytest.mark.parametrize("world", world_sizes)
        @wraps(body)
        def test(request: pytest.FixtureRequest, world: int, **keywords: Any) -> None:
            if only_fsdp2x and request.config.getoption("--impl") == "torch":
                pytest.skip("upstream does not have this")
            session = current_session(request.config)
            failure = None
            try:
                reason = session.run_test(Body.of(body), world, keywords, fresh=fresh, timeout=timeout)
            except DistributedTestError as error:
                failure = str(error)  # holds the ranks' tracebacks; pytest's own would hide them
            if failure is not None:
                pytest.fail(failure, pytrace=False)
            if reason is not None:
                pytest.skip(reason)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind) for name in ("request", "world")]
        test.__signature__ = inspect.Signature(own + parameters[1:])
        test.distributed_body = body
        # The ranks' own timeout has a better report than pytest's, which must not come first.
        return pytest.mark.timeout(timeout + 2 * START_TIMEOUT_S)(test) if timeout > DEFAULT_TIMEOUT_S else test

    return decorate if function is None else decorate(function)


def dist_run(
    function: Callable,
    world: int,
    *arguments: Any,
    timeout: float = DEFAULT_TIMEOUT_S,
    expect_exit: dict[int, int] | None = None,
    impl: str = "fsdp2x",
    fresh: bool = True,
) -> list[Outcome]:
    """Runs `function(ctx, *arguments)` on `world` fresh processes and returns the outcome of each rank.

    fresh=False: uses the processes that tests share. There no rank may die, and no result depends on earlier tests.

    `function` is at the top level of its file; `Outcome.value` is what it returned. A rank in `expect_exit` must end
    with that exit code (-9: killed by SIGKILL) before it returns; every other rank must succeed. Otherwise
    DistributedTestError.
    """
    session = current_session()
    if not fresh:
        outcomes = session.run(Body.of(function), world, arguments, {}, fresh=False, timeout=timeout)
        check(outcomes, f"{function.__qualname__} on {world} ranks")
        return outcomes
    expected = expect_exit or {}
    pool = RankPool(world)
    try:
        outcomes = pool.run(Body.of(function), impl, {}, arguments, {}, timeout, tolerate=set(expected))
    finally:
        codes = pool.close()
    wrong = []
    for outcome in outcomes:
        want = expected.get(outcome.rank)
        fine = outcome.status == "ok" if want is None else outcome.status == "died" and outcome.exit_code == want
        if not fine:
            wrong.append(f"rank {outcome.rank}: {'success' if want is None else f'exit code {want}'} expected")
        if outcome.exit_code is None:
            outcome.exit_code = codes[outcome.rank]
    if wrong:
        raise DistributedTestError(report(f"{function.__qualname__}: {'; '.join(wrong)}", outcomes))
    return outcomes
