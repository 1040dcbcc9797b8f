"""A Program in place of a policy: from a file, verified, compared with the problem, and run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dash_attn
from dash_attn.api import attention, backward
from dash_attn.api.explain import explain
from dash_attn.backends import Operands, Options
from dash_attn.plan import Plan
from dash_attn.prepare import prepare
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, window
from dash_attn.program import Program, Run, save
from dash_attn.tools.bench.operands import exact
from tests.backends.cpu.reference import CPU, difference, error, operands

PROBLEM = Problem(2, 4, 2, 300, 300, 16, "float32", None, CAUSAL)


def made_by(policy: str, problem: Problem = PROBLEM) -> Program:
    planned = prepare(problem, policy, Options(), CPU).plan
    assert isinstance(planned, Plan)
    return planned.program


def reversed_turns(program: Program) -> Program:
    """The same visits. The chain that adds first to a dQ tile adds last."""
    runs = program.runs.copy()
    last = program.contributors[runs[:, Run.FIRST_Q]] - 1
    grows = np.diff(program.contributors, append=program.contributors[-1])[runs[:, Run.FIRST_Q]]
    assert (runs[:, Run.STEP] == 1).all()
    steady = (runs[:, Run.COUNT] == 1) | (grows == 0)
    assert steady.all(), "a run crosses q tiles with different numbers of contributors"
    runs[:, Run.TURN] = last - runs[:, Run.TURN]
    runs[:, Run.TURN_STEP] *= -1
    return replace(program, policy="mine", runs=runs, launch=program.launch[::-1])


def through_file(program: Program, folder: Path) -> Program:
    save(program, folder / "program.npz")
    return dash_attn.load(folder / "program.npz")


def gradients(given: Operands, policy: str | Program, mask: Mask = CAUSAL) -> tuple[Tensor, ...]:
    return backward(*given, mask=mask, policy=policy)


@pytest.mark.parametrize("policy", ["auto", "symmetric_shift", "fa3", "spt@head", "auto@group"])
def test_a_program_from_a_file_gives_the_bits_of_its_policy(policy: str, tmp_path: Path) -> None:
    given, program = operands(PROBLEM), through_file(made_by(policy), tmp_path)
    assert difference(gradients(given, program), gradients(given, policy)) == ""


def test_autograd_takes_a_program(tmp_path: Path) -> None:
    leaves = [x.detach().requires_grad_() for x in operands(PROBLEM).qkv]
    program = through_file(made_by("descending"), tmp_path)
    runs = []
    for policy in (program, "descending"):
        out = attention(*leaves, causal=True, policy=policy)
        runs.append(torch.autograd.grad(out.sum(), leaves))
    assert difference(runs[0], runs[1]) == ""


@pytest.mark.parametrize("policy", ["fa3", "fa3@head"])
def test_other_turns_give_other_bits_and_right_gradients(policy: str, tmp_path: Path) -> None:
    problem = replace(PROBLEM, len_q=700, len_k=900, mask=FULL)  # two kv tiles add to the same sum in either order
    given, usual = operands(problem), made_by(policy, problem)
    mine = through_file(reversed_turns(usual), tmp_path)
    assert mine.fingerprint != usual.fingerprint
    run = gradients(given, mine, FULL)
    assert difference(run, gradients(given, policy, FULL)) != ""
    for grad, want in zip(run, exact(problem, *given[:4]).gradients, strict=True):
        assert error(grad, want) < 1e-6


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"batch": 1}, "its batch is 1, the problem's is 2"),
        ({"len_q": 250, "len_k": 250}, "its len_q is 250, the problem's is 300"),
        ({"heads_kv": 4}, "its heads_kv is 4, the problem's is 2"),
        ({"mask": FULL}, "another mask: q tile 0, kv tile 0 is full, the problem's is partial"),
        ({"mask": window(200, 0)}, "another mask"),
    ],
)
def test_a_program_for_another_problem_is_refused(other: dict[str, object], said: str, tmp_path: Path) -> None:
    program = through_file(made_by("fa3", replace(PROBLEM, **other)), tmp_path)
    given = operands(PROBLEM)
    with pytest.raises(ValueError, match=f"{said}.*give the name of a policy"):
        gradients(given, program)
    with pytest.raises(ValueError, match=said):  # before the forward, not in the backward
        attention(given.q.requires_grad_(), given.k, given.v, causal=True, policy=program)
    with pytest.raises(ValueError, match=said):
        explain(*given.qkv, causal=True, policy=program)


def test_a_program_that_would_be_wrong_is_refused(tmp_path: Path) -> None:
    """Its fingerprint fits, and its geometry and tiles are those of the problem: only the turns are wrong."""
    program = made_by("fa3")
    runs = program.runs.copy()
    runs[0, Run.TURN] += 1
    with pytest.raises(ValueError, match="turns are no permutation"):
        gradients(operands(PROBLEM), through_file(replace(program, runs=runs), tmp_path))


def test_a_program_is_verified_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, given = through_file(made_by("spt"), tmp_path), operands(PROBLEM)
    gradients(given, program)
    monkeypatch.setattr("dash_attn.verify.checks.check_panel", lambda *_: pytest.fail("verified again"))
    gradients(given, program)
    backward(*given, causal=True, scale=0.5, policy=program)  # another problem with the same tiles


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "program.npz"
    save(made_by("fa3"), path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged|is no dash_attn program"):
        dash_attn.load(path)


@pytest.mark.parametrize("how", [{"cu_seqlens": [0, 100, 300]}, {"panels": 2}], ids=str)
def test_packs_and_panels_take_no_program(how: dict[str, object]) -> None:
    packed = "cu_seqlens" in how
    q, k, v = ((x[0] if packed else x).detach().requires_grad_() for x in operands(PROBLEM).qkv)
    with pytest.raises(ValueError, match="need an order for each length: give the name of a policy"):
        attention(q, k, v, causal=True, policy=made_by("fa3"), **how)


def test_operators_take_no_program() -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, call, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return call(*args, **(kwargs or {}))

    given = operands(PROBLEM)
    with (
        Watching(),
        pytest.raises(NotImplementedError, match=r"torch\.compile, dispatch modes .* name of a policy"),
    ):
        attention(*given.qkv, causal=True, policy=made_by("fa3"))


def test_explain_says_that_a_program_was_given(tmp_path: Path) -> None:
    mine = through_file(replace(made_by("fa3"), policy="mine"), tmp_path)
    said = explain(*operands(PROBLEM).qkv, causal=True, policy=mine)
    assert (said.policy, said.reason, said.fingerprint) == ("mine", "given as a program", mine.fingerprint)
