"""DDP and FSDP2 with two processes: a file each, and the process that parts first is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from dash_attn.watching.causes import causes
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, load_run
from tests.watching.two_processes import RUNS, STEPS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Record]]:
    folder = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-m", "tests.watching.two_processes", str(folder)]
    both = [subprocess.Popen([*command, str(rank)], cwd=ROOT, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        errors = [process.communicate(timeout=200)[1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(errors)
    return {name: load_run(folder / name) for name in RUNS}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_equal_runs(runs: dict[str, list[Record]], kind: str) -> None:
    assert [record.rank for record in runs[kind]] == [0, 1]
    assert all(sorted(record.steps) == list(range(STEPS)) for record in runs[kind])
    assert runs[kind][0].environment["world size"] == 2
    assert first_difference(runs[kind], runs[f"{kind} again"]) is None


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_process_that_parts_first_is_named(runs: dict[str, list[Record]], kind: str) -> None:
    parting = first_difference(runs[kind], runs[f"{kind} with another batch"])
    assert parting is not None
    assert (parting.rank, parting.step, parting.topic) == (1, 1, "data")


def test_a_reduction(runs: dict[str, list[Record]]) -> None:
    """The gradients of each process are equal, and their sum is not."""
    parting = first_difference(runs["ddp"], runs["ddp with a wrong sum"])
    assert parting is not None
    assert (parting.step, parting.topic) == (0, "reduce") and parting.inputs
    a, b = (runs[name][0].environment for name in ("ddp", "ddp with a wrong sum"))
    assert "the reduction over processes" in [cause.name for cause in causes(parting, a, b)]


def test_gradients_in_the_buckets_of_ddp(runs: dict[str, list[Record]]) -> None:
    """Gradients that are views of buckets are read before the reduction and after it."""
    assert first_difference(runs["ddp"], runs["views"]) is None


def test_shards_of_fsdp(runs: dict[str, list[Record]]) -> None:
    """Each process records its own shard, under the names of the model without FSDP."""
    ddp, fsdp = (runs[name][0].steps[1] for name in ("ddp", "fsdp"))
    forms = {row[:3]: fsdp.form(row) for row in fsdp.rows}
    assert forms["update", "blocks.0.attn.qkv", "weight"] == "float32 [48, 32]"
    assert forms["reduce", "blocks.0.attn.qkv", "gradient of weight"] == "float32 [48, 32]"
    names = [{row[:3] for row in step.rows if row.phase in ("forward", "update")} for step in (ddp, fsdp)]
    assert names[0] == names[1]


def test_another_number_of_processes(runs: dict[str, list[Record]]) -> None:
    with pytest.raises(ValueError, match="2 and 1 processes"):
        first_difference(runs["ddp"], runs["ddp"][:1])
