"""A table with one turn too high, run by the debug build: prints what it should find and what it raised.

A program of its own, because the trap takes the CUDA context with it.
"""

import dataclasses
import os
import sys

from dash_attn.backends.sm90.config import with_debug
from dash_attn.backends.sm90.launch import debug_backward
from dash_attn.problem import Problem
from tests.backends.sm90.cases import Case, config_of, sms, tables_of

# One q tile: each chain is one task, and no other waits for the last of them.
problem = Problem(1, 1, 1, 64, 384, int(sys.argv[1]))
case, cfg = Case.make(problem), with_debug(config_of(problem))
tables = tables_of(problem, cfg, "fa3", sms())
runs = tables.runs.clone()
run = int(runs[:, 4].argmax())
runs[run, 4] += 1
chain = tables.chains[:, 3].tolist().index(run)
worker = int((tables.worker_first <= tables.worker_chains.tolist().index(chain)).sum()) - 1
print(f"expected worker {worker}, writer W, entry 0: q tile 0 of plane 0 at turn 2, waits for 3")
try:
    debug_backward(cfg, dataclasses.replace(tables, runs=runs), case.inputs, scale=problem.softmax_scale)
except RuntimeError as error:
    print(error)
sys.stdout.flush()
os._exit(0)  # what tidies up at exit would trip over the dead context
