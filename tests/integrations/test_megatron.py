"""core_attention of Megatron layers, with stand-ins for Megatron's config, mask types and packed sequences."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dash_attn
from dash_attn.api.arguments import wants_determinism
from dash_attn.integrations import megatron
from dash_attn.integrations.megatron import DashCoreAttention

MaskType = Enum("MaskType", ["padding", "causal", "no_mask", "padding_causal", "arbitrary", "causal_bottom_right"])
DEFAULTS = {
    "attention_dropout": 0.0,
    "context_parallel_size": 1,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "deterministic_mode": False,
}


def core(mask: MaskType = MaskType.causal, layer: int = 1, scale: float | None = None, **config: Any) -> Any:
    """Built with the keywords that Megatron's attention layer passes."""
    return DashCoreAttention(
        config=SimpleNamespace(**{**DEFAULTS, **config}),
        layer_number=layer,
        attn_mask_type=mask,
        attention_type="self",
        cp_comm_type=None,
        softmax_scale=scale,
        pg_collection=None,
    )


def call(module: Any, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Called as Megatron's attention layer does."""
    keywords = {"attn_mask_type": None, "attention_bias": None, "packed_seq_params": None, **given}
    return module(q, k, v, keywords.pop("attention_mask", None), **keywords)


def tensors(*lead: int, queries: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    lead_q = lead if queries is None else (queries, *lead[1:])
    return [torch.randn(*lead_q, 4, 16), torch.randn(*lead, 2, 16), torch.randn(*lead, 2, 16)]


def packed(ends: list[int], padded: list[int] | None = None, form: str = "thd", **others: list[int]) -> SimpleNamespace:
    given = {
        "cu_seqlens_q": ends,
        "cu_seqlens_kv": ends,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        **others,
    }
    tensors = {name: None if x is None else torch.tensor(x, dtype=torch.int32) for name, x in given.items()}
    return SimpleNamespace(qkv_format=form, **tensors)


@pytest.mark.parametrize("mask", [MaskType.causal, MaskType.no_mask, MaskType.causal_bottom_right])
def test_against_torch(mask: MaskType) -> None:
    q, k, v = (x.requires_grad_() for x in tensors(33, 2))
    out = call(core(), q, k, v, attn_mask_type=mask)
    assert out.shape == (33, 2, 64) and out.is_contiguous()
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.permute(1, 2, 0, 3) for x in (q, k, v)), is_causal=mask != MaskType.no_mask, enable_gqa=True
    )
    expected = expected.permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
    for got, want in zip(found, torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


def test_packed_sequences() -> None:
    q, k, v = tensors(33)
    out = call(core(), q, k, v, packed_seq_params=packed([0, 10, 33]), attn_mask_type=MaskType.padding_causal)
    assert out.shape == (33, 64)
    alone = [call(core(), *(x[a:b, None] for x in (q, k, v))).squeeze(1) for a, b in ((0, 10), (10, 33))]
    torch.testing.assert_close(out, torch.cat(alone), atol=1e-5, rtol=1e-4)


def test_padding_behind_packed_sequences_is_not_seen() -> None:
    q, k, v = tensors(33)
    real = torch.cat([torch.arange(10), torch.arange(16, 30)])
    without = call(core(), *(x[real] for x in (q, k, v)), packed_seq_params=packed([0, 10, 24]))
    k[10:16] = v[30:] = 1e4
    out = call(core(), q, k, v, packed_seq_params=packed([0, 10, 24], [0, 16, 33]))
    torch.testing.assert_close(out[real], without, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("skip", "narrow"),
    [(None, [True] * 4), (2, [True, False, True, False]), ([1, 0, 0, 1], [True, False, False, True])],
)
def test_windows_by_layer(skip: Any, narrow: list[int]) -> None:
    q, k, v = tensors(33, 1)
    for layer, expected in enumerate(narrow, 1):
        module = core(layer=layer, window_size=(5, 0), window_attn_skip_freq=skip)
        window = (5, 0) if expected else None
        want = dash_attn.attention(*(x.transpose(0, 1) for x in (q, k, v)), causal=True, window=window)
        assert torch.equal(call(module, q, k, v), want.transpose(0, 1).flatten(2))


def test_scale() -> None:
    q, k, v = tensors(9, 1)
    assert torch.equal(call(core(scale=0.25), q, k, v), call(core(), q, k, v))
    assert not torch.equal(call(core(scale=0.5), q, k, v), call(core(), q, k, v))


def test_decoding_sees_all_keys() -> None:
    q, k, v = tensors(33, 2)
    last = call(core(), q[-1:], k, v, attn_mask_type=MaskType.no_mask)
    torch.testing.assert_close(last, call(core(), q, k, v)[-1:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", [False, True])
def test_deterministic_mode(monkeypatch: pytest.MonkeyPatch, mode: bool) -> None:
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    asked = []

    def spy(q: Tensor, *_: Tensor, **options: Any) -> Tensor:
        asked.append(wants_determinism(options["deterministic"]))
        return q

    monkeypatch.setattr(megatron, "attention", spy)
    call(core(deterministic_mode=mode), *tensors(9, 1))
    assert asked == [mode]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout 0.0"),
        ({"context_parallel_size": 2}, "--cp-comm-type a2a or all_gather"),
        ({"softmax_type": "learnable"}, "sinks"),
        ({"fp8_dot_product_attention": True}, "fp8"),
        ({"qk_clip": True}, "qk_clip"),
    ],
    ids=lambda x: "".join(x) if isinstance(x, dict) else "",
)
def test_configs_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        core(**config)


def test_values_of_another_dim_are_refused() -> None:
    config = SimpleNamespace(**DEFAULTS)
    DashCoreAttention(config, 1, MaskType.causal, k_channels=64, v_channels=64)
    with pytest.raises(NotImplementedError, match="multi-latent"):
        DashCoreAttention(config, 1, MaskType.causal, k_channels=192, v_channels=128)


def test_recomputed_gives_the_same_bits() -> None:
    grads = []
    for again in (False, True):
        q, k, v = (x.requires_grad_() for x in tensors(33, 2))
        out = checkpoint(core(), q, k, v, None, use_reentrant=False) if again else core()(q, k, v, None)
        out.square().sum().backward()
        grads.append([x.grad for x in (q, k, v)])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_dropout_given_beside_the_config() -> None:
    config = SimpleNamespace(**{**DEFAULTS, "attention_dropout": 0.1})
    DashCoreAttention(config, 1, MaskType.causal, attention_dropout=0.0)
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.2"):
        DashCoreAttention(config, 1, MaskType.causal, attention_dropout=0.2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.zeros(1)}, "--no-create-attention-mask-in-dataloader"),
        ({"attention_bias": torch.zeros(1)}, "attention_bias"),
        ({"attn_mask_type": MaskType.arbitrary}, "arbitrary: dash_attn has causal"),
        ({"attn_mask_type": MaskType.padding}, "pack sequences as thd"),
        ({"packed_seq_params": packed([0, 33], form="sbhd")}, "'sbhd'"),
        ({"packed_seq_params": packed([0, 3], [0, 33]), "attn_mask_type": MaskType.padding}, "cu_seqlens_q_padded"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_calls_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        call(core(), *tensors(33, 1), **given)


def test_causal_with_fewer_queries_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="causal_bottom_right"):
        call(core(), *tensors(33, 1, queries=8))


@pytest.mark.parametrize("mask", [MaskType.causal, MaskType.padding_causal])
def test_packed_causal_with_fewer_queries_is_refused(mask: MaskType) -> None:
    with pytest.raises(NotImplementedError, match="causal_bottom_right"):
        call(core(mask), *tensors(33, queries=8), packed_seq_params=packed([0, 3, 8], cu_seqlens_kv=[0, 10, 33]))


def test_packed_with_fewer_queries_level_at_the_end() -> None:
    q, k, v = tensors(33, queries=8)
    bottom = core(MaskType.causal_bottom_right)
    out = call(bottom, q, k, v, packed_seq_params=packed([0, 3, 8], cu_seqlens_kv=[0, 10, 33]))
    alone = [
        call(bottom, q[a:b, None], *(x[c:d, None] for x in (k, v))).squeeze(1)
        for a, b, c, d in ((0, 3, 0, 10), (3, 8, 10, 33))
    ]
    torch.testing.assert_close(out, torch.cat(alone), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ends", [[0, 3, 8], [0, 16, 33]], ids=["none", "to the same ends"])
def test_padding_that_moves_queries_is_refused(ends: list[int]) -> None:
    """Behind 10 real keys stand 6 of padding, and behind 3 real queries none or 13."""
    moved = packed([0, 3, 8], ends, cu_seqlens_kv=[0, 10, 27], cu_seqlens_kv_padded=[0, 16, 33])
    with pytest.raises(NotImplementedError, match="cu_seqlens_kv_padded"):
        call(core(MaskType.causal_bottom_right), *tensors(33, queries=ends[-1]), packed_seq_params=moved)
