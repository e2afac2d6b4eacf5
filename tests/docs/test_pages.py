"""Pages run as they stand: programs, commands, and what they print. Those of docs/engine name files that exist."""

import doctest
import re

import pytest

from pages import ROOT, fences, name_of, pages, run_page

# The others take longer than everyone should wait.
SHORT = {"README.md"}
RUN = {name_of(page): page for page in pages() if any(fence.language == "sh" for fence in fences(page.read_text()))}


def _marked(name: str):
    return pytest.param(name, marks=() if name in SHORT else pytest.mark.full)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [_marked(name) for name in RUN])
def test_a_page_runs_as_it_stands(name, tmp_path):
    assert run_page(RUN[name].read_text(), tmp_path) > 0


# ---- docs/engine

ENGINE_PAGES = sorted((ROOT / "docs/engine").glob("*.md"))
PATHS = re.compile(r"`((?:csrc|python|tests|docs|benchmarks|cmake)/[\w/.*{},]+)`")


def missing(text: str) -> list[str]:
    found = []
    for name in PATHS.findall(text):
        stem, *endings = re.split(r"\{([^}]*)\}", name)
        names = [stem + ending + "".join(endings[1:]) for ending in endings[0].split(",")] if endings else [name]
        found += [one for one in names if not list(ROOT.glob(one))]
    return found


@pytest.mark.parametrize("page", ENGINE_PAGES, ids=lambda page: page.stem)
def test_examples_hold(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


@pytest.mark.parametrize("page", [*ENGINE_PAGES, ROOT / "csrc/README.md"], ids=lambda page: page.stem)
def test_pages_name_files_that_are_there(page):
    assert missing(page.read_text()) == []
