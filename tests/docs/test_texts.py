"""README.md and docs/ only name existing files, names, keys, commands, and messages. Their sentences are short."""

import ast
import doctest
import functools
import importlib
import inspect
import re
import shlex
import sys

import pytest

from fsdp2x.train.cli import make_parser
from fsdp2x.train.config import SECTIONS, known_keys
from pages import CODE, ROOT, commands, fences, name_of, pages

PAGES = {name_of(page): page.read_text() for page in pages()}
PACKAGE = ROOT / "python/fsdp2x"
# Words of other programs that look like fsdp2x's keys.
NOT_KEYS = {
    "model.half", "model.module", "model.no_sync", "model.parameters", "model.reshard", "model.safetensors",
    "data.yaml", "model.to", "train.py", "train.yaml",
}  # fmt: skip
each_page = pytest.mark.parametrize("name", PAGES)


def without_fences(text):
    return re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)


def inline_code(text):
    return CODE.findall(without_fences(text))


# ---- links


def dead_links(name, text):
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(text)):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or anchor and file.is_file() and anchor not in anchors(file):
            found.append(target)
    return found


def anchors(file):
    text = file.read_text()
    titles = re.findall(r"^#+ (.*)$", without_fences(text), flags=re.MULTILINE)
    if file.resolve() == ROOT / "benchmarks/results/README.md":  # the site adds tables
        titles += re.findall(r'^    "\w+": "(.+)",$', (ROOT / "benchmarks/report.py").read_text(), flags=re.MULTILINE)
    names = re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles} | set(names)


BENCHMARK_PAGES = [str(page.relative_to(ROOT)) for page in sorted((ROOT / "benchmarks").rglob("*.md"))]


@pytest.mark.parametrize("name", [*PAGES, *BENCHMARK_PAGES])
def test_links_lead_somewhere(name):
    assert dead_links(name, (ROOT / name).read_text()) == []


# ---- names


def is_there(dotted):
    """Whether a dotted name below fsdp2x is a module, or an attribute of one, of a class, or of a dataclass."""
    parts = dotted.split(".")
    found = importlib.import_module("fsdp2x")
    for index, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:index]))
        except ImportError:
            return part in getattr(found, "__dataclass_fields__", {})
    return True


def unknown_names(text):
    code = inline_code(text) + [fence.text for fence in fences(text) if fence.language == "python"]
    names = {name for part in code for name in re.findall(r"(?<![\w./-])fsdp2x(?:\.[A-Za-z_]\w*)+", part)}
    return sorted(name for name in names if not is_there(name))


def unknown_keys(text):
    pattern = rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})\.[a-z_]+(?![\w(/.])"
    found = {key for code in inline_code(text) for key in re.findall(pattern, code)}
    return sorted(found - set(known_keys()) - NOT_KEYS)


@each_page
def test_names_and_keys_are_there(name):
    assert unknown_names(PAGES[name]) == []
    assert unknown_keys(PAGES[name]) == []


@each_page
def test_programs_are_programs(name):
    for fence in fences(PAGES[name]):
        if fence.language == "python" and not fence.text.startswith(">>>"):
            ast.parse(fence.text)


# ---- sentences

MAX_WORDS = 35
# docs/glossary.md has the terms to use instead. Pages of docs/engine keep the terms of the code.
WORDS = re.compile(
    r"\b(nobody|whoever|beside|foretold|dear|anew|twins?|mends?|in silence|without a word|is told|are told|of ours|"
    r"of theirs|of hers|for good|held to|the way out)\b",
    re.IGNORECASE,
)


def sentences(text):
    """The prose of a page in sentences, without code and link targets."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_fences(text))
    prose = [" ".join(block.split()) for block in blocks if not block.lstrip().startswith(("|", "#", "-" * 3, ":"))]
    plain = [re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", one)) for one in prose]
    return [sentence for one in plain for sentence in re.split(r"(?<=[.!?:])\s+", one)]


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/") and "/engine/" not in name])
def test_sentences_are_short_and_plain(name):
    found = sentences(PAGES[name])
    assert [one for one in found if len(re.findall(r"[A-Za-z'-]+", one)) > MAX_WORDS] == []
    assert [one for one in found if WORDS.search(one)] == []


# ---- commands that are shown and not run


def check_command(command):
    """Raises where a command names a target, an option or a module that there is not."""
    words = shlex.split(command)
    if words[0] == "make":
        target = next(word for word in words[1:] if "=" not in word)
        if f"\n{target}:" not in (ROOT / "Makefile").read_text():
            raise ValueError(f"make has no target {target}")
    elif words[0] == "fsdp2x":
        make_parser().parse_args(words[1:])
    elif words[0] == "pip" and (found := re.search(r"\[(\w+)\]", command)):
        if f"\n{found[1]} = [" not in (ROOT / "pyproject.toml").read_text():
            raise ValueError(f"there is no extra {found[1]}")


@each_page
def test_commands_that_are_shown_could_be_run(name):
    text = PAGES[name]
    shown = [command for fence in fences(text) if fence.language == "bash" for command in commands(fence.text)]
    shown += [code for code in inline_code(text) if code.startswith("make ") and code.split()[1].islower()]
    for command in shown:
        check_command(command)


def test_the_recorded_terminal_shows_commands_that_could_be_run():
    picture = (ROOT / "docs/assets/train.svg").read_text()
    shown = re.findall(r">\$ (.+?)</text>", picture)
    assert len(shown) >= 2 and all(f'"{command}"' in (ROOT / "docs/record.py").read_text() for command in shown)
    for command in shown:
        check_command(command)


# ---- the API


def public_names():
    """Every name of the package's and its rooms' `__all__`, and whether it is torch's own."""
    fsdp2x = importlib.import_module("fsdp2x")
    rooms = [path.parent.name for path in PACKAGE.glob("*/__init__.py") if "__all__" in path.read_text()]
    named = {(module, name) for module in [fsdp2x] for name in fsdp2x.__all__}
    for room in rooms:
        if room not in ("selftest", "train"):  # commands
            module = importlib.import_module(f"fsdp2x.{room}")
            named |= {(module, name) for name in module.__all__}
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module, name in named
        if not inspect.ismodule(getattr(module, name))
    }


def test_every_public_name_is_in_the_api():
    text = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/api/"))
    shown = set(re.findall(r"^::: (\S+\w)$", text, flags=re.MULTILINE))
    for module in re.findall(r"^::: (\S+)\.\*$", text, flags=re.MULTILINE):
        shown |= {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    objects = [importlib_object(name) for name in shown]
    missing = [
        name
        for name, thing in public_names().items()
        if name not in shown and not any(thing is other for other in objects) and f"`{name}`" not in text
    ]
    assert missing == []
    assert len(shown) == len(set(map(id, objects))), "a name is there twice"


def importlib_object(dotted):
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


# ---- messages


@functools.cache
def messages():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("messages")
    finally:
        sys.path.pop(0)


@functools.cache
def said():
    """Texts of the package: strings of Python, and of C++ with what is put between them left out."""
    found = [text for path in PACKAGE.rglob("*.py") for text in messages().texts(path.read_text())]
    for path in (ROOT / "csrc").rglob("*.[ch]pp"):
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', path.read_text())
        found.append(" ".join("".join(literals).split()))
    return found


def is_said(message):
    parts = [part.strip() for part in message.split(messages().GAP) if part.strip()]
    return any(all(part in text for part in parts) for text in said())


QUOTED = re.findall(r"^\| `(.+?)` \|", PAGES["docs/troubleshooting.md"], flags=re.MULTILINE)


def test_messages_of_the_troubleshooting_page_are_in_the_source():
    assert len(QUOTED) >= 40
    assert [message for message in QUOTED if not is_said(message)] == []
    assert not is_said("this message … nobody wrote")


# ---- docs/engine

ENGINE_PAGES = sorted((ROOT / "docs/engine").glob("*.md"))
PATHS = re.compile(r"`((?:csrc|python|tests|docs|benchmarks|cmake|examples)/[\w/.*{},-]+)`")


def missing_files(text: str) -> list[str]:
    found = []
    for name in PATHS.findall(text):
        stem, *endings = re.split(r"\{([^}]*)\}", name)
        names = [stem + ending + "".join(endings[1:]) for ending in endings[0].split(",")] if endings else [name]
        found += [one for one in names if not list(ROOT.glob(one))]
    return found


@pytest.mark.parametrize("page", ENGINE_PAGES, ids=lambda page: page.stem)
def test_examples_hold(page):
    assert doctest.testfile(str(page), module_relative=False).failed == 0


@pytest.mark.parametrize("page", [*pages(), ROOT / "csrc/README.md"], ids=name_of)
def test_pages_name_files_that_are_there(page):
    assert missing_files(page.read_text()) == []
