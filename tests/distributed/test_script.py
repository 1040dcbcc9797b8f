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


def test_a_destroyed_group_is_gone(tmp_path: Path) -> None:
    """A group that something still holds has threads, and they abort the process if Python ends before them."""
    (tmp_path / "gone.py").write_text(
        """
import weakref
import torch
import torch.distributed as dist
from dash_attn.distributed import context_parallel_attention

dist.init_process_group("gloo", init_method="file://" + __file__ + ".store", rank=0, world_size=1)
q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
context_parallel_attention(q, k, v, causal=True).sum().backward()
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
print("gone" if group() is None else "held")
""",
        encoding="utf-8",
    )
    assert run("gone.py", at=tmp_path).strip() == "gone"


@pytest.mark.parametrize(
    ("options", "told"), [((), "identical after each of 2 steps"), (("--sum-by-rank",), "different from step 1 on")]
)
def test_training_on_one_and_two_ranks(tmp_path: Path, options: tuple[str, ...], told: str) -> None:
    small = ("--ranks", "1,2", "--steps", "2", "--layers", "1", "--length", "64")
    printed = run(str(ROOT / "examples/train_context_parallel.py"), *small, *options, at=tmp_path)
    assert f"2 ranks against 1: {told}" in printed
    assert (tmp_path / "context_parallel.png").read_bytes().startswith(b"\x89PNG")
