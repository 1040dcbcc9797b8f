"""A part of the sweep over Transformers' architectures, against the rows of docs/models.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from dash_attn.integrations.transformers import register  # noqa: E402
from dash_attn.integrations.transformers.sweep import compare, table  # noqa: E402
from dash_attn.integrations.transformers.sweep.published import gpu_cell  # noqa: E402

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "models.md"

# fmt: off
# Models that compute attention themselves with Transformers' masks, or mask with a window on both sides.
TREACHEROUS = [
    "bloom",
    "codegen",
    "xglm",
    "gpt_neox_japanese",
    "trocr",
    "mvp",
    "blip_text_model",
    "led",
    "mpnet",
    "roformer",
    "big_bird",
    "convbert",
    "megatron-bert",
    "luke",
    "rembert",
    "autoformer",
    "diffusion_gemma",
]
# Every kind of model: decoders, encoders, both, experts, state spaces, images, sound, several at once.
SPREAD = [
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "llama4_text",
    "mixtral",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
    "gptj",
    "falcon",
    "opt",
    "phi",
    "bert",
    "roberta",
    "bart",
    "t5",
    "t5gemma",
    "whisper",
    "vit",
    "siglip",
    "clip",
    "wav2vec2",
    "mamba",
    "jamba",
    "modernbert",
    "qwen2_vl",
    "sam",
    "blip-2",
    "depth_anything",
    "deformable_detr",
    "gemma4_vision",
    "lxmert",
    "qwen2_5_omni_audio_encoder",
    "time_series_transformer",
    "zamba2",
]
# fmt: on


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", [*TREACHEROUS, *SPREAD])
def test_the_document_says_what_the_sweep_finds(family: str) -> None:
    outcome = compare.examine(family)
    assert outcome.verdict in ("right", "own", "refused"), outcome
    assert table.row(outcome) == table.read(DOCUMENT)[family]


def test_the_treacherous_ones_are_refused() -> None:
    rows = table.read(DOCUMENT)
    assert all("refused" in rows[family] or "right, except" in rows[family] for family in TREACHEROUS)


def test_no_row_is_wrong_or_a_crash() -> None:
    verdicts = {family: line.split("|")[3].strip() for family, line in table.read(DOCUMENT).items()}
    assert len(verdicts) > 500
    assert not [family for family, verdict in verdicts.items() if verdict in ("wrong", "crash")]


def test_rows_of_some_families_are_merged(tmp_path: Path) -> None:
    file = tmp_path / "models.md"
    file.write_text("kept\n")
    outcomes = [compare.Outcome("llama", "right"), compare.Outcome("bloom"), compare.Outcome("bert", "own")]
    table.write(outcomes, "5", file)
    table.write([compare.Outcome("bloom", "refused")], "5", file, merge=True)
    assert list(table.read(file)) == ["bert", "bloom", "llama"]
    text = file.read_text()
    assert text.startswith("kept\n")
    assert "3 families" in text
    for line in ("- 1 families run", "- 1 are right by", "- 1 are refused", "- 0 are not built"):
        assert line in text


def test_no_hint_is_for_nobody() -> None:
    from dash_attn.integrations.transformers.sweep import given, hints
    from dash_attn.integrations.transformers.sweep.families import families

    assert {*given.GIVEN, *hints.HINTS, *hints.ARGUMENTS} <= {*families()}


def test_layers_that_a_model_takes_by_number_stay() -> None:
    from dash_attn.integrations.transformers.sweep.small import small_config

    backbone = small_config("depth_anything").backbone_config
    assert max(backbone.out_indices) <= backbone.num_hidden_layers
    assert backbone.hidden_size == 64


def test_published_head_dims() -> None:
    assert gpu_cell("llama") == "yes: 128"
    assert gpu_cell("deepseek_v3") == "no: 192/128"
    assert gpu_cell("resnet") == "not known"


# ---- the sweep itself: it must see what is wrong -------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our attention with other arguments."""
    import dash_attn
    from dash_attn.integrations.transformers import forward

    register()

    def replace(**changes: Any) -> None:
        def attention(*tensors: Any, **options: Any) -> Any:
            return dash_attn.attention(*tensors, **{**options, **changes})

        monkeypatch.setattr(forward, "attention", attention)

    return replace


@pytest.mark.parametrize(
    "changes", [{"causal": False}, {"scale": 0.3}, {"window": (3, 3)}], ids=lambda x: next(iter(x))
)
def test_a_wrong_attention_is_found(broken: Any, changes: dict[str, Any]) -> None:
    broken(**changes)
    outcome = compare.examine("llama")
    assert outcome.verdict == "wrong"
    assert outcome.cases["training"].startswith("wrong")


def test_an_unclear_crash_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_attn.integrations.transformers import forward

    def crash(*_: Any, **__: Any) -> Any:
        raise KeyError("dash")

    monkeypatch.setattr(forward, "attention", crash)
    assert compare.examine("llama").verdict == "crash"


def test_a_model_that_sees_the_future_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With None for a mask, as other implementations return it, BLOOM sees the future: the sweep says so."""
    from transformers import AttentionMaskInterface

    register()
    monkeypatch.setattr(compare, "register", lambda: None)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "dash", lambda *_, **__: None)
    outcome = compare.examine("bloom")
    assert "sees the future" in outcome.cases["leak"]


def test_every_size_is_small() -> None:
    from dash_attn.integrations.transformers.sweep.families import architectures, config_class
    from dash_attn.integrations.transformers.sweep.small import shrink

    for family in ("llama", "gemma3", "whisper"):
        config = shrink(config_class(family)())
        with torch.device("meta"):
            model: nn.Module = architectures(family)[0](config)
        assert sum(x.numel() for x in model.parameters()) < 2_000_000
