"""Runs recipes of docs/recipes.md and counts the calls of dash_attn. test_recipes.py starts it as a process.

python tests/docs/recipes.py TITLE[,TITLE...] ...

Each argument is a recipe: the titles of the sections that it needs, its own last. The last line of the output is a JSON
list with what each recipe did, with dash_attn and, as a control, with torch's attention in its place.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dash_attn.backends.cpu.backend import CpuBackend

PAGE = Path(__file__).resolve().parents[2] / "docs/recipes.md"
ACTIVATE = 'torch.nn.attention.activate_flash_attention_impl("dash")\n'
calls: Counter[str] = Counter()


def blocks(title: str) -> list[str]:
    """The Python blocks below a heading, up to the next heading."""
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"the page has no section {title!r}"
    return re.findall(r"^```python\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)


def by_torch(source: str) -> str:
    """The same recipe without dash_attn."""
    return source.replace(ACTIVATE, "").replace('"dash"', '"sdpa"').replace("assert check", "assert True or check")


def counted(name: str) -> None:
    """Count what the backend runs, not how often it is asked for a function."""
    make = getattr(CpuBackend, name)

    def made(*asked: Any) -> Callable[..., Any]:
        run = make(*asked)

        def once(*given: Any, **options: Any) -> Any:
            calls[name] += 1
            return run(*given, **options)

        return once

    setattr(CpuBackend, name, made)


def run(sources: list[str], name: str) -> dict[str, Any]:
    calls.clear()
    namespace: dict[str, Any] = {"__name__": "recipe"}
    for source in sources:
        exec(compile(source, name, "exec"), namespace)
    return {"bits": namespace["first"], "forwards": calls["forward"], "backwards": calls["backward"]}


def result(titles: list[str]) -> dict[str, Any]:
    before = [block for title in titles[:-1] for block in blocks(title)]
    own = blocks(titles[-1])
    ours = run([*before, *own], titles[-1])
    if torch.nn.attention.current_flash_attention_impl() is not None:
        torch.nn.attention.restore_flash_attention_impl()
    control = run([by_torch(source) for source in (*before, own[0])], f"{titles[-1]} (control)")
    return {"ours": ours, "control": control}


def let_torchvision_load() -> None:
    """Beside a torch for CPUs the operators of a torchvision for GPUs do not load, and its import fails because it
    expects the two below. timm needs the import and none of the operators."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        torch.ops.load_library(Path(spec.origin).with_name("_C.so"))
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")


if __name__ == "__main__":
    let_torchvision_load()
    for name in ("forward", "backward"):
        counted(name)
    print(json.dumps([result(titles.split(",")) for titles in sys.argv[1:]]))
