"""A table with one turn too high, run by the debug build: prints what it should find and what it raised.

A program of its own, because the trap takes the CUDA context with it.
"""

import dataclasses
import os
import sys

from dash_attn.backends.sm90 import builds
from dash_attn.backends.sm90.config import DEBUG
from dash_attn.backends.sm90.launch import Launch
from dash_attn.problem import Problem
from dash_attn.program import Chain, Run
from tests.backends.sm90.cases import Case, prepared, room

# One q tile: each chain is one task, and no other waits for the last of them.
problem = Problem(1, 1, 1, 64, 384, int(sys.argv[1]))
case, launch = Case.make(problem), prepared(problem, "fa3", **dict(DEBUG)).run_backward
tables = launch.tables
runs = tables.runs.clone()
run = int(runs[:, Run.TURN].argmax())
runs[run, Run.TURN] += 1
chain = tables.chains[:, Chain.FIRST_RUN].tolist().index(run)
worker = int((tables.worker_first <= tables.worker_chains.tolist().index(chain)).sum()) - 1
print(f"expected worker {worker}, writer W, entry 0: q tile 0 of plane 0 at turn 2, waits for 3")
try:
    wrong = Launch(launch.cfg, dataclasses.replace(tables, runs=runs), launch.scale)
    builds.debug(wrong, case.operands, room(case.operands))
except RuntimeError as error:
    print(error)
sys.stdout.flush()
os._exit(0)  # what tidies up at exit would trip over the dead context
