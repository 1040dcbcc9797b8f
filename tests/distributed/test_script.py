"""Scripts that start their own ranks: the examples of docs/distributed.md and examples/train_context_parallel.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_context_parallel
from tests.distributed.scripts import run_on_ranks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
EXAMPLES = PAGE.split("runs it on two ranks -->\n```python\n")[1:]


def written(code: str, folder: Path) -> Path:
    script = folder / "cp.py"
    script.write_text(code.partition("```\n")[0], encoding="utf-8")
    return script


def test_the_example_under_torchrun(tmp_path: Path) -> None:
    """The command of the page."""
    written(EXAMPLES[0], tmp_path)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "cp.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "heads over       2" in done.stdout
    assert done.stdout.count("True") == 2 and "False" not in done.stdout


@pytest.mark.parametrize(("number", "count"), [(1, 4), (2, 2)], ids=["Transformers", "its Trainer"])
def test_the_other_examples(tmp_path: Path, number: int, count: int) -> None:
    printed = run_on_ranks(written(EXAMPLES[number], tmp_path), 2)
    assert printed.splitlines().count("True") == count and "False" not in printed.splitlines()


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_destroyed_group_is_gone(imported: str, tmp_path: Path) -> None:
    """A group that something still holds has threads, and they abort the process if Python ends before them."""
    first = ["from dash_attn.distributed import context_parallel_attention", 'dist.init_process_group("gloo")']
    begin = "\n".join(first if imported == "before" else reversed(first))
    script = written(
        f"""
import weakref
import torch
import torch.distributed as dist
{begin}
q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
context_parallel_attention(q, k, v, causal=True).sum().backward()
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("gone" if group() is None else "held")
""",
        tmp_path,
    )
    assert run_on_ranks(script, 1).strip() == "gone"


@pytest.mark.parametrize(
    ("options", "told"), [((), "identical after each of 2 steps"), (("--sum-by-rank",), "different from step 1 on")]
)
def test_training_on_one_two_and_four_ranks(
    tmp_path: Path, options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = tmp_path / "context_parallel.png"
    small = ["--ranks", "1,2,4", "--steps", "2", "--layers", "1", "--length", "64", "--out", str(curves)]
    assert train_context_parallel.main([*small, *options]) == 0
    printed = capsys.readouterr().out
    for ranks in (2, 4):
        assert f"{ranks} ranks against 1: {told}" in printed
    assert curves.read_bytes().startswith(b"\x89PNG")
