"""The stubs have the module's documentation: editors show the one, help() the other."""

import ast
import pathlib

import pytest

from ripieno import _ripieno

STUBS = pathlib.Path(__file__).parents[1] / "ripieno/_ripieno.pyi"


def documented(node, owner, name=""):
    """Yields the name, documentation and object of each public class and function of a stub."""
    for inner in node.body:
        is_known = isinstance(inner, ast.ClassDef | ast.FunctionDef)
        if is_known and not inner.name.startswith("_"):
            found = getattr(owner, inner.name)
            yield f"{name}{inner.name}", ast.get_docstring(inner), found.__doc__
            if isinstance(inner, ast.ClassDef):
                yield from documented(inner, found, f"{inner.name}.")


ALL = list(documented(ast.parse(STUBS.read_text()), _ripieno))


@pytest.mark.parametrize(("stub", "module"), [pair for _, *pair in ALL], ids=[it[0] for it in ALL])
def test_documentation(stub, module):
    assert stub, "the stub has none"
    assert stub.split() == module.split()


def test_there_are_many():
    assert len(ALL) > 70
