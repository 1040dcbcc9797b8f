"""torch.compile does not trace what records, also if it compiles more than the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dash_attn
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, load_run

Step = Callable[[Tensor], Tensor]


def trained(to: Path, compiled: Callable[[Step], Step]) -> Record:
    """Two steps, each a forward and a backward in one function."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    run = compiled(step)
    with dash_attn.watch(model, optimizer=optimizer, to=to):
        for _ in range(3):
            run(torch.randn(4, 8))
            optimizer.step()
            optimizer.zero_grad()
    (record,) = load_run(to)
    return record


@pytest.mark.filterwarnings("error:dash_attn.watch stops")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_with_a_backward(tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    eager = trained(tmp_path / "eager", lambda step: step)
    a, b = (trained(tmp_path / name, lambda step: torch.compile(step, backend=backend)) for name in "ab")
    assert sorted(a.steps) == [0, 1, 2] and first_difference([a], [b]) is None
    assert "dash_attn.watch stops" not in capsys.readouterr().err
    keys = [{row[:3] for row in record.steps[1].rows} for record in (eager, a)]
    assert keys[0] == keys[1]
    assert first_difference([eager], [a]) is None or backend != "eager"


def test_a_compiled_step_of_an_optimizer(tmp_path: Path) -> None:
    """It has several graphs, also if it is not watched: torch refuses fullgraph=True there."""
    torch.compiler.reset()
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            step()
    assert sorted(load_run(tmp_path)[0].steps) == [0, 1]


def test_one_graph_is_refused_by_torch(tmp_path: Path) -> None:
    """docs/watch.md says so."""
    with pytest.raises(torch._dynamo.exc.Unsupported):
        trained(tmp_path, lambda step: torch.compile(step, backend="eager", fullgraph=True))
