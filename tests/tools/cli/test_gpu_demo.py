"""The GPU part of the demo, played on the CPU; on a GPU for real with -m gpu."""

from __future__ import annotations

import pytest
import torch

from dash_attn.tools.cli.doctor import usable_device
from dash_attn.tools.cli.gpu_demo import HEADER, gpu_rows, gpu_table


def check(rows: list[list[str]]) -> None:
    assert [row[:3] for row in rows] == [[m, d, "yes"] for m in ("full", "causal") for d in ("64", "128")]
    for row in rows:
        ours, torchs = (float(row[HEADER.index(name)]) for name in ("error", "torch's error"))
        assert ours < 2 * torchs + 1e-3


def test_rows_on_the_cpu() -> None:
    device = torch.device("cpu")
    rows = gpu_rows(device, length=128, repeats=2)
    check(rows)
    assert gpu_table(rows, device).row_count == 4


@pytest.mark.gpu
def test_rows_on_the_gpu() -> None:
    device = usable_device()
    assert device.type == "cuda"
    check(gpu_rows(device))
