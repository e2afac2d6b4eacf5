"""The stub of the compiled module says what the module has: ``make stub`` writes it."""

import ast
import importlib.util
from pathlib import Path

from fsdp2x.base.native import _C

ROOT = Path(__file__).resolve().parents[3]


def load_make_stub():
    spec = importlib.util.spec_from_file_location("make_stub", ROOT / "cmake/make_stub.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_stub = load_make_stub()


def test_the_stub_is_that_of_the_module():
    written, bound = (ast.dump(ast.parse(text)) for text in (make_stub.STUB.read_text(), make_stub.stub_of(_C)))
    assert written == bound, "run `make stub`"


def test_type_checkers_are_told_that_there_are_types():
    assert (make_stub.STUB.parent / "py.typed").is_file()
