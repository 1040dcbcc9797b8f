"""Seven models that people train, on the CPU in float32: against eager, and two trainings against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from dash_attn.api.arguments import wants_determinism
from dash_attn.integrations.transformers import forward
from tests.integrations.families import EVERY_LAYOUT, FAMILIES, Setting, same_bits

pytestmark = pytest.mark.usefixtures("registered")

SETTING = Setting("cpu", torch.float32, length=36, head_dims={"others": 16, "ViT": 20})


@pytest.mark.parametrize(("name", "layout"), EVERY_LAYOUT)
def test_against_eager(name: str, layout: str) -> None:
    """Logits and gradients."""
    eager, dash = (SETTING.outcome(name, kind, layout) for kind in ("eager", "dash"))
    for what, mine, want in zip(("logits", "gradients"), dash, eager, strict=True):
        assert float((mine - want).norm() / want.norm()) < 1e-5, what


@pytest.mark.parametrize("name", FAMILIES)
def test_two_runs_have_the_same_bits(name: str) -> None:
    first, second = (list(SETTING.trained(name, 3)) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert not same_bits(first[-1], second[-2])


@pytest.mark.parametrize("asked_of_flash", [None, "0"])
def test_modernbert_keeps_the_order_unless_somebody_asks(
    asked_of_flash: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config has a field for it, False by default, and the model gives it to every attention."""
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    if asked_of_flash is not None:
        monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", asked_of_flash)
    kept, original = list[bool](), forward.attention

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        kept.append(wants_determinism(options["deterministic"]))
        return original(*tensors, **options)

    monkeypatch.setattr(forward, "attention", spy)
    with torch.no_grad():
        SETTING.build("ModernBert", "dash")(**SETTING.batch("ModernBert", "whole"))
    assert kept and set(kept) == {asked_of_flash is None}
