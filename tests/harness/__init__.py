"""The one fixture that starts ranks: real processes over gloo, with timeouts, per-rank logs and full tracebacks.

    @distributed(world_sizes=(1, 2, 3))
    def test_something(ctx, other_parameter): ...        # this body runs on every rank

See tests/README.md; `decorator` is the pytest side, `pool` the parent of the processes, `worker` what runs in them.
"""

from harness.context import Context
from harness.decorator import dist_run, distributed
from harness.pool import DistributedTestError, Outcome, RankPool

__all__ = ["Context", "DistributedTestError", "Outcome", "RankPool", "dist_run", "distributed"]
