"""Sentences and cells of pages are short and plain. CONTRIBUTING.md has the rules, docs/glossary.md the terms.

Pages of docs/engine are for contributors and keep the terms of the code.
"""

import re

import pytest

from pages import ROOT, name_of, pages, tables
from test_texts import without_fences

MAX_WORDS, MAX_CELL = 35, 75
WORDS = re.compile(
    r"\b(nobody|whoever|beside|foretold|dear|anew|twins?|mends?|in silence|without a word|is told|are told|of ours|"
    r"of theirs|of hers|for good|held to|the way out)\b",
    re.IGNORECASE,
)
PAGES = {name_of(page): page for page in pages() if ROOT / "docs" in page.parents and "engine" not in page.parts}


def plain(text: str) -> str:
    """Prose without code and link targets."""
    return re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", text))


def sentences(text: str) -> list[str]:
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_fences(text))
    prose = [
        plain(" ".join(block.split())) for block in blocks if not block.lstrip().startswith(("|", "#", "-" * 3, ":"))
    ]
    return [one for block in prose for one in re.split(r"(?<=[.!?:])\s+", block)]


@pytest.mark.parametrize("name", PAGES)
def test_sentences_are_short_and_plain(name):
    text = PAGES[name].read_text()
    assert [one for one in sentences(text) if len(re.findall(r"[A-Za-z'-]+", one)) > MAX_WORDS] == []
    assert WORDS.findall(plain(without_fences(text))) == []


@pytest.mark.parametrize("name", PAGES)
def test_cells_hold_values_and_names(name):
    rows = [cell for rows in tables(PAGES[name].read_text()).values() for row in rows for cell in row[1:]]
    assert [cell for cell in rows if len(re.sub(r"[`\[\]]", "", plain(cell))) > MAX_CELL] == []


def test_a_bent_page_is_found():
    assert sentences("Short. " + "word " * 40 + ".")[1].count("word") == 40
    assert WORDS.search("A rank is told about it.")
