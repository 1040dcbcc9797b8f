"""The wheel in an environment that has torch and numpy, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest

import dash_attn
from dash_attn.tools import EXTRA

ROOT = Path(__file__).resolve().parents[2]
CORE = {"torch", "numpy"}

BACKWARD = f"""
import sys, torch, dash_attn
from pathlib import Path
assert Path(dash_attn.__file__).is_relative_to(sys.prefix), dash_attn.__file__
q, k, v = (torch.randn(1, 300, 4, 32, requires_grad=True) for _ in range(3))
out = dash_attn.attention(q, k, v, causal=True)
out.sum().backward()
want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
torch.testing.assert_close(out, want.transpose(1, 2))
print(dash_attn.explain(q, k, v, causal=True).fingerprint, q.grad.shape == q.shape)
assert not [name for name in {EXTRA!r} if name in sys.modules]
"""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, cwd="/")


def checked(*words: object) -> str:
    done = run(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    checked(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "-q", "-w", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it, and links to the packages of this one that the core asks for."""
    folder = tmp_path_factory.mktemp("environment")
    checked(sys.executable, "-m", "venv", folder)
    place = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", place))
    for source in {path for name in needed(CORE) for path in top_level(name)}:
        if not (packages / source.name).exists():  # a new environment has pip, and may have setuptools
            (packages / source.name).symlink_to(source)
    checked(folder / "bin" / "python", "-I", "-m", "pip", "install", "-q", "--no-deps", "--no-index", wheel)
    return folder


def needed(names: set[str]) -> set[str]:
    """The distributions that these need, with themselves: those that are installed here."""
    known: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        known.add(name)
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        plain = {re.split(r"[^\w.-]", line)[0].lower() for line in wanted if "extra ==" not in line}
        waiting |= plain - known
    return known


def top_level(name: str) -> Iterator[Path]:
    """What a distribution puts right into site-packages."""
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        return
    for file in files:
        if file.parts[0] not in ("..", "__pycache__"):
            yield Path(str(metadata.distribution(name).locate_file(file.parts[0])))


def test_the_wheel_is_pure_python_and_complete(wheel: Path) -> None:
    assert wheel.name == f"dash_attn-{dash_attn.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith("METADATA"))
        asked = Parser().parsestr(archive.read(about).decode()).get_all("Requires-Dist") or []
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dash_attn").rglob("*") if path.is_file()}
    assert {name for name in package if "__pycache__" not in name} <= names
    assert all(name.startswith(("dash_attn/", "dash_attn-")) for name in names)
    plain = {re.split(r"[^\w.-]", line)[0] for line in asked if "extra ==" not in line}
    assert plain == CORE
    tools = {re.split(r"[^\w.-]", line)[0] for line in asked if "extra == 'tools'" in line.replace('"', "'")}
    assert tools == {*EXTRA, "numba"}


def test_attention_runs_with_torch_alone(environment: Path) -> None:
    python = environment / "bin" / "python"
    for package in (*EXTRA, "numba"):
        assert run(python, "-I", "-c", f"import {package}").returncode == 1, f"{package} is there"
    fingerprint, written = checked(python, "-I", "-c", BACKWARD).split()
    assert re.fullmatch(r"[0-9a-f]{16}", fingerprint) and written == "True"


@pytest.mark.parametrize("arguments", [[], ["--version"], ["simulate", "--json"]])
def test_the_command_says_what_to_install(environment: Path, arguments: list[str]) -> None:
    for command in ([environment / "bin" / "dash-attn"], [environment / "bin" / "python", "-I", "-m", "dash_attn"]):
        done = run(*command, *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("dash-attn: error: ") and done.stderr.count("\n") == 1
        assert "pip install 'dash-attn[tools]'" in done.stderr
