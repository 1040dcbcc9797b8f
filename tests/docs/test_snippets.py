"""README and docs match the code: every example is run, every output shown is compared, every link leads somewhere.

How a document is read:

- Python blocks of one file are run from top to bottom in one namespace and one temporary folder. A ``text`` block right
  after a Python block is what it prints.
- ``console`` blocks hold ``$ dash-attn ...`` lines, run in the same folder. Lines below a command are what it prints,
  ``$ echo $?`` shows its exit status, which must be shown if it is not 0. A line or a part of one given as ``...``
  stands for anything.
- ``<!-- not run: the reason -->`` above a block leaves it out.

``python tests/docs/test_snippets.py README.md docs/model.md`` writes what is printed now into the documents.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dash_attn.tools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"recipes.md"}  # test_recipes.py runs it, in processes of its own
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the number of its first line (0-based, behind the fence), its lines."""

    language: str
    first: int
    lines: tuple[str, ...]
    left_out: bool

    @property
    def after(self) -> int:
        """Number of the line behind the closing fence."""
        return self.first + len(self.lines) + 1


@dataclass(frozen=True)
class Shown:
    """Output that a document shows for one example (lines first:last), and what the example prints today."""

    first: int
    last: int
    expected: str
    printed: str

    def holds(self) -> bool:
        return doctest.OutputChecker().check_output(self.expected, self.printed, doctest.ELLIPSIS)


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks of a document."""
    lines, found, at = text.splitlines(), list[Block](), 0
    while at < len(lines):
        if lines[at].startswith("```"):
            language = lines[at].removeprefix("```").strip()
            end = next((i for i in range(at + 1, len(lines)) if lines[i].rstrip() == "```"), None)
            assert end is not None, f"line {at + 1}: this block has no end"
            above = next((line for line in reversed(lines[:at]) if line.strip()), "")
            found.append(Block(language, at + 1, tuple(lines[at + 1 : end]), bool(NOT_RUN.fullmatch(above.strip()))))
            at = end
        at += 1
    return found


def tidy(text: str) -> str:
    """As it stands in a document: no trailing blanks, no colour, one newline at the end."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return "".join(f"{line.rstrip()}\n" for line in plain.strip("\n").splitlines())


def run_python(source: str, namespace: dict[str, Any], name: str, first: int) -> str:
    """Run a Python block; line numbers in a traceback are those of the document."""
    out = io.StringIO()
    code = compile("\n" * first + source, name, "exec")
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return tidy(out.getvalue())


def run_command(line: str) -> tuple[str, int]:
    """Run `dash-attn ...` in this process: what it prints, on either stream, and its exit status."""
    words = shlex.split(line, comments=True)
    assert words[0] == "dash-attn", f"only dash-attn is run, not {line!r}"
    out, status = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            main(words[1:])
        except SystemExit as done:
            status = done.code if isinstance(done.code, int) else 1
    return tidy(out.getvalue()), status


def run_console(block: Block, name: str) -> Iterator[Shown]:
    """Run the commands of a console block one after the other."""
    starts = [i for i, line in enumerate(block.lines) if line.startswith("$ ")]
    assert starts and starts[0] == 0, f"{name}, line {block.first + 1}: a console block starts with a command"
    status, must_show = 0, ""
    for begin, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
        command = block.lines[begin].removeprefix("$ ")
        if command == "echo $?":
            printed, must_show = f"{status}\n", ""
        else:
            assert not must_show, must_show
            printed, status = run_command(command)
            where = f"{name}, line {block.first + begin + 1}"
            must_show = f"{where}: exit status {status} is not shown; it printed\n{printed}" if status else ""
        if begin + 1 < end:
            yield Shown(
                block.first + begin + 1, block.first + end, tidy("\n".join(block.lines[begin + 1 : end])), printed
            )
    assert not must_show, must_show


def run_document(path: Path) -> list[Shown]:
    """Run all examples of a document in the current folder."""
    name, namespace, shown = path.name, dict[str, Any](__name__="__main__"), list[Shown]()
    lines = path.read_text(encoding="utf-8").splitlines()
    last: tuple[Block, str] | None = None
    for block in blocks_of("\n".join(lines)):
        if block.left_out:
            continue
        if block.language == "python":
            last = block, run_python("\n".join(block.lines), namespace, name, block.first)
        elif block.language == "console":
            shown.extend(run_console(block, name))
        elif block.language == "text" and last is not None:
            before, printed = last
            if not any(line.strip() for line in lines[before.after : block.first - 1]):
                shown.append(Shown(block.first, block.after - 1, tidy("\n".join(block.lines)), printed))
    return shown


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    kept = re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", heading.strip()).lower())
    return kept.replace(" ", "-")


def outside_blocks(text: str) -> str:
    lines = text.splitlines()
    for block in blocks_of(text):
        lines[block.first - 1 : block.after] = [""] * (block.after - block.first + 1)
    return "\n".join(lines)


def link_errors(path: Path) -> Iterator[str]:
    """Links and pictures of a document that lead nowhere."""
    for match in LINK.finditer(outside_blocks(path.read_text(encoding="utf-8"))):
        target = match.group(1) or match.group(2)
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (path.parent / place) if place else path
        if not file.exists():
            yield f"{path.relative_to(ROOT)}: {target} does not exist"
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", outside_blocks(file.read_text(encoding="utf-8")), re.MULTILINE)
            if anchor not in map(slug, headings):
                yield f"{path.relative_to(ROOT)}: {target} names no heading of {file.name}"


@pytest.mark.parametrize("path", [x for x in DOCUMENTS if x.name not in ELSEWHERE], ids=lambda path: path.name)
def test_examples(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for shown in run_document(path):
        where = f"{path.relative_to(ROOT)}, line {shown.first + 1}"
        assert shown.holds(), f"{where} shows\n{shown.expected}\nbut the code prints\n{shown.printed}"


@pytest.mark.parametrize("path", sorted({*DOCUMENTS, *ROOT.glob("*.md")}), ids=lambda path: path.name)
def test_links(path: Path) -> None:
    errors = list(link_errors(path))
    assert not errors, "\n".join(errors)


def test_what_is_read_from_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
```python
x = 1
```

```python
print("x is", x)
```

```text
x is 2
```

<!-- not run: needs a printer -->
```python
1 / 0
```

```console
$ dash-attn --version
0...
$ dash-attn verify nothing.npz
dash-attn: error: no such file: ...
$ echo $?
2
```

```text
no output of anything
```
"""
    path = tmp_path / "sample.md"
    path.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert [block.language for block in blocks_of(text)] == ["python", "python", "text", "python", "console", "text"]
    shown = run_document(path)
    assert [each.holds() for each in shown] == [False, True, True, True]
    assert shown[0].printed == "x is 1\n"


def test_a_failing_command_must_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sample.md"
    path.write_text("```console\n$ dash-attn verify nothing.npz\n```\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="exit status 2 is not shown"):
        run_document(path)


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [("The promise", "the-promise"), ("`verify`: what it checks", "verify-what-it-checks"), ("A, b & c", "a-b--c")],
)
def test_anchors(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def rewrite(path: Path) -> None:
    """Put what the examples print today into the document, where it is not the same."""
    path = path.resolve()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            stale = [shown for shown in run_document(path) if not shown.holds()]
        finally:
            os.chdir(here)
    lines = path.read_text(encoding="utf-8").splitlines()
    for shown in reversed(stale):
        lines[shown.first : shown.last] = shown.printed.splitlines()
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{path.name}: {len(stale)} outputs written")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument))
