"""One word, one meaning: no two classes have the same name, nor a module and what its package exports."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from tests.contract.test_layers import package_files, shown

# The words of the design: each is the name of one class, and of nothing else.
WORDS = ("Order", "Pack", "Panel", "Plan", "Problem", "Program", "Row", "Run", "Template")


def classes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The name and the line of every class, also of those in functions and in other classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno


def others(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The name and the line of everything else that is assigned, defined or imported from outside of the package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom) and not _is_own(node):
            yield from ((alias.asname or alias.name, node.lineno) for alias in node.names)


def _is_own(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.level > 0 or (node.module or "").startswith("dash_attn"))


def names_in(tree: ast.AST) -> Iterator[str]:
    """The functions and classes of a module, and what it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def places(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Where each class stands, by its name. The sources are pairs of a file and its text."""
    at = defaultdict[str, list[str]](list)
    for file, source in sources:
        for name, line in classes(ast.parse(source)):
            at[name].append(f"{file}, line {line}")
    return at


def package() -> list[tuple[str, str]]:
    return [(shown(path), path.read_text(encoding="utf-8")) for path in package_files()]


# ---- the package -------------------------------------------------------------------------------------------


def test_no_two_classes_have_one_name() -> None:
    errors = [f"{name}: {'; '.join(where)}" for name, where in sorted(places(package()).items()) if len(where) > 1]
    assert not errors, "rename all but one:\n" + "\n".join(errors)


def test_no_module_is_shadowed_by_a_name_of_its_package() -> None:
    """Else `a.b` is the module or the function, whichever Python has loaded last."""
    errors = [
        f"{shown(path)} has {name}, and a module of this name stands beside it"
        for path in package_files()
        if path.name == "__init__.py"
        for name in names_in(ast.parse(path.read_text(encoding="utf-8")))
        if (path.parent / f"{name}.py").is_file() or (path.parent / name / "__init__.py").is_file()
    ]
    assert not errors, "\n".join(errors)


def test_every_word_of_the_design_is_one_class() -> None:
    at = places(package())
    assert not [word for word in WORDS if word not in at], "WORDS has words that are no classes"
    errors = [
        f"{file}, line {line}: {name} is a word of the design"
        for file, source in package()
        for name, line in others(ast.parse(source))
        if name in WORDS
    ]
    assert not errors, "\n".join(errors)


# ---- the checker itself ------------------------------------------------------------------------------------

SAMPLE = """
from string import Template
from dash_attn.plan import Plan
from .order import Order
Run = int
class Panel:
    class Row: ...
def f():
    class Row: ...
"""


def test_finds_classes_everywhere() -> None:
    at = places([("a.py", SAMPLE), ("b.py", "class Panel: ...")])
    assert at == {"Panel": ["a.py, line 6", "b.py, line 1"], "Row": ["a.py, line 7", "a.py, line 9"]}


def test_finds_other_uses_of_a_name() -> None:
    assert sorted(name for name, _ in others(ast.parse(SAMPLE))) == ["Run", "Template", "f"]
