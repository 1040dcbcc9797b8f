"""Without numba the same loops run as plain Python and give the same answers; with it, it loads with the first plan."""

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


LAZY = """
import importlib, pkgutil, sys
import dash_attn
for name in ("jit", "problem", "tiling", "order", "program", "launch", "verify", "simulate", "timeline", "plan"):
    module = importlib.import_module(f"dash_attn.{name}")
    for each in pkgutil.iter_modules(getattr(module, "__path__", []), f"dash_attn.{name}."):
        importlib.import_module(each.name)
print("numba" in sys.modules)
dash_attn.plan.plan(dash_attn.problem.Problem(1, 1, 1, 8, 8), dash_attn.tiling.TileShape(4, 4))
print("numba" in sys.modules)
"""


def test_numba_loads_with_the_first_plan() -> None:
    output = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "True"]


def test_same_answers() -> None:
    assert answers(without=True) == answers(without=False) != ""
