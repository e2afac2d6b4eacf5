"""One GPU: kernels, copies, and host waits of a steady step, from a profiler's trace, against FSDP2."""

import pytest

import one_gpu
from one_gpu import measured, needs_kernels

pytestmark = [one_gpu.needs_gpu, pytest.mark.shows("launches")]

# A single rank: gradients to the pool, and before that, weights with a cast to the slot in forward and in backward.
MOST_KERNELS = 3


@pytest.fixture(scope="module")
def results() -> list[dict]:
    needs_kernels()
    found = measured("bench_units.py", "units", "--quick")
    if not any(result["launches"]["stock"]["all"] for result in found):
        pytest.skip("torch's profiler records no kernels here")
    return found


def test_a_unit_is_a_handful_of_kernels(results):
    for result in results:
        assert 0 < result["launches"]["fsdp2x"]["kernels"] <= MOST_KERNELS, result
        assert result["launches"]["fsdp2x"]["copies"] == result["launches"]["fsdp2x"]["fills"] == 0, result


def test_at_most_half_of_what_stock_launches(results):
    for result in results:
        assert 2 * result["launches"]["fsdp2x"]["all"] <= result["launches"]["stock"]["all"], result


@pytest.mark.shows("no waits")
def test_the_host_never_waits_and_takes_no_memory(results):
    """The unsharded model's trace ends with a wait, and fsdp2x's trace has no other."""
    for result in results:
        assert result["waits"]["fsdp2x"] == result["waits"]["unsharded"], result
