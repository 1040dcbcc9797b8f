"""Models of Transformers with sinks, capped scores, dropout, or values with another head dim, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from dash_attn.integrations.transformers import attention_forward, check, checking  # noqa: E402
from dash_attn.problem import intervals  # noqa: E402
from tests.integrations.small import GROUPED, LENGTH, SMALL  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")

MODELS: dict[str, dict[str, Any]] = {
    "GptOss": {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 2, "sliding_window": 7},
    "Gemma2": {**GROUPED, "attn_logit_softcapping": 0.5, "sliding_window": 7, "initializer_range": 0.2},
    "DeepseekV3": {
        **SMALL,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "Llama": {**SMALL, "attention_dropout": 0.25},
}


def build(name: str, implementation: str = "dash", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**MODELS[name], **changes})
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("sinks"):
                weight.normal_()
    return model.train()


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def step(model: Any, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of real tokens, and the gradients of all weights."""
    real = arguments.get("attention_mask", torch.ones(2, LENGTH)).bool()
    logits = model(input_ids=tokens(), use_cache=False, **arguments).logits[real]
    (logits * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
    grads = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return logits.detach(), grads


PADDING = torch.tensor([[0] * 9 + [1] * (LENGTH - 9), [1] * LENGTH])


@pytest.mark.parametrize("name", ["GptOss", "Gemma2", "DeepseekV3"])
@pytest.mark.parametrize("arguments", [{}, {"attention_mask": PADDING}], ids=["plain", "padded"])
def test_against_eager(name: str, arguments: dict[str, Any]) -> None:
    (want, wanted), (got, grads) = (step(build(name, how), **arguments) for how in ("eager", "dash"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert grads.keys() == wanted.keys()
    assert name != "GptOss" or sum(key.endswith("sinks") for key in grads) == 2
    for key, grad in wanted.items():
        limit = 1e-5 * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(grads[key], grad, atol=limit, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


def test_the_feature_matters() -> None:
    """The control of the test above: without the feature the results differ."""
    for name, changes in (("Gemma2", {"attn_logit_softcapping": 50.0}), ("Llama", {"attention_dropout": 0.0})):
        (with_it, _), (without, _) = (step(build(name, **each)) for each in ({}, changes))
        assert (with_it - without).abs().max() > 1e-3
    model = build("GptOss")
    with_sinks, _ = step(model)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-100.0)
    assert (with_sinks - step(model)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_two_runs_have_the_same_bits(name: str) -> None:
    def weights(steps: int = 3) -> list[Tensor]:
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(steps):
            model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [x.detach() for x in model.parameters()]

    first, second = weights(), weights()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, weights(steps=1), strict=True))


# ---- dropout -----------------------------------------------------------------------------------------------


def test_dropout_is_for_training() -> None:
    model = build("Llama").eval()
    want, _ = step(build("Llama", attention_dropout=0.0).eval())
    state = torch.get_rng_state()
    assert torch.equal(step(model)[0], want) and torch.equal(state, torch.get_rng_state())
    assert not torch.equal(step(model.train())[0], want)


def test_every_layer_and_step_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from dash_attn.api import extras

    seeds = []
    original = extras.drawn_seed
    monkeypatch.setattr(extras, "drawn_seed", lambda: seeds.append(original()) or seeds[-1])
    model = build("Llama")
    first, second = step(model)[0], step(model)[0]
    assert len({int(x) for x in seeds}) == 4  # two layers, two steps
    assert not torch.equal(first, second)


def test_dropout_on_average_is_as_eager() -> None:
    """Means over many steps: of one layer's output, by dash_attn and by torch's own dropout."""
    means = []
    for how in ("eager", "dash"):
        model = build("Llama", how, num_hidden_layers=1).model
        with torch.no_grad():
            outs = torch.stack([model(input_ids=tokens(), use_cache=False).last_hidden_state for _ in range(200)])
        means.append((outs.mean(0), outs.std(0)))
    (eager, spread), (dash, own) = means
    assert (((eager - dash) / (spread + 1e-6)).abs() * (200 / 2) ** 0.5).mean() < 1.0
    assert 0.9 < float(own.mean() / spread.mean()) < 1.1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_repeats_the_dropout(reentrant: bool) -> None:
    model = build("Llama")
    torch.manual_seed(5)
    want, wanted = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(5)
    got, grads = step(model)
    assert torch.equal(got, want)
    assert all(torch.equal(grads[key], grad) for key, grad in wanted.items())


def test_masks_of_single_rows_draw_once() -> None:
    """Batch entries with masks of their own are calls of their own, and have the seeds that one call gives them."""
    from dash_attn.integrations.transformers.masks import ModelMask

    def run(masks: list[Any]) -> Tensor:
        mask = ModelMask("a model", 2, 8, 8, torch.device("cpu"), False)
        object.__setattr__(mask, "intervals", masks)
        torch.manual_seed(3)
        q = torch.randn(2, 2, 8, 16)
        return attention_forward(nn.Identity().train(), q, q, q, mask, dropout=0.5)[0]

    prefix = intervals([0] * 8, [4, 4, 4, 4, 5, 6, 7, 8])
    assert torch.equal(run([prefix]), run([prefix, prefix]))


# ---- what a GPU lacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"dropout": 0.1}, r"dropout=0\.1: dash_attn has dropout on CPUs only"), ({"value_dim": 8}, "head dim 8 and")],
)
def test_refused_elsewhere(arguments: dict[str, Any], message: str) -> None:
    q = torch.zeros(1, 2, 8, 16, device="meta")
    value = q[..., : arguments.pop("value_dim", 16)]
    with pytest.raises(NotImplementedError, match=message):
        attention_forward(nn.Identity().train(), q, q, value, None, **arguments)


@pytest.mark.parametrize(
    ("name", "obstacle"), [("GptOss", "s_aux"), ("Gemma2", "attn_logit_softcapping=0.5"), ("Llama", "dropout=0.25")]
)
def test_check_asks_the_backend(name: str, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    assert check(model).ok

    class Lacking:
        name = "a gpu"

        def tile_shape(self, problem: Any) -> None:
            if str(problem.features) != "none":
                raise NotImplementedError(f"no kernel for {problem.features}")

    monkeypatch.setattr(checking, "backend_for", lambda device: Lacking())
    report = check(model)
    assert not report.ok
    assert all(obstacle in str(layer) and "no kernel for" in str(layer) for layer in report.layers)
