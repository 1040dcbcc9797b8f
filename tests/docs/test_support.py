"""docs/support.md says what is supported, and names the tests that show it.

The document is made from support.txt beside this file. That file has sections, a line for each feature, and below the
line, indented, its tests. `refused` before a test means that the test shows an error. The marks of the tests say
whether a row holds on the CPU, on a GPU or on both.

    python tests/docs/test_support.py     writes the document
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("support.txt")
DOCUMENT = ROOT / "docs/support.md"
NAMING = ("contract.md", "determinism.md")  # documents that name a test for each claim
HEAD = """# What is supported

<!-- Written by `python tests/docs/test_support.py` from tests/docs/support.txt: change it there. -->

Each row names a feature and the tests that show it. *Yes* means that a test shows it. *Refused* means an error that
says what to do instead. *No test* means that it may work, but no test shows it. `make test` runs the tests of the
column CPU. `make gpu-test` runs the tests of the column GPU, which need a Hopper GPU.

## Runs on a GPU

The GPU tests have run on an H200 with torch 2.11, on 2026-11-18. 1,036 passed and none failed. 16 were skipped: two
cases of one test need a second GPU, and for fourteen no installed forward takes the problem.

These tests have not run in their present form:

- two that run the benchmark of `watch` and expect less than 5 %. The benchmark itself gave 4.0 % and 1.0 %
  ([what it costs](watch.md#what-it-costs));
- the tests of ranks as threads of one process ([test](../tests/backends/sm90/test_gpu_held.py)). Their earlier form
  passed: it computed the panels of one rank after the other, and passed the sums of dK and dV by hand;
- the test of processes that share a GPU, which is now one test for each mode. Of its earlier form the cases of 1 and 2
  processes passed, and the case of four took longer than its time limit;
- three that repeat backwards with panels a thousand times;
- three that run the measurements of `bench`.

This code is newer than the run. On CPUs the tests run its kernels in an interpreter of their PTX
([test](../tests/backends/sm90/ptx/test_kernels.py)):

- at head dims up to 64, the order of the kernel's loads. The kernel has run in the suite `grid_close`, which compares
  gradients with float64 and bits with those of the first call;
- at head dims up to 64, one more arrival at a barrier at the end of a cut chain. In the interpreter the kernel hung
  without it, where six or more chains in a row had no task and one warp was late;
- the templates of packs with windows or with keys before the queries, `auto` in calls with panels, and the choice of
  the forward;
- the names of fields and arguments, and the checks of arguments.
"""


@dataclass(frozen=True)
class Row:
    section: str
    feature: str
    tests: tuple[str, ...]
    refusals: tuple[str, ...]

    def cell(self, gpu: bool) -> str:
        showing = [test for test in self.tests if needs_gpu(test) is gpu]
        if showing:
            return "yes"
        return "refused" if self.refusals else "no test"

    def links(self) -> str:
        parts = [test.partition("::") for test in (*self.tests, *self.refusals)]
        return ", ".join(
            f"[{name.removeprefix('test_').replace('_', ' ')}](../tests/{file})" for file, _, name in parts
        )


def rows() -> list[Row]:
    found, section = list[Row](), ""
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            section = line.removeprefix("# ")
        elif line.startswith("    "):
            last, kind = found[-1], "refusals" if line.strip().startswith("refused ") else "tests"
            test = line.strip().removeprefix("refused ")
            found[-1] = Row(**{**vars(last), kind: (*getattr(last, kind), test)})
        elif line:
            found.append(Row(section, line, (), ()))
    return found


@cache
def functions(file: str) -> dict[str, bool]:
    """Test functions of a file under tests, and whether they need a GPU."""
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    marks = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "pytestmark"]
    all_gpu = any("mark.gpu" in ast.unparse(mark.value) for mark in marks)
    return {
        node.name: all_gpu or any("mark.gpu" in ast.unparse(mark) for mark in node.decorator_list)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def needs_gpu(test: str) -> bool | None:
    """None if there is no such test."""
    file, _, name = test.partition("::")
    return functions(file).get(name) if (ROOT / "tests" / file).is_file() else None


def document() -> str:
    lines, section = [HEAD], ""
    for row in rows():
        if row.section != section:
            section = row.section
            lines += [
                f"{'' if len(lines) == 1 else chr(10)}## {section}\n",
                "| | CPU | GPU | tests |",
                "|---|---|---|---|",
            ]
        lines.append(f"| {row.feature} | {row.cell(False)} | {row.cell(True)} | {row.links()} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature)
def test_the_tests_of_a_row_exist(row: Row) -> None:
    assert row.tests or row.refusals, "a row without tests says nothing"
    missing = [test for test in (*row.tests, *row.refusals) if needs_gpu(test) is None]
    assert not missing, f"no such test: {', '.join(missing)}"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run: python tests/docs/test_support.py"


@pytest.mark.parametrize("document", NAMING)
def test_the_tests_of_the_contract_exist(document: str) -> None:
    """The text of a link is the name of a test in that file. A table may also name the file as a whole."""
    links = re.findall(r"\[([^\]]+)\]\(\.\./tests/([^)]+)\)", (ROOT / "docs" / document).read_text(encoding="utf-8"))
    named = [(name, file) for name, file in links if name != Path(file).stem]
    missing = [(name, file) for name, file in named if needs_gpu(f"{file}::test_{name.replace(' ', '_')}") is None]
    assert len(named) > 20 and not missing, f"no such test: {missing}"


def test_every_section_of_the_promise_names_tests() -> None:
    """Those with a list of claims. The examples of the others run as tests."""
    text = (ROOT / "docs/determinism.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"^##+ ", text, flags=re.MULTILINE)[1:]}
    claims = [
        "What keeps bits",
        "What changes bits",
        "The identity of a run",
        "Order and placement",
        "What `auto` does",
        "Bits belong to the sequence",
        "Panels",
        "Fail closed",
        "Files and caches",
    ]
    for name in claims:
        bullets = re.findall(r"^- (?:.+\n)(?:  .+\n)*", sections[name], re.MULTILINE)
        without = [bullet for bullet in bullets if "](../tests/" not in bullet]
        # The lists of `auto` belong to the sentences before them, which name the tests.
        assert bullets and "](../tests/" in sections[name] and (not without or name == "What `auto` does"), without


def test_a_mark_is_seen() -> None:
    assert needs_gpu("backends/sm90/test_gpu.py::test_masks") is True
    assert needs_gpu("examples/test_train_gpt_twice.py::test_on_a_gpu") is True
    assert needs_gpu("examples/test_train_gpt_twice.py::test_runs_are_the_same") is False
    assert needs_gpu("backends/sm90/test_gpu.py::test_nothing") is None


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
