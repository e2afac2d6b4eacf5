"""Reads every message that the package can raise from its source, for a page of the site."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

GAP = "…"
LEAST_WORDS = 4
THROWN = re.compile(r"(?:throw \w+(?:::\w+)*|fail|raise|set_error)\(((?:[^;\"]|\"(?:[^\"\\]|\\.)*\")*);")
LITERAL = re.compile(r"\"((?:[^\"\\]|\\.)*)\"")


def text_of(node: ast.AST) -> str:
    """The text of a string expression, with a gap for every computed part."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else GAP
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return GAP


def texts(source: str) -> Iterator[str]:
    """Yields every string of a module that is a sentence, with its parts joined."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            text = " ".join(text_of(node).split())
            if len(text.split()) >= LEAST_WORDS:
                yield text


def raised(source: str) -> list[str]:
    """Returns the messages of a module's errors and warnings, in the order of its lines."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call) or not call.args:
            continue
        if isinstance(node, ast.Call) and not ast.unparse(call.func).endswith(("warn", "Error")):
            continue
        message = " ".join(text_of(call.args[0]).split())
        if len(message.replace(GAP, "").split()) >= LEAST_WORDS:
            found.setdefault(message, call.lineno)
    return sorted(found, key=found.__getitem__)


def thrown(source: str) -> list[str]:
    """Returns the messages of a C++ file: the literals of an expression, with a gap for the parts between them."""
    found = []
    for (expression,) in (match.groups() for match in THROWN.finditer(source)):
        parts, end = [], 0
        for literal in LITERAL.finditer(expression):
            # The compiler joins adjacent literals.
            parts += [GAP if expression[end : literal.start()].strip() else "", literal[1]]
            end = literal.end()
        message = " ".join("".join(parts[1:]).replace('\\"', '"').split())
        if len(message.replace(GAP, "").split()) >= LEAST_WORDS and message not in found:
            found.append(message)
    return found


def page(package: Path, engine: Path) -> str:
    """Returns the page in Markdown, with a section for each folder of the package and one for the engine."""
    sections: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        folder = path.relative_to(package).parent.as_posix()
        sections.setdefault("fsdp2x" if folder == "." else folder, []).extend(raised(path.read_text()))
    sources = sorted(path for path in engine.rglob("*") if path.suffix in (".cpp", ".hpp"))
    sections["engine, in C++"] = [message for path in sources for message in thrown(path.read_text())]
    parts = ["# All messages", f"All errors and warnings of the package. `{GAP}` stands for the parts that differ."]
    for name, messages in sections.items():
        if messages:
            parts += [f"## {name}", "\n".join(f"- ``{message.replace('``', '`')} ``" for message in messages)]
    return "\n\n".join(parts) + "\n"
