"""torch's BlockMask as a mask: pair by pair against torch's own reading of it, and refused where it is none of ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    or_masks,
)

import dash_attn
from dash_attn import CAUSAL, FULL, Mask, documents, from_block_mask, window

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def everything(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0


def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k <= 20


def before(end: int) -> Mod:
    return lambda b, h, q, k: k < end


def same_document(number: Tensor) -> Mod:
    return lambda b, h, q, k: number[q] == number[k]


def in_some_range(ranges: Tensor) -> Mod:
    """A function that is right for single indices alone: `any` over a table."""
    return lambda b, h, q, k: ((ranges[:, 0] <= k) & (k < ranges[:, 1])).any()


def made(
    mod: Mod, len_q: int, len_k: int, size: int | tuple[int, int] = 16, batch: int = 1, heads: int = 1
) -> BlockMask:
    return create_block_mask(mod, batch, heads, len_q, len_k, device="cpu", BLOCK_SIZE=size)


NUMBER = torch.tensor([0] * 30 + [1] * 11 + [2] * 59)
SAME = [  # function, queries, keys, the mask that runs
    (causal, 100, 100, CAUSAL),
    (everything, 100, 90, FULL),
    (and_masks(causal, near), 100, 100, window(20, 0)),
    (same_document(NUMBER), 100, 100, documents([0, 30, 41, 100])),
    (and_masks(causal, same_document(NUMBER)), 100, 100, documents([0, 30, 41, 100], causal=True)),
]
INTERVALS = [
    (or_masks(causal, before(37)), 100, 100),  # a prefix that all see
    (and_masks(causal, before(37)), 100, 100),  # padded keys
    (before(37), 70, 100),
    (lambda b, h, q, k: k // 24 <= q // 24, 100, 100),  # causal from block to block
    (and_masks(causal, lambda b, h, q, k: k // 24 == q // 24), 101, 100),  # chunks
    (lambda b, h, q, k: (q % 7 <= k) & (k < q * 13 % 100), 100, 100),  # any order, some empty
    (in_some_range(torch.tensor([[10, 30], [30, 55]])), 40, 60),
    (lambda b, h, q, k: k < 0, 100, 100),
]
TILES = [  # holes between blocks
    (lambda b, h, q, k: (q // 16 + k // 16) % 2 == 0, 100, 90),
    (and_masks(causal, lambda b, h, q, k: (q // 16 + k // 16) % 3 != 1), 100, 100),
    (or_masks(before(16), and_masks(causal, lambda b, h, q, k: k // 32 == q // 32)), 100, 100),
]


@pytest.mark.parametrize(("mod", "len_q", "len_k", "plain"), SAME)
def test_plain_masks_are_recognised(mod: Mod, len_q: int, len_k: int, plain: Mask) -> None:
    mask = from_block_mask(made(mod, len_q, len_k)).without_rows(len_q, len_k)
    if mask.documents is not None:
        mask = replace(mask, documents=replace(mask.documents, within=None))
    assert mask == plain


@pytest.mark.parametrize("size", [16, (8, 32), 128])
@pytest.mark.parametrize(("mod", "len_q", "len_k"), [*INTERVALS, *(case[:3] for case in SAME)])
def test_intervals(mod: Mod, len_q: int, len_k: int, size: int | tuple[int, int]) -> None:
    mask = from_block_mask(made(mod, len_q, len_k, size))
    assert mask.tiles is None
    expected = create_mask(mod, 1, 1, len_q, len_k, device="cpu")[0, 0].numpy()
    np.testing.assert_array_equal(mask.dense(len_q, len_k), expected)


@pytest.mark.parametrize(("mod", "len_q", "len_k"), TILES)
def test_tiles(mod: Mod, len_q: int, len_k: int) -> None:
    mask = from_block_mask(made(mod, len_q, len_k))
    assert mask.tiles is not None
    expected = create_mask(mod, 1, 1, len_q, len_k, device="cpu")[0, 0].numpy()
    np.testing.assert_array_equal(mask.dense(len_q, len_k), expected)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_table_is_right_or_refused(data: st.DataObject) -> None:
    len_q, len_k = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 20))
    table = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 999))).random((len_q, len_k)))
    seen = (table < data.draw(st.sampled_from([0.02, 0.9, 0.98]))).repeat_interleave(2, 0).repeat_interleave(3, 1)
    size = data.draw(st.sampled_from([1, 2, 3, 4, 6, (2, 3)]))
    block_mask = made(lambda b, h, q, k: seen[q, k], 2 * len_q, 3 * len_k, size)
    try:
        mask = from_block_mask(block_mask)
    except NotImplementedError:
        assert size not in (1, (2, 3))  # blocks that fit take every table
    else:
        np.testing.assert_array_equal(mask.dense(2 * len_q, 3 * len_k), seen.numpy())


@pytest.mark.parametrize("mod", [INTERVALS[0][0], INTERVALS[4][0], TILES[1][0]])
def test_attention_agrees_with_torch(mod: Mod) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 100, 2, 16, requires_grad=True) for _ in range(3))
    block_mask = made(mod, 100, 100, batch=2, heads=2)
    out = dash_attn.attention(q, k, v, mask=from_block_mask(block_mask))
    # flex_attention has no backward on CPUs, so its dense mask goes to torch's other attention.
    dense = create_mask(mod, 2, 2, 100, 100, device="cpu")
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=dense)
    theirs = theirs.transpose(1, 2)
    torch.testing.assert_close(out, theirs, atol=1e-5, rtol=1e-4)
    dout = torch.randn_like(out)
    for mine, their in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (out, theirs)), strict=True):
        torch.testing.assert_close(mine, their, atol=1e-5, rtol=1e-4)


def test_full_blocks_are_not_asked() -> None:
    """As in flex_attention: mask_mod decides in partial blocks alone, and other blocks are not seen."""
    number, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(number, index, number, index.flip(-1), BLOCK_SIZE=4, mask_mod=before(2))
    expected = np.repeat([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 1, 1, 1, 1]], 4, 0)
    with pytest.raises(NotImplementedError, match="query 4 see keys that are not one interval"):
        from_block_mask(block_mask)
    block_mask.mask_mod = before(4)
    expected[4:, 2:4] = 1
    np.testing.assert_array_equal(from_block_mask(block_mask).dense(8, 8), expected)


def test_batch_entries_and_heads() -> None:
    ends = torch.tensor([100, 70, 90])
    equal = made(lambda b, h, q, k: (k < 50 + b - b) & (h >= 0), 100, 100, batch=3, heads=2)
    assert from_block_mask(equal) == dash_attn.intervals([0] * 100, [50] * 100)
    assert from_block_mask(made(causal, 100, 100, batch=3, heads=2)).without_rows(100, 100) == CAUSAL
    with pytest.raises(NotImplementedError, match=r"batch entry 1 than to entry 0.*B=None.*cu_seqlens"):
        from_block_mask(made(lambda b, h, q, k: k < ends[b], 100, 100, batch=3))
    with pytest.raises(NotImplementedError, match=r"head 1 than to head 0.*H=None"):
        from_block_mask(made(lambda b, h, q, k: q - k < 60 - h, 100, 100, heads=3))


def test_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"query 3 see keys .* blocks of 16x16: .*BLOCK_SIZE.*flex_attention"):
        from_block_mask(made(lambda b, h, q, k: (q < 3) | (k % 2 == 0), 100, 100))
    with pytest.raises(ValueError, match="must be a torch BlockMask, got Tensor"):
        from_block_mask(torch.ones(3, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a slice of a BlockMask keeps the lengths.*create_block_mask"):
        from_block_mask(made(lambda b, h, q, k: q >= k, 100, 100)[:, :, :2])


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_blocks_that_do_not_exist_are_refused(index: int) -> None:
    """An entry behind the last listed block may have any value."""
    block_mask = made(causal, 32, 32)
    block_mask.kv_num_blocks = torch.tensor([[[1, 2]]], dtype=torch.int32)
    block_mask.kv_indices = torch.tensor([[[[0, 9], [0, index]]]], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"block_mask must name blocks of keys from 0 to 1, got {index}:"):
        from_block_mask(block_mask)


@pytest.mark.parametrize("batch", [1, 8])
def test_many_blocks_take_milliseconds(batch: int) -> None:
    """512 x 512 blocks of 128 x 128, causal, whose diagonal is partial."""
    count = torch.arange(512, dtype=torch.int32).expand(batch, 1, 512).contiguous()
    listed = torch.arange(512, dtype=torch.int32).expand(batch, 1, 512, 512).contiguous()
    diagonal = count[..., None].expand(-1, -1, -1, 512).contiguous()
    block_mask = BlockMask.from_kv_blocks(torch.ones_like(count), diagonal, count, listed, mask_mod=causal)
    spans = []
    for _ in range(3):
        begin = time.perf_counter()
        mask = from_block_mask(block_mask)
        spans.append(time.perf_counter() - begin)
    assert mask.without_rows(65536, 65536) == CAUSAL
    assert min(spans) < 0.5  # about 0.04 s for one batch entry


def test_many_cells_take_milliseconds() -> None:
    cells = torch.rand(512, 512) < 0.5
    spans = []
    for given_ in (cells, cells.numpy(), cells.tolist()):
        begin = time.perf_counter()
        mask = dash_attn.tiles(given_, 128, 128)
        spans.append(time.perf_counter() - begin)
        assert mask == dash_attn.tiles(cells, 128, 128)
    assert max(spans) < 0.2  # about 0.01 s for nested lists


def test_compiling_many_cells_takes_no_longer_than_compiling_few() -> None:
    """7 s if torch.compile traced each cell."""
    q, k, v = (torch.randn(1, 512, 1, 16) for _ in range(3))
    spans = {}
    for cells in (8, 8, 512):  # the first compilation loads the compiler
        mask = dash_attn.tiles(np.tri(cells), 512 // cells, 512 // cells)
        compiled = torch.compile(lambda q, k, v, mask=mask: dash_attn.attention(q, k, v, mask=mask), backend="eager")
        begin = time.perf_counter()
        compiled(q, k, v)
        spans[cells] = time.perf_counter() - begin
    assert spans[512] < spans[8] + 2
