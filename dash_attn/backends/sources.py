"""A hash of source files that changes with the code, and not with comments, docstrings or layout."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path


def source_hash(paths: Iterable[Path]) -> str:
    """Hash of the code in Python files. The order of the files does not change it."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        code = ast.unparse(without_docstrings(ast.parse(path.read_text(encoding="utf-8"))))
        digest.update(f"{path.name}\0{code}\0".encode())
    return digest.hexdigest()


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The same tree, changed in place."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return tree
