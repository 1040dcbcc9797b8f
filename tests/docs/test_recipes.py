"""The recipes of docs/recipes.md train twice with the same bits, and every attention layer runs dash_attn.

Each test starts processes of its own, because the libraries are large and slow to import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.docs.recipes import PAGE, blocks

ROOT = PAGE.parents[1]
TIMM = Path(sys.prefix) / "timm"  # where `make` puts timm and torchvision, out of sight of Transformers
ALL, LLAMA, SDPA = "For all recipes", "Models of Transformers", "Models that call torch's attention"
LAYERS, RUNS = 2, 2


class Recipe(NamedTuple):
    """A recipe, and how often a layer of its model runs in one training."""

    needs: tuple[str, ...]
    title: str
    forwards: int
    backwards: int
    beside: int = 0  # passes forward and backward outside of training

    def expected(self) -> tuple[int, int]:
        return LAYERS * (RUNS * self.forwards + self.beside), LAYERS * (RUNS * self.backwards + self.beside)


GROUPS = {
    # TRL trains two steps, and each recomputes its forward. The reference model of DPO has a forward a step.
    "trl": [
        Recipe((ALL, LLAMA), "accelerate", 4, 4),
        Recipe((ALL, LLAMA), "Lightning", 4, 4),
        Recipe((ALL, LLAMA), "peft", 4, 4),
        Recipe((ALL, LLAMA, "TRL"), "TRL: fine-tuning with packing", 4, 2, beside=4),
        Recipe((ALL, LLAMA, "TRL"), "TRL: direct preference optimization", 6, 2),
    ],
    "diffusers": [Recipe((ALL, SDPA), "diffusers", 2, 2)],
    "timm": [Recipe((ALL, SDPA), "timm", 2, 2)],
}


def require(library: str) -> None:
    if importlib.util.find_spec(library) is None and not (TIMM / library).is_dir():
        pytest.skip(f"{library} is not installed: make env installs it, with Python 3.11 or later")


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, *folders)))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}


def test_every_recipe_is_tested() -> None:
    run = [recipe.title for recipes in GROUPS.values() for recipe in recipes]
    titles = re.findall(r"^### (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(titles) == sorted([*run, "TRL"])


@pytest.mark.parametrize("library", GROUPS)
def test_recipes(library: str, tmp_path: Path) -> None:
    require(library)
    recipes = GROUPS[library]
    done = subprocess.run(
        [sys.executable, ROOT / "tests/docs/recipes.py", *(",".join((*each.needs, each.title)) for each in recipes)],
        cwd=tmp_path,
        env=environment(*([TIMM] if library == "timm" else []), HF_HOME=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    for recipe, result in zip(recipes, json.loads(done.stdout.splitlines()[-1]), strict=True):
        ours, control = result["ours"], result["control"]
        assert (ours["forwards"], ours["backwards"]) == recipe.expected(), recipe.title
        assert (control["forwards"], control["backwards"]) == (0, 0), recipe.title
        assert ours["bits"] != control["bits"], recipe.title


# Tells at the end of a process whether dash_attn has made ready an attention there.
AT_EXIT = """
import atexit, os, sys

def tell():
    module = sys.modules.get("dash_attn.prepare")
    if module is not None and len(module.prepare.cache):
        open(f"ran-{os.getpid()}", "w").close()

atexit.register(tell)
"""


def test_trl_on_the_command_line(tmp_path: Path) -> None:
    require("trl")
    command = re.search(r"^DASH_ATTN_REGISTER=.*?(?=\n```)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert command is not None
    variable, program, *arguments = shlex.split(command[0].replace("\\\n", " "))
    recipe: dict[str, Any] = {"torch": torch, "device": "cpu"}
    for source in (*blocks(LLAMA), *blocks("TRL")):
        exec(source, recipe)
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT, encoding="utf-8")
    recipe["small_model"]().save_pretrained(tmp_path / "tiny")
    recipe["tokenizer"].save_pretrained(tmp_path / "tiny")
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in recipe["texts"]]
    (tmp_path / "data/train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = subprocess.run(
        [Path(sys.executable).with_name(program), *arguments, "--use_cpu", "--report_to", "none"],
        cwd=tmp_path,
        env=environment(tmp_path, HF_HOME=str(tmp_path), **dict([variable.split("=")])),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    before, after = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("tiny", "out"))
    assert before != after
    assert list(tmp_path.glob("ran-*"))
