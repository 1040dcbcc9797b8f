"""The tables of a pack: which sequence has which rows, tiles, tickets and order.

If Problem.panels cuts the queries into ranges, each part of a sequence counts as a sequence here. Parts of one sequence
share keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from dash_attn.program.program import Int32
from dash_attn.tiling import TileShape

if TYPE_CHECKING:
    from dash_attn.pack.templates import PackedTemplate


class Doc(IntEnum):
    """Columns of the table `docs`: one row for each sequence.

    Q_ROW, K_ROW     its first row in the tensors flattened over the batch
    Q_ROWS, K_ROWS   its lengths
    Q_TILE, KV_TILE  its first row of `q_tiles` and of `kv_tiles`
    BUNDLE, BUNDLES  its template's rows of `bundles`
    CONTRIBUTORS     its template's first row of `contributors`
    PANELS           the number of its kv heads, or of its q heads if its chains are cut

    If groups are whole, panel p has the q heads p * group .. p * group + group - 1. If chains are cut, panel p has the
    q head (p % heads_kv) * group + p // heads_kv: the first q heads of all groups come first, then the second q heads.
    The q heads of a group add to dK and dV in turn. Panels with neighbouring tickets belong to different groups, so
    their chains seldom wait for each other. The earlier q heads of a group have earlier tickets, so a chain waits only
    for chains with earlier tickets.
    """

    Q_ROW = 0
    K_ROW = 1
    Q_ROWS = 2
    K_ROWS = 3
    Q_TILE = 4
    KV_TILE = 5
    BUNDLE = 6
    BUNDLES = 7
    CONTRIBUTORS = 8
    PANELS = 9


class Round(IntEnum):
    """Columns of the table `rounds`: one row for each round of each sequence, in launch order.

    TICKET           its first ticket. Ticket t of the round is bundle BUNDLE + t % BUNDLES of panel t // BUNDLES
    DOC              its sequence: a row of `docs`
    BUNDLE, BUNDLES  its rows of `bundles`: some of the rows of its sequence

    The rounds of a sequence come in their order. A bundle waits only for bundles of its own round and for bundles with
    earlier tickets.
    """

    TICKET = 0
    DOC = 1
    BUNDLE = 2
    BUNDLES = 3


class PackedBundle(IntEnum):
    """Columns of the table `bundles`: the chains that one worker runs back to back.

    AWAITS  the number of following bundles that must begin before its worker may take another ticket
    """

    FIRST_CHAIN = 0
    NUM_CHAINS = 1
    AWAITS = 2


class PackedChain(IntEnum):
    """Columns of the table `chains`."""

    KV_TILE = 0
    FIRST_RUN = 1
    NUM_RUNS = 2


class TileRows(IntEnum):
    """Columns of the tables `q_tiles` and `kv_tiles`: one row for each tile of each sequence, in the order of `docs`.

    FIRST  its first row in the flattened tensor
    COUNT  the number of its rows. All are of one sequence
    """

    FIRST = 0
    COUNT = 1


class Fold(IntEnum):
    """Columns of the table `folds`: one row for each kv tile of a sequence that is cut into panels.

    K_ROW, K_ROWS  its first row in the flattened tensor, and its rows: the columns FIRST and COUNT of TileRows, because
                   a kernel reads the rows of both tables in the same way
    PART, PARTS    its rows of `parts`: the sums of the panels, in the order in which they are added
    """

    K_ROW = 0
    K_ROWS = 1
    PART = 2
    PARTS = 3


class Part(IntEnum):
    """Columns of the table `parts`: one row for each kv tile of each panel.

    KV_TILE  its row of `kv_tiles`. The number of this row is also the place of its sums
    K_ROWS   its rows. The last kv tile of a panel may have fewer rows than this kv tile of the whole sequence
    """

    KV_TILE = 0
    K_ROWS = 1


class Numbers(NamedTuple):
    """Rows and columns of a tile, and heads, as compiled loops take them."""

    m: int
    n: int
    heads_q: int
    heads_kv: int


@dataclass(frozen=True)
class Sizes:
    """Numbers of a pack that its tables do not hold.

    shape           the tile of every sequence
    heads_q, heads_kv
    rows_q, rows_k  rows of the flattened tensors
    cut             dK and dV have fp32 sums. If chains are cut by q head, the q heads of a group add to these sums in
                    turn. With panels every panel has its own sums
    panels          the number of ranges that the queries of a batch entry are cut into
    all_keys        every panel sees all keys of its sequence. Otherwise the last query of a panel is at its last key
    apart           the pack has only some panels of a problem. Their sums are added elsewhere, so there are no folds
    """

    shape: TileShape
    heads_q: int
    heads_kv: int
    rows_q: int
    rows_k: int
    cut: bool
    panels: int
    all_keys: bool
    apart: bool = False

    @property
    def numbers(self) -> Numbers:
        return Numbers(self.shape.m, self.shape.n, self.heads_q, self.heads_kv)


@dataclass(frozen=True, eq=False)
class Assembly:
    """All sequences of a pack as int32 tables. Rows of a template count tiles from the sequence's first tile.

    docs          one row for each sequence (columns Doc). Sequences whose panels have most tasks come first
    rounds        columns Round
    bundles       columns PackedBundle
    chains        columns PackedChain. A chain without runs has a row too, because it writes zeros
    runs          columns Run, and zeros up to RUN_WIDTH
    contributors  contributions to the dQ tile of each q tile of a template
    q_tiles       columns TileRows
    kv_tiles      the same for keys
    folds         columns Fold. Without panels, and with some panels of a problem, there are none
    parts         columns Part
    tickets       their number, for all sequences. A sequence without queries or without keys has no tickets
    co_resident   the number of workers that must run at the same time
    clears_dq     some rows of dQ are written by no task: no query there sees a key
    clears_dkv    some rows of dK and dV are written by no chain: their sequence has no queries
    templates     the verified templates whose tables stand one after the other in `bundles`, `chains`, `runs` and
                  `contributors`
    """

    sizes: Sizes
    docs: Int32
    rounds: Int32
    bundles: Int32
    chains: Int32
    runs: Int32
    contributors: Int32
    q_tiles: Int32
    kv_tiles: Int32
    folds: Int32
    parts: Int32
    tickets: int
    co_resident: int
    clears_dq: bool
    clears_dkv: bool
    templates: tuple[PackedTemplate, ...]
