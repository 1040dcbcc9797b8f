"""The words for a problem, an order and a model of time. Every command takes them from here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, Annotated

from typer import Context, Option

from dash_attn.launch import compose
from dash_attn.order import POLICIES, applicable, looks_at_batch
from dash_attn.pack import Pack
from dash_attn.problem import CAUSAL, FULL, Mask, Problem, documents, window
from dash_attn.simulate import H200_SMS, Machine, Model, Paper, Tickets
from dash_attn.tiling import TileShape, Tiling, tile
from dash_attn.tools.cli.app import given_options
from dash_attn.verify import Verified, verify

if TYPE_CHECKING:
    from dash_attn.backends import Backend

BACKENDS = {"sm90": "bfloat16", "cpu": "float32"}  # name and the dtype that it runs unless another is given
TILES = 8  # of a head, where neither --seqlen nor --q-tiles is given
POLICY = (
    f"the order: auto, {', '.join(POLICIES)}; a window width follows ':', as in shift:64; @head at the end orders "
    "each query head by itself, auto@group all query heads of a key/value head together"
)

# How a file that --save writes is used.
RUN = "dash_attn.attention(q, k, v, policy=dash_attn.load(FILE)) runs it"

# What the options for a problem mean, in every command.
MASK = "full or causal"
SEQLEN = "tokens of a sequence"
BATCH = "sequences"
HEADS = "query heads"
KV_HEADS = "key/value heads [default: as many as --heads]"
HEAD_DIM = "size of a head"
DTYPE = "bfloat16, float16 or float32 [default: bfloat16, on the cpu float32]"
DTYPES = ("bfloat16", "float16", "float32")
COMPUTE = "time of a task's compute"
REDUCE = "time of a task's reduction"
SEVERAL = "; several with commas"

PolicyOption = Annotated[str, Option("--policy", help=POLICY)]
PoliciesOption = Annotated[str | None, Option("--policy", help=f"{POLICY}{SEVERAL} [default: all that apply]")]
WORKERS = "workers that run at once"
CPU_WORKERS = "or all CPU threads"
WorkersOption = Annotated[
    int | None,
    Option("--workers", help=f"{WORKERS} [default: one a kv tile; with --seqlen {H200_SMS} SMs, {CPU_WORKERS}]"),
]


@dataclass(frozen=True)
class ProblemOptions:
    """A real problem, and the backend whose kernel would run it."""

    mask: Annotated[
        str,
        Option("--mask", help=f"{MASK}; or, in tokens, documents:LENGTH,... or causal-documents:LENGTH,..."),
    ] = "causal"
    window: Annotated[
        str | None,
        Option(
            "--window",
            metavar="LEFT,RIGHT",
            help="a query sees this many keys before and after its position; -1 is no limit",
        ),
    ] = None
    seqlen: Annotated[int | None, Option("--seqlen", help=SEQLEN)] = None
    batch: Annotated[int, Option("--batch", help=BATCH)] = 1
    heads: Annotated[int, Option("--heads", help=HEADS)] = 1
    kv_heads: Annotated[int | None, Option("--kv-heads", help=KV_HEADS)] = None
    head_dim: Annotated[int, Option("--head-dim", help=HEAD_DIM)] = 128
    dtype: Annotated[str | None, Option("--dtype", help=DTYPE)] = None
    backend: Annotated[
        str, Option("--backend", help="whose tiles are used: sm90 (Hopper GPUs; this machine needs none) or cpu")
    ] = "sm90"

    @property
    def is_real(self) -> bool:
        """Whether the options give a length in tokens. Documents have lengths of their own."""
        return self.seqlen is not None or self.mask_value().documents is not None

    def mask_value(self) -> Mask:
        return parse_mask(self.mask) & parse_window(self.window)

    def given(self, context: Context) -> ProblemOptions:
        """With the tokens of the documents, if there are some, in place of the default of --seqlen."""
        parts = self.mask_value().documents
        return self if parts is None or given_options(context, ["seqlen"]) else replace(self, seqlen=parts.cu_q[-1])

    def problem(self, length: int | None = None) -> Problem:
        """The problem, or one of another length with the same heads."""
        if self.backend not in BACKENDS:
            raise ValueError(f"--backend {self.backend!r}: choose from {', '.join(BACKENDS)}")
        dtype = check_dtype(self.dtype) or BACKENDS[self.backend]
        kv_heads, mask = self.heads if self.kv_heads is None else self.kv_heads, self.mask_value()
        packed = None if mask.documents is None else mask.documents.cu_q[-1]
        tokens = length or (packed if self.seqlen is None else self.seqlen)
        if tokens is None:
            raise ValueError("--seqlen is needed: give a number of tokens")
        if tokens < 1:
            raise ValueError(f"--seqlen must be at least 1, got {tokens}")
        if packed not in (None, tokens):
            raise ValueError(f"--mask {self.mask}: its documents have {packed} tokens, and --seqlen is {tokens}")
        return Problem(self.batch, self.heads, kv_heads, tokens, tokens, self.head_dim, dtype, mask=mask)


@dataclass(frozen=True)
class TileOptions:
    """A size in tiles instead of tokens, for studies of orders."""

    q_tiles: Annotated[
        int | None, Option("--q-tiles", help=f"q tiles of a head, instead of --seqlen [default: {TILES}]")
    ] = None
    kv_tiles: Annotated[
        int | None, Option("--kv-tiles", help="kv tiles of a head, instead of --seqlen [default: as many as --q-tiles]")
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """A model of time and the workers in it."""

    workers: WorkersOption = None
    model: Annotated[
        str, Option("--model", help="paper, machine (a Hopper SM), or h200 (fitted to one, for --head-dim)")
    ] = "paper"
    compute: Annotated[float | None, Option("--compute", help=f"{COMPUTE} [default: the model's]")] = None
    reduce: Annotated[float | None, Option("--reduce", help=f"{REDUCE} [default: the model's]")] = None

    def value(self, h200: Callable[[], Machine]) -> Model:
        """The named model, with its compute and reduce times replaced where given."""
        models: dict[str, Callable[[], Model]] = {"paper": Paper, "machine": Machine, "h200": h200}
        if self.model not in models:
            raise ValueError(f"--model {self.model!r}: choose from {', '.join(models)}")
        base = models[self.model]()
        compute = base.compute if self.compute is None else self.compute
        reduce = base.reduce if self.reduce is None else self.reduce
        check_times(compute, reduce)
        return replace(base, compute=compute, reduce=reduce)


@dataclass(frozen=True)
class Workload:
    """A problem cut into tiles: a real one as its backend cuts it, or as many tiles as asked for."""

    problem: ProblemOptions
    tiles: TileOptions

    def tiling(self) -> Tiling:
        asked = (self.tiles.q_tiles, self.tiles.kv_tiles)
        if self.problem.is_real:
            problem = self._sequence(self._posed())
            return tile(problem, backend_named(self.problem.backend).tile_shape(problem))
        q_tiles = TILES if asked[0] is None else asked[0]
        kv_tiles = q_tiles if asked[1] is None else asked[1]
        if q_tiles < 1 or kv_tiles < 1:
            raise ValueError(f"--q-tiles and --kv-tiles must be at least 1, got {q_tiles} and {kv_tiles}")
        # Twice the least common length makes a diagonal tile partial, as it is in a real problem.
        length = 2 * lcm(q_tiles, kv_tiles)
        return tile(self.problem.problem(length), TileShape(length // q_tiles, length // kv_tiles))

    def _posed(self) -> Problem:
        """The problem of a length in tokens."""
        if (self.tiles.q_tiles, self.tiles.kv_tiles) != (None, None):
            raise ValueError(
                "--q-tiles or --kv-tiles beside a length in tokens (--seqlen, or documents in --mask): give one of them"
            )
        return self.problem.problem()

    def _sequence(self, problem: Problem) -> Problem:
        if problem.is_packed:
            raise ValueError(
                f"--mask {self.problem.mask}: each document has a program of its own, and this command takes one: give "
                "--mask full or causal and the length of one document. 'dash-attn simulate', 'compare' and 'explain' "
                "take all of them"
            )
        return problem

    def work(self, policy: str) -> Verified | Tickets:
        """The verified program of a problem, or the tickets of a pack."""
        pack = self._pack(policy)
        return verify(compose(self.tiling(), policy)) if pack is None else Tickets.of(pack)

    def policies(self) -> list[str]:
        """The policies that can order the problem, or every document of it."""
        pack = self._pack("auto")
        return applicable(self.tiling()) if pack is None else policies_of(pack)

    def _pack(self, policy: str) -> Pack | None:
        """The documents of the problem, if it has documents."""
        if not self.problem.is_real or not (problem := self._posed()).is_packed:
            return None
        if self.problem.backend == "cpu":
            raise ValueError(
                f"--mask {self.problem.mask} --backend cpu: the CPU runs the documents one after the other: give the "
                "length of one document with --seqlen and --mask full or causal, or --backend sm90"
            )
        return Pack(problem, backend_named(self.problem.backend).tile_shape, policy)

    def model(self, asked: ModelOptions) -> Model:
        """The model of time asked for; one that is fitted to a GPU is the one for this problem's kernel."""
        return asked.value(self._h200)

    def _h200(self) -> Machine:
        from dash_attn.backends.sm90.config import padded

        if not self.problem.is_real or self.problem.backend == "cpu":
            return Machine.h200(padded(self.problem.head_dim))
        return h200_of(self.problem.problem())

    def workers(self, given: int | None) -> int:
        """Workers to simulate: the paper puts a head on as many as it has kv tiles, a real problem has a machine."""
        check_workers(given)
        if given is not None:
            return given
        if not self.problem.is_real:
            return self.tiling().num_kv
        if self.problem.backend == "cpu":
            import torch

            return torch.get_num_threads()
        return H200_SMS


def policies_of(pack: Pack) -> list[str]:
    """The policies that can order every document of a pack, and look at nothing beyond a document."""
    orders = [applicable(tile(alone, pack.shape_of(alone))) for alone in pack.problem.distinct.values()]
    return [name for name in POLICIES if not looks_at_batch(name) and all(name in order for order in orders)]


def check_dtype(given: str | None) -> str | None:
    if given not in (None, *DTYPES):
        raise ValueError(f"--dtype {given!r}: choose from {', '.join(DTYPES)}")
    return given


def check_workers(given: int | None) -> None:
    if given is not None and given < 1:
        raise ValueError(f"--workers must be at least 1, got {given}")


def check_times(compute: float, reduce: float) -> None:
    if not (0 < compute < math.inf and 0 <= reduce < math.inf):
        raise ValueError(
            f"--compute must be a number above 0 and --reduce a number from 0, got {compute:g} and {reduce:g}"
        )


def backend_named(name: str) -> Backend:
    """A backend to ask about a problem, also where its device is not."""
    if name == "cpu":
        from dash_attn.backends.cpu.backend import CpuBackend

        return CpuBackend()
    from dash_attn.tools.cli.absent import sm90

    return sm90()


def h200_of(problem: Problem) -> Machine:
    """An H200 while it runs the kernel of a problem."""
    from dash_attn.backends.sm90.backend import config_of

    cfg = config_of(problem)
    return Machine.h200(cfg.dim, cfg.last_finishes)


def parse_mask(text: str) -> Mask:
    """full, causal, documents:LENGTH,... or causal-documents:LENGTH,..."""
    kind, _, rest = text.partition(":")
    if kind in ("full", "causal") and not rest:
        return FULL if kind == "full" else CAUSAL
    if kind in ("documents", "causal-documents") and rest:
        lengths = _whole_numbers("--mask", text, rest)
        if min(lengths) < 0:
            raise ValueError(f"--mask {text!r}: lengths must be at least 0")
        return documents([0, *accumulate(lengths)], causal=kind.startswith("causal"))
    raise ValueError(
        f"--mask {text!r}: choose full, causal, documents:LENGTH,... or causal-documents:LENGTH,...; "
        "--window LEFT,RIGHT narrows any of them"
    )


def parse_window(text: str | None) -> Mask:
    if text is None:
        return FULL
    sides = _whole_numbers("--window", text, text)
    if len(sides) != 2:
        raise ValueError(f"--window {text!r}: expected LEFT,RIGHT, for example 512,0")
    return window(*sides)


def parse_names(option: str, text: str | None) -> tuple[str, ...]:
    """Words separated by commas; none only if the option is not given."""
    names = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    if text is not None and not names:
        raise ValueError(f"{option} {text!r}: expected names, separated by commas")
    return names


def _whole_numbers(option: str, text: str, numbers: str) -> list[int]:
    try:
        return [int(number) for number in numbers.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected whole numbers, separated by commas") from None
