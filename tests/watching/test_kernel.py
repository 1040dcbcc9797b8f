"""The kernels of the fingerprint, run on the CPU by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dash_attn.watching.fingerprint import BLOCK, LARGE, WHOLE, Share, fingerprint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="not installed: triton")
def test_the_kernels_compute_the_fingerprint() -> None:
    """Whole blocks, a last block, bytes behind the last word, shares; a launch for each tensor, and one for all."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.watching.test_kernel"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def main() -> None:
    sizes = (1, 3, 4, 15, 16, 17, 30, 4096, BLOCK - 16, BLOCK - 1, BLOCK, BLOCK + 3, 2 * BLOCK, 2 * BLOCK + 17)
    tensors = [torch.randint(256, (size,)).to(torch.uint8) for size in sizes]
    check(tensors, [WHOLE] * len(tensors))
    large = [
        torch.randint(256, (LARGE + size,)).to(torch.uint8) for size in (-1, 0, 3, 511, 512 * 7 + 9, 3 * BLOCK + 5)
    ]
    for one_in, turn in ((2, 1), (3, 0), (4, 0), (4, 3)):
        check(large, [Share(one_in, turn)] * len(large))
    check(large[1:5], [Share(4, turn) for turn in range(4)])


def check(tensors: list[Tensor], shares: list[Share]) -> None:
    """Each tensor with its share, in a launch of its own and with all others in one."""
    from dash_attn.watching import kernel

    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    pairs = list(zip(tensors, shares, strict=True))
    want = [fingerprint(tensor, share) for tensor, share in pairs]
    listed = [kernel.numbers(tensor, share) for tensor, share in pairs]
    alone, together = (torch.zeros(len(tensors), dtype=torch.int64) for _ in range(2))
    for place, row in enumerate(listed):
        kernel._one[(kernel._blocks(row),)](*row, alone.data_ptr() + 8 * place)
    assert [value % 2**64 for value in alone.tolist()] == want
    rows, blocks = kernel.tables(listed)
    kernel._many[(len(blocks),)](rows.data_ptr(), blocks.data_ptr(), together.data_ptr())
    assert [value % 2**64 for value in together.tolist()] == want


if __name__ == "__main__":
    main()
