"""The kernels of the fingerprint, run on the CPU by Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dash_attn.watching.fingerprint import fingerprint

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="not installed: triton")
def test_the_kernels_compute_the_fingerprint() -> None:
    """Whole blocks, a last block, bytes behind the last word; each tensor with a launch of its own, and all in one."""
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
    from dash_attn.watching import kernel

    block = 8 * kernel.BLOCK
    sizes = (1, 7, 8, 9, block - 8, block - 1, block, block + 3, 2 * block, 2 * block + 17)
    tensors = [torch.randint(256, (size,)).to(torch.uint8) for size in sizes]
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    want = [fingerprint(tensor) for tensor in tensors]
    alone, together = torch.zeros(len(sizes), dtype=torch.int64), torch.zeros(len(sizes), dtype=torch.int64)
    for place, tensor in enumerate(tensors):
        numbers = (tensor.data_ptr(), tensor.nbytes, alone.data_ptr() + 8 * place)
        kernel._one[(kernel._blocks(tensor.nbytes),)](*numbers)
    assert [value % 2**64 for value in alone.tolist()] == want
    addresses, blocks = kernel.rows(tuple((tensor.data_ptr(), tensor.nbytes) for tensor in tensors))
    kernel._many[(len(blocks),)](addresses.data_ptr(), blocks.data_ptr(), together.data_ptr())
    assert [value % 2**64 for value in together.tolist()] == want


if __name__ == "__main__":
    main()
