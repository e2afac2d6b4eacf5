"""README.md and the pages of docs/ run as they stand: programs, commands and what they print."""

import pytest

from pages import fences, name_of, pages, run_page, unseen

# The others take longer than everyone should wait.
SHORT = {"README.md"}
RUN = {name_of(page): page for page in pages() if any(fence.language == "sh" for fence in fences(page.read_text()))}


def _marked(name: str):
    return pytest.param(name, marks=() if name in SHORT else pytest.mark.full)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [_marked(name) for name in RUN])
def test_a_page_runs_as_it_stands(name, tmp_path):
    assert run_page(RUN[name].read_text(), tmp_path) > 0


def test_the_readme_and_the_quick_start_are_run():
    assert {*SHORT, "docs/quickstart.md"} <= set(RUN)


PAGE = """
```python title="script.py"
print("loss 0.5")
print("7 units")
```

```sh
python script.py
```

```text
loss 0.25
...
7 units
```
"""


def test_a_page_that_does_not_hold_is_found(tmp_path):
    assert run_page(PAGE, tmp_path) == 1
    for old, new in (
        ('print("7', 'print("8'),
        ("script.py\n```\n\n```text", "other.py\n```\n\n```text"),
        ("...\n7", "8"),
    ):
        with pytest.raises(AssertionError):
            run_page(PAGE.replace(old, new), tmp_path)


def test_lines_are_compared_in_their_order():
    assert unseen("a 1.5\nb\n", "x\na 2.25\nb\n") == []
    assert unseen("b\na\n", "a\nb\n") == ["a"]
