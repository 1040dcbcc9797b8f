"""What a newcomer finds outside the package agrees with the package."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import dash_attn

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
MAKE = r"(?:^ *|`)make ([a-z-]+)(?:`| *$| +#)"  # a command on a line of its own, or in backticks
# Absolute paths of one particular machine: whoever reads them has another.
MACHINE_PATH = re.compile(r"(?<![\w.~<>$)}\]-])/(?:root|home|Users|work|workspace|mnt|opt)/\w")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project_files() -> list[Path]:
    """The files of the repository: what is committed, and what would be."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(
        [git, "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted({ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()})


def test_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "([^"]+)"$', text("pyproject.toml"), re.MULTILINE)
    assert declared is not None
    assert dash_attn.__version__ == declared.group(1)
    assert importlib.metadata.version("dash-attn") == declared.group(1)
    assert f"## [{declared.group(1)}]" in text("CHANGELOG.md")


def test_licence_is_the_one_declared() -> None:
    assert importlib.metadata.metadata("dash-attn")["License-Expression"] == "Apache-2.0"
    assert "Apache License" in text("LICENSE")


def test_types_are_shipped() -> None:
    assert (ROOT / "dash_attn" / "py.typed").is_file()


def test_ci_runs_the_tests() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in text(".ci/run")


def test_makefile_targets() -> None:
    """The usual ones, and all that a page tells its reader to make."""
    makefile, pages = text("Makefile"), ["README.md", "CONTRIBUTING.md", *(f"docs/{x.name}" for x in DOCS)]
    named = {name for page in pages for name in re.findall(MAKE, text(page), re.MULTILINE)}
    assert named
    for target in named | {"demo", "test", "lint", "types", "env", "gpu-test", "clean"}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_constraints_are_exact() -> None:
    lines = [line for line in text("constraints.txt").splitlines() if line and not line.startswith("#")]
    loose = [
        line
        for line in lines
        if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*( ; python_version [<>=]+ \"3\.\d+\")?", line)
    ]
    assert not loose
    assert "torch==2.13.0" in lines


def test_no_file_names_a_particular_machine() -> None:
    errors = []
    for path in project_files():
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(content.splitlines(), 1):
            if found := MACHINE_PATH.search(line):
                errors.append(f"{path.relative_to(ROOT)}, line {number}: {found.group()}")
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("line", "caught"),
    [
        ("cd /" + "root/x", True),
        ("path='/" + "home/me'", True),
        ("total/work/share", False),
        ("https://example.org/opt/x", False),
    ],
)
def test_machine_paths_are_told_from_others(line: str, caught: bool) -> None:
    assert bool(MACHINE_PATH.search(line)) == caught
