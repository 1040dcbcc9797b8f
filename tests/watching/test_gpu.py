"""Watching on a GPU: the same fingerprints, no waiting, little time, and a culprit by name: make gpu-test"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dash_attn
from dash_attn.watching import fingerprint as by_torch
from dash_attn.watching.difference import first_difference
from dash_attn.watching.files import Record, load_run
from dash_attn.watching.fingerprint import LARGE, Share, fingerprint, has_triton
from dash_attn.watching.scope import SHARE
from tests.watching.small import GPT, loss_of
from tests.watching.test_fingerprint import DTYPES, some

pytestmark = pytest.mark.gpu

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks/watch_overhead.py"
LENGTH = 4096
SIZES = [(), (1,), (7,), (0,), (8192,), (4096, 8), (4096 * 8 + 3,), (3, 333, 77)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fingerprints_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    assert has_triton()
    for shape in SIZES:
        tensor = some(dtype, *shape)
        there = tensor.cuda()
        assert fingerprint(there) == fingerprint(tensor), shape
        if tensor.dim() == 3:
            assert fingerprint(there.transpose(0, 2)) == fingerprint(tensor.transpose(0, 2))
            assert fingerprint(there[1:, 1:, 3:]) == fingerprint(tensor[1:, 1:, 3:])
            assert fingerprint(there.flatten()[1:]) == fingerprint(tensor.flatten()[1:])


SHARES = [Share(), Share(2, 1), Share(3, 2), Share(4, 0), Share(4, 3)]
LARGE_SIZES = [LARGE - 1, LARGE, LARGE + 1, LARGE + 511, LARGE + 512 * 7 + 9, 5 * LARGE + 1029]


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_shares_are_those_of_the_cpu(share: Share) -> None:
    for size in LARGE_SIZES:
        tensor = some(torch.uint8, size)
        there = tensor.cuda()
        assert fingerprint(there, share) == fingerprint(tensor, share), size
        assert fingerprint(there[1:], share) == fingerprint(tensor[1:], share), size
    tensor = some(torch.bfloat16, 512, 1028)
    assert fingerprint(tensor.cuda().t(), share) == fingerprint(tensor.t(), share)


def test_every_piece_is_read_in_one_of_four_steps() -> None:
    """A changed word changes the fingerprint of one of four steps."""
    tensor = torch.zeros(LARGE // 8, dtype=torch.int64, device="cuda")
    shares = [Share.of_step(4, step) for step in range(4)]
    before = [fingerprint(tensor, share) for share in shares]
    for place in range(0, 64 * 64, 61):
        tensor[place] = 1
        after = [fingerprint(tensor, share) for share in shares]
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
        tensor[place] = 0


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_many_tensors_in_one_launch(share: Share) -> None:
    tensors = [some(dtype, *shape) for dtype in DTYPES for shape in SIZES]
    tensors += [some(torch.uint8, size) for size in LARGE_SIZES]
    there = [tensor.cuda() for tensor in tensors]
    for _ in range(2):
        slots = torch.zeros(len(tensors) + 5, dtype=torch.int64, device="cuda")
        by_torch.add(there, slots, 5, share)
        assert [value % 2**64 for value in slots[5:].tolist()] == [fingerprint(tensor, share) for tensor in tensors]
        assert not slots[:5].any()


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_torch, "has_triton", lambda: False)
    for shape in SIZES:
        tensor = some(torch.bfloat16, *shape)
        assert fingerprint(tensor.cuda()) == fingerprint(tensor)
    for share in SHARES:
        tensor = some(torch.uint8, LARGE + 1029)
        assert fingerprint(tensor.cuda(), share) == fingerprint(tensor, share)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ordered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return dash_attn.attention(q, k, v, causal=True).transpose(1, 2)


def fa4_default(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn.cute.interface import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def run(to: Path, second: Attend, stream: torch.cuda.Stream | None = None, share: float = SHARE) -> list[Record]:
    """Two steps of a GPT of three blocks. The attention of the block in the middle is given."""
    torch.manual_seed(0)
    model = GPT(layers=3, width=1024, heads=16).cuda().bfloat16()
    for number, block in enumerate(model.blocks):
        block.attn.attend = second if number == 1 else ordered
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(19, (2, LENGTH + 1), device="cuda")
    torch.cuda.synchronize()
    with dash_attn.watch(model, optimizer=optimizer, to=to, share=share), torch.cuda.stream(stream):
        for _ in range(2):
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return load_run(to)


@pytest.mark.usefixtures("strict")
@pytest.mark.parametrize("share", [SHARE, 1])
def test_attention_in_any_order_is_named(tmp_path: Path, share: float) -> None:
    """One of three layers runs FlashAttention-4 in its default mode, whose backward adds dQ as it comes.

    Few elements differ. With every share the gradient that attention computes is read whole.
    """
    pytest.importorskip("flash_attn.cute.interface")
    first = run(tmp_path / "first", fa4_default, share=share)
    for number in range(5):
        parting = first_difference(first, run(tmp_path / str(number), fa4_default, share=share))
        if parting is not None:
            break
    assert parting is not None, "FlashAttention-4 repeated its bits in six runs"
    assert parting.direction == "backward"  # of the first step, or of a later one: bits may be equal by chance
    assert parting.is_sure == (share == 1)  # else layers before it are read in part
    assert (parting.row.module, parting.tensor) == ("blocks.1.attn.qkv", "gradient of output")
    assert parting.operation.startswith("the backward of blocks.1.attn, in its own code")


@pytest.mark.usefixtures("strict")
def test_runs_in_order_are_equal_on_any_stream(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", ordered), run(tmp_path / "b", ordered, torch.cuda.Stream())
    assert first_difference(a, b) is None
    assert sorted(a[0].steps) == [0, 1] and a[0].environment["device"] == torch.cuda.get_device_name()


def test_nothing_waits_for_the_gpu(tmp_path: Path) -> None:
    """No operation waits, and neither does the end of a step: the GPU still works when the host is done."""
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(19, (4, 17), device="cuda")

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    with dash_attn.watch(model, optimizer=optimizer, to=tmp_path):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
            step()
            done = torch.cuda.Event()
            done.record()
            assert not done.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sorted(load_run(tmp_path)[0].steps) == [0, 1, 2, 3]


def test_a_graph_that_is_captured_is_left_out(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8).cuda()
    x = torch.randn(4, 8, device="cuda")
    with dash_attn.watch(model, to=tmp_path):
        model(x).sum().backward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, model(x))
    steps = load_run(tmp_path)[0].steps
    assert [sum(row.phase == "data" for row in step.rows) for step in steps.values()] == [1, 1]


@pytest.mark.alone
@pytest.mark.parametrize("depth", [None, 2], ids=["all modules", "blocks"])
def test_overhead(depth: int | None) -> None:
    """A step of a small GPT takes less than 5 % longer if it is watched, with all gradients and weights.

    The batch is large enough for the GPU to be slower than the host, whose speed differs from machine to machine.
    """
    command = [sys.executable, str(BENCHMARK), "--batch", "32", "--rounds", "5"]
    command += [] if depth is None else ["--depth", str(depth)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)
    assert row["overhead"] < 0.05, row
