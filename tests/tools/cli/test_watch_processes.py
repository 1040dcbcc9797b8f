"""dash-attn watch of scripts that train in processes of their own. Only the process of the command is recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dash_attn.watching.files import load_run

TRAINS = """
import multiprocessing
import sys
import torch
from torch import nn

def train(count):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

def in_process(kind):
    worker = multiprocessing.get_context(kind).Process(target=train, args=(7,))
    worker.start()
    worker.join()
    print("worker", worker.exitcode, flush=True)
"""
NOT_WATCHED = "processes that the script starts are not recorded"


def watched(folder: Path, main: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(f"{TRAINS}\nif __name__ == '__main__':\n    {main}\n", encoding="utf-8")
    command = [sys.executable, "-m", "dash_attn", "watch", "--to", folder / "r", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_that_fork(tmp_path: Path) -> None:
    done = watched(tmp_path, "train(2); in_process('fork'); train(1)")
    assert (done.returncode, done.stdout) == (0, "worker 0\n"), done.stderr
    assert done.stderr.count(NOT_WATCHED) == 1 and "recorded in" in done.stderr
    assert len(load_run(tmp_path / "r")[0].steps) == 2


@pytest.mark.parametrize("kind", ["fork", "spawn"])
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_script_that_trains_only_in_others(tmp_path: Path, kind: str) -> None:
    done = watched(tmp_path, f"in_process('{kind}')")
    assert (done.returncode, done.stdout) == (2, "worker 0\n"), done.stderr
    assert "nothing was recorded" in done.stderr and NOT_WATCHED in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_subprocess_is_no_training(tmp_path: Path) -> None:
    work = "import subprocess; subprocess.run([sys.executable, '-c', 'sum(range(10**7))'], check=True)"
    done = watched(tmp_path, work)
    assert done.returncode == 2 and "made no optimizer" in done.stderr and NOT_WATCHED in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_child_that_runs_to_the_end_of_the_script(tmp_path: Path) -> None:
    done = watched(tmp_path, "train(2); import os; pid = os.fork(); pid and os.waitpid(pid, 0)")
    assert done.returncode == 0 and done.stderr.count("recorded in") == 1, done.stderr
    assert len(load_run(tmp_path / "r")[0].steps) == 2
