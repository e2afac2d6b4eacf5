"""The pages of docs/engine: their examples hold, and the files that they name are there."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs/engine").glob("*.md"))
PATHS = re.compile(r"`((?:csrc|python|tests|docs|benchmarks|cmake)/[\w/.*{},]+)`")


def missing(text: str) -> list[str]:
    found = []
    for name in PATHS.findall(text):
        stem, *endings = re.split(r"\{([^}]*)\}", name)
        names = [stem + ending + "".join(endings[1:]) for ending in endings[0].split(",")] if endings else [name]
        found += [one for one in names if not list(ROOT.glob(one))]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_hold(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


@pytest.mark.parametrize("page", [*PAGES, ROOT / "csrc/README.md"], ids=lambda page: page.stem)
def test_pages_name_files_that_are_there(page):
    assert missing(page.read_text()) == []


def test_a_file_that_is_not_there_is_found():
    assert missing("see `csrc/core/layout.{hpp,cu}` and `tests/cpp/test_*.cpp`") == ["csrc/core/layout.cu"]
