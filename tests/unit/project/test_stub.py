"""The stub of the compiled module says what the module has: ``make stub`` writes it."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp2x.base.native import _C

ROOT = Path(__file__).resolve().parents[3]


def load_make_stub():
    spec = importlib.util.spec_from_file_location("make_stub", ROOT / "cmake/make_stub.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_stub = load_make_stub()


def same(text: str, other: str) -> bool:
    return ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))


def test_the_stub_is_that_of_the_module():
    assert same(make_stub.STUB.read_text(), make_stub.stub_of(_C)), "run `make stub`"


def test_another_argument_is_noticed():
    text = make_stub.STUB.read_text()
    planted = text.replace("def align_up(num_bytes: int)", "def align_up(num_bytes: float)")
    assert planted != text and not same(planted, make_stub.stub_of(_C))


def bound(doc: str):
    function = lambda: None  # noqa: E731
    function.__doc__ = doc
    return SimpleNamespace(name=function)


@pytest.mark.parametrize(
    ("doc", "written"),
    [
        ("name(size: typing.SupportsInt | typing.SupportsIndex) -> int\n", "def name(size: int) -> int: ..."),
        ("name(size: typing.SupportsInt) -> float | None\n", "def name(size: int) -> float | None: ..."),
        ("name(arg0: pkg._C.Unit, arg1: object) -> object\n", "def name(arg0: Unit, arg1: Any, /) -> Any: ..."),
    ],
)
def test_spellings_of_pybind11(doc, written):
    assert written in make_stub.stub_of(bound(doc))


def test_overloads_stand_side_by_side():
    doc = "name(*args, **kwargs)\nOverloaded function.\n\n1. name(a: str) -> int\n\n2. name(a: int) -> int\n"
    assert make_stub.stub_of(bound(doc)).count("@overload") == 2


def test_a_type_that_is_bound_too_late_is_an_error():
    with pytest.raises(make_stub.StubError, match="bind it before"):
        make_stub.stub_of(bound("name(unit: fsdp2x::Unit) -> None\n"))


def test_type_checkers_are_told_that_there_are_types():
    assert (make_stub.STUB.parent / "py.typed").is_file()
