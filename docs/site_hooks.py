"""Adds to the site: benchmarks, changelog, messages, commands, settings, all names of the API, and plain docstrings."""

from __future__ import annotations

import importlib
import posixpath
import re
import subprocess
import sys
from pathlib import Path

import messages
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import reference
from fsdp2x.train.cli import make_parser
from fsdp2x.train.config import list_keys

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "benchmarks.md": "benchmarks/README.md",
    "benchmarks-method.md": "benchmarks/METHOD.md",
    "benchmarks-tables.md": "benchmarks/results/README.md",
    "changelog.md": "CHANGELOG.md",
}
# Pages link to the repository's files, so that links also work where the repository is browsed.
ON_SITE = {source: page for page, source in SOURCES.items()} | {"benchmarks/plots/": "plots/"}
LINK = re.compile(rf"\]\(((?:\.\./)*)\.\./({'|'.join(map(re.escape, ON_SITE))})")
INNER = re.compile(r"\]\((?!http)([\w./-]+\.md)")  # of pages that are not in docs
ALL = re.compile(r"^::: (\S+)\.\*$", flags=re.MULTILINE)  # the names of a module
NAME = re.compile(r"^::: (\S+)(?:\n +options:\n +heading: (\S+))?", flags=re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|attr|mod):(?=<code>)")


def on_files(files: Files, config) -> Files:
    """Adds pages and pictures whose source is elsewhere in the repository."""
    pages = {page: _page_of(source) for page, source in SOURCES.items()}
    tables = [sys.executable, ROOT / "benchmarks/report.py"]
    pages["benchmarks-tables.md"] += "\n" + subprocess.run(tables, check=True, capture_output=True, text=True).stdout
    pages["messages.md"] = messages.page(ROOT / "python/fsdp2x", ROOT / "csrc")
    pages["cli.md"] = reference.commands(make_parser())
    pages["settings.md"] = reference.settings(list_keys())
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "benchmarks/plots").iterdir()):
        files.append(File.generated(config, f"plots/{picture.name}", abs_src_path=str(picture)))
    return files


def _page_of(source: str) -> str:
    """A page whose file is elsewhere in the repository, with links as seen from the site's root."""

    def moved(link: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1]))
        return f"]({ON_SITE.get(target, target.removeprefix('docs/'))}"

    return INNER.sub(moved, (ROOT / source).read_text())


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Links to the site's page of a file instead of the file. Pages of the API get the names of their modules."""
    markdown = ALL.sub(_all_of, markdown)
    if page.file.src_uri == "api/index.md":
        markdown += "".join(map(_names_of, re.findall(r"^\| \[(.+)\]\((.+)\) \|", markdown, flags=re.MULTILINE)))
    return LINK.sub(lambda found: f"]({found[1]}{ON_SITE[found[2]]}", markdown)


def _all_of(module: re.Match) -> str:
    return "\n\n".join(f"::: {module[1]}.{name}" for name in importlib.import_module(module[1]).__all__)


def _names_of(linked: tuple[str, str]) -> str:
    title, file = linked
    found = NAME.findall(ALL.sub(_all_of, (ROOT / "docs/api" / file).read_text()))
    items = [f"- [`{heading or name}`]({file}#{name})" for name, heading in found]
    return "\n".join([f"\n## {title}\n", *items, ""])


def on_page_content(html: str, **_) -> str:
    """Docstrings name others as Sphinx does; the site shows the names."""
    return ROLE.sub("", html)
