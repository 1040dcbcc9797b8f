"""Without numba the same loops run as plain Python and give the same answers."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
if {without}:
    sys.modules["numba"] = None
from dash_attn.launch import compose
from dash_attn.problem import CAUSAL, FULL, Problem
from dash_attn.order import applicable
from dash_attn.simulate import Machine, simulate
from dash_attn.tiling import TileShape, tile
from dash_attn.verify import verify
for mask in (FULL, CAUSAL):
    tiling = tile(Problem(1, 4, 2, 50, 37, mask=mask), TileShape(4, 4))
    for name in applicable(tiling):
        program = compose(tiling, name)
        result = simulate(program, 12, Machine())
        print(name, program.fingerprint, verify(program).co_resident, result.makespan, result.stall)
"""


def answers(without: bool) -> str:
    command = [sys.executable, "-c", SCRIPT.format(without=without)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_same_answers() -> None:
    assert answers(without=True) == answers(without=False) != ""
