"""Models of Transformers in bfloat16 on a Hopper GPU: make gpu-test"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tests.integrations.small import as_close_as_eager  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),  # what torch has no such form of is not ours
]

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 256,  # head dim 64
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 4},
    "Qwen2": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 50},
    # Every expert sees every token: else the last digit of a score may choose another one.
    "Mixtral": {
        "num_key_value_heads": 2,
        "sliding_window": None,
        "num_local_experts": 4,
        "num_experts_per_tok": 4,
    },
}
EVERY = pytest.mark.parametrize("name", MODELS)
LENGTH = 300
DEVICE = "cuda"


def build(name: str, implementation: str, dtype: torch.dtype) -> Any:
    """The same weights, rounded to bfloat16, in any dtype."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL, **MODELS[name], attn_implementation=implementation)
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().to(DEVICE, dtype)
    assert model.config._attn_implementation == implementation
    return model.train()


def batch(layout: str) -> dict[str, Tensor]:
    """Three rows, whole or padded, or one row of three sequences."""
    ids = torch.randint(SMALL["vocab_size"], (3, LENGTH), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids}
    if layout == "padded":
        given["attention_mask"] = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [170], [1]])).long()
    if layout == "packed":
        places = torch.cat([torch.arange(n) for n in (130, 1, LENGTH - 131)])
        given = {"input_ids": ids[:1], "position_ids": places[None]}
    return {key: x.to(DEVICE) for key, x in given.items()}


def outcome(model: Any, given: dict[str, Tensor]) -> list[Tensor]:
    """Logits of real tokens, and all gradients in one row, by a loss of real tokens."""
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(*real.shape, SMALL["vocab_size"], generator=generator).to(DEVICE)[real]
    logits = model(**given, use_cache=False).logits[real].float()
    (logits * weight).sum().backward()
    return [logits.detach(), torch.cat([x.grad.float().flatten() for x in model.parameters()])]


@EVERY
@pytest.mark.parametrize("layout", ["whole", "padded", "packed"])
def test_as_close_as_eager(name: str, layout: str) -> None:
    """To the same weights in float32."""
    given = batch(layout)
    exact = outcome(build(name, "eager", torch.float32), given)
    eager, dash = (outcome(build(name, kind, torch.bfloat16), given) for kind in ("eager", "dash"))
    as_close_as_eager(dash, eager, exact)


def weights_after(name: str, steps: int) -> list[Tensor]:
    model = build(name, "dash", torch.bfloat16)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layouts = [batch(layout) for layout in ("whole", "padded", "packed")]
    for step in range(steps):
        given = layouts[step % 3]
        real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
        labels = given["input_ids"].masked_fill(~real, -100)
        model(**given, labels=labels, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return [x.detach().view(torch.int16) for x in model.parameters()]


@EVERY
def test_two_runs_have_the_same_bits(name: str) -> None:
    first, second = (weights_after(name, 20) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, weights_after(name, 1), strict=True))
