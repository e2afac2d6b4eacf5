"""What judges runs on a GPU, without one: the page of claims, and readings of traces by kernels and streams."""

from pathlib import Path

from harness import programs
from one_gpu import device_work

ROOT = Path(__file__).resolve().parents[3]
TESTS = """
import pytest

shows = pytest.mark.shows

@shows("kernels")
def test_that_passes(): pass

@shows("collectives")
@pytest.mark.parametrize("place", ["cuda", "streams"])
def test_that_fails_on_the_device(place): assert place == "streams", "wrong on the device"

@shows("worlds")
@pytest.mark.parametrize("place", [pytest.param("cuda", marks=pytest.mark.skip(reason="no such device")), "streams"])
def test_that_is_rehearsed(place): pass
"""
# The plugin alone: the project's conftest belongs to its own tests.
CONFTEST = f"""
import sys
from pathlib import Path
sys.path.append({str(ROOT / "tests" / "gpu")!r})
from verdict import Verdict
def pytest_configure(config):
    config.addinivalue_line("markers", "shows(claim): a claim")
    config.pluginmanager.register(Verdict(Path(__file__).with_name("page.txt")))
"""


def test_a_claim_is_held_by_the_device_alone(tmp_path):
    (tmp_path / "test_made_up.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    done = programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path)
    page = (tmp_path / "page.txt").read_text()
    assert "VERDICT" in done.stdout
    results = {line.partition(":")[0]: " ".join(line[90:].split()) for line in page.splitlines() if ": " in line}
    assert results["kernels"] == "held 1"
    assert results["collectives"] == "FAILED 1 of 1 held 1"
    assert results["worlds"] == "not shown held 1"
    assert "AssertionError: wrong on the device" in page and "1 x no such device" in page


def sources(*folders: str) -> dict[str, str]:
    return {str(path): path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}


def test_every_claim_has_a_test(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    from verdict import CLAIMS

    tests = "".join(sources("tests/gpu").values())
    assert [claim for claim in CLAIMS if f'shows("{claim}")' not in tests] == []


def event(cat: str, name: str, start: float = 0.0, dur: float = 1.0, stream: int = 7) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "args": {"stream": stream}}


TRACE = {
    "traceEvents": [
        event("kernel", "gemm", 0, 10),
        event("kernel", "gemm", 12, 10),
        event("kernel", "cast", 5, 3, stream=20),
        event("kernel", "cast", 9, 4, stream=20),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 5, stream=20),
        event("gpu_memset", "Memset (Device)", 40, 1),
        event("cuda_runtime", "cudaLaunchKernel"),
        event("cpu_op", "aten::mm"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
}


def test_work_of_a_trace_is_counted_and_its_overlap_measured():
    work = device_work.work_of(TRACE)
    assert device_work.counts(work) == {"kernels": 4, "copies": 1, "fills": 1, "all": 6}
    compute = device_work.compute_stream(work)
    gemms = [one for one in work if one.stream == compute and one.kind == "kernels"]
    casts = [one for one in work if one.stream != compute and one.kind == "kernels"]
    assert compute == 7 and device_work.busy_us(gemms) == 20 and device_work.busy_us(casts) == 7
    # 5..8 and 9..10 overlap the first product, 12..13 the second.
    assert device_work.shared_us(casts, gemms) == device_work.shared_us(gemms, casts) == 5
    assert device_work.shared_us(casts, []) == 0
