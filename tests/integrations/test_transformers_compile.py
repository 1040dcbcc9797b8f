"""torch.compile(fullgraph=True) of whole models, against the same models uncompiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from dash_attn.integrations.transformers import register  # noqa: E402
from tests.integrations.small import GROUPED, LENGTH  # noqa: E402

MASK = (torch.arange(LENGTH) >= torch.tensor([[7], [0]])).long()
HOLED = MASK.clone()
HOLED[1, 5:9] = 0
PACKED = torch.cat([torch.arange(10), torch.arange(23)])[None].expand(2, -1)
CASES: dict[str, dict[str, Any]] = {
    "plain": {"use_cache": False},
    "cache": {},
    "padded": {"attention_mask": MASK, "use_cache": False},
    "packed": {"position_ids": PACKED, "use_cache": False},
    "packed, cache": {"position_ids": PACKED},
}


@pytest.fixture(autouse=True)
def registered() -> None:
    register()
    torch._dynamo.reset()


def run(name: str, given: dict[str, Any], compiled: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    window = {"sliding_window": 7} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(**GROUPED, **window)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="dash")
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    ids = torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = forward(input_ids=ids, **given).logits
    real = given.get("attention_mask", torch.ones_like(ids)).bool()
    logits[real].square().mean().backward()
    return logits[real].detach(), [x.grad for x in model.parameters()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral"])
def test_in_one_graph(name: str, case: str) -> None:
    (logits, grads), (expected, expected_grads) = (run(name, CASES[case], compiled) for compiled in (True, False))
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-4)


def test_a_hole_in_the_padding() -> None:
    """Right without a window, refused with one, as without torch.compile."""
    compiled, plain = (run("Llama", {"attention_mask": HOLED, "use_cache": False}, x)[0] for x in (True, False))
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="padding between tokens"):
        run("Mistral", {"attention_mask": HOLED, "use_cache": False}, True)


@pytest.mark.filterwarnings("ignore:.*computes attention itself")
def test_a_model_that_computes_attention_itself_does_not_compile() -> None:
    config = transformers.BloomConfig(vocab_size=99, hidden_size=64, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="dash")
    with pytest.raises(Exception, match=r"Bloom|NotImplementedError"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=torch.arange(8)[None])
