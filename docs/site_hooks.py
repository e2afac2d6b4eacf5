"""What the site adds to the pages of docs/: benchmarks/, the changelog, every message; and names in docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import messages
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROLE = re.compile(r":(?:func|class|meth|attr|mod):(?=<code>)")


def on_files(files: Files, config) -> Files:
    """Adds pages and pictures that have their home elsewhere in the repository."""
    for page, source in (("benchmarks.md", "benchmarks/README.md"), ("changelog.md", "CHANGELOG.md")):
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "messages.md", content=messages.page(ROOT / "python/fsdp2x", ROOT / "csrc")))
    picture = ROOT / "benchmarks/plots/overview.png"
    files.append(File.generated(config, "plots/overview.png", abs_src_path=str(picture)))
    return files


def on_page_content(html: str, **_) -> str:
    """Docstrings name others as Sphinx does; the site shows the names."""
    return ROLE.sub("", html)
