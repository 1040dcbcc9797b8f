"""Several shapes at once, in the words of a problem: what bench and audit run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from typer import Option

from dash_attn.problem import CAUSAL, FULL, Mask, Problem
from dash_attn.tools.cli.workload import (
    BATCH,
    DTYPE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    MASK,
    SEQLEN,
    SEVERAL,
    check_dtype,
    parse_mask,
    parse_names,
)


@dataclass(frozen=True)
class ShapeOptions:
    """Lengths, head dims and masks in every combination."""

    mask: Annotated[str | None, Option("--mask", help=f"{MASK}{SEVERAL} [default: both]")] = None
    seqlen: Annotated[str | None, Option("--seqlen", metavar="N,...", help=f"{SEQLEN}{SEVERAL}")] = None
    batch: Annotated[int | None, Option("--batch", help=BATCH)] = None
    heads: Annotated[int | None, Option("--heads", help=HEADS)] = None
    kv_heads: Annotated[int | None, Option("--kv-heads", help=KV_HEADS)] = None
    head_dim: Annotated[str | None, Option("--head-dim", metavar="N,...", help=f"{HEAD_DIM}{SEVERAL}")] = None
    dtype: Annotated[str | None, Option("--dtype", help=DTYPE)] = None

    def given(self) -> list[str]:
        """The options that were given."""
        return [f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None]

    def masks(self) -> list[Mask]:
        """A benchmark counts the work of a full or causal mask, and a report names these two."""
        if self.mask is None:
            return [FULL, CAUSAL]
        words = parse_names("--mask", self.mask)
        if not set(words) <= {"full", "causal"}:
            packs = "; 'audit --pack' and 'bench --suite packed' have documents" if "documents" in self.mask else ""
            raise ValueError(f"--mask {self.mask!r}: choose full, causal, or both with a comma{packs}")
        return [parse_mask(word) for word in words]

    def lengths(self) -> tuple[int, ...]:
        return parse_numbers("--seqlen", self.seqlen)

    def dims(self) -> tuple[int, ...]:
        return parse_numbers("--head-dim", self.head_dim)

    def dtype_or(self, usual: str) -> str:
        return check_dtype(self.dtype) or usual

    def problems(self, like: Problem) -> Iterator[tuple[str, Problem]]:
        """Name and problem of every combination; what is not given is as in `like`."""
        heads = like.heads_q if self.heads is None else self.heads
        kv_heads = (like.heads_kv if self.heads is None else heads) if self.kv_heads is None else self.kv_heads
        batch, dtype = like.batch if self.batch is None else self.batch, self.dtype_or(like.dtype)
        for dim in self.dims() or (like.dim,):
            for mask in self.masks():
                for length in self.lengths() or (like.len_q,):
                    problem = Problem(batch, heads, kv_heads, length, length, dim, dtype, mask=mask)
                    yield f"{batch}x{length} {heads}/{kv_heads} heads d{dim} {mask}", problem


def parse_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers from 1; none if the option is not given."""
    words = parse_names(option, text)
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"{option} {text!r}: expected whole numbers from 1, separated by commas")
    return tuple(map(int, words))
