"""Pages run as they stand: programs, commands, and what they print."""

import pytest

from pages import fences, name_of, pages, run_page

# The others take longer than everyone should wait.
SHORT = {"README.md"}
RUN = {name_of(page): page for page in pages() if any(fence.language == "sh" for fence in fences(page.read_text()))}


def _marked(name: str):
    return pytest.param(name, marks=() if name in SHORT else pytest.mark.full)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [_marked(name) for name in RUN])
def test_a_page_runs_as_it_stands(name, tmp_path):
    assert run_page(RUN[name].read_text(), tmp_path) > 0
