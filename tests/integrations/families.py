"""Seven models that people train, small, with what they are trained on: for the tests on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor

from dash_attn.integrations.transformers import check

VOCABULARY = 97
IGNORED = -100  # a label that is none
SHORT = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
GROUPED = {**SHORT, "num_key_value_heads": 2}
TYPES = ["sliding_attention", "full_attention"]
# Every expert sees every token: else the last digit of a score may choose another one.
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4}
# These ids are inside the vocabulary. The default ones are not.
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A model class, the fields of its config apart from widths, and what its batches look like.

    layouts    whole: rows of tokens; padded: with padding at the end; packed: several sequences in a row
    width      the field of the config for the width of the model
    inner      the fields for the width of its other layers
    window     the field for a window that a token sees
    """

    model: str
    config: str
    fields: dict[str, Any]
    layouts: tuple[str, ...] = ("whole", "padded", "packed")
    width: str = "hidden_size"
    inner: tuple[str, ...] = ("intermediate_size",)
    window: str | None = "sliding_window"


FAMILIES = {
    "Gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        # Capped this low, and with weights this large, scores meet the cap.
        {**GROUPED, "attn_logit_softcapping": 2.0, "initializer_range": 0.08},
    ),
    "Gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "layer_types": TYPES}),
    "GptOss": Family("GptOssForCausalLM", "GptOssConfig", {**GROUPED, **EXPERTS}),
    "Qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", GROUPED, window=None),
    "ModernBert": Family(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**SHORT, **IDS, "cls_token_id": 1, "sep_token_id": 2, "layer_types": TYPES},
        ("whole", "padded"),
        window="local_attention",
    ),
    "ViT": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "num_labels": 10},
        ("whole",),
        window=None,
    ),
    "Whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **IDS,
            "vocab_size": VOCABULARY,
            "decoder_start_token_id": 1,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_mel_bins": 16,
        },
        ("whole", "padded"),
        "d_model",
        ("encoder_ffn_dim", "decoder_ffn_dim"),
        None,
    ),
}
EVERY_LAYOUT = [(name, layout) for name, family in FAMILIES.items() for layout in family.layouts]


@dataclass(frozen=True)
class Setting:
    """How large the models are and where they run.

    length   tokens of a row, at most; a multiple of 4
    """

    device: str
    dtype: torch.dtype
    length: int
    head_dims: dict[str, int]

    def config(self, name: str) -> Any:
        family, dim = FAMILIES[name], self.head_dims.get(name, self.head_dims["others"])
        width = family.fields.get("num_attention_heads", 4) * dim
        sizes = {family.width: width, **dict.fromkeys(family.inner, width + 64)}
        if family.window is not None:
            sizes[family.window] = self.length // 4
        if name == "Whisper":
            # The encoder has fewer tokens than the decoder.
            sizes |= {"max_source_positions": self.length // 2, "max_target_positions": self.length}
        elif name == "ViT":
            sizes["image_size"] = 4 * int(self.length**0.5)
        elif name != "ModernBert":
            sizes["head_dim"] = dim
        if name.startswith("Gemma"):
            sizes["query_pre_attn_scalar"] = dim
        return getattr(transformers, family.config)(**family.fields, **sizes)

    def build(self, name: str, implementation: str, dtype: torch.dtype | None = None) -> Any:
        """The same weights, rounded to bfloat16, in any dtype."""
        torch.manual_seed(0)
        kind = getattr(transformers, FAMILIES[name].model)
        model = kind._from_config(self.config(name), attn_implementation=implementation)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if key.endswith("sinks"):
                    weight.normal_()
        model = model.bfloat16().to(self.device, dtype or self.dtype).train()
        assert implementation != "dash" or check(model).ok, str(check(model))
        return model

    def batch(self, name: str, layout: str, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Inputs and labels."""
        generator, length = torch.Generator().manual_seed(1), self.length
        ids = torch.randint(3, VOCABULARY, (3, length), generator=generator)
        real = torch.ones_like(ids)
        if layout == "padded":
            real = (torch.arange(length) < torch.tensor([[length], [length // 2 + 3], [1]])).long()
        given: dict[str, Any] = {"input_ids": ids, "labels": ids.masked_fill(real == 0, IGNORED)}
        if layout == "packed":
            lengths = (length // 3, 5, length - length // 3 - 5)
            places = torch.cat([torch.arange(n) for n in lengths])[None]
            given = {"input_ids": ids[:1], "labels": ids[:1], "position_ids": places}
        mask = {"attention_mask": real} if layout == "padded" else {}
        if name == "Whisper":
            sounds = torch.randn(3, 16, length, generator=generator).bfloat16().to(dtype or self.dtype)
            given = {"input_features": sounds, "labels": given["labels"]}
            mask = {f"decoder_{key}": x for key, x in mask.items()}
        elif name == "ViT":
            size = 4 * int(length**0.5)
            images = torch.randn(3, 3, size, size, generator=generator).bfloat16().to(dtype or self.dtype)
            given = {"pixel_values": images, "labels": torch.tensor([1, 4, 9])}
        moved = {key: x.to(self.device) for key, x in {**given, **mask}.items()}
        return moved if name in ("ViT", "ModernBert") else {**moved, "use_cache": False}

    def outcome(self, name: str, implementation: str, layout: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Logits of real tokens, and all gradients in one row, by a loss of real tokens.

        Another attention than ours has packed sequences one by one: in some models they would see each other.
        """
        model, given = self.build(name, implementation, dtype), self.batch(name, layout, dtype)
        parts = [given] if implementation == "dash" else alone(given)
        logits = torch.cat([model(**part).logits[part["labels"] != IGNORED].float() for part in parts])
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(self.device)
        (logits * weight).sum().backward()
        grads = [x.grad.float().flatten() for x in model.parameters() if x.requires_grad]
        return [logits.detach(), torch.cat(grads)]

    def trained(self, name: str, steps: int, layouts: tuple[str, ...] | None = None) -> Iterator[list[Tensor]]:
        """All weights after each step, with batches of each layout in turn, all that there are or these."""
        model = self.build(name, "dash")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = [self.batch(name, layout) for layout in layouts or FAMILIES[name].layouts]
        for step in range(steps):
            loss = model(**batches[step % len(batches)]).loss
            assert bool(loss.isfinite()), f"step {step}: loss {float(loss)}"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield [x.detach().clone() for x in model.parameters()]


def alone(given: dict[str, Any]) -> list[dict[str, Any]]:
    """The sequences of a packed row."""
    if "position_ids" not in given:
        return [given]
    ends = [*(given["position_ids"][0] == 0).nonzero().flatten().tolist(), given["position_ids"].shape[1]]
    return [{key: x[:, a:b] if isinstance(x, Tensor) else x for key, x in given.items()} for a, b in pairwise(ends)]


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    bits = {2: torch.int16, 4: torch.int32}
    return all(torch.equal(*(x.view(bits[x.element_size()]) for x in pair)) for pair in zip(first, second, strict=True))
