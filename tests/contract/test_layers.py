"""The shape of the package: imports point backwards, files and signatures are short, heavy imports few."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dash_attn.tools import EXTRA

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dash_attn"

# A part may import itself and every part of an earlier row; parts of one row do not know each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"jit", "kept", "lazily"}),
    frozenset({"problem"}),
    frozenset({"tiling"}),
    frozenset({"order"}),
    frozenset({"program"}),
    frozenset({"launch"}),
    frozenset({"verify", "timeline"}),
    frozenset({"plan"}),
    frozenset({"pack"}),
    frozenset({"simulate", "backends"}),
    frozenset({"prepare"}),
    frozenset({"api", "watching"}),
    frozenset({"distributed"}),
    frozenset({"integrations"}),
    frozenset({"tools.dag", "tools.exact"}),
    frozenset({"tools.bench"}),
    frozenset({"tools.trace"}),
    frozenset({"tools.viz"}),
    frozenset({"tools.cli"}),
)
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}
# These stand above every layer: they may import all, and only the command line and the benchmarks may import them.
TOP = frozenset({"__init__", "__main__", "tools"})
MAY_IMPORT_TOP = frozenset({"tools.bench", "tools.cli"})

WITHOUT_TORCH = frozenset(
    {
        "jit",
        "kept",
        "lazily",
        "problem",
        "tiling",
        "order",
        "program",
        "launch",
        "verify",
        "timeline",
        "simulate",
        "plan",
        "pack",
    }
)
NUMBA_MODULES = frozenset({"dash_attn/jit.py"})

MAX_LINES = 500
MAX_PARAMETERS = 6
# Functions with more parameters, by file: their signatures are given by others.
MIRRORS: dict[str, frozenset[str]] = {
    # keywords of torch and FlashAttention
    "dash_attn/api/autograd.py": frozenset({"attention", "forward"}),
    "dash_attn/api/gradients.py": frozenset({"backward"}),
    "dash_attn/api/explain.py": frozenset({"explain"}),
    "dash_attn/api/flash.py": frozenset({"flash_attn_func", "flash_attn_varlen_func"}),
    # an operator of torch takes plain values one by one
    "dash_attn/api/ops.py": frozenset({"backward", "forward"}),
    "dash_attn/distributed/ops.py": frozenset({"backward", "forward"}),
    # the keywords of attention, and where the ranks are
    "dash_attn/distributed/attention.py": frozenset({"context_parallel_attention", "forward"}),
    "dash_attn/distributed/explanation.py": frozenset({"explain"}),
    # what torch, Transformers and Megatron call
    "dash_attn/integrations/megatron.py": frozenset({"__init__", "forward"}),
    "dash_attn/integrations/torch_sdpa.py": frozenset(
        {"cpu_backward", "cpu_forward", "flash_backward", "flash_forward", "sdpa_backward", "sdpa_forward"}
    ),
    "dash_attn/integrations/transformers/forward.py": frozenset({"attention_forward"}),
    "dash_attn/integrations/transformers/masks.py": frozenset({"model_mask"}),
}
FORBIDDEN_NAMES = frozenset({"utils", "helpers", "common", "manager"})


@dataclass(frozen=True)
class Import:
    """One imported module name, absolute, and whether loading the file is enough to run the import."""

    target: str
    line: int
    on_load: bool


def imports_of(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Every import in ``source``, relative ones resolved, also those in functions and TYPE_CHECKING blocks.

    ``from a import b`` gives ``a.b``: whether ``b`` is a module or a name, it belongs to the same part.
    """
    found: list[Import] = []
    _collect(ast.parse(source), module if is_package else module.rpartition(".")[0], True, found)
    return found


def _collect(node: ast.AST, package: str, on_load: bool, found: list[Import]) -> None:
    if isinstance(node, ast.Import):
        found.extend(Import(alias.name, node.lineno, on_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _base(node, package)
        found.extend(Import(f"{base}.{alias.name}", node.lineno, on_load) for alias in node.names)
    elif isinstance(node, ast.Call) and _is_import_call(node):
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            found.append(Import(name.value, node.lineno, on_load))
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            _collect(child, package, False, found)
        for child in node.orelse:
            _collect(child, package, on_load, found)
        return
    inside = on_load and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        _collect(child, package, inside, found)


def _base(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join([*parts, node.module] if node.module else parts)


def _is_import_call(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("import_module", "__import__") and bool(node.args)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    """The folder or module right under dash_attn, or under its tools, that a file belongs to."""
    return part_named(path.relative_to(PACKAGE).with_suffix("").parts)


def part_named(parts: tuple[str, ...]) -> str:
    return ".".join(parts[:2]) if parts[0] == "tools" and parts[1:] and parts[1] != "__init__" else parts[0]


def file_imports(path: Path) -> list[Import]:
    names = list(path.relative_to(ROOT).with_suffix("").parts)
    is_package = names[-1] == "__init__"
    module = ".".join(names[:-1] if is_package else names)
    return imports_of(path.read_text(encoding="utf-8"), module, is_package=is_package)


def layering_errors(importer: str, imports: list[Import]) -> Iterator[str]:
    """What is wrong with the imports of a file of part ``importer``."""
    for item in imports:
        root, _, rest = item.target.partition(".")
        if root != "dash_attn":
            continue
        target = part_named(tuple(rest.split(".")))
        if target not in LEVEL:
            if importer not in MAY_IMPORT_TOP:
                yield f"line {item.line}: {importer} imports {item.target}, which stands above every layer"
        elif target != importer and LEVEL[target] >= LEVEL[importer]:
            yield f"line {item.line}: {importer} imports {target}, which does not stand before it"


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def parameter_count(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters a reader has to keep apart: all kinds, without self, cls and the ctx of an autograd function."""
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    if named and named[0].arg in ("self", "cls", "ctx"):
        named = named[1:]
    return len(named) + (args.vararg is not None) + (args.kwarg is not None)


def smuggled(function: ast.FunctionDef | ast.AsyncFunctionDef, *, device: bool = False) -> list[str]:
    """Parameters that are tuples of unlike types and that the body unpacks: several parameters under one name.

    Device code has few types. There a parameter without a type counts too, and one that is just a `tuple`, and a fixed
    place of a `tuple` is an unpacking too. Only the `__call__` of a kernel may unpack such a tuple: the host passes
    plain tuples, and the build decides their length.
    """
    args = function.args
    bare = (None, "tuple") if device and function.name != "__call__" else ()
    mixed = {
        each.arg
        for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)
        if _is_mixed_tuple(each.annotation) or (each.annotation and ast.unparse(each.annotation)) in bare
    }
    plain = {each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs) if _is_plain_tuple(each.annotation)}
    places = plain & {name for node in ast.walk(function) for name in _placed(node)} if bare else set()
    return sorted(mixed & {name for node in ast.walk(function) for name in _unpacked(node)} | places)


def _is_plain_tuple(annotation: ast.expr | None) -> bool:
    return annotation is not None and ast.unparse(annotation) == "tuple"


def _placed(node: ast.AST) -> Iterator[str]:
    """The name of what is read at a fixed place: of `x[0]` and of `x[1:]` it is x."""
    is_place = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant | ast.Slice)
    if is_place and isinstance(node.value, ast.Name):
        yield node.value.id


def _is_mixed_tuple(annotation: ast.expr | None) -> bool:
    """Whether an annotation is `tuple[A, B]` with unlike types. Sizes and slices of one type are values."""
    if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "tuple"):
        return False
    types = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    names = {ast.unparse(each) for each in types}
    return len(names - {"..."}) > 1


def _unpacked(node: ast.AST) -> Iterator[str]:
    """The names that an assignment takes apart: of `a, b = x` and of `(a, b), c = x, y` it is x."""
    pairs = [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []
    while pairs:
        target, value = pairs.pop()
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs.extend(zip(target.elts, value.elts, strict=False))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Name):
            yield value.id


# ---- the package -------------------------------------------------------------------------------------------


def test_every_part_has_a_layer() -> None:
    parts = {part_of(path) for path in package_files()} - TOP
    assert parts, "no package found"
    assert parts <= set(LEVEL), f"give these a place in LAYERS: {sorted(parts - set(LEVEL))}"


def test_imports_point_backwards() -> None:
    errors = [
        f"{shown(path)}, {error}"
        for path in package_files()
        if part_of(path) in LEVEL
        for error in layering_errors(part_of(path), file_imports(path))
    ]
    assert not errors, "\n".join(errors)


def test_no_torch_when_loading_the_first_layers() -> None:
    errors = [
        f"{shown(path)}, line {item.line}: imports {item.target} when it is loaded"
        for path in package_files()
        if part_of(path) in WITHOUT_TORCH
        for item in file_imports(path)
        if item.on_load and item.target.partition(".")[0] == "torch"
    ]
    assert not errors, "\n".join(errors)


def test_cutlass_stays_in_the_backend() -> None:
    errors = [
        f"{shown(path)}, line {item.line}: imports {item.target}"
        for path in package_files()
        if "sm90" not in path.parts
        for item in file_imports(path)
        if item.target.partition(".")[0] == "cutlass"
    ]
    assert not errors, "\n".join(errors)


def test_numba_stays_in_its_modules() -> None:
    missing = sorted(name for name in NUMBA_MODULES if not (ROOT / name).is_file())
    assert not missing, f"listed in NUMBA_MODULES, not in the package: {missing}"
    errors = [
        f"{shown(path)}, line {item.line}: imports {item.target}"
        for path in package_files()
        if shown(path) not in NUMBA_MODULES
        for item in file_imports(path)
        if item.target.partition(".")[0] == "numba"
    ]
    assert not errors, "\n".join(errors)


def test_files_are_short() -> None:
    files = [*package_files(), *sorted((ROOT / "tests").rglob("*.py"))]
    lengths = {shown(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    errors = [f"{name}: {lines} lines" for name, lines in lengths.items() if lines > MAX_LINES]
    assert not errors, f"over {MAX_LINES} lines: " + ", ".join(errors)


def long_signatures() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in package_files():
        for function in functions(ast.parse(path.read_text(encoding="utf-8"))):
            if parameter_count(function) > MAX_PARAMETERS:
                yield shown(path), function


def is_mirror(file: str, name: str) -> bool:
    return name in MIRRORS.get(file, ())


def test_signatures_are_short() -> None:
    errors = [
        f"{file}, line {function.lineno}: {function.name} takes {parameter_count(function)} parameters"
        for file, function in long_signatures()
        if not is_mirror(file, function.name)
    ]
    assert not errors, "\n".join(errors)


def test_every_exception_is_needed() -> None:
    needed = {(file, function.name) for file, function in long_signatures()}
    unused = {(file, name) for file, names in MIRRORS.items() for name in names} - needed
    assert not unused, f"listed in MIRRORS, but short or gone: {sorted(unused)}"


def test_no_tuple_carries_parameters() -> None:
    errors = [
        f"{shown(path)}, line {function.lineno}: {function.name} unpacks {name}; give it a NamedTuple"
        for path in package_files()
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        for name in smuggled(function, device="device" in path.parts)
    ]
    assert not errors, "\n".join(errors)


def test_only_the_tools_import_their_packages() -> None:
    errors = [
        f"{shown(path)}, line {item.line}: imports {item.target}"
        for path in package_files()
        if "tools" not in path.parts
        for item in file_imports(path)
        if item.target.partition(".")[0] in EXTRA
    ]
    assert not errors, "\n".join(errors)


def test_modules_say_what_they_hold() -> None:
    errors = [
        shown(path)
        for path in package_files()
        if FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)
    ]
    assert not errors, f"named after nothing in particular: {errors}"


# ---- the checker itself ------------------------------------------------------------------------------------

SAMPLE = """
import torch.nn as nn, numpy
from typing import TYPE_CHECKING
from . import tile
from ..problem.mask import Mask
from dash_attn import order
if TYPE_CHECKING:
    import rich
else:
    import plotly
try:
    import numba
except ImportError:
    pass
def f():
    from ..tools.cli import main
    importlib.import_module("dash_attn.api.ops")
class C:
    import json
"""


def test_collects_every_kind_of_import() -> None:
    imports = {item.target: item.on_load for item in imports_of(SAMPLE, "dash_attn.tiling.tiling")}
    assert imports == {
        "torch.nn": True,
        "numpy": True,
        "typing.TYPE_CHECKING": True,
        "dash_attn.tiling.tile": True,
        "dash_attn.problem.mask.Mask": True,
        "dash_attn.order": True,
        "rich": False,
        "plotly": True,
        "numba": True,
        "dash_attn.tools.cli.main": False,
        "dash_attn.api.ops": False,
        "json": True,
    }


def test_relative_imports_of_a_package_start_at_itself() -> None:
    assert [item.target for item in imports_of("from .mask import Mask", "dash_attn.problem", is_package=True)] == [
        "dash_attn.problem.mask.Mask"
    ]


@pytest.mark.parametrize(
    ("importer", "target", "allowed"),
    [
        ("tiling", "dash_attn.problem.mask", True),
        ("tiling", "dash_attn.tiling.tile", True),
        ("tiling", "dash_attn.order", False),
        ("order", "dash_attn.launch", False),
        ("program", "dash_attn.launch", False),
        ("verify", "dash_attn.timeline", False),
        ("simulate", "dash_attn.timeline", True),
        ("simulate", "dash_attn.verify", True),
        ("simulate", "dash_attn.backends.cpu", False),
        ("pack", "dash_attn.plan", True),
        ("plan", "dash_attn.pack", False),
        ("api", "dash_attn.attention", False),
        ("tools.cli", "dash_attn.__version__", True),
        ("problem", "numpy", True),
    ],
)
def test_layering_rule(importer: str, target: str, allowed: bool) -> None:
    errors = list(layering_errors(importer, [Import(target, 1, True)]))
    assert (not errors) == allowed


def test_counts_parameters() -> None:
    source = "class C:\n    def f(self, a, /, b, *args, c=1, **kwargs): ...\n    def h(ctx, a): ...\ndef g(a, b): ..."
    counts = [parameter_count(function) for function in functions(ast.parse(source))]
    assert sorted(counts) == [1, 2, 5]


def test_an_exception_is_for_one_file() -> None:
    assert is_mirror("dash_attn/api/ops.py", "backward")
    assert not is_mirror("dash_attn/api/flash.py", "backward")
    assert not is_mirror("dash_attn/api/ops.py", "explain")


def test_finds_tuples_that_carry_parameters() -> None:
    source = """
def f(a: tuple[int, str], b: tuple[int, int], c: tuple[int, str], d: tuple[int, ...], *, e: tuple[str, Tensor]):
    x, y = a
    u, v = b
    w = c
    p, q = d
    (r, s), t = e, 1
"""
    assert [smuggled(function) for function in functions(ast.parse(source))] == [["a", "e"]]


def test_finds_tuples_without_types_in_device_code() -> None:
    source = """
def f(a, b: tuple, c, d: Record, *, e, g: tuple, h: tuple):
    x, *y = a
    (u,) = b
    w = c[0]
    p, q = d
    r, (s, t) = 1, e
    z = g[1:], h[x]
def __call__(self, a: tuple):
    x, y = a[0], a[1]
"""
    found = list(functions(ast.parse(source)))
    assert [smuggled(function, device=True) for function in found] == [["a", "b", "e", "g"], []]
    assert [smuggled(function) for function in found] == [[], []]
