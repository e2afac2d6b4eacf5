"""nvcc's kernels without a GPU: the bodies of tests/cpp run the PTX of every architecture, translated to C++."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import ptx_build
import ptx_coverage
import pytest

ORDERS = ("forward", "reverse", "random")


@pytest.fixture(scope="session", autouse=True)
def built():
    try:
        for architecture in ptx_build.ARCHITECTURES:
            ptx_build.entries(architecture)
        for name in ptx_build.PROGRAMS:
            ptx_build.program(name)
    except ptx_build.NotBuilt as reason:
        pytest.skip(str(reason))


def passed(result: subprocess.CompletedProcess) -> None:
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "[  PASSED  ]" in result.stdout and "SKIPPED" not in result.stdout, result.stdout[-2000:]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("architecture", ptx_build.ARCHITECTURES)
def test_bodies(architecture, order):
    kernels = ptx_build.library(architecture)
    with ThreadPoolExecutor(2) as pool:
        for result in pool.map(lambda name: ptx_build.run(name, kernels, order=order), ptx_build.PROGRAMS):
            passed(result)


@pytest.mark.parametrize("program", ptx_build.PROGRAMS)
def test_no_access_beyond_memory(program):
    """Runs under AddressSanitizer, with the guards around every buffer forbidden."""
    kernels = ptx_build.library("sm_90", sanitize=True)
    passed(ptx_build.run(program, kernels, sanitize=True))


@pytest.mark.parametrize("architecture", ptx_build.ARCHITECTURES)
def test_bodies_execute_the_kernels(architecture):
    """Checks each instantiation. The report is `python tests/ptx/ptx_coverage.py`."""
    found = ptx_coverage.measure(architecture)
    print(ptx_coverage.table(found))
    short = [entry.title for entry, done in found if sum(done) < ptx_coverage.LEAST * len(done)]
    assert not short, ptx_coverage.table(found)


@pytest.mark.parametrize("architecture", ptx_build.ARCHITECTURES)
def test_floats_are_written_in_whole_sectors(architecture):
    """No thread writes two adjacent words: a warp would then fill sectors by halves. AdamW's vectors are as long as
    those of its 16-bit parameters."""
    for entry in ptx_build.entries(architecture):
        adjoining = [i for i in entry.instructions if i.parts[0] == "st" and i.operands[0].endswith("+16]")]
        assert not adjoining or entry.title.startswith(("AdamWBody", "coded_adamw_kernel")), (
            entry.title,
            [str(i) for i in adjoining],
        )
