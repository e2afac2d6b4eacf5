"""Who may import what, which file is told of where, and that a name stands for one thing.

The rings of the package are the table of ``python/fsdp2x/README.md``, those of ``csrc`` the tables of its README and of
its engine's.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, CSRC, TESTS = ROOT / "python/fsdp2x", ROOT / "csrc", ROOT / "tests"
# A file name says which of its folder it is; these stand in several folders, each for the same thing there.
SHARED_FILE_NAMES = {"layout", "names", "plan", "sources"}
CODE = {".cpp", ".hpp", ".cu", ".cuh"}


# ---- imports


parse = functools.cache(ast.parse)


@functools.cache
def modules() -> dict[str, str]:
    """Text of every module by its name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path.read_text()
    return found


def imports_of(name: str, text: str, known: Collection[str]) -> set[str]:
    """The modules that a module imports, in functions, too; those that are for annotations alone are left out."""
    is_package = any(other.startswith(f"{name}.") for other in known)
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".")[: -node.level + is_package or None] if node.level else []
            base = ".".join([*parts, *filter(None, [node.module])])
            # What is built is in the package's folder, and is no part of it.
            names = [alias.name for alias in node.names if alias.name not in ("_C", "_build_info")]
            found.update(f"{base}.{inner}" if f"{base}.{inner}" in known else base for inner in names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parse(text))
    return (found & set(known)) - {name}


@functools.cache
def import_graph() -> dict[str, set[str]]:
    return {name: imports_of(name, text, modules()) for name, text in modules().items()}


def planted(name: str, text: str) -> dict[str, set[str]]:
    """The graph with this text in or in place of a module."""
    return {**import_graph(), name: imports_of(name, text, modules())}


def rings() -> dict[str, int]:
    """Module or folder -> its ring, from the README."""
    found = {}
    for ring, cell in re.findall(r"^\| (\d+) \| ([^|]+) \|", (PACKAGE / "README.md").read_text(), flags=re.MULTILINE):
        for part in re.findall(r"`([^`]+)`", cell):
            name = part.strip("/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
            found["fsdp2x" if name == "__init__" else f"fsdp2x.{name}"] = int(ring)
    return found


def room_of(name: str, table: dict[str, int]) -> str | None:
    """The longest entry of the table that a module is or lies in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return name if name in table else next((prefix for prefix in prefixes if prefix in table), None)


def wrong_imports(graph: dict[str, set[str]], table: dict[str, int]) -> list[str]:
    wrong = []
    for name, targets in sorted(graph.items()):
        room = room_of(name, table)
        if room is None:
            wrong.append(f"{name} has no ring in python/fsdp2x/README.md")
            continue
        for target in sorted(targets):
            other = room_of(target, table)
            if other is not None and other != room and table[other] >= table[room]:
                wrong.append(f"{name} (ring {table[room]}) imports {target} (ring {table[other]})")
    return wrong


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Nodes that lead back to themselves: each circle once, by one way around it."""
    found, done = [], set()

    def follow(node: str, way: list[str]) -> None:
        if node in way:
            found.append(way[way.index(node) :])
        elif node not in done:
            for target in sorted(graph.get(node, ())):
                follow(target, [*way, node])
            done.add(node)

    for node in sorted(graph):
        follow(node, [])
    return found


def test_imports_point_to_lower_rings():
    assert wrong_imports(import_graph(), rings()) == []


def test_modules_import_in_no_circle():
    assert circles(import_graph()) == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("fsdp2x.runtime", "from fsdp2x.api import fully_shard"),
        ("fsdp2x.runtime", "def late():\n    import fsdp2x"),
        ("fsdp2x.runtime", "from ..train.config import TrainConfig"),
        ("fsdp2x.reading", "from fsdp2x.runtime import padding"),
        ("fsdp2x.checkpoint", "from fsdp2x.hf import files"),
        ("fsdp2x.nowhere", "import os"),
    ],
)
def test_a_planted_arrow_to_a_higher_ring_is_found(room, line):
    name = f"{room}.planted"
    assert [wrong.split()[0] for wrong in wrong_imports(planted(name, line), rings())] == [name]


def test_a_planted_circle_is_found():
    name, target = "fsdp2x.runtime.shapes", "fsdp2x.runtime.param_group"
    assert any({name, target} <= set(circle) for circle in circles(planted(name, f"import {target}")))
    assert circles(planted(name, f"if TYPE_CHECKING:\n    import {target}")) == []


def private_imports(text: str) -> list[str]:
    """Parts of names of torch that begin with an underscore."""
    found = []
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found += [*node.module.split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found += [part for name in node.names if name.name.startswith("torch.") for part in name.name.split(".")]
    return [part for part in found if part.startswith("_")]


def test_only_one_file_imports_private_names_of_torch():
    culprits = {name: private_imports(text) for name, text in modules().items()}
    assert [name for name, found in culprits.items() if found] == ["fsdp2x.runtime.torch_private"]
    assert private_imports("import torch._C\nfrom torch.utils import _pytree") == ["_C", "_pytree"]


# ---- includes


def code() -> dict[str, str]:
    """Text of every C++ and CUDA file by its path below csrc."""
    return {str(path.relative_to(CSRC)): path.read_text() for path in CSRC.rglob("*") if path.suffix in CODE}


def includes(files: dict[str, str]) -> dict[str, set[str]]:
    return {name: set(re.findall(r'^#include "([^"]+)"', text, flags=re.MULTILINE)) for name, text in files.items()}


@functools.cache
def csrc_rings() -> dict[str, tuple[int, ...]]:
    """Folder of csrc -> its ring, from the READMEs: that of a room of the engine is (2, 3)."""
    found = {}
    for above in ("", "engine/"):
        table = (CSRC / above / "README.md").read_text()
        for ring, cell in re.findall(r"^\| ([\d.]+) \| ([^|]+) \|", table, flags=re.MULTILINE):
            for folder in re.findall(r"`([\w/]+)/`", cell):
                found[above + folder] = tuple(int(number) for number in ring.split("."))
    del found["engine"]  # every file of it is in one of its rooms
    return found


def csrc_room_of(file: str) -> str | None:
    """The longest folder of the tables that a file lies in."""
    return max((room for room in csrc_rings() if file.startswith(f"{room}/")), key=len, default=None)


def wrong_includes(files: dict[str, str]) -> list[str]:
    wrong = []
    for name, targets in sorted(includes(files).items()):
        room = csrc_room_of(name)
        if room is None:
            wrong.append(f"{name} has no ring in csrc/README.md or csrc/engine/README.md")
            continue
        for target in sorted(targets):
            other = csrc_room_of(target)
            if other is not None and other != room and csrc_rings()[other] >= csrc_rings()[room]:
                wrong.append(f"{name} includes {target}")
    return wrong


def test_includes_point_inward_and_in_no_circle():
    assert wrong_includes(code()) == []
    assert circles(includes(code())) == []


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("core/planted.hpp", "cpu/kernels.hpp"),
        ("cpu/planted.cpp", "cuda/plan.hpp"),
        ("engine/params/planted.cpp", "engine/transport/transport.hpp"),
        ("engine/transport/shm/planted.cpp", "engine/schedule/root.hpp"),
        ("engine/transport/device/planted.cpp", "engine/schedule/unit.hpp"),
        ("engine/transport/planted.hpp", "engine/transport/device/device_layer.hpp"),
        ("engine/schedule/planted.cpp", "engine/transport/shm/shared_memory_transport.hpp"),
    ],
)
def test_a_planted_include_of_an_outer_ring_is_found(name, target):
    assert wrong_includes({**code(), name: f'#include "{target}"\n'}) == [f"{name} includes {target}"]


@pytest.mark.parametrize("name", ["planted/planted.cpp", "engine/planted.cpp", "engine/planted/planted.cpp"])
def test_a_file_of_a_folder_without_a_ring_is_found(name):
    assert [wrong.split()[0] for wrong in wrong_includes({**code(), name: ""})] == [name]


def test_a_planted_circle_of_includes_is_found():
    files = {"core/a.hpp": '#include "core/b.hpp"\n', "core/b.hpp": '#include "core/a.hpp"\n'}
    assert circles(includes(files)) == [["core/a.hpp", "core/b.hpp"]]


# ---- names


def twice(names: list[tuple[str, str]]) -> dict[str, list[str]]:
    places = defaultdict(set)
    for name, place in names:
        places[name].add(place)
    return {name: sorted(where) for name, where in sorted(places.items()) if len(where) > 1}


def classes(sources: dict[str, str]) -> list[tuple[str, str]]:
    return [
        (node.name, name)
        for name, text in sources.items()
        for node in ast.walk(parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]


def types(files: dict[str, str]) -> list[tuple[str, str]]:
    """Types that a header shows to others: those of the namespace, not those inside of others."""
    pattern = r"^(?:struct|class|enum class) (?:alignas\([^)]*\) )?(\w+)[^;{]*\{"
    return [
        (name, path)
        for path, text in files.items()
        if path.endswith(".hpp")
        for name in re.findall(pattern, text, flags=re.MULTILINE)
    ]


def test_a_type_name_stands_for_one_type():
    assert twice(classes(modules())) == {}
    assert twice(types(code())) == {}


def test_a_type_name_that_stands_twice_is_found():
    assert "UnitState" in twice(classes({**modules(), "fsdp2x.planted": "class UnitState: pass"}))
    assert "Layout" in twice(types({**code(), "engine/torch/planted.hpp": "class Layout {\n};\n"}))


def test_a_file_name_stands_for_one_file():
    stems = [
        (path.stem, str(path.parent))
        for path in PACKAGE.rglob("*.py")
        if not path.stem.startswith("__") and path.parent.name != "commands"  # named as what is typed
    ]
    assert set(twice(stems)) == SHARED_FILE_NAMES


def test_a_file_name_stands_for_one_file_of_tests():
    """pytest imports them by their names alone, and refuses the second one."""
    assert not twice([(path.stem, str(path.parent)) for path in TESTS.rglob("test_*.py")])


# ---- folder READMEs


def _is_room(path: Path) -> bool:
    return path.is_dir() and path.name[0] not in "_." and any(path.glob("[!_.]*"))


def untold(folder: Path) -> list[str]:
    """Files and folders that a folder's README does not name, and files that it names and that are not there."""
    text = re.sub(
        r"(\w*)\{([\w,]+)\}(\w*)",
        lambda m: " ".join(f"{m[1]}{part}{m[3]}." for part in m[2].split(",")),
        (folder / "README.md").read_text(),
    )
    here = {
        path.stem if path.is_file() else f"{path.name}/"
        for path in folder.iterdir()
        if path.suffix in {*CODE, ".py"} and path.stem != "__init__" or _is_room(path)
    }
    missing = [
        name for name in here if not re.search(rf"(?<!\w){re.escape(name)}{'' if name[-1] == '/' else '[.]'}", text)
    ]
    named = re.findall(r"^\|(?: [\d.]+ \|)? ([^|]+) \|", text, flags=re.MULTILINE)
    files = [file for cell in named for file in re.findall(r"`([\w/]+)\.(?:py|hpp|cpp|\*)", cell)]
    return sorted(missing) + sorted(f"{file}: is not there" for file in files if not list(folder.glob(f"{file}.*")))


@pytest.mark.parametrize(
    "folder",
    [
        str(path.parent.relative_to(ROOT))
        for top in (PACKAGE, CSRC, TESTS / "support")
        for path in sorted(top.rglob("README.md"))
    ],
)
def test_a_folders_readme_names_its_files(folder):
    assert untold(ROOT / folder) == []


def test_a_file_without_a_row_is_found(tmp_path):
    for name in ("told.py", "untold.py", "first.cpp", "second.cpp"):
        (tmp_path / name).touch()
    (tmp_path / "README.md").write_text(
        "| file | job |\n| --- | --- |\n| `told.py` | x |\n| `gone.py` | y |\n`{first,second}.cpp`\n"
    )
    assert untold(tmp_path) == ["untold", "gone: is not there"]
