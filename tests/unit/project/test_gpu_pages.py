"""Pages at the end of GPU runs: they list what holds, failed, was missed, or was not shown."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from harness import programs

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


def pytest_over(folder: Path, source: str, *options: str) -> subprocess.CompletedProcess:
    (folder / "test_made_up.py").write_text(source)
    # The plugin alone: the project's conftest belongs to its own tests.
    (folder / "conftest.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        f"sys.path.append({str(ROOT / 'tests' / 'gpu')!r})\n"
        "from verdict import Verdict\n"
        "def pytest_configure(config):\n"
        "    config.addinivalue_line('markers', 'shows(claim): a claim')\n"
        "    config.pluginmanager.register(Verdict(Path(__file__).with_name('page.txt')))\n"
    )
    return programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, *options)


def test_a_claim_is_held_by_the_device_alone(tmp_path):
    done = pytest_over(tmp_path, TESTS)
    page = (tmp_path / "page.txt").read_text()
    assert "VERDICT" in done.stdout
    results = {line.partition(":")[0]: " ".join(line[90:].split()) for line in page.splitlines() if ": " in line}
    assert results["kernels"] == "held 1"
    assert results["collectives"] == "FAILED 1 of 1 held 1"
    assert results["worlds"] == "not shown held 1"
    assert "AssertionError: wrong on the device" in page and "1 x no such device" in page
    assert "1 held on this device, 1 FAILED, 20 were not shown" in page


def test_every_claim_has_a_test():
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "gpu").rglob("test_*.py"))
    sys.path.append(str(ROOT / "tests" / "gpu"))
    try:
        from verdict import CLAIMS
    finally:
        sys.path.pop()
    assert [claim for claim in CLAIMS if f'shows("{claim}")' not in sources] == []


def sources(*folders: str) -> dict[str, str]:
    return {str(path): path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}


def test_kernels_are_counted_by_names_that_they_have():
    """`"run_tiles" in name` over the names of a trace."""
    kernel = r"__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\("
    device = (ROOT / "csrc" / "kernels" / "cuda" / "device").iterdir()
    named = {name for path in device for name in re.findall(kernel, path.read_text())}
    counted = {
        (node.left.value, path)
        for path, source in sources("tests/gpu", "tests/support", "benchmarks/gpu").items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Constant)
        and isinstance(node.ops[0], ast.In)
        and getattr(node.comparators[0], "id", "") == "name"
    }
    assert len(named) >= 9 and len({name for name, _ in counted}) >= 2
    assert [one for one in counted if one[0] not in named] == []
