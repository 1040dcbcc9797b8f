"""FlexAttention: a BlockMask of torch as a mask of dash_attn."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask

from dash_attn.problem import Mask, RowIntervals, TileMask

Bools = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]

PAIRS_AT_ONCE = 1 << 24  # pairs that mask_mod is asked about in one call


class Cells(NamedTuple):
    """The blocks of one (batch entry, head), q blocks x kv blocks: pairs in full blocks are all seen, and mask_mod
    decides about pairs in partial blocks."""

    full: Bools
    partial: Bools


class SeenKeys(NamedTuple):
    """The keys that each row sees: the first, one past the last, and how many. And the blocks in which any is seen."""

    lo: Longs
    hi: Longs
    number: Longs
    blocks: Bools


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask of a torch BlockMask, for tensors with its number of queries. Keys after its last key are not seen.

    Each row must see one interval of keys, or the part of one interval that lies in the blocks of the BlockMask. All
    batch entries and heads must see the same pairs. Other masks are refused. mask_mod is asked about pairs in partial
    blocks alone. Make the mask once and keep it: it depends on no tensor of a call.
    """
    if not isinstance(block_mask, BlockMask):
        raise ValueError(f"block_mask must be a torch BlockMask, got {type(block_mask).__name__}")
    cells = _cells(block_mask)
    batch, heads = cells.full.shape[:2]
    # Blocks that differ can still hold the same pairs: those in which mask_mod hides all pairs count for nothing.
    alike = tuple(all((x == x.take([0], axis)).all() for x in cells) for axis in (0, 1))
    entries = range(1 if alike[0] and not _looks_at(block_mask, 0, batch) else batch)
    each_head = range(1 if alike[1] and not _looks_at(block_mask, 1, heads) else heads)
    first: SeenKeys | None = None
    for b, h in product(entries, each_head):
        seen = _seen(block_mask, Cells(cells.full[b, h], cells.partial[b, h]), (b, h))
        if first is None:
            first = seen
        elif not all(np.array_equal(*pair) for pair in zip(first, seen, strict=True)):
            raise NotImplementedError(_unequal(b, h))
    assert first is not None
    return _mask(block_mask, first)


def _unequal(b: int, h: int) -> str:
    if b == 0:
        return (
            f"block_mask shows other keys to head {h} than to head 0: give the heads that share a mask a call of their "
            "own, each with a BlockMask made with H=None"
        )
    return (
        f"block_mask shows other keys to batch entry {b} than to entry 0: make a BlockMask with B=None for each entry "
        "and call attention for each, or, if it hides padding, pack the sequences and give cu_seqlens"
    )


def _mask(block_mask: BlockMask, seen: SeenKeys) -> Mask:
    (len_q, len_k), (rows, keys) = block_mask.seq_lengths, _block_size(block_mask)
    if np.array_equal(seen.hi - seen.lo, seen.number):
        return Mask(rows=RowIntervals.of(seen.lo, seen.hi))
    # before[r, c]: keys in blocks of row r before block c that are in `blocks`.
    sizes = np.minimum(keys, len_k - keys * np.arange(seen.blocks.shape[1]))
    before = np.pad((seen.blocks * sizes).cumsum(1), ((0, 0), (1, 1)), mode="edge")
    before[:, 0] = 0
    blocks = np.pad(seen.blocks, ((0, 0), (0, 1)))
    row = np.arange(len_q) // rows

    def up_to(key: Longs) -> Longs:
        return np.asarray(before[row, key // keys] + blocks[row, key // keys] * (key % keys))

    tiles = TileMask.of(seen.blocks, rows, keys)
    if np.array_equal(before[row, -1], seen.number):
        return Mask(tiles=tiles)
    pieces = up_to(seen.hi) - up_to(seen.lo) != seen.number
    if pieces.any():
        raise NotImplementedError(
            f"block_mask lets query {int(pieces.argmax())} see keys that are not one interval, nor one interval inside "
            f"its blocks of {rows}x{keys}: make it with a BLOCK_SIZE that fits the holes, or use torch's flex_attention"
        )
    return Mask(tiles=tiles, rows=RowIntervals.of(seen.lo, seen.hi))


def _block_size(block_mask: BlockMask) -> tuple[int, int]:
    rows, keys = block_mask.BLOCK_SIZE
    return int(rows), int(keys)


def _cells(block_mask: BlockMask) -> Cells:
    """The blocks of all batch entries and heads."""
    (len_q, len_k), (rows, keys) = block_mask.seq_lengths, _block_size(block_mask)
    size = -(-len_q // rows), -(-len_k // keys)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, size)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, size)
    return Cells(full, partial & ~full)


def _listed(numbers: Tensor, indices: Tensor, size: tuple[int, int]) -> Bools:
    """The listed blocks, (batch, heads, q blocks, kv blocks)."""
    if indices.ndim != 4 or indices.shape[2] != size[0]:
        raise ValueError(
            f"block_mask must have indices (batch, heads, {size[0]} blocks of queries, blocks of keys), got "
            f"{tuple(indices.shape)}; a slice of a BlockMask keeps the lengths of the whole: make a BlockMask for your "
            "queries with create_block_mask"
        )
    count, column = numbers.cpu().numpy()[..., None], indices.cpu().numpy()
    listed = np.zeros((*column.shape[:3], size[1] + 1), bool)
    unused = np.arange(column.shape[-1]) >= count
    strange = column[~unused & ((column < 0) | (column >= size[1]))]
    if len(strange):
        raise ValueError(
            f"block_mask must name blocks of keys from 0 to {size[1] - 1}, got {strange[0]}: make it with the number "
            "of keys that its blocks need"
        )
    np.put_along_axis(listed, np.where(unused, size[1], column).astype(np.int64), True, -1)
    return listed[..., :-1]


def _looks_at(block_mask: BlockMask, argument: int, size: int) -> bool:
    """Whether mask_mod uses its argument 0 (batch entry) or 1 (head). vmap repeats a result that does not."""
    if size == 1:
        return False
    device = block_mask.kv_indices.device
    given = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
    given[argument] = torch.arange(size, device=device)
    dims = tuple(0 if i == argument else None for i in range(4))
    with TransformGetItemToIndex():
        answer: Tensor = torch.vmap(block_mask.mask_mod, in_dims=dims)(*given)
    return answer.stride(0) != 0


def _seen(block_mask: BlockMask, cells: Cells, place: tuple[int, int]) -> SeenKeys:
    (len_q, len_k), (rows, keys) = block_mask.seq_lengths, _block_size(block_mask)
    num_q, num_kv = cells.full.shape
    begin = keys * np.arange(num_kv)
    end = np.minimum(begin + keys, len_k)
    shape = (num_q, rows)
    lo = np.broadcast_to(np.where(cells.full, begin, len_k).min(1, initial=len_k)[:, None], shape).copy()
    hi = np.broadcast_to(np.where(cells.full, end, 0).max(1, initial=0)[:, None], shape).copy()
    count = np.broadcast_to(np.where(cells.full, end - begin, 0).sum(1)[:, None], shape).copy()
    blocks = cells.full.copy()
    row, column = np.nonzero(cells.partial)
    if len(row):
        first, last, number = _partial(block_mask, (row, column), place)
        blocks[row, column] = (number > 0).any(1)
        into, starts = np.unique(row, return_index=True)  # the blocks of a row are neighbours
        some, at = number > 0, keys * column[:, None]
        lo[into] = np.minimum(lo[into], np.minimum.reduceat(np.where(some, at + first, len_k), starts))
        hi[into] = np.maximum(hi[into], np.maximum.reduceat(np.where(some, at + last, 0), starts))
        count[into] += np.add.reduceat(number, starts)
    lo, hi, count = (x.reshape(-1)[:len_q] for x in (lo, hi, count))
    return SeenKeys(np.where(count > 0, lo, 0), np.where(count > 0, hi, 0), count, blocks)


def _partial(block_mask: BlockMask, at: tuple[Longs, Longs], place: tuple[int, int]) -> tuple[Longs, Longs, Longs]:
    """For each of the blocks and each row of it: the first key that is seen, one past the last, and how many."""
    (len_q, len_k), (rows, keys) = block_mask.seq_lengths, _block_size(block_mask)
    device = block_mask.kv_indices.device
    b, h = (torch.tensor(x, device=device) for x in place)
    over_keys = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    over_rows = torch.vmap(over_keys, in_dims=(None, None, 0, None))
    over_blocks = torch.vmap(over_rows, in_dims=(None, None, 0, 0))
    made = []
    step = max(1, PAIRS_AT_ONCE // (rows * keys))
    for start in range(0, len(at[0]), step):
        row, column = (torch.from_numpy(x[start : start + step, None]).to(device) for x in at)
        q = row * rows + torch.arange(rows, device=device)
        k = column * keys + torch.arange(keys, device=device)
        # mask_mod may read tables, which end with the tokens.
        inside = (q < len_q)[..., None] & (k < len_k)[:, None]
        with TransformGetItemToIndex():
            seen = over_blocks(b, h, q.clamp(max=len_q - 1), k.clamp(max=len_k - 1))
        pairs: Bools = (seen.bool() & inside).cpu().numpy()
        made.append((pairs.argmax(-1), keys - pairs[..., ::-1].argmax(-1), np.count_nonzero(pairs, axis=-1)))
    first, last, number = (np.concatenate(each).astype(np.int64) for each in zip(*made, strict=True))
    return first, last, number
