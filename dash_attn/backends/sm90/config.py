"""The choices that fix the machine code of the backward kernel. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

from .barriers import ring_depth_needed
from .cta import CONSUMER_REGS, CONSUMER_WARPGROUPS, RING, SMEM_LIMIT, TILE_N, WARPGROUP
from .smem_plan import plan

DTYPES = ("bf16", "fp16")
LOG2_E = 1.4426950408889634
HEAD_DIMS = range(8, 129, 8)  # a row of a tensor is a whole number of 16-byte pieces
MASKS = ("full", "causal", "interval")
FINISHES = ("last", "postpass")
PATIENCE_NS = 2_000_000_000  # the debug build's writers wait this long for a turn
REPORT = ("stuck", "worker", "writer", "entry", "q_tile", "plane", "wanted", "seen")  # int32 words of their report
# Time stamps that the tracing build writes for an entry, in cycles of the SM. "turn 1" and "landed 1" belong to the
# second writer, where turns are split. The first entry of a chain's end has the common clock (ns) under "loaded", and
# the cycle of the chain's end under "begun". In a pack an entry has one word more: the first entry of a bundle has its
# ticket there, plus 1.
STAMPS = ("loaded", "begun", "computed", "slot", "staged", "left", "turn", "landed", "turn 1", "landed 1")
HEAD = ("sm", "time", "cycle")  # row 0 of a worker's stamps
COUNTER_WORDS = 8  # a turnstile counter has a 32-byte sector to itself, because its neighbours are polled too
DTYPE_OF = {"bfloat16": "bf16", "float16": "fp16"}  # of tensors, and in a config
KV_COUNTERS = 8  # the word of the buffer `words` at which the turnstiles of cut chains begin; word 0 counts tickets
MOST_TURNS = 2**16 - 1  # of a q tile, because two halves may count in one word
MANY_KEYS = {64: 1024, 128: 2048}  # by padded head dim: from this many keys per query on, "postpass" is faster
PIECE_ROWS = 128  # rows of K or V that one CTA copies at most (device/spread.py)
SPARE_REGS = 24  # registers that a consumer thread needs beside its tiles


class Piece(IntEnum):
    """Columns of the table `pieces`: rows that are copied together.

    SOURCE, FILLED  the first row, and how many are copied
    COPY, ROWS      where they go, and how many are written. Those that are not copied are zeros
    """

    SOURCE = 0
    FILLED = 1
    COPY = 2
    ROWS = 3


def padded(columns: int) -> int:
    """Columns of a tile in shared memory, for tensors with this head dim."""
    return 64 if columns <= 64 else 128


@dataclass(frozen=True)
class KernelConfig:
    """One build of the kernel. Equal configs have equal machine code. A config that cannot run cannot be made.

    In ordered builds the gradient bits follow from the Program, the head dim, the dtype, the mask and softcap. The
    other fields change only the speed.
    """

    columns: int  # head dim of the tensors; loads pad a tile with zeros to `dim` columns, stores drop the padding
    dtype: str = "bf16"
    mask: str = "full"  # how partial tiles are masked: by key length only, causally, or by an interval for each query
    ordered: bool = True  # add each dQ contribution in its turn; otherwise in the order of arrival
    finish: str = "last"  # who rounds dQ to 16 bits: the last contributor of a tile, or a pass over the fp32 sums
    split: bool = False  # the halves of a dQ tile take turns separately, each with a writer of its own
    p_early: int = 0  # words of P that a consumer thread rounds while dP is computed; 0 rounds all of them later
    lse_ahead: int = 0  # pairs of LSE that a consumer thread loads ahead of their use; 0 loads all of them at once
    delta_ahead: int = 0  # the same for delta, where consumers load it
    k_kept: int = 0  # 16-column steps of K that the consumers hold in registers during a chain
    peek: bool = False  # consumers test for the next Q at the end of a task, so that they need not wait for it later
    cut: bool = False  # a chain has one q head of its group: dK and dV are summed in turn over the q heads
    packed: bool = False  # sequences of any lengths lie one after the other; workers draw tickets for their chains
    softcap: bool = False  # scores s are softcap * tanh(s / softcap); the number itself is an argument of the kernel
    debug: bool = False  # waits end with a report, and every contribution is kept (see device/debug.py); for tests
    trace: bool = False  # every entry gets time stamps (see device/stamps.py)

    def __post_init__(self) -> None:
        reasons = list(self._reasons_against())
        if reasons:
            raise ValueError(f"{self} cannot run on sm_90a: " + "; ".join(reasons))

    @property
    def dim(self) -> int:
        """Columns of a tile in shared memory."""
        return padded(self.columns)

    @property
    def tile_m(self) -> int:
        """Queries of a tile: a consumer warpgroup owns 64 x 64 elements of dQ."""
        return 128 if self.dim == 64 else 64

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return TILE_N

    @property
    def dq_split_rows(self) -> bool:
        """True if each warpgroup owns 64 rows of a dQ tile, False if each owns 64 columns."""
        return self.tile_m == 128

    @property
    def half_floats(self) -> int:
        """fp32 values of a dQ tile that one warpgroup owns, padding included."""
        return self.tile_m * self.dim // CONSUMER_WARPGROUPS

    @property
    def sum_parts(self) -> tuple[int, int]:
        """fp32 values of a dQ tile that are summed for each warpgroup, without the padding."""
        if self.dq_split_rows:
            return 64 * self.columns, 64 * self.columns
        return 64 * 64, 64 * (self.columns - 64)

    @property
    def delta_in_product(self) -> bool:
        """True if the product dP^T has one step more, which subtracts delta. Otherwise consumers load and subtract it.

        Tiles of 128 queries gain 3 to 5 % by it: a thread would load 32 numbers for its 64 scores. The dK writer makes
        the operand of the step. It lies in the memory of dS, and so would slopes.
        """
        return self.tile_m == 128 and not self.softcap

    @property
    def holds_slopes(self) -> bool:
        """True if the derivative of the cap is kept in registers between S and dS."""
        return self.softcap and not self.stores_slopes

    @property
    def stores_slopes(self) -> bool:
        """True if the derivative of the cap is kept in shared memory between S and dS. Tiles of 128 queries have no
        registers left for it."""
        return self.softcap and self.tile_m == 128

    @property
    def last_finishes(self) -> bool:
        return self.ordered and self.finish == "last"

    @property
    def counters(self) -> tuple[int, int]:
        """Turnstile counters of a q tile, and the words of each.

        Wide counters lie in memory borrowed from dQ (see workspace.py). Contributors that finish dQ themselves
        write to that memory early, so such a config has one word for a tile. Split turns then count in its halves.
        """
        return (1, 1) if self.last_finishes else (2 if self.split else 1, COUNTER_WORDS)

    @property
    def part_entries(self) -> int:
        """Entries of the task ring for dV of a cut chain, and as many for dK: a dQ slot holds 64 columns."""
        return self.dim // 64

    @property
    def chain_entries(self) -> int:
        """Entries of the task ring for the end of a chain."""
        return 2 * self.part_entries if self.cut else 1

    @property
    def stamps(self) -> int:
        """Words of an entry's stamps."""
        return len(STAMPS) + self.packed

    @property
    def score_steps(self) -> int:
        """16-column steps of S^T and dP^T. Steps of padding alone are left out."""
        return -(-self.columns // 16)

    @property
    def wgmma_per_task(self) -> int:
        """wgmma instructions that one warpgroup issues for a task."""
        scores, gradients, queries = 2 * self.score_steps, 2 * (self.tile_m // 16), TILE_N // 16
        scores += self.delta_in_product
        return scores + gradients + queries

    @property
    def tile_regs(self) -> int:
        """Registers of a consumer thread for tiles: dK, dV, S^T, dP^T in fp32, and K if kept. dQ uses those of S^T."""
        rows = TILE_N // CONSUMER_WARPGROUPS
        sums = 2 * rows * self.dim // WARPGROUP + 2 * rows * self.tile_m // WARPGROUP
        return sums + self.k_kept * rows * 16 // 2 // WARPGROUP

    def _reasons_against(self) -> Iterator[str]:
        """Why this config cannot run; nothing if it can."""
        for name, value, known in (
            ("dtype", self.dtype, DTYPES),
            ("mask", self.mask, MASKS),
            ("finish", self.finish, FINISHES),
        ):
            if value not in known:
                yield f"{name} {value!r} is not one of {known}"
        if self.columns not in HEAD_DIMS:
            yield f"head dim {self.columns} is not a multiple of 8 up to {max(HEAD_DIMS)}"
            return  # everything below follows from the head dim
        if self.debug and (not self.ordered or self.finish != "postpass"):
            yield "debug keeps every contribution, in turn: it needs ordered=True and finish='postpass'"
        if ring_depth_needed(self.chain_entries) > RING:
            yield f"the task ring has {RING} entries, and {ring_depth_needed(self.chain_entries)} are needed"
        if self.debug and self.trace:
            yield "debug and trace are separate builds: choose one"
        if self.split and self.sum_parts[0] != self.sum_parts[1]:
            yield f"split turns need equal halves, and those of head dim {self.columns} differ"
        words, pairs = self.tile_m // 4, self.tile_m // 8  # words of P, and pairs of LSE or delta, of one thread
        if not 0 <= self.p_early <= words:
            yield f"p_early {self.p_early}: a thread has {words} words of P"
        if self.p_early and not self.delta_ahead and not self.delta_in_product:
            yield f"p_early {self.p_early} needs a delta_ahead above 0"
        if self.p_early and self.stores_slopes:
            yield f"p_early {self.p_early}: P is rounded together with dS where slopes lie in shared memory"
        for name, ahead in (("lse_ahead", self.lse_ahead), ("delta_ahead", self.delta_ahead)):
            if not 0 <= ahead <= pairs:
                yield f"{name} {ahead}: a thread has {pairs} pairs"
        if self.delta_ahead and self.delta_in_product:
            yield f"delta_ahead {self.delta_ahead}: consumers load no delta here, the product dP^T subtracts it"
        if not 0 <= self.k_kept <= self.dim // 16:
            yield f"k_kept {self.k_kept}: K has {self.dim // 16} steps"
        if self.tile_regs + SPARE_REGS > CONSUMER_REGS:
            yield f"{self.tile_regs} registers for tiles leave fewer than {SPARE_REGS} of {CONSUMER_REGS}"
        if plan(self).total > SMEM_LIMIT:
            yield f"{plan(self).total} bytes of shared memory are more than {SMEM_LIMIT}"


@lru_cache(maxsize=1024)
def select(
    dim: int, dtype: str, mask: str, ordered: bool = True, len_k: int = 0, softcap: bool = False
) -> KernelConfig:
    """The tuned config for a head dim, dtype, kind of mask and number of keys. The number of keys changes no bits."""
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dim {dim} is not built; multiples of 8 up to {max(HEAD_DIMS)} are")
    # The last contributor of a tile stages its dQ only after its turn has come, and until then the tensor cores idle.
    # With few contributors that costs less than a pass over the sums, with many it costs more.
    narrow = padded(dim) == 64
    keys = len_k // 2 if mask == "causal" else len_k
    finish = "last" if ordered and keys < MANY_KEYS[padded(dim)] else "postpass"
    # All numbers below are measured without softcap (docs/experiments.md).
    if narrow:
        # Tiles of 128 queries have no registers left for p_early. Loading few pairs ahead frees registers, and these
        # hold K, which the product S^T then need not fetch from shared memory. Neighbours in a shift order are one step
        # apart here, and a half tile is handed over faster than a whole one.
        tuned = KernelConfig(dim, dtype, mask, ordered, finish, split=True, lse_ahead=3, k_kept=4, peek=True)
        # Slopes pass through registers on their way to shared memory and back. With K or more of LSE beside them some
        # builds spill.
        return replace(tuned, softcap=True, lse_ahead=1, delta_ahead=2, k_kept=0) if softcap else tuned
    return KernelConfig(dim, dtype, mask, ordered, finish, p_early=12, delta_ahead=3, softcap=softcap)


# Fields of the two special builds, whose bits are those of the plain one.
DEBUG = (("debug", True), ("finish", "postpass"))
TRACE = (("trace", True),)


def shipped() -> list[KernelConfig]:
    """The configs of head dims 64 and 128. Other head dims run the same tiles, padded."""
    kinds = ((True, 0), (True, 2 * max(MANY_KEYS.values())), (False, 0))
    return [select(d, t, m, *kind) for d in (64, 128) for t in DTYPES for m in MASKS for kind in kinds]
