"""Scripts that start their own ranks: the example of docs/distributed.md and examples/train_context_parallel.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str, at: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=at, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("number", "told"), [(0, "heads over       2"), (1, "True")])
def test_the_examples_of_the_documentation(tmp_path: Path, number: int, told: str) -> None:
    blocks = (ROOT / "docs/distributed.md").read_text(encoding="utf-8").split("```python\n")[1:]
    (tmp_path / "cp.py").write_text(blocks[number].partition("```\n")[0], encoding="utf-8")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(*torchrun, "cp.py", at=tmp_path)
    assert told in printed
    assert printed.count("True") == 2 * (number + 1) and "False" not in printed


@pytest.mark.parametrize(
    ("options", "told"), [((), "identical after each of 2 steps"), (("--sum-by-rank",), "different from step 1 on")]
)
def test_training_on_one_and_two_ranks(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    small = ("--ranks", "1,2", "--steps", "2", "--layers", "1", "--length", "64")
    printed = run(str(ROOT / "examples/train_context_parallel.py"), *small, *options, at=tmp_path)
    assert f"2 ranks against 1: {told}" in printed
    assert (tmp_path / "context_parallel.png").read_bytes().startswith(b"\x89PNG")
