"""Masks of several parts: segments whose tokens see each other, padding and windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.masking_utils import packed_sequence_mask_function as segments  # noqa: E402

from dash_attn.integrations.transformers import attention_forward  # noqa: E402
from tests.integrations.small import SMALL  # noqa: E402

pytestmark = pytest.mark.usefixtures("registered")

RUNS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [-1, -1, 5, 5, 5, 5, 2, 2]])
BACK = torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2], [1, 0, 0, 0, 0, 0, 0, 1]])
PADDING = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 1, 1, 1, 1]])
STARTS_AGAIN = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]])


def outputs(maker: str, padding: Tensor | None = None, past: int = 0, **given: Any) -> list[Tensor]:
    """What real tokens of two rows get from sdpa and from dash_attn, with Transformers' mask of that name."""
    torch.manual_seed(0)
    length = 8 - past
    q, k, v = torch.randn(2, 4, length, 8), torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    results = []
    for name in ("sdpa", "dash"):
        config = transformers.LlamaConfig(**SMALL, sliding_window=3, attention_chunk_size=4, attn_implementation=name)
        if past:
            cache = transformers.DynamicCache()
            cache.update(torch.zeros(2, 4, past, 8), torch.zeros(2, 4, past, 8), 0)
            given["past_key_values"] = cache
        elif "bidirectional" not in maker:
            given["past_key_values"] = None
        mask = getattr(masking_utils, maker)(config, torch.zeros(2, length, 64), padding, **given)
        if name == "sdpa":
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        else:
            out = attention_forward(torch.nn.Identity(), q, k, v, mask)[0]
        results.append(out if padding is None else out[padding[:, past:].bool()])
    return results


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
@pytest.mark.parametrize("ids", [RUNS, BACK], ids=["runs", "back"])
@pytest.mark.parametrize(
    "maker",
    [
        "create_causal_mask",
        "create_chunked_causal_mask",
        "create_sliding_window_causal_mask",
        "create_bidirectional_mask",
        "create_bidirectional_sliding_window_mask",
    ],
)
def test_segments_are_those_of_sdpa_or_refused(maker: str, ids: Tensor, padding: Tensor | None) -> None:
    try:
        theirs, mine = outputs(maker, padding, and_mask_function=segments(ids))
    except NotImplementedError as refusal:
        # A segment that comes back leaves tokens with two intervals of keys. A window counts padding between tokens.
        assert ids is BACK or padding is not None, refusal
        assert "packed_sequence_mask_function" in str(refusal) or "padding between tokens" in str(refusal)
    else:
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_padding_and_segments_run() -> None:
    for maker in ("create_causal_mask", "create_bidirectional_mask"):
        theirs, mine = outputs(maker, PADDING, and_mask_function=segments(RUNS))
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_two_segmentations_both_count() -> None:
    theirs, mine = outputs("create_causal_mask", position_ids=STARTS_AGAIN, and_mask_function=segments(RUNS))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("maker", ["create_causal_mask", "create_chunked_causal_mask"])
def test_segments_with_a_cache(maker: str) -> None:
    theirs, mine = outputs(maker, past=3, and_mask_function=segments(RUNS))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_esmc_chains_that_come_back_are_refused() -> None:
    config = transformers.EsmcConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=64)
    ids, chains = torch.arange(4, 16)[None], torch.tensor([[0] * 4 + [1] * 4 + [2] * 4])
    outs = []
    for name in ("eager", "dash"):
        torch.manual_seed(0)
        model = transformers.EsmcModel._from_config(config, attn_implementation=name).eval()
        outs.append(model(input_ids=ids, sequence_id=chains).last_hidden_state)
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)
    with pytest.raises(NotImplementedError, match="Esmc masks with packed_sequence_mask_function"):
        model(input_ids=ids, sequence_id=chains % 2)


def test_ids_of_more_tokens_than_there_are() -> None:
    theirs, mine = outputs("create_causal_mask", and_mask_function=segments(RUNS.repeat(2, 2)))
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("padding", [None, PADDING[:1].expand(2, -1)], ids=["whole", "padded"])
def test_two_windows_both_count(padding: Tensor | None) -> None:
    """One has no limit to the right, which leaves the limit of the other."""
    narrow = masking_utils.sliding_window_overlay(2)
    theirs, mine = outputs("create_bidirectional_sliding_window_mask", padding, and_mask_function=narrow)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Bert"])
def test_a_padding_mask_of_one_row_is_for_all_rows(family: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL)
    model = getattr(transformers, f"{family}Model")._from_config(config, attn_implementation="dash").eval()
    ids = torch.randint(97, (2, 8), generator=torch.Generator().manual_seed(1))
    one, all_rows = (model(input_ids=ids, attention_mask=PADDING[:1].expand(n, -1))[0] for n in (1, 2))
    assert torch.equal(one, all_rows)
    with pytest.raises(ValueError, match="attention_mask has 3 rows for a batch of 2"):
        model(input_ids=ids, attention_mask=PADDING[:1].expand(3, -1))
