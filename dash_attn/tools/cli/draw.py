"""dash-attn figures, plot and paper: pictures of programs and of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from dash_attn.tools.cli.app import Json, command, emit, reading, wrote
from dash_attn.tools.cli.tables import working

Results = Annotated[list[Path], Argument(help="files that bench wrote; files of one suite share a picture")]
Folder = Annotated[Path, Option("--out", metavar="FOLDER", help="folder to write to")]


def report(paths: list[Path], as_json: bool) -> None:
    if as_json:
        emit([str(path) for path in paths])
    else:
        wrote(paths)


@command("figures")
def figures(out: Folder = Path("figures"), as_json: Json = False) -> None:
    """Draw the timelines of the paper from programs of this package."""
    from dash_attn.tools import viz

    out.mkdir(parents=True, exist_ok=True)
    with working("drawing"):
        paths = list(viz.figures(out))
    report(paths, as_json)


@command("plot")
def plot(
    results: Results,
    out: Folder = Path("figures"),
    dark: Annotated[bool, Option("--dark", help="draw for dark pages")] = False,
    kind: Annotated[str, Option("--format", help="png or svg")] = "png",
    as_json: Json = False,
) -> None:
    """Draw what bench measured: throughput, price of determinism, memory, blocks, deviations."""
    from dash_attn.tools.viz.results import plot as draw

    if kind not in ("png", "svg"):
        raise ValueError(f"--format {kind!r}: choose from png, svg")
    with reading(results):
        paths = list(draw(results, out, dark=dark, kind=kind))
    report(paths, as_json)


@command("paper")
def paper(
    results: Annotated[list[Path], Argument(help="files that bench wrote; for --html also traces (.npz)")],
    out: Annotated[Path, Option("--out", help="page to write")] = Path("paper.md"),
    figures: Annotated[
        Path, Option("--figures", metavar="FOLDER", help="folder of its pictures, beside the page")
    ] = Path("bench"),
    html: Annotated[
        Path | None, Option("--html", help="write one self-contained web page to this file, and nothing else")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page with the paper's claims beside what bench measured. Its pictures are light and dark."""
    if html is not None:
        from dash_attn.tools.viz.evidence import evidence

        with reading(results):
            page_path = evidence(results, html)
        report([Path(page_path)], as_json)
        return
    from dash_attn.tools.bench.paper import page
    from dash_attn.tools.viz.results import gathered, plot

    with reading(results):
        text = page(gathered(results), figures.as_posix())
        pictures = [path for dark in (False, True) for path in plot(results, out.parent / figures, dark=dark)]
    out.write_text(text, encoding="utf-8")
    report([out, *map(Path, pictures)], as_json)
