"""Models of Transformers, built small from their config classes: dash against eager, and dash against itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

from dash_attn.integrations.transformers import attention_forward, model_mask, register  # noqa: E402
from tests.integrations.small import LENGTH, SMALL  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 4},
    "Qwen2": {"num_key_value_heads": 2},
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 7},
    "Mixtral": {"num_key_value_heads": 2, "sliding_window": None, "num_local_experts": 4},
}
EVERY = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What enable_full_determinism sets in the process, put back."""
    for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "ASCEND_LAUNCH_BLOCKING", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def build(name: str, implementation: str = "dash", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        **{**SMALL, **MODELS[name], **changes}, attn_implementation=implementation
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tokens(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side: str, lengths: tuple[int, ...] = (LENGTH, 20, 1)) -> Tensor:
    column = torch.arange(LENGTH)
    begin = torch.tensor([LENGTH - n if side == "left" else 0 for n in lengths])[:, None]
    return ((column >= begin) & (column < begin + torch.tensor(lengths)[:, None])).long()


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(n) for n in lengths])


def compare(name: str, arguments: dict[str, Any], training: bool = True, **extra: Any) -> None:
    """Logits of real tokens, and gradients by a loss of real tokens. `extra` is for dash alone."""
    real = arguments.get("attention_mask", torch.ones_like(arguments["input_ids"])).bool()
    weight = torch.randn(*real.shape, SMALL["vocab_size"], generator=torch.Generator().manual_seed(2))[real]
    found = []
    for implementation in ("eager", "dash"):
        model = build(name, implementation).train(training)
        given = {**arguments, **(extra if implementation == "dash" else {})}
        logits = model(**given, use_cache=False).logits[real]
        (logits * weight).sum().backward()
        found.append((logits.detach(), {key: x.grad for key, x in model.named_parameters()}))
    (eager, eager_grads), (dash, dash_grads) = found
    torch.testing.assert_close(dash, eager, atol=1e-5, rtol=1e-4)
    for key, grad in eager_grads.items():
        limit = 1e-5 * max(1.0, float(grad.abs().max()))
        torch.testing.assert_close(dash_grads[key], grad, atol=limit, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}")


@EVERY
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_without_padding(name: str, training: bool) -> None:
    compare(name, {"input_ids": tokens()}, training)


@EVERY
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(name: str, side: str) -> None:
    mask = padded(side)
    where = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    compare(name, {"input_ids": tokens(3), "attention_mask": mask, "position_ids": where})


def test_a_hole_in_the_mask_is_no_boundary() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 5:9] = 0
    compare("Llama", {"input_ids": tokens(), "attention_mask": mask})


def test_padding_has_no_gradient() -> None:
    mask = padded("left")
    model = build("Llama")
    inputs = model.get_input_embeddings()(tokens(3)).detach().requires_grad_()
    model(inputs_embeds=inputs, attention_mask=mask, use_cache=False).logits[mask.bool()].sum().backward()
    assert inputs.grad is not None
    assert not inputs.grad[mask == 0].any()
    assert inputs.grad[mask == 1].any(-1).all()


@EVERY
def test_packed_by_position_ids(name: str) -> None:
    rows = torch.stack([positions(10, 1, 1, 21), torch.cat([positions(12), positions(26)[5:]])])
    compare(name, {"input_ids": tokens(), "position_ids": rows})


@EVERY
def test_packed_by_cu_seq_lens(name: str) -> None:
    ends = torch.tensor([0, 10, 11, 33], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 22, "max_length_k": 22}
    lengths["seq_idx"] = torch.repeat_interleave(torch.arange(3), ends.diff())[None]  # TRL gives it too
    compare(name, {"input_ids": tokens(1), "position_ids": positions(10, 1, 22)[None]}, **lengths)


def test_packed_is_as_if_alone() -> None:
    """Also with padding at the end, where eager lets documents see each other, and with a cache."""
    model = build("Mistral").eval()
    ids = tokens(1)
    mask = torch.ones_like(ids)
    mask[:, 30:] = 0
    where = torch.cat([positions(12), positions(23)[5:], positions(3)])
    given = {"input_ids": ids, "position_ids": where[None]}
    with torch.no_grad():
        alone = torch.cat([model(input_ids=part).logits for part in (ids[:, :12], ids[:, 12:30])], 1)
        for extra in ({}, {"attention_mask": mask}, {"use_cache": False}):
            torch.testing.assert_close(model(**given, **extra).logits[:, :30], alone, atol=1e-5, rtol=1e-4)


def test_packed_if_a_model_keeps_position_ids_to_itself() -> None:
    from transformers.masking_utils import create_causal_mask

    model = build("Llama")
    embeds = model.get_input_embeddings()(tokens(1))
    mask = create_causal_mask(model.config, embeds, None, None, positions(10, 23)[None])
    q, k, v = (torch.randn(1, 2, LENGTH, 16) for _ in range(3))
    by_mask = attention_forward(nn.Identity(), q, k, v, mask)[0]
    by_ends = attention_forward(
        nn.Identity(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 10, 33], dtype=torch.int32)
    )[0]
    assert torch.equal(by_mask, by_ends)
    assert not torch.equal(by_mask, attention_forward(nn.Identity(), q, k, v, None)[0])


def test_no_causality_if_asked() -> None:
    for mask in (None, padded("right")):
        given = {"input_ids": tokens(3), "attention_mask": mask, "is_causal": False, "use_cache": False}
        with torch.no_grad():
            eager, dash = (build("Llama", name).eval()(**given).logits for name in ("eager", "dash"))
        torch.testing.assert_close(dash, eager, atol=1e-5, rtol=1e-4)


@EVERY
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(name: str, cache: str | None) -> None:
    """Prompts padded on the left, then one query at a time."""
    mask = padded("left", (LENGTH, 20))
    given = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    given |= {"cache_implementation": cache, "disable_compile": True}
    eager, dash = (
        build(name, implementation).eval().generate(tokens(), **given, output_logits=True, return_dict_in_generate=True)
        for implementation in ("eager", "dash")
    )
    assert torch.equal(eager.sequences, dash.sequences)
    torch.testing.assert_close(torch.stack(dash.logits), torch.stack(eager.logits), atol=1e-5, rtol=1e-4)


@EVERY
def test_several_queries_on_a_cache(name: str) -> None:
    model = build(name).eval()
    ids = tokens()
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        for kind in ("growing", "static", "static, mask of all its places"):
            cache = None if kind == "growing" else transformers.StaticCache(model.config, max_cache_len=64)
            masks = [(torch.arange(64) < n).long().expand(2, -1) if "mask" in kind else None for n in (20, LENGTH)]
            first = model(input_ids=ids[:, :20], attention_mask=masks[0], past_key_values=cache, use_cache=True)
            second = model(input_ids=ids[:, 20:], attention_mask=masks[1], past_key_values=first.past_key_values)
            both = torch.cat([first.logits, second.logits], 1)
            torch.testing.assert_close(both, whole, atol=1e-5, rtol=1e-4)


def weights_after(name: str, steps: int = 20, **changes: Any) -> list[Tensor]:
    model = build(name, **changes).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mask = padded("right")
    for _ in range(steps):
        ids = torch.randint(SMALL["vocab_size"], mask.shape)
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return [x.detach().view(torch.int32) for x in model.parameters()]


@EVERY
def test_two_runs_have_the_same_bits(name: str) -> None:
    first, second = (weights_after(name) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, weights_after(name, steps=1), strict=True))


def test_full_determinism_after_import(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spy(*tensors: Tensor, **options: Any) -> Tensor:
        from dash_attn.api.arguments import wants_determinism

        asked.append(wants_determinism(options["deterministic"]))
        return original(*tensors, **options)

    from dash_attn.integrations.transformers import forward as integration

    original = integration.attention
    monkeypatch.setattr(integration, "attention", spy)
    before = weights_after("Qwen2")
    assert asked and not any(asked)
    asked.clear()
    transformers.enable_full_determinism(0)
    after = weights_after("Qwen2")
    assert asked and all(asked)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("flag", "argument", "expected"),
    [(False, None, None), (False, True, True), (False, False, False), (True, None, True), (True, False, True)],
)
def test_deterministic_argument(
    restored: None, monkeypatch: pytest.MonkeyPatch, flag: bool, argument: bool | None, expected: bool | None
) -> None:
    """A False that some models pass on their own does not undo torch's flag."""
    found = []
    monkeypatch.setattr(
        "dash_attn.integrations.transformers.forward.attention",
        lambda q, k, v, **options: (found.append(options["deterministic"]), q)[1],
    )
    torch.use_deterministic_algorithms(flag)
    with torch.no_grad():
        build("Llama")(input_ids=tokens(), deterministic=argument)
    assert found == [expected] * 2


def test_gradient_checkpointing() -> None:
    """Computed again, it gives the same bits."""
    grads = []
    for again in (False, True):
        model = build("Mistral").train()
        if again:
            model.gradient_checkpointing_enable()
        model(input_ids=tokens(3), attention_mask=padded("left"), use_cache=False).logits.square().sum().backward()
        grads.append([x.grad.view(torch.int32) for x in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_autocast() -> None:
    """Rotated queries and keys are float32 there, values are not."""
    model = build("Qwen2")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    expected = build("Qwen2", "eager")(input_ids=tokens(), labels=tokens()).loss
    assert abs(loss.item() - expected.item()) < 0.02


def call(shape: tuple[int, ...] = (1, 2, 8, 16), mask: Any = None, **kwargs: Any) -> Tensor:
    module = nn.Identity().train()
    q, k, v = (torch.randn(shape) for _ in range(3))
    return attention_forward(module, q, k, v, mask, **kwargs)[0]


def mask_for(len_q: int, padding: Tensor, kind: str = "causal") -> Any:
    """As Transformers asks for it: for one row, or as many as `padding` has."""
    from transformers import masking_utils

    function = getattr(masking_utils, f"{kind}_mask_function")
    return model_mask(len(padding), len_q, padding.shape[1], 0, 0, function, padding.bool(), config=None, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dropout": 1.5}, ValueError, "dropout must be"),
        ({"softcap": -30.0}, ValueError, "softcap must be"),
        ({"s_aux": torch.zeros(3)}, ValueError, "sinks must have one number for each of the 2 heads"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "position_bias.*eager"),
        ({"indices": torch.zeros(1)}, NotImplementedError, "indices.*eager"),
        ({"block_indices": torch.zeros(1)}, NotImplementedError, "block_indices.*eager"),
        ({"block_table": torch.zeros(1)}, NotImplementedError, "block_table.*paged"),
        ({"cache": SimpleNamespace()}, NotImplementedError, "cache.*paged"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions.*eager"),
        ({"new_bias": torch.zeros(1)}, NotImplementedError, "a tensor new_bias.*eager"),
        ({"mask": torch.zeros(1, 1, 8, 8)}, NotImplementedError, "mask of its own.*sdpa"),
        ({"mask": torch.ones(1, 8)}, NotImplementedError, "mask of its own.*sdpa"),
        ({"mask": mask_for(8, torch.ones(1, 9))}, NotImplementedError, r"\(1, 8, 9\).*\(1, 8, 8\)"),
        ({"mask": mask_for(8, torch.ones(2, 8))}, NotImplementedError, r"\(2, 8, 8\).*\(1, 8, 8\)"),
        ({"sliding_window": 0}, ValueError, "sliding_window"),
        (
            {"mask": mask_for(8, torch.arange(8)[None]), "cu_seq_lens_q": torch.tensor([0, 8])},
            ValueError,
            "leave one out",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 7])}, ValueError, "cu_seqlens"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(**arguments)


def test_messages_name_the_cause_and_a_way_out() -> None:
    ids, short = tokens(), torch.ones(2, LENGTH - 4, dtype=torch.long)
    with pytest.raises(ValueError, match="attention_mask must cover all tokens so far"):
        build("Llama")(input_ids=ids, attention_mask=short, use_cache=False)
    with pytest.raises(ValueError, match=r"float64.*cast the model.*attn_implementation='eager'"):
        build("Llama").double()(input_ids=ids)
    config = transformers.LlamaConfig(**SMALL, output_attentions=True)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="dash")
    with pytest.raises(NotImplementedError, match=r"output_attentions.*attn_implementation='eager'"):
        model(input_ids=ids)


@pytest.mark.parametrize(("name", "field"), [("Bert", "attention_probs_dropout_prob"), ("GPT2", "attn_pdrop")])
def test_dropout_is_named_as_the_config_names_it(name: str, field: str) -> None:
    sizes = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    module = nn.Identity().train()
    module.config = getattr(transformers, f"{name}Config")(**sizes)
    q = torch.zeros(1, 2, 8, 16, device="meta")
    with pytest.raises(NotImplementedError, match=f"set {field}=0.0"):
        attention_forward(module, q, q, q, None, dropout=0.1)


def test_packed_on_a_cache_needs_cu_seq_lens() -> None:
    model, ids = build("Llama").eval(), tokens(1)
    with torch.no_grad():
        cache = model(input_ids=ids[:, :20]).past_key_values
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q and cu_seq_lens_k"):
            model(input_ids=ids[:, 20:], position_ids=positions(4, 9)[None] + 20, past_key_values=cache)


def test_queries_and_keys_of_other_lengths_need_a_mask() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 12, 16)
    with pytest.raises(NotImplementedError, match="8 queries, 12 keys and no mask"):
        attention_forward(nn.Identity(), q, k, k, None)
    assert attention_forward(nn.Identity(), q, k, k, None, is_causal=False)[0].shape == (1, 8, 2, 16)


def test_a_window_on_both_sides_needs_a_mask() -> None:
    q, k = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 12, 16)
    with pytest.raises(NotImplementedError, match="sliding_window=11 and no mask"):
        attention_forward(nn.Identity(), q, k, k, None, is_causal=False, sliding_window=11)
    whole, plain = (
        attention_forward(nn.Identity(), q, k, k, None, is_causal=False, sliding_window=window)[0]
        for window in (12, None)
    )
    assert torch.equal(whole, plain)


def test_keys_from_elsewhere() -> None:
    """Cross attention: the padding is of keys, and every query has an answer, also if there are as many."""
    for length in (5, 8):
        q, k, v = torch.randn(2, 2, length, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
        mask = torch.tensor([[1] * 8, [1] * 3 + [0] * 5])
        out = attention_forward(nn.Identity(), q, k, v, mask_for(length, mask, "bidirectional"))[0]
        expected = nn.functional.scaled_dot_product_attention(q, k, v, mask[:, None, None].bool())
        torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=1e-4)


def test_a_mask_of_new_tokens_alone_is_refused() -> None:
    model, ids = build("Llama").eval(), tokens()
    with torch.no_grad():
        cache = model(input_ids=ids[:, :20]).past_key_values
        with pytest.raises(ValueError, match="the cache too: 33; got 13"):
            model(input_ids=ids[:, 20:], attention_mask=torch.ones(2, 13), past_key_values=cache)


def test_register() -> None:
    register()
    register("another")
    assert transformers.AttentionInterface()["another"] is attention_forward
    assert transformers.AttentionMaskInterface()["another"] is model_mask
    for name, message in (("sdpa", "another attention"), ("eager", "another attention"), ("my_flash", "flash")):
        with pytest.raises(ValueError, match=message):
            register(name)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"dash-attn\[hf\]"):
        register()


def fake_transformers(version: str, error: Exception) -> Any:
    """A module from which nothing can be imported."""

    class Broken(ModuleType):
        __version__ = version

        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(f"Could not import module {name!r}") from error

    return Broken("transformers")


def test_a_broken_environment_is_not_an_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = RuntimeError("operator torchvision::nms does not exist")
    monkeypatch.setitem(sys.modules, "transformers", fake_transformers("5.22.2", reason))
    with pytest.raises(ImportError, match=r"5\.22\.2 is installed and does not load.*torchvision::nms"):
        register()
    monkeypatch.setitem(sys.modules, "transformers", fake_transformers("4.57.1", reason))
    with pytest.raises(ImportError, match=r"5 or later.*4\.57\.1"):
        register()


def test_example() -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, str(ROOT / "examples/hf_finetune.py"), "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "identical: all 21 tensors, bit for bit, after 2 steps" in done.stdout
