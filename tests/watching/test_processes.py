"""A watched process that forks, and threads that record at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

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
