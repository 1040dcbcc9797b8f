"""The compiled kernels on a machine that runs their PTX: right, and the same bits in every interleaving."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import accumulate, pairwise

import pytest
import torch

from dash_attn.backends import Operands, Options
from dash_attn.backends.sm90.cache import compile_kernel
from dash_attn.backends.sm90.config import PIECE_ROWS, KernelConfig
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Features, Problem, documents, tiles, window
from tests.backends.sm90.ptx.device import machine
from tests.backends.sm90.ptx.kernels import Kernel
from tests.backends.sm90.ptx.machine import Chance
from tests.backends.sm90.ptx.mutants import Mutant, main_text, mutants, noticed
from tests.backends.sm90.ptx.trial import CPU, ROLES, Got, Trial, same
from tests.distributed import jobs, threads

pytestmark = pytest.mark.skipif(
    find_spec("cutlass") is None or find_spec("tvm_ffi") is None, reason="the kernel compiler is not installed"
)


@dataclass(frozen=True)
class Case:
    problem: Problem
    policy: str = "auto"
    kernel: dict[str, object] = field(default_factory=dict)
    with_dlse: bool = False


FEATURES = Features(softcap=15.0, sinks=True)
CASES = {
    "d64": Case(Problem(1, 2, 2, 256, 256, 64, mask=CAUSAL)),
    "d64, shift": Case(Problem(1, 1, 1, 384, 384, 64), "shift:3"),
    "d64, two kernels for dQ": Case(Problem(1, 1, 1, 200, 300, 64, mask=CAUSAL), kernel={"finish": "postpass"}),
    "d64, cut": Case(Problem(1, 4, 2, 140, 200, 64, mask=CAUSAL)),
    "d64, cut, empty chains": Case(Problem(1, 2, 1, 64, 2000, 64, mask=window(100, 0)), "auto@head"),
    "d64, features": Case(Problem(1, 2, 1, 140, 140, 64, mask=CAUSAL, features=FEATURES), with_dlse=True),
    "d64, pack": Case(Problem(1, 2, 2, 300, 300, 64, mask=CAUSAL & documents([0, 130, 131, 131, 300]))),
    "d64, cut pack": Case(Problem(1, 2, 1, 300, 300, 64, mask=window(90, 20) & documents([0, 130, 300]))),
    "d64, panels": Case(Problem(1, 2, 1, 260, 260, 64, mask=CAUSAL, panels=4)),
    "d64, no order": Case(Problem(1, 2, 1, 200, 200, 64), kernel={"ordered": False}),
    "d80, fp16": Case(Problem(1, 2, 2, 130, 130, 80, "float16")),
    "d96, batch": Case(Problem(2, 2, 1, 70, 70, 96, mask=CAUSAL)),
    "d128": Case(Problem(1, 1, 1, 300, 300, 128, mask=CAUSAL), "symmetric_shift:4"),
    "d128, cut": Case(Problem(1, 2, 1, 140, 200, 128, mask=CAUSAL)),
    "d128, tiles": Case(Problem(1, 1, 1, 256, 256, 128, mask=tiles([[True, False], [True, True]], 128, 128))),
    "d128, rows without keys": Case(Problem(1, 2, 1, 200, 100, 128, mask=CAUSAL)),
    "d128, features": Case(Problem(1, 2, 1, 130, 130, 128, "float16", features=FEATURES), with_dlse=True),
    "d128, cut pack of a batch": Case(Problem(2, 2, 1, 140, 140, 128, mask=CAUSAL & documents([0, 60, 140]))),
    "d128, panels": Case(Problem(1, 2, 1, 200, 200, 128, mask=CAUSAL, panels=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_right_and_the_same_in_every_interleaving(name: str) -> None:
    """Copies and products soon, and as late as possible together with one role. The cases share the roles."""
    case, number = CASES[name], list(CASES).index(name)
    trial = Trial.of(case.problem, with_dlse=case.with_dlse)
    needed = trial.co_resident(case.policy, **case.kernel)
    soon = trial.run(Chance(1, 1.0, 30), case.policy, max(needed, 3), **case.kernel)
    role, workers = ROLES[number % len(ROLES)], max(needed, 1 + number % 3)
    late = trial.run(Chance(2, 0.0, 100, role), case.policy, workers, **case.kernel)
    trial.check(soon)
    trial.check(late)
    assert same(soon, late) or not case.kernel.get("ordered", True)


def part(trial: Trial, a: int, b: int) -> Trial:
    """A document by itself."""
    dout, q, k, v, out = (x[:, a:b].contiguous() for x in trial.operands[:5])
    problem = trial.problem
    alone = replace(problem, len_q=b - a, len_k=b - a, mask=replace(problem.mask, documents=None))
    operands = Operands(dout, q, k, v, out, trial.operands.lse[:, :, a:b].contiguous())
    return replace(trial, problem=alone, operands=operands)


@pytest.mark.parametrize(("heads", "dim"), [((2, 1), 64), ((2, 2), 128)], ids=["d64, cut", "d128"])
def test_bits_belong_to_the_sequence(heads: tuple[int, int], dim: int) -> None:
    """A document alone, in a pack, beside NaN, and on other numbers of workers."""
    ends = [0, *accumulate([150, 1, 0, 129])]
    trial = Trial.of(Problem(1, *heads, ends[-1], ends[-1], dim, mask=CAUSAL & documents(ends)))
    packed = trial.run(Chance(1))
    beside = replace(trial, operands=Operands(*(x.clone() for x in trial.operands)))
    for x in beside.operands[:5]:
        x[:, :150] = float("nan")
    poisoned = beside.run(Chance(2), workers=2)
    for a, b in pairwise(ends):
        mine = Got(*(x[:, a:b] for x in packed[:3]))
        if b > a:
            assert same(part(trial, a, b).run(Chance(3 + a), workers=3), mine)
        assert a == 0 or same(Got(*(x[:, a:b] for x in poisoned[:3])), mine)


def test_panels_of_ranks() -> None:
    """Ranks as threads, each with kernels of its own, have the bits of one call."""
    case = jobs.Case(
        dtype=torch.bfloat16, lengths=(140, 140), heads=(2, 1), dim=64, panels=4, arguments={"causal": True}
    )
    with machine(Chance(1, 0.3)):
        alone = case.alone()
        assert jobs.differences(threads.apart(case, (2,), "all_gather", "zigzag", 1), alone) == []
    assert "dk" in jobs.differences(case.alone(), alone), "the machine has run the kernels"


def test_room_behind_sequences() -> None:
    """The copy of K and V before a forward has zeros behind each sequence."""
    k, v = (torch.randn(200, 2, 80).half() for _ in range(2))
    copies = [torch.full((400, 2, 80), float("nan")).half() for _ in range(2)]
    rows = [(0, 130, 0, 256), (130, 70, 256, 144)]  # first row, rows with values, first row of the copy, its rows
    pieces = [
        (first + i, min(PIECE_ROWS, max(0, filled - i)), to + i, min(PIECE_ROWS, count - i))
        for first, filled, to, count in rows
        for i in range(0, count, PIECE_ROWS)
    ]
    kernel = Kernel("spread", KernelConfig(80, "fp16", packed=True), Chance(1))
    kernel((k, v), copies, torch.tensor(pieces, dtype=torch.int32))
    for x, copy in zip((k, v), copies, strict=True):
        want = torch.zeros_like(copy)
        want[:130], want[256:326] = x[:130], x[130:]
        assert torch.equal(copy, want)


def some(every: list[Mutant]) -> list[Mutant]:
    """Few enough for a test: the last one of each instruction and kind of change."""
    return list({(each.was.op, each.instruction.op): each for each in every}.values())


@pytest.mark.parametrize("dim", [64, 128])
def test_a_kernel_without_a_synchronisation_is_noticed(dim: int) -> None:
    """The control: `python -m tests.backends.sm90.ptx.mutants` tries every one."""
    trial = Trial.of(Problem(1, 2, 1, 256, 300, dim, mask=CAUSAL))
    every, want = some(list(mutants(main_text(trial)))), trial.run(Chance())
    assert len(every) >= 9
    for mutant in every:
        assert noticed(trial, mutant, want) is not None, mutant


def test_a_kernel_without_a_turn_hangs() -> None:
    trial = Trial.of(Problem(1, 1, 1, 256, 256, 64))
    text = main_text(trial)
    (release,) = [each for each in mutants(text) if each.was.op.startswith("red.release")]
    how = noticed(trial, release, trial.run(Chance()))
    assert how is not None and re.search(r"hangs: .* warp [12] at", how)


def test_full_masks_are_not_causal() -> None:
    """The check against float64 can fail."""
    trial = Trial.of(Problem(1, 1, 1, 130, 130, 64, mask=FULL))
    wrong = replace(trial, problem=replace(trial.problem, mask=CAUSAL))
    with pytest.raises(AssertionError, match="error"):
        trial.check(wrong.run(Chance(1)))


def test_a_kernel_is_compiled_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_kernel("prepare", KernelConfig(64, "bf16"))


def test_too_few_sms_are_named() -> None:
    problem = Problem(1, 1, 1, 512, 512, 64)
    for workers, margin, said in (
        (2, 0, "^this order needs 4 co-resident workers, 2"),
        (4, 1, "^sm_margin=1 leaves 3"),
    ):
        with machine(Chance(), workers):
            ready = prepare(problem, "shift:4", Options(sm_margin=margin), CPU)
            with pytest.raises(ValueError, match=said):
                ready.backward(Trial.of(problem).operands)
