"""What an import loads, and how long it takes: users of `attention` do not pay for the tools."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dash_attn.tools import EXTRA

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("numba", *EXTRA, "transformers", "scipy", "pandas", "cutlass", "tvm_ffi", "flash_attn", "triton")
LIMIT = 0.15  # seconds that dash_attn may add to the import of torch

LOADED = f"""
import json, sys
import torch
HEAVY = {HEAVY!r}
before = set(sys.modules)
def added():
    return [name for name in HEAVY if name in sys.modules and name not in before]
seen = []
import dash_attn
seen.append(added())
dash_attn.attention, dash_attn.backward, dash_attn.explain, dash_attn.flash_attn_func
seen.append(added())
assert not any(name.startswith("dash_attn.watching") for name in sys.modules)
q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=True) for _ in range(3))
dash_attn.attention(q, k, v, causal=True).sum().backward()
seen.append(added())
print(json.dumps(seen))
"""

BEHIND = ("tiling", "order", "program", "launch", "verify", "plan", "pack", "prepare")  # dash_attn/api/border.py

FIRST = f"""
import sys, threading
import torch
import dash_attn
attention, flash = dash_attn.attention, dash_attn.flash_attn_func
print([name for name in {BEHIND!r} if f"dash_attn.{{name}}" in sys.modules])
q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
"""

THREADS = f"""{FIRST}
sys.setswitchinterval(1e-5)
start, outs = threading.Barrier(4), []
def call(number):
    start.wait()
    operator = torch.ops.dash_attn.forward
    outs.append(attention(q, k, v) if number else operator(q, k, v, None, None, -1, -1, [], "", None)[0])
threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(outs) == 4 and all(torch.equal(out, outs[0]) for out in outs))
"""

COMPILED = f"""{FIRST}
compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), backend="eager", fullgraph=True)
torch._dynamo.config.error_on_recompile = True
print(all(torch.equal(compiled(q, k, v), attention(q, k, v, causal=True)) for _ in range(2)))
"""

FORKED = f"""{FIRST}
import os, sys, threading, time
sys.setswitchinterval(1e-5)
first = threading.Thread(target=attention, args=(q, k, v))
first.start()
children = []
for _ in range(30):
    time.sleep(0.002)
    children.append(os.fork())
    if not children[-1]:
        attention(q, k, v)
        os._exit(0)
first.join()
deadline = time.monotonic() + 60
while children and time.monotonic() < deadline:
    children = [child for child in children if not os.waitpid(child, os.WNOHANG)[0]]
    time.sleep(0.01)
for child in children:
    os.kill(child, 9)
print(not children)
"""

TIMED = """
import time
import torch
before = time.process_time()
import dash_attn
dash_attn.attention
print(time.process_time() - before)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout


def test_neither_an_import_nor_a_backward_loads_anything_heavy() -> None:
    assert json.loads(run(LOADED)) == [[], [], []]


@pytest.mark.parametrize("code", [THREADS, COMPILED, FORKED], ids=["threads", "compiled", "forked"])
def test_the_first_call_loads_the_planner(code: str) -> None:
    """Not the import. The first call may come from several threads at once, from torch.compile, or from children that
    are born while another thread makes it."""
    assert run(code).splitlines() == ["[]", "True"]


def test_the_package_adds_little_to_the_import_of_torch() -> None:
    fastest = min(float(run(TIMED)) for _ in range(5))
    assert fastest <= LIMIT, f"{fastest:.3f} s of processor time"


def test_the_command_line_starts_without_torch() -> None:
    code = f"import sys, dash_attn.tools.cli.main; print([x for x in ('torch', *{HEAVY}) if x in sys.modules])"
    assert ast.literal_eval(run(code)) == ["rich", "typer"]
