"""check(model), and registration by an environment variable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dash_attn.integrations.transformers import check, register  # noqa: E402
from dash_attn.integrations.transformers.checking import gpu_obstacle  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
pytestmark = pytest.mark.filterwarnings("ignore:.*computes attention itself")


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


def built(name: str, implementation: Any = "dash", **sizes: Any) -> Any:
    family = name.removesuffix("ForCausalLM").removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, name)._from_config(config, attn_implementation=implementation)


def test_every_layer_of_a_llama_runs_ours() -> None:
    report = check(built("LlamaForCausalLM", **SMALL))
    assert report.ok
    assert [(x.name, x.runs, x.backend) for x in report.layers] == [
        (f"model.layers.{i}.self_attn", "dash", "cpu") for i in range(2)
    ]


def test_another_attention_is_named() -> None:
    report = check(built("LlamaForCausalLM", "sdpa", **SMALL))
    assert not report.ok
    assert {x.runs for x in report.layers} == {"sdpa"}
    assert "attn_implementation='dash'" in str(report)


@pytest.mark.parametrize(
    ("name", "sizes", "obstacle"),
    [
        ("T5Model", {"vocab_size": 97, "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 1}, "position_bias"),
    ],
)
def test_obstacles_are_found_without_a_batch(name: str, sizes: dict[str, Any], obstacle: str) -> None:
    report = check(built(name, **sizes))
    assert not report.ok
    assert report.layers and all(any(obstacle in x for x in layer.obstacles) for layer in report.layers)


def test_attention_of_its_own_is_found() -> None:
    report = check(built("BloomForCausalLM", vocab_size=99, hidden_size=64, n_layer=2, n_head=4))
    assert [x.runs for x in report.layers] == ["its own attention"] * 2
    assert "the first forward is refused" in str(report)


def test_parts_with_different_attention_are_told_apart() -> None:
    text, vision = {**SMALL, "intermediate_size": 64, "head_dim": 16}, {"hidden_size": 32, "num_attention_heads": 2}
    vision |= {"intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    chosen = {"text_config": "dash", "vision_config": "sdpa"}
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation=chosen)
    runs = {(x.name.split(".")[1], x.runs) for x in check(model).layers}
    assert runs >= {("vision_tower", "sdpa"), ("language_model", "dash")}
    assert not runs & {("vision_tower", "dash"), ("language_model", "sdpa")}


def test_no_attention_is_no_layer() -> None:
    report = check(built("MambaModel", vocab_size=97, hidden_size=64, num_hidden_layers=1))
    assert not report.layers and not report.ok


@pytest.mark.parametrize(
    ("dims", "fits"),
    [((64, 64), True), ((128, 128), True), ((256, 256), False), ((192, 128), False), ((20, 20), False)],
)
def test_head_dims_of_the_gpu(dims: tuple[int, int], fits: bool) -> None:
    assert (gpu_obstacle(dims) is None) == fits


def test_a_device_without_a_backend_is_an_obstacle() -> None:
    with torch.device("meta"):
        model = built("LlamaForCausalLM", **SMALL)
    assert "meta" in str(check(model)) and not check(model).ok


@pytest.mark.parametrize(("value", "expected"), [("transformers", "True"), ("", "False")])
def test_registration_by_environment(tmp_path: Path, value: str, expected: str) -> None:
    """As installed: torch finds the entry point in the package's metadata."""
    info = tmp_path / "entry-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 0\n", encoding="utf-8")
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition('entry-points."torch.backends"]')[2]
    line = declared.strip().splitlines()[0].replace('"', "")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{line}\n", encoding="utf-8")
    script = (
        "from transformers import LlamaConfig, LlamaModel, AttentionInterface; print('dash' in AttentionInterface())"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "DASH_ATTN_REGISTER": value}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout.strip() == expected, done.stderr
