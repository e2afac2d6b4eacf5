"""The harness itself: reuse, tracebacks, hangs, deaths and logs. Bodies that must fail run through private pools."""

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import DistributedTestError, RankPool, dist_run, distributed, programs
from harness.context import Body
from harness.pool import check
from harness.shares import outgrown
from harness.tables import thin_out


def body_pid(ctx):
    return os.getpid()


def body_raise_on_one(ctx):
    print(f"rank {ctx.rank} was here")
    if ctx.rank == 1:
        value = 3
        assert value == 4


def body_hang_on_one(ctx):
    while ctx.rank == 0:
        time.sleep(0.1)


def body_die(ctx):
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def body_unpicklable(ctx):
    return lambda: None


def body_allreduce(ctx, value):
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([float(value + ctx.rank)])
    dist.all_reduce(tensor)
    return tensor.item()


@pytest.fixture
def pool():
    pool = RankPool(2)
    assert all(os.fstat(log.fileno()).st_nlink == 0 for log in pool._logs), "a killed pytest would leave them"
    yield pool
    pids = pool.pids
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def run(pool, body, *arguments, timeout=30.0):
    return pool.run(Body.of(body), "fsdp2x", {}, arguments, {}, timeout)


@distributed(world_sizes=(1, 2))
@pytest.mark.parametrize("value", [1, 5])
def test_body_runs_on_every_rank(ctx, value):
    expected = sum(value + rank for rank in range(ctx.world))
    assert body_allreduce(ctx, value) == expected
    assert int(os.environ["RANK"]) == ctx.rank


def test_processes_are_reused(pool):
    first = [outcome.value for outcome in run(pool, body_pid)]
    assert first == [outcome.value for outcome in run(pool, body_pid)] == pool.pids
    assert not pool.broken and os.getpid() not in first


def test_failure_has_the_ranks_traceback_and_log(pool):
    outcomes = run(pool, body_raise_on_one)
    assert [outcome.status for outcome in outcomes] == ["ok", "fail"] and pool.broken
    with pytest.raises(DistributedTestError) as error:
        check(outcomes, "body")
    message = str(error.value)
    assert "rank 1 fail" in message and "assert 3 == 4" in message  # with pytest's values
    assert "rank 1 was here" in message and "body_raise_on_one" in message
    assert "rank 0 was here" not in message


def test_a_hang_ends_with_the_stack(pool):
    started = time.monotonic()
    outcomes = run(pool, body_hang_on_one, timeout=1.0)
    assert [outcome.status for outcome in outcomes] == ["hung", "ok"] and pool.broken
    assert "body_hang_on_one" in outcomes[0].log  # faulthandler's dump
    assert time.monotonic() - started < 10


def test_a_dead_rank_is_named(pool):
    outcomes = run(pool, body_die)
    assert outcomes[1].status == "died" and outcomes[1].exit_code == -signal.SIGKILL
    with pytest.raises(DistributedTestError, match="rank 1 died"):
        check(outcomes, "body")


def test_unpicklable_result_is_a_failure_and_not_a_hang(pool):
    outcomes = run(pool, body_unpicklable)
    assert [outcome.status for outcome in outcomes] == ["fail", "fail"]
    assert "cannot be sent" in outcomes[0].value


def test_dist_run_checks_exit_codes():
    outcomes = dist_run(body_die, 2, expect_exit={1: -signal.SIGKILL})
    assert outcomes[0].value == "survived" and outcomes[0].exit_code == 0
    with pytest.raises(DistributedTestError, match="rank 1: success expected"):
        dist_run(body_die, 2)
    with pytest.raises(DistributedTestError, match="rank 0: exit code -9 expected"):
        dist_run(body_allreduce, 1, 1, expect_exit={0: -9})


SHOUT = "import os, sys; print(os.environ['NAME'], sys.argv[1:], __name__); sys.exit(sys.argv[1])"


def test_a_forked_program_is_one_of_its_own():
    done = programs.run("-c", SHOUT, "a b", env=programs.environment(NAME="here"))
    assert (done.returncode, done.stdout, done.stderr) == (1, "here ['a b'] __main__\n", "a b\n")
    done = programs.run("-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -signal.SIGKILL and "NAME" not in os.environ
    inner = "[sys.executable, '-c', 'import sys; sys.exit(5)']"
    nested = f"import subprocess, sys; sys.exit(subprocess.run({inner}).returncode)"
    assert programs.run("-c", nested).returncode == 5
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run("-c", "import time; time.sleep(60)", timeout=0.2)


class Case:
    """The part of a pytest item that `thin_out` uses."""

    path, originalname = "file", "test"

    def __init__(self, names, **params):
        self.names, self.callspec = set(names), SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name if name in self.names else None

    add_marker = property(lambda self: self.names.add)


@pytest.mark.parametrize(("names", "num"), [(("each_pair",), 9), ((), 3)])
def test_values_of_two_arguments_meet(names, num):
    axes = {"world": (1, 2, 3), "kind": ("a", "b", "c"), "flag": (True, False)}
    cases = [Case(names, **dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]
    thin_out(cases)
    stay = [case.callspec.params for case in cases if "full" not in case.names]
    assert len(stay) == num
    for one, other in itertools.combinations(axes, 2):
        met = {(case[one], case[other]) for case in stay}
        assert (met == set(itertools.product(axes[one], axes[other]))) == bool(names)
        assert {value for value, _ in met} == set(axes[one]) and {value for _, value in met} == set(axes[other])


@pytest.mark.parametrize(("name", "worlds"), [("each_world", {1, 2, 3, 4}), ("none", {1, 2, 3})])
def test_the_smallest_of_the_larger_worlds_stays(name, worlds):
    cases = [Case((name,), world=world) for world in (1, 2, 3, 4)]
    thin_out(cases)
    assert {case.callspec.params["world"] for case in cases if "full" not in case.names} == worlds


def test_a_folder_that_outgrows_its_share_is_named():
    recorded = {"dist/io": 0.8, "unit/io": 0.2}
    assert outgrown({"dist/io": 60.0, "unit/io": 40.0}, recorded) == [
        "unit/io: 40.0% of the time of all tests, recorded are 20.0%"
    ]
    assert outgrown({"dist/io": 8.0, "unit/io": 2.0, "new": 0.1}, recorded) == []
