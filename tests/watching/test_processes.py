"""A watched process that forks, and threads that record at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

import dash_attn
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, Writer, load_run, path_of


def child(run: Callable[[], None]) -> int:
    """Run in a forked child, which ends as one that calls `sys.exit` and so closes the watcher."""
    number = os.fork()
    if number == 0:
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_record_alone(tmp_path: Path) -> None:
    def trained(to: Path, forks: bool) -> Record:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watcher = dash_attn.watch(model, optimizer=optimizer, to=to)

        def trains() -> None:
            for _ in range(2):
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
            watcher.see("a child", torch.ones(1))
            watcher.end_step()
            watcher.close()

        for step in range(4):
            model(torch.randn(4, 8)).sum().backward()
            if forks and step == 2:
                assert child(trains) == 0
                with pytest.raises(ValueError, match="another watcher"):
                    Writer(path_of(to, 0))  # the parent still has the file
            optimizer.step()
            optimizer.zero_grad()
        watcher.close()
        (record,) = load_run(to)
        return record

    plain, forked = trained(tmp_path / "a", False), trained(tmp_path / "b", True)
    assert sorted(forked.steps) == [0, 1, 2, 3] and forked.complete
    assert first_difference([plain], [forked]) is None


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_backwards_at_once(tmp_path: Path, quick_switches: None) -> None:
    """As of a model on two devices: torch runs the backward of each device in a thread of its own."""

    def trained(to: Path) -> Record:
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Sequential(*(nn.Linear(16, 16) for _ in range(20))) for _ in range(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with dash_attn.watch(model, optimizer=optimizer, to=to):
            for _ in range(5):
                x = torch.randn(4, 16)
                threads = [Thread(target=part(x).sum().backward) for part in model]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                optimizer.step()
                optimizer.zero_grad()
        (record,) = load_run(to)
        return record

    a, b = trained(tmp_path / "a"), trained(tmp_path / "b")
    assert first_difference([a], [b]) is None
    assert {len(step.rows) for step in a.steps.values()} == {len(step.rows) for step in b.steps.values()}
    gradients = [row[:3] for row in a.steps[1].rows if row.phase == "backward"]
    assert len(gradients) == len(set(gradients)) == 3 * 20 * 3
