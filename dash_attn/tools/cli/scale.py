"""dash-attn simulate --ranks: attention over a sequence on many GPUs, in a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

from rich.table import Table
from typer import Option

from dash_attn.problem import Problem
from dash_attn.tools.cli.workload import parse_names


@dataclass(frozen=True)
class RankOptions:
    """Ranks of context parallel attention."""

    ranks: Annotated[
        str | None,
        Option(
            "--ranks",
            metavar="N,...",
            help="numbers of GPUs, separated by commas: predict the time of a sequence on all of them",
        ),
    ] = None
    mode: Annotated[
        str | None,
        Option("--mode", help="with --ranks: a2a, all_gather, a2a+all_gather, separated by commas; else all"),
    ] = None
    layout: Annotated[
        str | None, Option("--layout", help="with --ranks: zigzag, contiguous, separated by a comma; else both")
    ] = None

    def predicted(self, whole: Problem) -> list[dict[str, Any]]:
        """Time, exposed communication, bytes sent and held, for each number of ranks, mode and layout."""
        from dash_attn.distributed.layout import LAYOUTS, MODES
        from dash_attn.distributed.scale import predict, ways_of  # torch takes seconds to import

        numbers = _numbers(self.ranks)
        modes, layouts = _chosen("--mode", self.mode, MODES), _chosen("--layout", self.layout, LAYOUTS)
        rows = [
            asdict(predict(whole, number, each, tokens, ways))
            for number in numbers
            for each in modes
            for ways in ways_of(whole, number, each)
            for tokens in layouts
        ]
        if not rows:
            raise ValueError(
                f"--mode {', '.join(modes)}: on {self.ranks} GPUs no number of ranks between 1 and all of them can "
                f"share {whole.heads_kv} key/value heads"
            )
        return rows


def _chosen(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are given, or all."""
    names = parse_names(option, text)
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name!r}: choose from {', '.join(known)}")
    return names or known


def _numbers(text: str | None) -> list[int]:
    names = parse_names("--ranks", text)
    if not all(name.isdecimal() and int(name) > 0 for name in names):
        raise ValueError(f"--ranks {text!r}: expected whole numbers from 1, separated by commas")
    return [int(name) for name in names]


def rank_table(rows: list[dict[str, Any]], whole: Problem) -> Table:
    """The fastest row of each number of ranks is marked."""
    heads = f"{whole.heads_q} query and {whole.heads_kv} key/value heads of {whole.dim}"
    sequences = f"{whole.batch} sequences of " if whole.batch > 1 else ""
    title = f"{sequences}{whole.len_q} tokens, {whole.mask}, {heads}: a prediction, not a measurement"
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("ranks", "mode", "layout"):
        table.add_column(name)
    for name in ("heads over", "forward ms", "backward ms", "exposed ms", "sent GiB", "held GiB", ""):
        table.add_column(name, justify="right")
    best = {row["ranks"]: min(x["forward"] + x["backward"] for x in rows if x["ranks"] == row["ranks"]) for row in rows}
    for row in rows:
        times = [f"{1000 * row[name]:.1f}" for name in ("forward", "backward", "exposed")]
        sizes = [f"{row[name] / 2**30:.2f}" for name in ("sent_bytes", "memory_bytes")]
        fastest = "fastest" if row["forward"] + row["backward"] == best[row["ranks"]] else ""
        place = str(row["ranks"]), row["mode"], row["layout"], str(row["heads_over"])
        table.add_row(*place, *times, *sizes, fastest)
    return table
