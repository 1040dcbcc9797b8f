"""Seven models that people train, in bfloat16 on a Hopper GPU: make gpu-test"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from dash_attn.backends.sm90.forwards import FlashAttention4
from tests.integrations.families import EVERY_LAYOUT, FAMILIES, Setting, same_bits
from tests.integrations.small import as_close_as_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),  # what torch has no such form of is not ours
]

DEVICE = "cuda"
SETTING = Setting(DEVICE, torch.bfloat16, length=300, head_dims={"others": 64, "Qwen3": 128, "ViT": 80})
FEATURED = ("Gemma2", "GptOss")  # capped scores and sinks: no other forward has them for several sequences in a row


@pytest.mark.parametrize(("name", "layout"), EVERY_LAYOUT)
def test_as_close_as_eager(name: str, layout: str) -> None:
    """To the same weights in float32."""
    if name in FEATURED and layout != "whole" and (reason := FlashAttention4().missing()) is not None:
        pytest.skip(reason)
    exact = SETTING.outcome(name, "eager", layout, torch.float32)
    eager, dash = (SETTING.outcome(name, kind, layout) for kind in ("eager", "dash"))
    as_close_as_eager(dash, eager, exact)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_runs_have_the_same_bits(name: str) -> None:
    layouts = ("whole",) if name in FEATURED and FlashAttention4().missing() is not None else None
    first, second = (list(SETTING.trained(name, 10, layouts)) for _ in range(2))
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    assert not same_bits(first[-1], second[-2])
