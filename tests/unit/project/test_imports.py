"""Allowed imports and includes. pyproject.toml has contracts of Python directories, READMEs have tables of csrc's."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE, CSRC = ROOT / "python/fsdp2x", ROOT / "csrc"
CODE = {".cpp", ".hpp", ".cu", ".cuh"}


def imports_of(path: Path, *, only_at_import: bool = False) -> list[str]:
    """Dotted names that a file imports, with the names taken; ``only_at_import``: not those inside functions."""
    found, nodes = [], [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if not (only_at_import and isinstance(node, ast.FunctionDef)):
            nodes += ast.iter_child_nodes(node)
    return found


def places(wrong) -> list[str]:
    return [str(path.relative_to(PACKAGE)) for path in sorted(PACKAGE.rglob("*.py")) if wrong(path)]


def test_only_one_file_imports_private_names_of_torch():
    def is_private(name: str) -> bool:
        return name.split(".")[0] == "torch" and any(part.startswith("_") for part in name.split("."))

    assert places(lambda path: any(map(is_private, imports_of(path)))) == ["base/torch_private.py"]


def test_only_one_file_imports_the_engine_and_rooms_never_import_the_package():
    names = {"fsdp2x", "fsdp2x._C"}
    found = places(lambda path: names.intersection(imports_of(path)))
    assert [path for path in found if not path.startswith("compare/")] == ["base/native.py"]


def test_compare_needs_public_names_alone():
    used = {name for path in (PACKAGE / "compare").glob("*.py") for name in imports_of(path)}
    others = {name for name in used if name.startswith("fsdp2x") and not name.startswith("fsdp2x.compare")}
    assert {name for name in others if not name.startswith("fsdp2x.ranks.")} == {"fsdp2x"}


def test_import_needs_torch_alone():
    """transformers, peft, yaml and others are imported where they are used, and may be absent.

    pydantic may be absent from commands that read no training file, and pytest imports two files of conformance.
    """
    known = {*sys.stdlib_module_names, "fsdp2x", "torch", "numpy", "engine", "engine_group"}
    others = {
        name.split(".")[0]: path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        for name in imports_of(path, only_at_import=True)
        if name.split(".")[0] not in known
        and path not in (PACKAGE / "train/config.py", PACKAGE / "train/config_file.py")
        and path not in (PACKAGE / "conformance/plugin.py", PACKAGE / "conformance/test_contract.py")
    }
    assert others == {}
    modules = ["fsdp2x.train.commands.trl_rank", "fsdp2x.train.selftest", "fsdp2x.train.cli", "fsdp2x.convert"]
    program = f"import sys, {', '.join(modules)}; fsdp2x.train.cli.main(['doctor'])"
    subprocess.run([sys.executable, "-c", f"{program}; assert 'pydantic' not in sys.modules"], check=True)


def test_answers_about_commands_need_no_torch():
    """Help of commands and of the settings, and typos: a user waits for no import."""
    asked = [
        "--help",
        "--version",
        "train --help",
        "trl --help",
        "config list",
        "config explain --help",
        "doctor --hel",
    ]
    asked += [f"{name} --help" for name in ("config translate", "export", "convert", "compare")] + [
        "",
        "trian",
        "train",
    ]
    program = f"""
import contextlib, sys
from fsdp2x.train.cli import main
for words in {asked!r}:
    with contextlib.suppress(SystemExit):
        main(words.split())
    assert "torch" not in sys.modules, words
import fsdp2x.installer
assert callable(fsdp2x.install) and fsdp2x.train.cli.main is main and "fully_shard" in dir(fsdp2x)
assert not hasattr(fsdp2x, "nothing") and "torch" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- includes of csrc


@functools.cache
def rings() -> dict[str, tuple[int, ...]]:
    """Folder of csrc -> its ring, from the READMEs: that of a room of the engine is (2, 3)."""
    found = {}
    for above in ("", "engine/"):
        table = (CSRC / above / "README.md").read_text()
        for ring, cell in re.findall(r"^\| ([\d.]+) \| ([^|]+) \|", table, flags=re.MULTILINE):
            for folder in re.findall(r"`([\w/]+)/`", cell):
                found[above + folder] = tuple(int(number) for number in ring.split("."))
    del found["engine"]  # every file of it is in one of its rooms
    return found


def room_of(file: str) -> str | None:
    """The longest folder of the tables that a file lies in."""
    return max((room for room in rings() if file.startswith(f"{room}/")), key=len, default=None)


def wrong_includes(files: dict[str, str]) -> list[str]:
    """Includes of a ring that is not lower, files without a ring, and files that include each other in a circle."""
    graph = {name: re.findall(r'^#include "([^"]+)"', text, flags=re.MULTILINE) for name, text in files.items()}
    wrong = [f"{name} has no ring in a README" for name in graph if room_of(name) is None]
    for name, targets in graph.items():
        for target in targets:
            room, other = room_of(name), room_of(target)
            if room is not None and other not in (None, room) and rings()[other] >= rings()[room]:
                wrong.append(f"{name} includes {target}")
    while ends := [name for name, targets in graph.items() if not graph.keys() & set(targets)]:
        for name in ends:
            del graph[name]
    return wrong + [f"{name} is in a circle" for name in graph]


def code() -> dict[str, str]:
    return {str(path.relative_to(CSRC)): path.read_text() for path in CSRC.rglob("*") if path.suffix in CODE}


def test_includes_point_inward_and_in_no_circle():
    assert wrong_includes(code()) == []


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ({"core/a.hpp": '#include "kernels/cpu/kernels.hpp"\n'}, "core/a.hpp includes kernels/cpu/kernels.hpp"),
        (
            {"engine/params/a.cpp": '#include "engine/transport/transport.hpp"\n'},
            "engine/params/a.cpp includes engine/transport/transport.hpp",
        ),
        ({"planted/a.cpp": ""}, "planted/a.cpp has no ring in a README"),
        (
            {"core/a.hpp": '#include "core/b.hpp"\n', "core/b.hpp": '#include "core/a.hpp"\n'},
            "core/a.hpp is in a circle",
        ),
    ],
)
def test_a_planted_include_is_found(planted, complaint):
    assert complaint in wrong_includes(code() | planted)


@pytest.mark.parametrize("folder", [PACKAGE, CSRC])
def test_the_lines_to_read_first_are_there(folder):
    rows = re.findall(r"^\| \d+ \| `(\S+)` \| (\d+) \|", (folder / "README.md").read_text(), re.M)
    assert len(rows) >= 3
    sizes = {name: (int(said), len((folder / name).read_text().splitlines())) for name, said in rows}
    wrong = {name: size for name, (said, size) in sizes.items() if abs(size - said) > 20 + said // 5}
    assert not wrong, f"correct the counts in {folder.name}/README.md: {wrong}"
