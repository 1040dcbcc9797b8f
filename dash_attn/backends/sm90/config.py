"""What fixes the machine code of the backward kernel, and whether Hopper can run it. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

SMEM_LIMIT = 232_448  # bytes one CTA may ask for on sm_90
REGISTER_FILE = 65_536  # 32-bit registers of one SM
WARPGROUP = 128  # threads
CONSUMER_WARPGROUPS = 2  # both split the kv rows of a tile, so P^T and dS^T stay in registers
RING = 16  # task entries in flight between the roles (see barriers.ring_depth_needed)

DTYPES = ("bf16", "fp16")
HEAD_DIMS = range(8, 129, 8)  # rows of whole 16-byte pieces
MASKS = ("full", "causal", "interval")
FINISHES = ("last", "postpass")
PATIENCE_NS = 2_000_000_000  # how long a writer of the debug build waits for its turn
REPORT = ("stuck", "worker", "writer", "entry", "q_tile", "plane", "wanted", "seen")  # int32 words it leaves then
# What the tracing build notes of an entry, in cycles of the SM, and in row 0 of its worker. The writers of split turns
# note their half each. A chain's own entry (dV) has the common clock (ns) under "loaded" and its end under "begun".
STAMPS = ("loaded", "begun", "computed", "slot", "staged", "left", "turn", "landed", "turn 1", "landed 1")
HEAD = ("sm", "time", "cycle")
COUNTER_WORDS = 8  # a turnstile counter has a 32-byte sector to itself: neighbours are polled at the same time
MOST_TURNS = 2**16 - 1  # of a q tile, whose halves may count in one word
MANY_KEYS = {64: 1024, 128: 2048}  # so many a query, and a pass of its own finishes dQ (measured, by head dim)


@dataclass(frozen=True)
class KernelConfig:
    """One compiled kernel. Equal configs share machine code, and bits depend on nothing else but the Program."""

    dim: int  # columns of a tile in shared memory: 64 or 128
    tile_m: int  # queries of a tile
    tile_n: int = 128  # keys of a tile
    dtype: str = "bf16"
    mask: str = "full"  # how a partial tile is masked: key length only, causal, or per-row intervals
    ordered: bool = True  # turnstile on, or plain atomic adds in arrival order
    finish: str = "last"  # who makes 16-bit dQ: the last contributor, or a pass over the fp32 sums
    stages: int = 2  # ring slots of Q and dO
    ds_stages: int = 2  # buffers of dS; two need only one consumer barrier per task
    dq_slots: int = 2  # staged dQ tiles; each writer warp serves one
    split: bool = False  # a turn per half tile, each writer serving one half, instead of a turn per tile
    head_dim: int = 0  # columns of the tensors, if fewer than dim: loads fill the rest with zeros, stores drop it
    debug: bool = False  # waits that end, every contribution kept (see debug.py)
    trace: bool = False  # time stamps of every entry (see stamps.py)
    p_early: int = 0  # words of P a consumer thread rounds while dP is computed; 0: all of them behind it
    lse_ahead: int = 0  # pairs of LSE it loads ahead of their use; 0: all of them
    delta_ahead: int = 0  # likewise of delta
    k_kept: int = 0  # k steps (16 columns) of K that a consumer warpgroup holds in registers, not in shared memory only
    peek: bool = False  # consumers ask for the next Q before they need it
    consumer_regs: int = 240
    worker_regs: int = 24  # producer and writer warps

    @property
    def columns(self) -> int:
        """The tensors' head dim."""
        return self.head_dim or self.dim

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + CONSUMER_WARPGROUPS)

    @property
    def consumer_threads(self) -> int:
        return WARPGROUP * CONSUMER_WARPGROUPS

    @property
    def writers(self) -> int:
        return self.dq_slots

    @property
    def dq_split_rows(self) -> bool:
        """A warpgroup owns 64 rows of the dQ tile (128-row tiles) or 64 columns of it (64-row tiles)."""
        return self.tile_m == 128

    @property
    def half_floats(self) -> int:
        """fp32 values of a dQ tile that one warpgroup owns."""
        return self.tile_m * self.dim // CONSUMER_WARPGROUPS

    @property
    def sum_parts(self) -> tuple[int, int]:
        """Of these, how many are summed for each warpgroup: the pieces of 8 columns that the tensors have."""
        if self.dq_split_rows:
            return 64 * self.columns, 64 * self.columns
        return 64 * 64, 64 * (self.columns - 64)

    @property
    def last_finishes(self) -> bool:
        return self.ordered and self.finish == "last"

    @property
    def counters(self) -> tuple[int, int]:
        """Of a q tile: how many, and words of each. While the last contributors finish dQ piece by piece there is no
        memory to borrow (see launch.Workspace), and one word has to do: split turns count in its halves."""
        return (1, 1) if self.last_finishes else (2 if self.split else 1, COUNTER_WORDS)

    @property
    def launch_regs(self) -> int:
        """Registers the CTA owns from its launch on: equal shares in steps of 8. setmaxnreg only moves these."""
        return REGISTER_FILE // self.threads // 8 * 8 * self.threads

    @property
    def wgmma_per_task(self) -> int:
        """HGMMA instructions one warpgroup issues per task (checked against the machine code)."""
        grads = 2 * (self.tile_m // 16)  # dV and dK
        return 2 * self.score_steps + grads + self.tile_n // 16  # dQ

    @property
    def score_steps(self) -> int:
        """k steps of S^T and dP^T: those of 16 columns in which the tensors have any, for the others are zero."""
        return -(-self.columns // 16)

    @property
    def tile_regs(self) -> int:
        """Of a consumer thread, for tiles live at once: dK, dV, S^T, dP^T in fp32 (dQ reuses S^T), and K where kept."""
        rows = self.tile_n // CONSUMER_WARPGROUPS
        sums = 2 * rows * self.dim // WARPGROUP + 2 * rows * self.tile_m // WARPGROUP
        return sums + self.k_kept * rows * 16 // 2 // WARPGROUP

    def problems(self) -> list[str]:
        """Every reason why this config cannot run; empty when it can."""
        from .barriers import barrier_problems
        from .smem_plan import plan

        out = []
        if self.dtype not in DTYPES:
            out.append(f"dtype {self.dtype!r} is not one of {DTYPES}")
        if self.mask not in MASKS:
            out.append(f"mask {self.mask!r} is not one of {MASKS}")
        if self.finish not in FINISHES:
            out.append(f"finish {self.finish!r} is not one of {FINISHES}")
        if (self.dim, self.tile_m) not in ((128, 64), (64, 128)):
            out.append(f"head dim {self.dim} with {self.tile_m}-row q tiles: a warpgroup must own a 64x64 part of dQ")
        if self.head_dim and (self.head_dim % 8 or not self.dim - 64 < self.head_dim < self.dim):
            # dQ leaves in pieces of 64 columns, none of which may lie past the end.
            out.append(f"head_dim {self.head_dim}: 0, or a multiple of 8 between {self.dim - 64} and {self.dim}")
        if self.debug and (not self.ordered or self.finish != "postpass"):
            out.append("debug keeps every contribution, in turn: it needs ordered=True and finish='postpass'")
        if self.debug and self.trace:
            out.append("debug and trace are builds of their own: choose one")
        if self.tile_n != 64 * CONSUMER_WARPGROUPS:
            out.append(f"tile_n {self.tile_n}: each consumer warpgroup owns 64 kv rows")
        if self.stages != 2 or self.ds_stages != 2:
            out.append(f"stages {self.stages}, ds_stages {self.ds_stages}: only 2 and 2 are built")
        if not 1 <= self.dq_slots <= 2:
            out.append(f"dq_slots {self.dq_slots}: two warps are left beside the producer and the dK writer")
        if self.split and self.dq_slots != 2:
            out.append("split turns need two slots: each writer serves its half of both")
        if self.split and self.sum_parts[0] != self.sum_parts[1]:
            out.append(f"split turns of head dim {self.columns}: the writers' halves differ")
        words, pairs = self.tile_m // 4, self.tile_m // 8  # of P, and of LSE or delta, that a thread has
        if not 0 <= self.p_early <= words or (self.p_early and not self.delta_ahead):
            out.append(f"p_early {self.p_early}, delta_ahead {self.delta_ahead}: at most {words} words, and with delta")
        if not (0 <= self.lse_ahead <= pairs and 0 <= self.delta_ahead <= pairs):
            out.append(f"lse_ahead {self.lse_ahead}, delta_ahead {self.delta_ahead}: a thread has {pairs} pairs")
        if not 0 <= self.k_kept <= self.dim // 16:
            out.append(f"k_kept {self.k_kept}: K has {self.dim // 16} steps")
        regs = self.worker_regs * WARPGROUP + self.consumer_regs * self.consumer_threads
        if regs > self.launch_regs:
            out.append(f"{regs} registers of the {self.launch_regs} the CTA starts with: setmaxnreg would wait forever")
        if self.worker_regs % 8 or self.consumer_regs % 8:
            out.append("setmaxnreg takes multiples of 8")
        if self.tile_regs + 24 > self.consumer_regs:
            out.append(f"{self.tile_regs} registers of tiles leave too few of {self.consumer_regs}")
        if out:
            return out
        total = plan(self).total
        if total > SMEM_LIMIT:
            out.append(f"{total} bytes of shared memory of {SMEM_LIMIT}")
        return out + barrier_problems(self)

    def validate(self) -> KernelConfig:
        problems = self.problems()
        if problems:
            raise ValueError(f"{self} cannot run on sm_90a: " + "; ".join(problems))
        return self


@lru_cache(maxsize=1024)
def select(dim: int, dtype: str, mask: str, ordered: bool = True, len_k: int = 0) -> KernelConfig:
    """The shipped config for a head dim, dtype, kind of mask and number of keys. Bits depend on the first three."""
    if dim not in HEAD_DIMS:
        raise ValueError(f"head dim {dim} is not built; multiples of 8 up to {max(HEAD_DIMS)} are")
    padded = 64 if dim <= 64 else 128
    # The last contributor stages its sum only once its turn has come, and its tensor cores idle until then. Where many
    # contribute to a tile that costs more than a pass over the sums, where few do it saves the pass.
    keys = len_k // 2 if mask == "causal" else len_k
    finish = "last" if ordered and keys < MANY_KEYS[padded] else "postpass"
    return KernelConfig(
        dim=padded,
        head_dim=0 if dim == padded else dim,
        tile_m=64 if padded == 128 else 128,
        dtype=dtype,
        mask=mask,
        ordered=ordered,
        finish=finish,
        # Timed, all of them (docs/experiments.md). 128-row q tiles have no registers left for p_early; those that
        # LSE and delta need not wait in are worth more as a place for K, which the products then need not fetch again.
        p_early=12 if padded == 128 else 0,
        lse_ahead=0 if padded == 128 else 2,
        delta_ahead=3 if padded == 128 else 2,
        k_kept=0 if padded == 128 else 3,
        peek=padded == 64,
        # 128-row q tiles leave one step between neighbours of a shift: there a half tile is handed over faster.
        split=padded == 64,
    ).validate()


def with_debug(cfg: KernelConfig) -> KernelConfig:
    """The debug build of an ordered config; its bits are the same."""
    return replace(cfg, debug=True, finish="postpass").validate()


def with_trace(cfg: KernelConfig) -> KernelConfig:
    """The tracing build of a config; its bits are the same."""
    return replace(cfg, trace=True).validate()


def shipped() -> list[KernelConfig]:
    """The tuned configs. Other head dims run the same tiles, padded."""
    kinds = ((True, 0), (True, 2 * max(MANY_KEYS.values())), (False, 0))
    return [select(d, t, m, *kind) for d in (64, 128) for t in DTYPES for m in MASKS for kind in kinds]
